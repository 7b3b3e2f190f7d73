"""Properties of every plan on every machine."""

import itertools
from collections import defaultdict
from dataclasses import astuple, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.cost.memory import state_bytes, token_bytes
from rayfcp.plan import CostModel, plan_batch
from rayfcp.program import RankProgram, lower
from rayfcp.simulate import script as writer
from rayfcp.simulate import simulate
from rayfcp.values import (
    BatchPlan,
    ClusterSpec,
    HardwareProfile,
    InfeasiblePlanError,
    ModelProfile,
    SpanKind,
)
from tests.examples import examples
from tests.masks import specs
from tests.simulate.helpers import MODEL, machine

lengths = st.lists(st.integers(1, 800) | st.integers(1, 40), min_size=1, max_size=14)
machines = st.builds(
    machine,
    peak_flops=st.sampled_from([1e8, 1e9, 1e10]),
    attention_efficiency=st.sampled_from([0.05, 0.4]),
    intra_node_bandwidth=st.sampled_from([1e7, 1e9]),
    inter_node_bandwidth=st.sampled_from([1e6, 1e8]),
    node_uplink_bandwidth=st.sampled_from([0.0, 2e7]),
    latency_s=st.sampled_from([0.0, 1e-4]),
    linear_half_tokens=st.sampled_from([0.0, 30.0]),
    devices_per_node=st.integers(1, 6),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
)


def planned(
    sizes: list[int],
    hardware: HardwareProfile,
    *,
    num_ranks: int,
    model: ModelProfile = MODEL,
    recomputed_layers: int = 0,
    reduce_every: str = "step",
) -> tuple[BatchPlan, tuple[RankProgram, ...]]:
    cost = CostModel.from_profiles(
        model,
        hardware,
        num_ranks=num_ranks,
        recomputed_layers=recomputed_layers,
        bytes_per_element=2,
        reduce_every=reduce_every,  # type: ignore[arg-type]
    )
    room = max(max(sizes) // num_ranks + 1, sum(sizes) // (2 * num_ranks) + 1)
    sequences = specs(sizes)
    plan = plan_batch(sequences, cluster=ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room), cost=cost)
    return plan, lower(plan, sequences, reduce_every=reduce_every)


@examples(10)
@given(lengths, machines, st.integers(1, 9), st.integers(0, 4))
def test_a_timeline_adds_up(sizes: list[int], hardware: HardwareProfile, num_ranks: int, recomputed: int) -> None:
    plan, programs = planned(sizes, hardware, num_ranks=num_ranks, recomputed_layers=recomputed)
    timeline = simulate(programs, model=MODEL, hardware=hardware, detail=True)
    assert timeline.iteration_s >= plan.lower_bound_s * (1 - 1e-9)
    assert sum(astuple(timeline.breakdown)) == pytest.approx(timeline.iteration_s, rel=1e-9)
    assert all(each >= 0 for each in astuple(timeline.breakdown))
    assert 0 <= timeline.bubble < 1 and 0 < timeline.attention_mfu < timeline.mfu < 1
    assert timeline.num_tokens == sum(sizes)
    assert sum(timeline.sent_bytes) == pytest.approx(sum(timeline.received_bytes))
    per_sequence = [size * (size + 1) / 2 for size in sizes]
    assert timeline.attention_flops == pytest.approx(3 * MODEL.attention_flops_per_pair * sum(per_sequence))
    assert timeline == simulate(programs, model=MODEL, hardware=hardware, detail=True)


STRATEGIES = ("flex-ring", "static-cp", "ring", "ulysses", "bytescale", "magi", "flex-block")


@examples(20)
@given(
    st.lists(st.integers(1, 800) | st.integers(1, 20), min_size=1, max_size=10),
    machines,
    st.integers(1, 9),
    st.integers(0, 4),
    st.sampled_from([0.0, 20.0, 300.0]),
    st.sampled_from(["step", "microbatch"]),
    st.sampled_from(STRATEGIES),
)
def test_nothing_beats_the_lower_bound(
    sizes: list[int],
    hardware: HardwareProfile,
    num_ranks: int,
    recomputed: int,
    half_tokens: float,
    reduce_every: str,
    strategy: str,
) -> None:
    """Whatever overlaps, however small the batch, however often gradients are reduced."""
    hardware = replace(hardware, attention_half_tokens=half_tokens)
    sequences = specs(sizes)
    cost = CostModel.from_profiles(
        MODEL,
        hardware,
        num_ranks=num_ranks,
        recomputed_layers=recomputed,
        bytes_per_element=2,
        reduce_every=reduce_every,  # type: ignore[arg-type]
    )
    room = max(max(sizes) // num_ranks + 1, sum(sizes) // (2 * num_ranks) + 1)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    try:
        plan = plan_batch(
            sequences,
            cluster=cluster,
            cost=cost,
            strategy=strategy,
            options=PlanConfig(primitives=("ring", "ulysses")),
        )
    except InfeasiblePlanError:
        assume(False)
    programs = lower(plan, sequences, reduce_every=reduce_every)
    seconds = simulate(programs, model=MODEL, hardware=hardware).iteration_s
    assert seconds >= plan.lower_bound_s * (1 - 1e-9)


@examples(12)
@given(lengths, machines, st.integers(1, 9))
def test_spans_of_a_kind_do_not_overlap(sizes: list[int], hardware: HardwareProfile, num_ranks: int) -> None:
    _, programs = planned(sizes, hardware, num_ranks=num_ranks)
    timeline = simulate(programs, model=MODEL, hardware=hardware, detail=True)
    coarse = simulate(programs, model=MODEL, hardware=hardware).spans
    assert set(coarse) <= set(timeline.spans)
    by_kind = defaultdict(list)
    for span in timeline.spans:
        by_kind[span.rank, span.kind].append(span)
    for spans in by_kind.values():
        for one, other in itertools.pairwise(spans):
            assert one.stop_s <= other.start_s + 1e-12 * timeline.iteration_s
    for rank in range(num_ranks):
        own = [span for span in coarse if span.rank == rank]
        assert own[0].start_s == 0.0 and own[-1].stop_s == timeline.iteration_s
        assert all(one.stop_s == other.start_s for one, other in itertools.pairwise(own))
        attention = [span for span in by_kind[rank, SpanKind.ATTENTION]]
        assert attention and all(span.start_s >= 0 and span.stop_s <= timeline.iteration_s for span in attention)


@examples(12)
@given(lengths, machines, st.integers(2, 9), st.sampled_from(["intra_node_bandwidth", "inter_node_bandwidth"]))
def test_more_bandwidth_is_never_slower(sizes: list[int], hardware: HardwareProfile, num_ranks: int, name: str) -> None:
    """Equal up to the order in which messages of different groups reach a shared link."""
    _, programs = planned(sizes, hardware, num_ranks=num_ranks)
    wider = replace(hardware, **{name: 3 * getattr(hardware, name)})
    before, after = (simulate(programs, model=MODEL, hardware=each).iteration_s for each in (hardware, wider))
    assert after <= before * (1 + 5e-3)


@examples(10)
@given(lengths, machines, st.integers(1, 9), st.integers(0, 24), st.sampled_from(["step", "microbatch"]))
def test_layers_left_out_are_those_that_repeat(
    sizes: list[int], hardware: HardwareProfile, num_ranks: int, recomputed: int, reduce_every: str
) -> None:
    """Equal up to the order of events at one instant, which rounding decides."""
    model = replace(MODEL, num_layers=24)
    _, programs = planned(
        sizes, hardware, num_ranks=num_ranks, model=model, recomputed_layers=recomputed, reduce_every=reduce_every
    )
    short = simulate(programs, model=model, hardware=hardware)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHOWN_LAYERS", 1000)
        whole = simulate(programs, model=model, hardware=hardware)
    assert short.iteration_s == pytest.approx(whole.iteration_s, rel=1e-3)
    assert astuple(short.breakdown) == pytest.approx(astuple(whole.breakdown), abs=1e-3 * whole.iteration_s)
    assert [span.label for span in short.spans] == [span.label for span in whole.spans]


@pytest.mark.parametrize("reduce_every", ["step", "microbatch"])
def test_peak_memory_is_the_memory_models(reduce_every: str) -> None:
    plan, programs = planned(
        [700, 300, 200, 100, 50], machine(), num_ranks=3, recomputed_layers=1, reduce_every=reduce_every
    )
    assert len(plan.microbatches) > 1
    timeline = simulate(programs, model=MODEL, hardware=machine())
    fixed = state_bytes(MODEL, num_devices=3, bytes_per_element=2, reduce_every=reduce_every)  # type: ignore[arg-type]
    each = token_bytes(MODEL, recomputed_layers=1, bytes_per_element=2)
    peak_tokens = map(max, zip(*timeline.loads.num_tokens, strict=True))
    assert timeline.peak_memory_bytes == tuple(fixed + tokens * each for tokens in peak_tokens)
    for samples in timeline.memory:
        times = [at_s for at_s, _ in samples]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= timeline.iteration_s
        assert samples[0][1] == samples[-1][1] == fixed
