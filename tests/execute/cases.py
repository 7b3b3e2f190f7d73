"""Global batches with everything that goes wrong elsewhere, and what a single process makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from rayfcp.config.architecture import ArchitectureConfig
from rayfcp.config.models import ModelConfig
from rayfcp.execute.interpreter import Tokens
from rayfcp.models import causal_lm
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config
from rayfcp.plan import lay_out
from rayfcp.values import BatchPlan, Group, MicrobatchPlan, Primitive, SequenceSpec
from tests.execute.layouts import over_runs

# Small enough that ranks of the cases below take their loss in several chunks.
causal_lm.loss_chunk_tokens = lambda _hidden_size, *, bytes_per_element: 24

VOCAB = 97
SEED = 5

ARCHITECTURE = ArchitectureConfig(
    num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96, vocab_size=VOCAB
)

Gradients = dict[str, torch.Tensor]
Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`microbatches[m]` lists groups: (ranks, sequences), of several ranks all of `primitive`. `recomputed`: layers,
    with their attention unless that is kept (`keeps`); `reduce_every` as in the config. With `heads` above 1, groups
    are rings of runs of that many ranks, numbered. `compiled`: layers of rank 0 are, in processes."""

    num_ranks: int
    lengths: tuple[int, ...]
    microbatches: tuple[Groups, ...]
    recomputed: int = 0
    keeps: bool = False
    reduce_every: str = "step"
    primitive: Primitive = Primitive.RING
    heads: int = 1
    compiled: bool = False

    @property
    def sequences(self) -> list[SequenceSpec]:
        return [SequenceSpec(id=i, num_tokens=n, num_targets=n - 1) for i, n in enumerate(self.lengths)]

    @property
    def num_targets(self) -> int:
        return sum(n - 1 for n in self.lengths)

    def plan(self) -> BatchPlan:
        return BatchPlan(
            strategy="by hand",
            num_ranks=self.num_ranks,
            generation=0,
            microbatches=tuple(self._microbatch(groups) for groups in self.microbatches),
            recomputed_layers=self.recomputed,
            keeps_attention=self.keeps,
            predicted_s=1.0,
            lower_bound_s=1.0,
            reason="a test",
        )

    def _microbatch(self, groups: Groups) -> MicrobatchPlan:
        found = tuple(Group(ranks=ranks, sequences=ids, primitive=self.primitive) for ranks, ids in groups)
        microbatch = MicrobatchPlan(groups=found, group_s=(1.0,) * len(groups), predicted_s=1.0)
        if self.heads == 1:
            return microbatch
        layout = over_runs(lay_out(microbatch, self.sequences), num_ranks=self.num_ranks, heads=self.heads)
        runs = layout.runs(self.num_ranks)
        found = tuple(replace(each, ranks=tuple(rank for run in each.ranks for rank in runs[run])) for each in found)
        return replace(microbatch, groups=found, layout=layout)


CASES = (
    Case(num_ranks=1, lengths=(33, 1, 20), microbatches=((((0,), (0, 1, 2)),),)),
    Case(
        num_ranks=2,
        lengths=(101, 1, 37, 2),
        microbatches=((((0, 1), (0,)),), (((1,), (1, 2)), ((0,), (3,)))),
        recomputed=2,
    ),
    Case(
        num_ranks=3,
        lengths=(131, 17, 1, 45, 7),
        microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (1, 3)), ((0,), (4,)))),
        reduce_every="microbatch",
    ),
    Case(
        num_ranks=5,
        lengths=(151, 63, 1, 29, 9, 3),
        microbatches=((((1, 2, 4), (0, 1)), ((0,), (2,))), (((0, 3), (3,)), ((4,), (4, 5)))),
        recomputed=3,
        keeps=True,
    ),
    Case(num_ranks=5, lengths=(3, 211), microbatches=((((0, 1, 2, 3, 4), (0, 1)),),)),
    Case(
        num_ranks=3,
        lengths=(101, 1, 37, 2),
        microbatches=((((2, 0), (0,)),), (((1, 2), (1, 2)), ((0,), (3,)))),
        recomputed=2,
        primitive=Primitive.ULYSSES,
    ),
    Case(
        num_ranks=4,
        lengths=(131, 17, 1, 45, 7),
        microbatches=((((3, 1, 0, 2), (0, 2)),), (((1, 2), (1, 3)), ((0, 3), (4,))), (((0, 1, 2, 3), ()),)),
        recomputed=1,
        keeps=True,
        reduce_every="microbatch",
        primitive=Primitive.ULYSSES,
    ),
    Case(num_ranks=4, lengths=(3,), microbatches=((((0, 1, 2, 3), (0,)),),), primitive=Primitive.ULYSSES),
    Case(
        num_ranks=4,
        lengths=(131, 17, 1, 45),
        microbatches=((((1, 0), (0, 2)),), (((1,), (1, 3)),)),
        recomputed=2,
        keeps=True,
        heads=2,
    ),
)
"""Rings of degrees 1, 2, 3 and 5, Ulysses groups of 2 and 4, rings of runs that share out heads; odd lengths; one
token; fewer tokens than ranks; ranks with nothing to do."""


class CaseTokens:
    """Random tokens of a case; see `TokenSource`."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(0)
        self.rows = [rng.integers(0, VOCAB, n) for n in case.lengths]

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        row = self.rows[sequence]
        return row[start:stop], np.append(row[1:], -100)[start:stop]


def library_config(dtype: str):
    return model_config(ModelConfig(dtype=dtype, architecture=ARCHITECTURE), vocab_size=VOCAB)


def expected(case: Case, dtype: str) -> tuple[float, Gradients]:
    """What `reference` says of the cases' model."""
    return reference(random_model(library_config(dtype), dtype=dtype, seed=SEED), case)


def use_library_attention(model: CausalLM) -> None:
    """Let a model run as the library wrote it."""
    model.model.set_attn_implementation("sdpa")
    for module in model.modules():
        vars(module).pop("expand_kv", None)  # latents became keys and values elsewhere


def reference(model: CausalLM, case: Case) -> tuple[float, Gradients]:
    """Mean loss and its gradients by the library's own attention, one sequence at a time, one process."""
    use_library_attention(model)
    total = 0.0
    for row in CaseTokens(case).rows:
        ids = torch.from_numpy(row)[None]
        logits = model.model(input_ids=ids).logits[0]
        loss = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum") / case.num_targets
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters()}


def assert_same(
    loss: float, gradients: Gradients, *, want: tuple[float, Gradients], dtype: str, what: Sequence[object] = ()
) -> None:
    """Loss and every parameter's gradient within 1e-5 (fp32) or 1e-10 (fp64) of a single process's."""
    bound = 1e-10 if dtype == "float64" else 1e-5
    assert abs(loss - want[0]) <= bound * abs(want[0]), (*what, loss, want[0])
    assert gradients.keys() == want[1].keys()
    for name, gradient in gradients.items():
        error = float((gradient - want[1][name]).norm() / want[1][name].norm())
        assert error <= bound, (*what, name, error)
