"""Tiny models of several families, and one rank that runs them as the interpreter does."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.config.architecture import ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import Targets
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config
from rayfcp.program import Forward, lower
from rayfcp.values import LayerKinds
from tests.execute.threads import InProcessTransport

VOCAB = 61
FAMILIES = ("qwen3", "qwen2", "llama")
NUM_LAYERS = 3


def architecture(family: str, *, tied: bool = True) -> ArchitectureConfig:
    return ArchitectureConfig(
        model_type=family,
        num_layers=NUM_LAYERS,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        ffn_size=64,
        tied_embeddings=tied,
    )


def library_config(family: str, *, tied: bool = True) -> PreTrainedConfig:
    return model_config(ModelConfig(architecture=architecture(family, tied=tied)), vocab_size=VOCAB)


def rows_of(lengths: Sequence[int]) -> list[Tensor]:
    """Random tokens of sequences."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def shifted(row: Tensor) -> Tensor:
    """Targets: the next token, none for the last."""
    return torch.cat([row[1:], torch.tensor([-100])])


def targets_of(rows: Sequence[Tensor]) -> Targets:
    """The tokens that follow in packed sequences."""
    return Targets.of(torch.cat([shifted(row) for row in rows]), loss=CrossEntropy())


def context_of(lengths: Sequence[int], *, recomputed_layers: int = 0, layer_kinds: LayerKinds = ()) -> AttentionContext:
    """One rank that holds all sequences."""
    shape = PassShape(degree=1, lengths=tuple(lengths), layer_kinds=layer_kinds)
    (program,) = lower(*pass_plan(shape, num_ranks=1, recomputed_layers=recomputed_layers))
    (forward,) = (item for item in program.instructions if isinstance(item, Forward))
    return AttentionContext.of(forward, transport=InProcessTransport(Fabric(1), 0), kernel=pick_kernel("cpu"))


def loss_sum(model: CausalLM, rows: Sequence[Tensor], *, context: AttentionContext) -> Tensor:
    """Summed loss of packed sequences."""
    return model(
        torch.cat(list(rows)),
        torch.cat([torch.arange(len(row)) for row in rows]),
        targets_of(rows),
        context,
    )
