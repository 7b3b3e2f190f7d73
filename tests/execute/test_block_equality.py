"""Blocks anywhere, through the whole model: loss and gradients of a single process, also on gloo processes."""

from dataclasses import dataclass, field, replace

import pytest

from rayfcp.config.models import BlockOptions
from rayfcp.plan.strategies.flex_block import propose_blocks
from rayfcp.values import BatchPlan, ClusterSpec
from rayfcp.verify import check_plan
from tests.execute.cases import Case
from tests.execute.test_blocks import COST
from tests.execute.test_equality import assert_same_on_gloo
from tests.execute.test_equality import test_in_process as in_process


@dataclass(frozen=True, kw_only=True)
class BlockCase(Case):
    """Planned with `options`, `room` tokens a rank."""

    options: BlockOptions = field(default_factory=BlockOptions)
    room: int = 1000

    def plan(self) -> BatchPlan:
        cluster = ClusterSpec(num_ranks=self.num_ranks, max_tokens_per_rank=self.room)
        proposal = propose_blocks(self.sequences, cluster=cluster, cost=COST, options=self.options)
        plan = BatchPlan(
            strategy="flex-block",
            num_ranks=self.num_ranks,
            generation=0,
            microbatches=proposal.microbatches,
            recomputed_layers=self.recomputed,
            predicted_s=sum(each.predicted_s for each in proposal.microbatches),
            lower_bound_s=0.0,
            reason=proposal.reason,
        )
        check_plan(plan, self.sequences, cluster=cluster)
        return plan


def blocks(**options: object) -> BlockOptions:
    return BlockOptions.model_validate(options)


CASES = (
    BlockCase(num_ranks=2, lengths=(101, 1, 37, 2), microbatches=(), options=blocks(block_tokens=16)),
    BlockCase(
        num_ranks=3, lengths=(131, 17, 1, 45, 7), microbatches=(), options=blocks(block_tokens=9, coalesce=2), room=60
    ),
    BlockCase(
        num_ranks=4,
        lengths=(150, 60, 33),
        microbatches=(),
        options=blocks(block_tokens=8, placement="lpt", num_buffers=2),
        recomputed=2,
    ),
    BlockCase(num_ranks=5, lengths=(222, 3), microbatches=(), options=blocks(block_tokens=11, num_buffers=4)),
    BlockCase(
        num_ranks=7,
        lengths=(200, 90, 40, 5),
        microbatches=(),
        options=blocks(block_tokens=7, coalesce=3, placement="lpt", pairing="free"),
        reduce_every="microbatch",
    ),
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_ranks}-ranks")
def test_blocks_in_process(case: Case, dtype: str) -> None:
    in_process(case, dtype)


def test_blocks_on_gloo_processes_sharded() -> None:
    """Cases of up to five processes, FSDP2 shards, several microbatches, recomputation, every kind of rounds."""
    cases = [*CASES[:-1], replace(CASES[-1], num_ranks=5)]
    assert_same_on_gloo([(case, "float64") for case in cases] + [(CASES[2], "float32")])
