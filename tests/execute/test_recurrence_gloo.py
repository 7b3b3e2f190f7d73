"""Recurrent layers on real gloo processes."""

import torch.distributed as dist

from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.program import lower
from rayfcp.values import BatchPlan, RecurrentKind, SequenceSpec
from tests.execute.gloo import joined, on_processes
from tests.execute.recurrent import RULES, Batch, Found, OneRank, assert_same, with_kind
from tests.execute.test_recurrence import strewn
from tests.program.pipelines import random_pipelines

NUM_RANKS, KIND = 3, RecurrentKind(halo=3)


def cases() -> dict[str, tuple[BatchPlan, list[SequenceSpec]]]:
    """By rule. Of two heads and three ranks that fold, one rank has none."""
    return {
        "kda": strewn([70, 2, 33], num_ranks=NUM_RANKS, seed=0, how="zigzag"),
        "mamba-2": random_pipelines(5, num_stages=1, num_ranks=NUM_RANKS),
    }


def run_cases(rank: int, client: dist.Store) -> dict[str, Found]:
    results = {}
    with joined(MeshPosition(rank=rank, num_ranks=NUM_RANKS), client, name="recurrence"):
        for rule, (plan, sequences) in cases().items():
            batch = Batch.of(RULES[rule], sequences)
            results[rule] = batch.nothing(layers=2, num_ranks=NUM_RANKS)
            program = lower(plan, with_kind(sequences, KIND))[rank]
            runner = OneRank(program, DistributedTransport(dist.group.WORLD), rule=RULES[rule], kind=KIND)
            runner.run(batch.given, batch.grads, found=results[rule])
    return results


def test_ranks_equal_whole_sequences() -> None:
    found = on_processes(run_cases, size=NUM_RANKS)
    for rule, (_, sequences) in cases().items():
        batch = Batch.of(RULES[rule], sequences)
        whole = batch.nothing(layers=2, num_ranks=NUM_RANKS)
        for rank, results in enumerate(found):
            whole.merge(results[rule], rank=rank)
        assert_same(batch, whole, width=KIND.halo + 1)
