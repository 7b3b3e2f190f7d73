"""The planner's replay of passes against the simulation of every instruction, layer and message."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jobs.reproduce.chunks import chunks_of
from rayfcp.cost.microbatches import chunk_bytes, chunk_passes, stage_times
from rayfcp.plan import CostModel
from rayfcp.plan.pipeline.schedule import one_forward_one_backward, peak_bytes, pipeline_plan, replayed_s
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import Primitive, Slice
from tests.masks import specs
from tests.plan.pipeline.runs import run_lengths
from tests.simulate.helpers import MODEL, machine
from tests.simulate.pipelines import plan_of_chunks

DEEP = replace(MODEL, num_layers=12)


def cut(sequence: int, *bounds: int) -> list[list[int | Slice]]:
    return [[Slice(sequence=sequence, start=a, stop=b)] for a, b in itertools.pairwise(bounds)]


LENGTHS = [9600, 4800, 2400, 600, 2400, 2400]
CHUNKS = [*cut(0, 0, 4000, 7200, 9600), *cut(1, 0, 3000, 4800), [2], [4], [5]]
CHUNKS[4].append(3)
"""Split, tail with a short sequence, and batched chunks."""


@pytest.mark.parametrize("gather_every", ["microbatch", "step"])
@pytest.mark.parametrize("primitive", list(Primitive))
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 2), (2, 3), (2, 4), (4, 2)])
def test_the_planners_replay_is_the_simulators(
    num_ranks: int, num_stages: int, primitive: Primitive, gather_every: str
) -> None:
    """Seconds within 3 %, and the same peak of memory to a token a chunk; where ranks are two, attention is kept."""
    model = replace(DEEP, keeps_attention=num_ranks == 2)
    hardware = machine(attention_efficiency=0.05, attention_half_tokens=20.0, peak_flops=1e10, memory_bytes=1 << 40)
    cost = CostModel.from_profiles(
        model,
        hardware,
        num_ranks=num_ranks,
        num_stages=num_stages,
        bytes_per_element=2,
        reduce_every="step",
        gather_every=gather_every,  # type: ignore[arg-type]
    )
    sequences = specs(LENGTHS)
    plan = plan_of_chunks(CHUNKS, num_ranks=num_ranks, pipelines=[], primitive=primitive)
    plan = replace(plan, keeps_attention=model.keeps_attention)
    columns = chunks_of(plan.microbatches, by_id={each.id: each for each in sequences})
    order = one_forward_one_backward(run_lengths(plan.microbatches), num_stages=num_stages)
    recomputed = np.arange(num_stages * len(CHUNKS)).reshape(num_stages, -1) % 3
    passes = chunk_passes(columns, cost=cost, degree=num_ranks, primitive=primitive)
    times = stage_times(passes, cost=cost, gathers=0, reduces=int(~order[0, -1]))
    predicted = replayed_s(
        order,
        forward_s=times.forward_s,
        backward_s=times.recomputing(recomputed.astype(float)),
        transfer_s=times.transfer_s,
    )
    staged = replace(plan, pipelines=(pipeline_plan(order, start=0, recomputed=recomputed, predicted_s=0.0),))
    timeline = simulate(lower(staged, sequences), model=DEEP, hardware=hardware, gather_every=gather_every)  # type: ignore[arg-type]
    assert timeline.iteration_s == pytest.approx(predicted, rel=0.03)
    held = chunk_bytes(columns, cost=cost, degree=num_ranks, primitive=primitive)
    peaks = peak_bytes(order, held=held, recomputed=recomputed)
    assert cost.pipeline is not None
    for stage, room in enumerate(cost.pipeline.budget_bytes):
        fixed_bytes = hardware.memory_bytes - room
        simulated = max(timeline.peak_memory_bytes[stage * num_ranks : (stage + 1) * num_ranks]) - fixed_bytes
        assert simulated == pytest.approx(peaks[stage], rel=2e-3)
