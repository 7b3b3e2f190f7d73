"""A Hugging Face causal language model, or one stage of it, as the interpreter wants it."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfcp.execute.attention import AttentionContext
from rayfcp.execute.interfaces import Placed
from rayfcp.execute.sharding import StageModule, StageRunner
from rayfcp.models.attention_hook import KEYWORD, follow_context
from rayfcp.models.loss import cross_entropy_sum, head_loss
from rayfcp.models.stages import Stage, cut, decoder_layers, enter, is_tied
from rayfcp.plan.costs.memory import LOSS_CHUNK_TOKENS, loss_chunk_tokens


class CausalLM(StageModule):
    """Wraps a `*ForCausalLM`; parameters are the library's own, under `model`.

    Args:
        model: from the transformers library, with our attention implementation set; it loses what `stage` lacks.
        stage: the layers that run here; all of them if absent.
    """

    def __init__(self, model: Any, *, stage: Stage | None = None) -> None:
        super().__init__()
        self.model = model
        total = len(decoder_layers(self.decoder))
        self.stage = stage or Stage(start=0, stop=total, num_layers=total)
        self.is_tied = is_tied(model)
        cut(model, self.stage)
        numbers = range(self.stage.start, self.stage.stop)
        follow_context(dict(zip(numbers, self.layers, strict=True)))

    @property
    def decoder(self) -> nn.Module:
        """Embedding, layers and final norm."""
        return self.model.get_decoder()  # type: ignore[no-any-return]

    @property
    def layers(self) -> nn.ModuleList:
        """Those of the stage."""
        return decoder_layers(self.decoder)[self.stage.start : self.stage.stop]

    @property
    def sharded_parts(self) -> list[nn.Module]:
        """What is gathered part by part; all else is gathered together."""
        return list(self.layers)

    @property
    def shared_matrix(self) -> nn.Parameter | None:
        """What the first and the last of several stages both hold, on these: its gradient is the sum of theirs."""
        if not self.is_tied or self.stage.is_first == self.stage.is_last:
            return None
        return self.model.get_input_embeddings().weight  # type: ignore[no-any-return]

    def tie(self) -> None:
        """Make embedding and head one matrix again, after weights got new memory."""
        if self.is_tied and self.stage.is_last:
            self.model.tie_weights()

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        targets: Tensor | None,
        attention: AttentionContext,
        keep_logits: bool = True,
        placed: Placed | None = None,
    ) -> Tensor:
        """Sum of cross entropies in fp32 over targets that are not -100; before the last stage activations instead,
        `[1, tokens, hidden]`. `inputs`: token ids, after the first stage activations `[tokens, hidden]`; the others
        `[tokens]`, positions with several axes `[axes, tokens]`.

        `keep_logits`: what is made of them, since backward follows at once; otherwise they are computed again.
        """
        given = self._entering(inputs, placed)
        output = self.decoder(**given, position_ids=positions.unsqueeze(-2), use_cache=False, **{KEYWORD: attention})
        hidden: Tensor = output.last_hidden_state
        if not self.stage.is_last:
            return hidden
        hidden = hidden.squeeze(0)
        assert targets is not None
        head = self.model.get_output_embeddings()
        if keep_logits and type(head) is nn.Linear and torch.is_grad_enabled():
            few = loss_chunk_tokens(hidden.shape[1], bytes_per_element=hidden.element_size())
            return head_loss(head, hidden, targets=targets, chunk_tokens=min(few, LOSS_CHUNK_TOKENS))
        few = LOSS_CHUNK_TOKENS // 2  # autograd keeps more of each
        again = functools.partial(checkpoint, cross_entropy_sum, head, use_reentrant=False, preserve_rng_state=False)
        parts = zip(hidden.split(few), targets.split(few), strict=True)
        return torch.stack([again(own, targets=wanted) for own, wanted in parts]).sum()

    def _entering(self, inputs: Tensor, placed: Placed | None) -> dict[str, Any]:
        """The decoder's arguments."""
        assert placed is None
        return {"input_ids": inputs.unsqueeze(0)} if self.stage.is_first else enter(self.decoder, inputs)


class WholeModel(StageRunner):
    """Nothing is sharded. The caller sums gradients over ranks."""

    def set_reduce(self, reduce: bool) -> None:
        """Nothing is sharded, so nothing is reduced."""
