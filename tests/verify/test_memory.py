"""The memory bound of pipelines, recounted from programs: closed forms, and the planner's own count."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.reproduce.chunks import chunks_of
from rayfcp.cost.microbatches import chunk_bytes
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.plan.pipeline.schedule import peak_bytes
from rayfcp.program import RankProgram, lower
from rayfcp.values import BatchPlan, ClusterSpec, Group, Primitive, SequenceSpec, Slice
from rayfcp.verify import check_plan
from rayfcp.verify.memory import check_memory, most_held
from tests.examples import examples
from tests.plan.pipeline.helpers import order_of
from tests.program.pipelines import chunk, pipeline, plan_of, split_split_hybrid

STAGES = 3


def cost_of(num_ranks: int, *, num_stages: int = STAGES) -> CostModel:
    return CostModel.from_profiles(
        model_profile("llama3-8b"),
        hardware_profile("a800"),
        num_ranks=num_ranks,
        num_stages=num_stages,
        bytes_per_element=2,
        reduce_every="microbatch",
        memory_bytes=200 << 30,
    )


def most_of(program: RankProgram, cost: CostModel) -> int:
    assert cost.pipeline is not None
    return most_held(program, cost=cost, pipeline=cost.pipeline)[0]


@st.composite
def one_group_a_microbatch(draw: st.DrawFn, num_ranks: int, primitive: Primitive) -> tuple[BatchPlan, list]:
    """Sequences in slices, the last one beside a short sequence now and then; any number of recomputed layers."""
    sequences, microbatches, ranks = list[SequenceSpec](), [], tuple(range(num_ranks))
    for _ in range(draw(st.integers(1, 3))):
        bounds = [0, *itertools.accumulate(draw(st.lists(st.integers(600, 4000), min_size=1, max_size=4)))]
        number = len(sequences)
        sequences.append(SequenceSpec(id=number, num_tokens=bounds[-1], num_targets=bounds[-1] - 1))
        for start, stop in itertools.pairwise(bounds):
            held = [number]
            if stop == bounds[-1] and draw(st.booleans()):
                short = draw(st.integers(1, 500))
                held.append(len(sequences))
                sequences.append(SequenceSpec(id=held[-1], num_tokens=short, num_targets=short - 1))
            microbatches.append(
                chunk(
                    [Group(ranks=ranks, sequences=tuple(held), primitive=primitive)],
                    [Slice(sequence=number, start=start, stop=stop)],
                )
            )
    count, layers = len(microbatches), cost_of(num_ranks).pipeline.layers_of_stage  # type: ignore[union-attr]
    recomputed = [[draw(st.sampled_from([0, 1, 5, most])) for _ in range(count)] for most in layers]
    only = pipeline(microbatches, start=0, stop=count, recomputed_layers=recomputed, ahead=draw(st.booleans()))
    return plan_of(microbatches, [only], num_ranks=num_ranks), sequences


@examples(60)
@given(data=st.data(), num_ranks=st.sampled_from([1, 2, 4]), primitive=st.sampled_from(Primitive))
def test_programs_hold_what_the_planner_counts(data: st.DataObject, num_ranks: int, primitive: Primitive) -> None:
    """The fullest rank's bytes; the planner rounds shares of several ranks once, programs with each slice."""
    plan, sequences = data.draw(one_group_a_microbatch(num_ranks, primitive))
    cost = cost_of(num_ranks)
    assert cost.pipeline is not None
    chunks = chunks_of(plan.microbatches, by_id={each.id: each for each in sequences})
    held = chunk_bytes(chunks, cost=cost, degree=num_ranks, primitive=primitive)
    only = plan.pipelines[0]
    due = peak_bytes(order_of(only), held=held, recomputed=only.recomputed_layers)
    programs = lower(plan, sequences)
    for stage in range(STAGES):
        found = max(most_of(program, cost) for program in programs[stage * num_ranks :][:num_ranks])
        assert found == (due[stage] if num_ranks == 1 else pytest.approx(due[stage], rel=0.02))


def test_one_microbatch_alone_by_hand() -> None:
    """One rank, two stages, 1000 tokens: all layers whole, then all recomputed."""
    sequences = [SequenceSpec(id=0, num_tokens=1000, num_targets=999)]
    cost = cost_of(1, num_stages=2)
    assert cost.pipeline is not None
    (each,), layers = cost.pipeline.layer_bytes.shapes, cost.pipeline.layers_of_stage
    for recomputed in (False, True):
        microbatches = [chunk([Group(ranks=(0,), sequences=(0,))])]
        rows = [[most if recomputed else 0] for most in layers]
        plan = plan_of(microbatches, [pipeline(microbatches, start=0, stop=1, recomputed_layers=rows)], num_ranks=1)
        first, last = lower(plan, sequences)
        kept = [most * each.kept + each.whole if recomputed else most * each.whole for most in layers]
        assert most_of(first, cost) == 1000 * (kept[0] + each.working + each.buffers)
        assert most_of(last, cost) == 1000 * (kept[1] + each.head + each.working + each.buffers)


@pytest.mark.parametrize("primitive", Primitive)
def test_the_bound_is_exact_and_named(primitive: Primitive) -> None:
    plan, sequences = split_split_hybrid(primitive)
    cluster = ClusterSpec(num_ranks=2, num_stages=2, max_tokens_per_rank=100)
    cost = cost_of(2, num_stages=2)
    assert cost.pipeline is not None
    programs = lower(plan, sequences)
    most = [max(most_of(program, cost) for program in programs[2 * stage :][:2]) for stage in range(2)]
    tight = replace(cost, pipeline=replace(cost.pipeline, budget_bytes=tuple(most)))
    check_plan(plan, sequences, cluster=cluster, cost=tight)
    less = replace(cost, pipeline=replace(cost.pipeline, budget_bytes=(most[0], most[1] - 1)))
    with pytest.raises(ValueError, match=r"stage 1 rank 0 holds .* GiB in a pass of microbatch \d, the bound is"):
        check_plan(plan, sequences, cluster=cluster, cost=less)


def test_costs_of_other_stages_are_refused() -> None:
    plan, sequences = split_split_hybrid(Primitive.RING)
    with pytest.raises(ValueError, match=r"cost.pipeline has 3 stages, must have the plan's 2"):
        check_memory(lower(plan, sequences), cost=cost_of(2))


def test_more_recomputed_layers_than_a_stage_has_are_refused() -> None:
    plan, sequences = split_split_hybrid(Primitive.RING)
    wrong = replace(plan.pipelines[0], recomputed_layers=((0, 0, 0), (0, 0, 17)))
    with pytest.raises(ValueError, match="must be at most its 16 layers"):
        check_memory(lower(replace(plan, pipelines=(wrong,)), sequences), cost=cost_of(2, num_stages=2))


def test_shares_of_replicated_heads_are_not_below_one_head() -> None:
    """Eight key and value heads over 16 ranks: each rank keeps one head of all tokens, not half of one."""
    cost = cost_of(2)
    assert cost.kv_share(16) == 1 / 8 and math.isclose(cost.kv_share(4), 1 / 4)
