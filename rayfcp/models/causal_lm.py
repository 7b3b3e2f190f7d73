"""A Hugging Face causal language model or reward model, or one stage of it, for the interpreter; and the loss of its
output head.

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
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.losses.base import Targets, wide
from rayfcp.execute.parallel.sharding import StageModule
from rayfcp.models.attention_hook import KEYWORD, Carried, follow_context
from rayfcp.models.latent import send_latents
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import decoder_layers, decoder_of, text_of
from rayfcp.models.logits import LogitCurve, curve_of
from rayfcp.models.recurrence_hook import hook_recurrence
from rayfcp.models.stages import Stage, before_head, cut, enter, head_of, is_tied

if TYPE_CHECKING:
    from rayfcp.execute.vision import PlacedFeatures

_SCALED_ROWS = 4096
"""Rows scaled in fp32 at a time: enough for one kernel launch, little memory."""


PLAIN = LogitCurve()


def head_loss(
    head: nn.Linear, hidden: Tensor, *, targets: Targets, chunk_tokens: int, curve: LogitCurve = PLAIN
) -> Tensor:
    """Weighted sum of the terms of `targets`, in fp32 at least. `hidden`: `[tokens, hidden]`. `curve`: of the logits.

    From forward to backward it keeps the gradients of `hidden` and of the head's trained parameters, in their dtypes.
    """
    return _HeadLoss.apply(hidden, head.weight, head.bias, targets, chunk_tokens, curve)  # type: ignore[no-any-return, no-untyped-call]


def weighted_terms(head: nn.Module, hidden: Tensor, *, targets: Targets, curve: LogitCurve = PLAIN) -> Tensor:
    """`head_loss` by autograd, all logits at once, for any head."""
    terms = targets.loss.terms(curve(head(hidden)), targets)
    targets.terms.copy_(terms.detach())
    return targets.weighted(terms)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        chunk_tokens: int,
        curve: LogitCurve,
    ) -> Tensor:
        sum_dtype = wide(hidden)
        loss = hidden.new_zeros((), dtype=sum_dtype)
        hidden_grad, (_, trains_weight, trains_bias, *_) = torch.empty_like(hidden), ctx.needs_input_grad
        weight_grad = torch.zeros_like(weight) if trains_weight else None
        bias_grad = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and trains_bias else None
        parts = (each.split(chunk_tokens) for each in (hidden, hidden_grad))
        for own, own_grad, wanted in zip(*parts, targets.split(chunk_tokens), strict=True):
            logits = F.linear(own, weight, bias)
            slope = curve.bend(logits)
            terms = targets.loss.into_gradient(logits, wanted)
            if not curve.is_plain:
                logits *= slope
            wanted.terms.copy_(terms)
            loss += wanted.weighted(terms)
            torch.mm(logits, weight, out=own_grad)
            if weight_grad is not None:
                weight_grad.addmm_(logits.t(), own)
            if bias_grad is not None:
                bias_grad += logits.sum(0, dtype=sum_dtype)
            del logits, slope
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
        embedding = model.get_input_embeddings()
        if self.stage.is_first and not embedding.weight.requires_grad:
            # Exchanges of the first layer's attention belong to each backward pass, whatever that layer trains.
            embedding.register_forward_hook(_require_gradient)

    @property
    def decoder(self) -> nn.Module:
        """Embedding, layers and final norm."""
        return decoder_of(self.model)  # type: ignore[no-any-return]

    @property
    def head(self) -> nn.Module:
        """Gives logits or rewards, on the last stage."""
        return head_of(self.model)  # type: ignore[no-any-return]

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
        """Weighted sum of the loss's terms, in fp32 at least; before the last stage the activations
        `[1, tokens, hidden]`.

        Args:
            inputs: Token ids `[tokens]`; after the first stage activations `[tokens, hidden]`.
            positions: `[tokens]`, or `[axes, tokens]`.
            targets: Needed by the last stage, which fills in the terms.
            attention: The attention program of the call.
            keep_logits: Keep the gradients of the logits, since backward follows at once; otherwise recompute them.
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
        hidden = (between(hidden) if between else hidden).squeeze(0).to(self.head.get_parameter("weight").dtype)
        few = min(loss_chunk_tokens(hidden.shape[1], bytes_per_element=hidden.element_size()), LOSS_CHUNK_TOKENS)
        return self._loss(hidden, targets, few=few, keep_logits=keep_logits)

    def _loss(self, hidden: Tensor, targets: Targets, *, few: int, keep_logits: bool) -> Tensor:
        """Weighted sum of terms in chunks of `few` tokens: by `head_loss` if logits are kept, or by repeated passes."""
        head, run = self.head, functools.partial(weighted_terms, curve=self.curve)
        if torch.is_grad_enabled():
            if keep_logits and type(head) is nn.Linear:
                return head_loss(head, hidden, targets=targets, chunk_tokens=few, curve=self.curve)
            few = LOSS_CHUNK_TOKENS // 2  # autograd keeps more per token
            run = functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        parts = zip(hidden.split(few), targets.split(few), strict=True)
        return torch.stack([run(head, own, targets=wanted) for own, wanted in parts]).sum()

    def _decoder_inputs(self, inputs: Tensor, placed: "PlacedFeatures | None") -> dict[str, Any]:
        assert placed is None
        return {"input_ids": inputs.unsqueeze(0)} if self.stage.is_first else enter(self.decoder, inputs)
