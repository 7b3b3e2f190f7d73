"""Small pipelines for the tests: cost models, chunk lists and plain replays."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.plan.pipeline.schedule import Order
from rayfcp.values import PipelinePlan


def staged_cost(*, num_ranks: int = 2, num_stages: int = 2, model: str = "gpt-7b", **keywords: object) -> CostModel:
    given = {"bytes_per_element": 2, "reduce_every": "step", **keywords}
    return CostModel.from_profiles(
        model_profile(model), hardware_profile("a800"), num_ranks=num_ranks, num_stages=num_stages, **given
    )


def order_of(pipeline: PipelinePlan) -> Order:
    """The order of a value, its microbatches numbered from 0."""
    codes = [
        [
            -1 - (each.microbatch - pipeline.start) if each.backward else each.microbatch - pipeline.start
            for each in stage
        ]
        for stage in pipeline.actions
    ]
    return np.array(codes, np.int64)


runs_of_chunks = st.lists(st.integers(1, 4), min_size=1, max_size=5)
descending = runs_of_chunks.map(lambda lengths: sorted(lengths, reverse=True))


def replay(
    order: Order,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    transfer_s: Sequence[float],
) -> float:
    """Makespan by repeated relaxation of all constraints, until nothing moves."""
    num_stages, num_passes = order.shape
    ends: dict[tuple[int, int], float] = {}
    last = num_stages - 1
    for _ in range(num_stages * num_passes + 1):
        before = dict(ends)
        for stage in range(num_stages):
            free = 0.0
            for code in order[stage].tolist():
                m, spent = (code, forward_s[stage][code]) if code >= 0 else (-1 - code, backward_s[stage][-1 - code])
                source = stage - 1 if code >= 0 else stage + 1
                came = _arrivals(order, ends, source=source, backward=code < 0, transfer_s=transfer_s).get(m, 0.0)
                free = ends[stage, code] = max(free, came if 0 <= source <= last else 0.0) + spent
        if ends == before:
            return max(ends.values())
    raise AssertionError("never settles")


def _arrivals(
    order: Order, ends: dict[tuple[int, int], float], *, source: int, backward: bool, transfer_s: Sequence[float]
) -> dict[int, float]:
    if not 0 <= source < len(order):
        return {}
    wire, came = 0.0, {}
    for code in order[source].tolist():
        if (code < 0) == backward and (source, code) in ends:
            m = -1 - code if backward else code
            wire = came[m] = max(wire, ends[source, code]) + transfer_s[m]
    return came
