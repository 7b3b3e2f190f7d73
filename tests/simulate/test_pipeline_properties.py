"""Properties of every pipeline on every machine."""

import itertools
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import CostModel
from rayfcp.plan.pipeline.bound import pipeline_bound
from rayfcp.program import lower
from rayfcp.simulate import simulate, simulate_plan
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, Primitive, SequenceSpec, Slice
from tests.examples import examples
from tests.masks import specs
from tests.simulate.helpers import MODEL
from tests.simulate.pipelines import gpipe, one_f_one_b, pipeline, plan_of_chunks
from tests.simulate.test_properties import machines


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[BatchPlan, list[SequenceSpec]]:
    """Runs of slices, the last of each with short sequences beside it or not, in one or two pipelines."""
    num_stages, num_ranks = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    lengths: list[int] = []
    chunks: list[list[int | Slice]] = []
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        start, sliced = len(chunks), False
        for sizes in draw(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=3), min_size=1, max_size=3)):
            bounds = [0, *itertools.accumulate(sizes)]
            number = len(lengths)
            lengths.append(bounds[-1])
            cuts = [Slice(sequence=number, start=low, stop=high) for low, high in itertools.pairwise(bounds)]
            chunks += [[cut] for cut in cuts] if len(cuts) > 1 else [[number]]
            sliced |= len(cuts) > 1
            if draw(st.booleans()):
                chunks[-1].append(len(lengths))
                lengths.append(draw(st.integers(1, 40)))
        count = len(chunks) - start
        orders = gpipe(count, num_stages) if sliced else one_f_one_b(count, num_stages)
        shifted = [
            tuple(type(each)(microbatch=each.microbatch + start, backward=each.backward) for each in order)
            for order in orders
        ]
        layers = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        parts.append(pipeline(shifted, start=start, recomputed=[layers] * num_stages))
    primitive = draw(st.sampled_from(Primitive))
    return plan_of_chunks(chunks, num_ranks=num_ranks, pipelines=parts, primitive=primitive), specs(lengths)


@examples(30)
@given(pipelines(), machines, st.sampled_from(["step", "microbatch"]), st.sampled_from([0.0, 25.0]))
def test_no_pipeline_beats_the_lower_bound(
    drawn: tuple[BatchPlan, list[SequenceSpec]], hardware: HardwareProfile, gather_every: str, half_tokens: float
) -> None:
    plan, sequences = drawn
    hardware = replace(hardware, attention_half_tokens=half_tokens, memory_bytes=1 << 40)
    cost = CostModel.from_profiles(
        MODEL,
        hardware,
        num_ranks=plan.num_ranks,
        num_stages=plan.num_stages,
        bytes_per_element=2,
        reduce_every="step",
        gather_every=gather_every,  # type: ignore[arg-type]
    )
    most = max(sum(row) for row in simulate_plan(plan, sequences, model=MODEL, hardware=hardware).loads.num_tokens)
    cluster = ClusterSpec(num_ranks=plan.num_ranks, num_stages=plan.num_stages, max_tokens_per_rank=int(most))
    timeline = simulate_plan(plan, sequences, model=MODEL, hardware=hardware, gather_every=gather_every)  # type: ignore[arg-type]
    assert timeline.iteration_s >= pipeline_bound(sequences, cluster=cluster, cost=cost) * (1 - 1e-9)


@examples(25)
@given(pipelines(), machines, st.sampled_from(["step", "microbatch"]), st.sampled_from(["step", "microbatch"]))
def test_a_timeline_of_stages_adds_up(
    drawn: tuple[BatchPlan, list[SequenceSpec]], hardware: HardwareProfile, reduce_every: str, gather_every: str
) -> None:
    """It ends, no sooner than the busiest device."""
    plan, sequences = drawn
    programs = lower(plan, sequences, reduce_every=reduce_every)
    timeline = simulate(programs, model=MODEL, hardware=hardware, gather_every=gather_every, detail=True)  # type: ignore[arg-type]
    assert timeline.iteration_s >= max(timeline.compute_s) * (1 - 1e-9)
    for each in timeline.by_rank:
        assert sum(astuple(each)) == pytest.approx(timeline.iteration_s, rel=1e-9)
        assert all(part >= -1e-12 for part in astuple(each))
    assert timeline.num_tokens == sum(each.num_tokens for each in sequences)
    assert timeline.attention_flops == pytest.approx(
        3 * MODEL.attention_flops_per_pair * sum(each.attention_pairs for each in sequences)
    )
    for stage, rank in itertools.product(range(plan.num_stages), range(plan.num_ranks)):
        own = [each for each in timeline.spans if (each.stage, each.rank) == (stage, rank)]
        assert own[0].start_s == 0.0 and max(each.stop_s for each in own) == timeline.iteration_s
    for samples in timeline.memory:
        assert samples[0][1] == samples[-1][1] == min(size for _, size in samples)
    assert timeline == simulate(programs, model=MODEL, hardware=hardware, gather_every=gather_every, detail=True)  # type: ignore[arg-type]
