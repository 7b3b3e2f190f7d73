"""A Hugging Face causal language model as the interpreter wants it: tokens in, sum of losses out."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfcp.execute.attention import AttentionContext
from rayfcp.execute.interfaces import IGNORED
from rayfcp.execute.sharding import StageModule
from rayfcp.models.attention_hook import KEYWORD, follow_context
from rayfcp.plan.costs.memory import LOSS_CHUNK_TOKENS


class CausalLM(StageModule):
    """Wraps a `*ForCausalLM`; parameters are the library's own, under `model`.

    Args:
        model: from the transformers library, with our attention implementation set.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        follow_context(dict(enumerate(self.layers)))

    @property
    def decoder(self) -> nn.Module:
        """Embedding, layers and final norm."""
        return self.model.get_decoder()  # type: ignore[no-any-return]

    @property
    def layers(self) -> nn.ModuleList:
        found = getattr(self.decoder, "layers", None)
        if not isinstance(found, nn.ModuleList):
            # Not an AttributeError: torch would report a missing property instead.
            raise TypeError(f"{type(self.decoder).__name__} has no list of layers")
        return found

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, attention: AttentionContext) -> Tensor:
        """Sum of cross entropies in fp32 over targets that are not -100; all arguments `[tokens]`."""
        output = self.decoder(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **{KEYWORD: attention},
        )
        hidden = output.last_hidden_state.squeeze(0)
        head = self.model.get_output_embeddings()
        parts = zip(hidden.split(LOSS_CHUNK_TOKENS), targets.split(LOSS_CHUNK_TOKENS), strict=True)
        return torch.stack(
            [self._chunk_loss(head, *part, keep=len(hidden) <= LOSS_CHUNK_TOKENS) for part in parts]
        ).sum()

    def _chunk_loss(self, head: nn.Module, hidden: Tensor, targets: Tensor, *, keep: bool) -> Tensor:
        if keep:
            return _cross_entropy_sum(head, hidden, targets)
        return checkpoint(_cross_entropy_sum, head, hidden, targets, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


def _cross_entropy_sum(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)
    if logits.dtype is not torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


class WholeModel:
    """A `CausalLM` that is not sharded; see `TrainableModel`. The caller sums gradients over ranks."""

    def __init__(self, module: CausalLM) -> None:
        self.module = module

    def loss_sum(self, tokens: Tensor, *, positions: Tensor, targets: Tensor, attention: AttentionContext) -> Tensor:
        return self.module(tokens, positions, targets, attention)  # type: ignore[no-any-return]

    def set_reduce(self, reduce: bool) -> None:
        """Nothing is sharded, so nothing is reduced."""
