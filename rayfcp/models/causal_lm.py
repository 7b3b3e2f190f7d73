"""A Hugging Face causal language model, or one stage of it, for the interpreter; and the loss of its output head.

Logits exist for a chunk of the tokens at a time. Where the backward pass follows at once, gradients of the sum of
losses are computed in the forward pass, chunk by chunk, so that logits are computed once: a chunk's logits become its
gradient in place. Nothing waits for the device.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rayfcp.cost.memory import LOSS_CHUNK_TOKENS, loss_chunk_tokens
from rayfcp.data.rows import IGNORED
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.parallel.sharding import SourceLosses, StageModule
from rayfcp.models.attention_hook import KEYWORD, follow_context
from rayfcp.models.stages import Stage, cut, decoder_layers, enter, is_tied

if TYPE_CHECKING:
    from rayfcp.execute.vision import PlacedFeatures

_SCALED_ROWS = 4096
"""Rows scaled in fp32 at a time: enough for one kernel launch, little memory."""


def head_loss(
    head: nn.Linear, hidden: Tensor, *, targets: Tensor, chunk_tokens: int, by_source: SourceLosses | None = None
) -> Tensor:
    """Sum of cross entropies over targets that are not -100, in fp32 at least. `hidden`: `[tokens, hidden]`.

    From forward to backward it keeps the gradients of `hidden` and of the head's trained parameters, in their dtypes.
    """
    return _HeadLoss.apply(hidden, head.weight, head.bias, targets, chunk_tokens, by_source)  # type: ignore[no-any-return, no-untyped-call]


def token_losses(head: nn.Module, hidden: Tensor, *, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Cross entropies of single tokens, `[tokens]`, in fp32 at least, 0 where the target is -100; for any head. Without
    gradients: nothing of a chunk's logits is kept."""
    parts = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return torch.cat([cross_entropy_sum(head, own, targets=wanted, reduction="none") for own, wanted in parts])


def cross_entropy_sum(head: nn.Module, hidden: Tensor, *, targets: Tensor, reduction: str = "sum") -> Tensor:
    """`head_loss` by autograd, all logits at once, for any head. `reduction` none: the losses `[tokens]`."""
    logits = head(hidden)
    return F.cross_entropy(logits.to(_wide(logits)), targets, ignore_index=IGNORED, reduction=reduction)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_tokens: int,
        by_source: SourceLosses | None,
    ) -> Tensor:
        wide = _wide(hidden)
        loss = hidden.new_zeros((), dtype=wide)
        hidden_grad, (_, trains_weight, trains_bias, *_) = torch.empty_like(hidden), ctx.needs_input_grad
        weight_grad = torch.zeros_like(weight) if trains_weight else None
        bias_grad = torch.zeros_like(bias, dtype=wide) if bias is not None and trains_bias else None
        parts = (each.split(chunk_tokens) for each in (hidden, targets, hidden_grad))
        for number, (own, wanted, own_grad) in enumerate(zip(*parts, strict=True)):
            logits = F.linear(own, weight, bias)
            losses = _into_gradient(logits, wanted)
            loss += losses.sum()
            if by_source is not None:
                by_source.add(losses, start=number * chunk_tokens)
            torch.mm(logits, weight, out=own_grad)
            if weight_grad is not None:
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
        biases = None if bias_grad is None else (bias_grad * scale).to(hidden_grad.dtype)
        weights = None if weight_grad is None else _scaled(weight_grad, scale)
        return _scaled(hidden_grad, scale), weights, biases, None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """`gradient * scale`, with `scale` in its own precision: rounded to bf16 it would bias all gradients alike."""
    result = torch.empty_like(gradient)
    for rows, own in zip(gradient.split(_SCALED_ROWS), result.split(_SCALED_ROWS), strict=True):
        own.copy_(rows * scale.expand_as(rows))
    return result


def _into_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses `[tokens]` of `logits`, `[tokens, vocab]`, which are overwritten with the gradient of their sum.

    Without a fused kernel one wide copy of the logits exists at a time: `log_softmax` to a wider dtype would make two.
    """
    fused = backend_of(logits.device).loss_kernel()
    if fused is not None and _wide(logits) is torch.float32:
        return fused(logits, targets)
    counted, index = targets != IGNORED, targets.clamp(min=0).unsqueeze(1)
    shares = logits.to(_wide(logits))
    shares -= shares.amax(-1, keepdim=True)
    chosen = shares.gather(1, index)
    total = shares.exp_().sum(-1, keepdim=True)
    losses = (total.log() - chosen).squeeze(1).masked_fill(~counted, 0.0)
    shares.scatter_add_(1, index, -total)
    torch.mul(shares, counted.unsqueeze(1) / total, out=logits)
    return losses


def _wide(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for that."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _require_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    output.requires_grad_()


class CausalLM(StageModule):
    """Wraps a `*ForCausalLM`; parameters are the library's own, under `model`.

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
        cut(model, self.stage)
        numbers = range(self.stage.start, self.stage.stop)
        follow_context(dict(zip(numbers, self.layers, strict=True)))
        embedding = model.get_input_embeddings()
        if self.stage.is_first and not embedding.weight.requires_grad:
            # Exchanges of the first layer's attention belong to each backward pass, whatever that layer trains.
            embedding.register_forward_hook(_require_gradient)

    @property
    def decoder(self) -> nn.Module:
        """Embedding, layers and final norm."""
        return self.model.get_decoder()  # type: ignore[no-any-return]

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
        targets: Tensor | None,
        attention: AttentionContext,
        keep_logits: bool = True,
        placed: "PlacedFeatures | None" = None,
        by_token: bool = False,
        by_source: SourceLosses | None = None,
    ) -> Tensor:
        """Sum of cross entropies in fp32 over targets that are not -100; before the last stage the activations
        `[1, tokens, hidden]`.

        Args:
            inputs: Token ids `[tokens]`; after the first stage activations `[tokens, hidden]`.
            positions: `[tokens]`, or `[axes, tokens]`.
            targets: `[tokens]`, needed by the last stage.
            attention: The attention program of the call.
            keep_logits: Keep the gradients of the logits, since backward follows at once; otherwise recompute them.
            placed: Image features in place of the embeddings of their tokens.
            by_token: Return the cross entropy of each token, `[tokens]`, in place of their sum; without gradients.
            by_source: Where the last stage adds up its losses by source.
        """
        given = self._decoder_inputs(inputs, placed)
        output = self.decoder(**given, position_ids=positions.unsqueeze(-2), use_cache=False, **{KEYWORD: attention})
        hidden: Tensor = output.last_hidden_state
        if not self.stage.is_last:
            return hidden
        assert targets is not None
        hidden = hidden.squeeze(0)
        few = min(loss_chunk_tokens(hidden.shape[1], bytes_per_element=hidden.element_size()), LOSS_CHUNK_TOKENS)
        if by_token:
            return token_losses(self.model.get_output_embeddings(), hidden, targets=targets, chunk_tokens=few)
        return self._loss(hidden, targets, few=few if keep_logits else 0, by_source=by_source)

    def _loss(self, hidden: Tensor, targets: Tensor, *, few: int, by_source: SourceLosses | None) -> Tensor:
        """Sum of losses by `head_loss` in chunks of `few` tokens, or if that is 0 by repeated passes."""
        head = self.model.get_output_embeddings()
        if few and type(head) is nn.Linear and torch.is_grad_enabled():
            return head_loss(head, hidden, targets=targets, chunk_tokens=few, by_source=by_source)
        few = LOSS_CHUNK_TOKENS // 2  # autograd keeps more per token
        again = functools.partial(checkpoint, cross_entropy_sum, head, use_reentrant=False, preserve_rng_state=False)
        parts = zip(hidden.split(few), targets.split(few), strict=True)
        if by_source is None:
            return torch.stack([again(own, targets=wanted) for own, wanted in parts]).sum()
        losses = torch.cat([again(own, targets=wanted, reduction="none") for own, wanted in parts])
        by_source.add(losses, start=0)  # here, since the passes above are repeated
        return losses.sum()

    def _decoder_inputs(self, inputs: Tensor, placed: "PlacedFeatures | None") -> dict[str, Any]:
        assert placed is None
        return {"input_ids": inputs.unsqueeze(0)} if self.stage.is_first else enter(self.decoder, inputs)
