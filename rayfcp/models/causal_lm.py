"""Cross entropy behind the output head, whose logits exist for a chunk of the tokens at a time.

Where the backward pass follows at once, gradients of the sum of losses are made in the forward pass, chunk by chunk, so
that logits are computed once: a chunk's logits become its gradient in place. Nothing waits for the device.

A Hugging Face causal language model, or one stage of it, as the interpreter wants it.

A Hugging Face model that sees, as the interpreter wants it: a causal language model and its vision encoder.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rayfcp.cost.memory import LOSS_CHUNK_TOKENS, loss_chunk_tokens
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.interpreter import IGNORED, Pixels, Placed
from rayfcp.execute.parallel.sharding import StageModule, StageRunner
from rayfcp.models.attention_hook import KEYWORD, follow_context
from rayfcp.models.stages import Stage, cut, decoder_layers, enter, is_tied
from rayfcp.models.vision import ENCODERS

_SCALED_ROWS = 4096


def head_loss(head: nn.Linear, hidden: Tensor, *, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Sum of cross entropies over targets that are not -100, in fp32 at least. `hidden`: `[tokens, hidden]`.

    From forward to backward it keeps gradients, of `hidden` and of the head's parameters, in their dtypes.
    """
    return _HeadLoss.apply(hidden, head.weight, head.bias, targets, chunk_tokens)  # type: ignore[no-any-return, no-untyped-call]


def cross_entropy_sum(head: nn.Module, hidden: Tensor, *, targets: Tensor) -> Tensor:
    """The same by autograd, all logits at once, for any head."""
    logits = head(hidden)
    return F.cross_entropy(logits.to(_wide(logits)), targets, ignore_index=IGNORED, reduction="sum")


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_tokens: int
    ) -> Tensor:
        wide = _wide(hidden)
        loss = hidden.new_zeros((), dtype=wide)
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        bias_grad = None if bias is None else torch.zeros_like(bias, dtype=wide)
        parts = (each.split(chunk_tokens) for each in (hidden, targets, hidden_grad))
        for own, wanted, own_grad in zip(*parts, strict=True):
            logits = F.linear(own, weight, bias)
            loss += _into_gradient(logits, wanted)
            torch.mm(logits, weight, out=own_grad)
            weight_grad.addmm_(logits.t(), own)
            if bias_grad is not None:
                bias_grad += logits.sum(0, dtype=wide)
            del logits
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        biases = None if bias_grad is None else (bias_grad * scale).to(weight_grad.dtype)
        return _scaled(hidden_grad, scale), _scaled(weight_grad, scale), biases, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """`scale` in its own precision: rounded to bf16 it would shift all gradients alike. Few wide rows at a time."""
    result = torch.empty_like(gradient)
    for rows, own in zip(gradient.split(_SCALED_ROWS), result.split(_SCALED_ROWS), strict=True):
        own.copy_(rows * scale.expand_as(rows))
    return result


def _into_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Overwrite `logits`, `[tokens, vocab]`, with the gradient of their losses' sum, which is returned."""
    counted, index = targets != IGNORED, targets.clamp(min=0).unsqueeze(1)
    shares = F.log_softmax(logits, dim=-1, dtype=_wide(logits))
    losses = shares.gather(1, index).squeeze(1).masked_fill(~counted, 0.0)
    shares.exp_()
    shares.scatter_add_(1, index, torch.full_like(index, -1, dtype=shares.dtype))
    torch.mul(shares, counted.unsqueeze(1), out=logits)
    return -losses.sum()


def _wide(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for that."""
    return torch.promote_types(tensor.dtype, torch.float32)


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


class VisionLM(CausalLM):
    """Wraps a `*ForConditionalGeneration`; parameters are the library's own, under `model`.

    Args:
        model: as for `CausalLM`.
        stage: all layers, as long as stages do not run with pictures.
        freeze: the encoder, mergers and projector included, keeps its weights.
    """

    def __init__(self, model: Any, *, stage: Stage | None = None, freeze: bool = False) -> None:
        super().__init__(model, stage=stage)
        self.encoder = ENCODERS[model.config.model_type](model)
        self.is_frozen = freeze
        for module in self.encoder.modules if freeze else ():
            module.requires_grad_(False)
        decoder: Any = self.decoder
        if hasattr(decoder, "_deepstack_process"):
            # The library's own asks a mask of tokens for their places, for which the host would wait.
            decoder._deepstack_process = _add

    @property
    def occasional(self) -> tuple[nn.Parameter, ...]:
        """The encoder's."""
        found = (parameter for module in self.encoder.modules for parameter in module.parameters())
        return tuple(parameter for parameter in found if parameter.requires_grad)

    @property
    def sharded_parts(self) -> list[nn.Module]:
        return [*self.encoder.layers, *super().sharded_parts]

    def encode(self, pixels: Pixels | None) -> Tensor:
        """Features of the pictures' tokens, `[tokens, num_mergers x hidden]`, without a graph where the encoder is
        frozen. None: those of a small picture, of which nobody needs more than that they stand in the graph."""
        device = next(self.parameters()).device
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            return self.encoder.encode(pixels or self.encoder.blank(), device)

    def blank_pictures(self, count: int, *, side: int) -> Pixels:
        return self.encoder.blank(count, side=side)

    def _entering(self, inputs: Tensor, placed: Placed | None) -> dict[str, Any]:
        if placed is None:
            return super()._entering(inputs, None)
        embedded = self.model.get_input_embeddings()(inputs)
        first, *others = placed.features.to(embedded.dtype).split(embedded.shape[1], dim=1)
        given = {"inputs_embeds": embedded.index_copy(0, placed.rows, first).unsqueeze(0)}
        return given | ({"visual_pos_masks": placed.rows, "deepstack_visual_embeds": others} if others else {})


def _add(hidden: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """`hidden`, `[1, tokens, hidden]`, with `features` added at `rows`."""
    return hidden.index_add(1, rows, features.unsqueeze(0))
