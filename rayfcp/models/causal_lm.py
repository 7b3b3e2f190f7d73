"""A Hugging Face causal language model, or one stage of it, as the interpreter wants it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfcp.execute.attention import AttentionContext
from rayfcp.execute.interfaces import IGNORED
from rayfcp.execute.sharding import StageModule, StageRunner
from rayfcp.models.attention_hook import KEYWORD, follow_context
from rayfcp.models.stages import Stage, cut, decoder_layers, enter, is_tied
from rayfcp.plan.costs.memory import LOSS_CHUNK_TOKENS


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
    ) -> Tensor:
        """Sum of cross entropies in fp32 over targets that are not -100; before the last stage activations instead,
        `[1, tokens, hidden]`. `inputs`: token ids, after the first stage activations `[tokens, hidden]`; the others
        `[tokens]`.

        `keep_logits`: until backward, if they are few; otherwise they are computed again.
        """
        given = {"input_ids": inputs.unsqueeze(0)} if self.stage.is_first else enter(self.decoder, inputs)
        output = self.decoder(**given, position_ids=positions.unsqueeze(0), use_cache=False, **{KEYWORD: attention})
        hidden: Tensor = output.last_hidden_state
        if not self.stage.is_last:
            return hidden
        hidden = hidden.squeeze(0)
        assert targets is not None
        head = self.model.get_output_embeddings()
        parts = zip(hidden.split(LOSS_CHUNK_TOKENS), targets.split(LOSS_CHUNK_TOKENS), strict=True)
        keep = keep_logits and len(hidden) <= LOSS_CHUNK_TOKENS
        return torch.stack([self._chunk_loss(head, *part, keep=keep) for part in parts]).sum()

    def _chunk_loss(self, head: nn.Module, hidden: Tensor, targets: Tensor, *, keep: bool) -> Tensor:
        if keep:
            return _cross_entropy_sum(head, hidden, targets)
        return checkpoint(_cross_entropy_sum, head, hidden, targets, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _cross_entropy_sum(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)
    if logits.dtype is not torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


class WholeModel(StageRunner):
    """Nothing is sharded. The caller sums gradients over ranks."""

    def set_reduce(self, reduce: bool) -> None:
        """Nothing is sharded, so nothing is reduced."""
