"""A Hugging Face causal language model or reward model, or one stage of it, for the interpreter."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rayfcp.cost.memory import loss_chunk_tokens
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.losses.base import Targets
from rayfcp.execute.parallel.sharding import StageModule
from rayfcp.models.attention_hook import KEYWORD, Carried, follow_context
from rayfcp.models.embedding import sum_widely
from rayfcp.models.head import head_loss
from rayfcp.models.latent import send_latents
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import decoder_layers, decoder_of, text_of
from rayfcp.models.logits import curve_of
from rayfcp.models.recurrence_hook import hook_recurrence
from rayfcp.models.stages import Stage, before_head, cut, enter, head_of, is_tied

if TYPE_CHECKING:
    from rayfcp.execute.vision import PlacedFeatures


def _require_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    output.requires_grad_()


class CausalLM(StageModule):
    """Wraps a `*ForCausalLM`, or a `*ForSequenceClassification` of one label; parameters are the library's own, under
    `model`.

    Args:
        model: From the transformers library, with our attention implementation set; layers of other stages are removed.
        stage: The layers that run here, by default all.
    """

    def __init__(self, model: Any, *, stage: Stage | None = None) -> None:
        super().__init__()
        self.model = model
        total = len(decoder_layers(self.decoder))
        self.stage = stage or Stage(start=0, stop=total, num_layers=total)
        self.is_tied = is_tied(model)
        self.curve = curve_of(model.config)
        cut(model, self.stage)
        numbers = range(self.stage.start, self.stage.stop)
        send_latents(self.layers)
        kinds = kinds_of_layers(text_of(model.config))
        follow_context(dict(zip(numbers, self.layers, strict=True)), kinds=kinds)
        hook_recurrence(model)
        sum_widely(model)
        embedding = model.get_input_embeddings()
        if self.stage.is_first and not embedding.weight.requires_grad:
            # Exchanges of the first layer's attention belong to each backward pass, whatever that layer trains.
            embedding.register_forward_hook(_require_gradient)

    @property
    def decoder(self) -> nn.Module:
        """Embedding, layers and final norm."""
        return decoder_of(self.model)  # type: ignore[no-any-return]

    @property
    def head(self) -> nn.Linear:
        """Linear layer that computes logits or rewards; only the last stage has one."""
        head = head_of(self.model)
        if type(head) is not nn.Linear:
            raise TypeError(f"the model's head is a {type(head).__name__}, must be a torch.nn.Linear")
        return head

    @property
    def layers(self) -> nn.ModuleList:
        """Layers of the stage."""
        return decoder_layers(self.decoder)[self.stage.start : self.stage.stop]

    @property
    def sharded_parts(self) -> list[nn.Module]:
        """Modules that FSDP gathers one by one; the rest is gathered together."""
        return list(self.layers)

    @property
    def shared_matrix(self) -> nn.Parameter | None:
        """Tied embedding and head on the first and the last of several stages, whose gradients are to be summed."""
        if not self.is_tied or self.stage.is_first == self.stage.is_last:
            return None
        matrix: nn.Parameter = self.model.get_input_embeddings().weight
        return matrix if matrix.requires_grad else None

    def tie(self) -> None:
        """Tie embedding and head again, after weights were given new memory."""
        if self.is_tied and self.stage.is_last:
            self.model.tie_weights()

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        targets: Targets | None,
        attention: AttentionContext,
        keep_logits: bool = True,
        placed: "PlacedFeatures | None" = None,
    ) -> Tensor:
        """Return the weighted sum of the loss's terms, in fp32 at least; before the last stage the activations `[1,
        tokens, hidden]`.

        Args:
            inputs: Token ids `[tokens]`; after the first stage activations `[tokens, hidden]`.
            positions: `[tokens]`, or `[axes, tokens]`.
            targets: Needed by the last stage, which fills in the terms.
            attention: The attention program of the call.
            keep_logits: Compute gradients behind the head in the forward pass, since backward follows at once.
            placed: Image features in place of the embeddings of their tokens.
        """
        given = self._decoder_inputs(inputs, placed)
        given[KEYWORD] = Carried(attention, positions)
        output = self.decoder(**given, position_ids=positions.unsqueeze(-2), use_cache=False)
        hidden: Tensor = output.last_hidden_state
        if not self.stage.is_last:
            return hidden
        assert targets is not None
        between = before_head(self.model)
        hidden = (between(hidden) if between else hidden).squeeze(0).to(self.head.weight.dtype)
        return head_loss(
            self.head,
            hidden,
            targets=targets,
            chunk_tokens=loss_chunk_tokens(hidden.shape[1], bytes_per_element=hidden.element_size()),
            curve=self.curve,
            keep_logits=keep_logits,
        )

    def _decoder_inputs(self, inputs: Tensor, placed: "PlacedFeatures | None") -> dict[str, Any]:
        assert placed is None
        return {"input_ids": inputs.unsqueeze(0)} if self.stage.is_first else enter(self.decoder, inputs)
