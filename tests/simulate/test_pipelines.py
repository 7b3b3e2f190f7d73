"""Pipelines whose times can be worked out by hand."""

from dataclasses import replace

import pytest

from rayfcp.cost.memory import layer_bytes, stage_state_bytes
from rayfcp.program import Forward, Programs, RankProgram, Send, lower
from rayfcp.simulate import simulate, simulate_plan
from rayfcp.values import Action, HardwareProfile, PipelinePlan, Primitive, Slice, SpanKind
from tests.masks import specs
from tests.program.changes import with_outlines
from tests.simulate.helpers import MODEL, machine, plan_of, root_parameters
from tests.simulate.pipelines import actions, gpipe, one_f_one_b, pipeline, plan_of_chunks

HEADLESS = replace(MODEL, num_layers=12, vocab_size=1)
"""Next to no output head, so that stages are level."""
FREE = {"intra_node_bandwidth": 1e18, "inter_node_bandwidth": 1e18, "latency_s": 0.0, "microbatch_overhead_s": 0.0}
ORDERS = {"1f1b": one_f_one_b, "gpipe": gpipe}


def pass_s(num_tokens: int, hardware: HardwareProfile, *, num_layers: int, num_ranks: int = 1) -> float:
    """Forward and backward of one sequence through some layers, without stages."""
    model = replace(HEADLESS, num_layers=num_layers)
    plan = plan_of([[(tuple(range(num_ranks)), (0,))]], num_ranks=num_ranks)
    return simulate(lower(plan, specs([num_tokens])), model=model, hardware=hardware).iteration_s


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("num_stages", "count"), [(2, 1), (2, 5), (3, 4), (4, 9), (4, 2)])
def test_equal_chunks_on_free_links_fill_and_drain(order: str, num_stages: int, count: int, num_ranks: int) -> None:
    """(M + P - 1) (f + b), of which P - 1 are bubbles."""
    hardware = machine(**FREE)
    plan = plan_of_chunks(
        [[at] for at in range(count)], num_ranks=num_ranks, pipelines=[pipeline(ORDERS[order](count, num_stages))]
    )
    timeline = simulate(lower(plan, specs([240] * count)), model=HEADLESS, hardware=hardware)
    each_s = pass_s(240, hardware, num_layers=12 // num_stages, num_ranks=num_ranks)
    assert timeline.iteration_s == pytest.approx((count + num_stages - 1) * each_s, rel=2e-3)
    assert timeline.bubble == pytest.approx((num_stages - 1) / (count + num_stages - 1), abs=2e-3)
    assert timeline.breakdown.hop == pytest.approx(0.0, abs=1e-9)
    assert (timeline.num_ranks, timeline.num_stages) == (num_ranks, num_stages)
    assert timeline.mfu == pytest.approx(
        timeline.model_flops / timeline.iteration_s / hardware.peak_flops / num_ranks / num_stages
    )


def test_two_pipelines_follow_each_other() -> None:
    hardware = machine(**FREE)
    parts = [pipeline(one_f_one_b(3, 2)), pipeline(one_f_one_b(2, 2, start=3), start=3)]
    plan = plan_of_chunks([[at] for at in range(5)], num_ranks=1, pipelines=parts)
    timeline = simulate(lower(plan, specs([200] * 5)), model=HEADLESS, hardware=hardware)
    each_s = pass_s(200, hardware, num_layers=6)
    # The second one's first forward pass runs on stage 0 while stage 1 ends the first; its drain is hidden likewise.
    assert 7 * each_s * (1 - 2e-3) <= timeline.iteration_s <= 7.01 * each_s


def test_a_hop_is_waited_for_and_not_paid_by_its_sender() -> None:
    """One chunk through P stages waits for 2 (P - 1) hops of its activations."""
    slow = machine(**(FREE | {"inter_node_bandwidth": 1e6, "latency_s": 1e-3, "devices_per_node": 1}))
    free = machine(**FREE)
    programs = lower(plan_of_chunks([[0]], num_ranks=1, pipelines=[pipeline(gpipe(1, 3))]), specs([300]))
    hop_s = 300 * HEADLESS.hidden_size * 2 / 1e6 + 1e-3
    seen, level = (simulate(programs, model=HEADLESS, hardware=each) for each in (slow, free))
    assert seen.iteration_s == pytest.approx(level.iteration_s + 4 * hop_s, rel=1e-9)
    assert seen.by_rank[1].hop == pytest.approx(2 * hop_s, rel=1e-9)
    assert sum(each.hop for each in seen.by_rank) == pytest.approx(4 * hop_s, rel=1e-9)


def test_hops_of_a_stage_share_their_nodes_uplink() -> None:
    hardware = machine(**FREE, node_uplink_bandwidth=1e6, devices_per_node=2)
    programs = lower(plan_of_chunks([[0]], num_ranks=2, pipelines=[pipeline(gpipe(1, 2))]), specs([300]))
    timeline = simulate(programs, model=HEADLESS, hardware=hardware)
    both_s = 300 * HEADLESS.hidden_size * 2 / 1e6  # 150 tokens of each of two ranks
    assert max(each.hop for each in timeline.by_rank) == pytest.approx(both_s, rel=1e-9)


def test_each_stage_computes_its_own_layers_and_the_last_one_the_head() -> None:
    hardware = machine(**FREE)
    programs = lower(
        plan_of_chunks([[0]], num_ranks=1, pipelines=[pipeline(gpipe(1, 3), recomputed=[[0], [1], [9]])]), specs([300])
    )
    timeline = simulate(programs, model=MODEL, hardware=hardware, layers_of_stage=(2, 1, 1))
    layer_s = pass_s(300, hardware, num_layers=1) - pass_s(300, hardware, num_layers=1) / 1e9
    forward = [each.compute for each in timeline.by_rank]
    again_s = (forward[1] - forward[0] / 2) / (forward[0] / 2)
    assert forward[0] == pytest.approx(2 * layer_s, rel=2e-3)
    assert 1 / 3.5 < again_s < 1 / 3  # a forward pass on top of forward and backward
    head_s = 3 * 2 * MODEL.vocab_size * MODEL.hidden_size * 300 / (hardware.peak_flops * hardware.linear_efficiency)
    assert forward[2] == pytest.approx(forward[1] + head_s, rel=1e-9)
    assert timeline.compute_s == pytest.approx(forward, rel=1e-9)
    assert timeline.loads.attention_flops[0][0] == timeline.loads.attention_flops[0][2]


@pytest.mark.parametrize("gather_every", ["microbatch", "step"])
@pytest.mark.parametrize("reduce_every", ["microbatch", "step"])
def test_a_stage_gathers_and_reduces_its_own_parameters(gather_every: str, reduce_every: str) -> None:
    """Nothing is computed, so that the first stage's traffic over its two ranks follows on itself, up to the hops and
    rings of two tokens."""
    hardware = machine(**(FREE | {"peak_flops": 1e30, "intra_node_bandwidth": 1e9}))
    plan = plan_of_chunks([[0], [1]], num_ranks=2, pipelines=[pipeline(gpipe(2, 3))])
    programs = lower(plan, specs([2, 2]), reduce_every=reduce_every)
    timeline = simulate(programs, model=MODEL, hardware=hardware, layers_of_stage=(2, 1, 1), gather_every=gather_every)  # type: ignore[arg-type]
    matrix, layers = MODEL.vocab_size * MODEL.hidden_size, 2 * MODEL.layer_matmul_parameters
    gathers = 2 * (matrix + 2 * layers) if gather_every == "microbatch" else matrix + layers
    reduced = (matrix + layers) * (2 if reduce_every == "microbatch" else 1)
    sharding_s = (gathers * 2 + reduced * 4) / 2 / 1e9
    assert timeline.by_rank[0].sharding == pytest.approx(sharding_s, rel=5e-3)
    assert timeline.by_rank[2].sharding < timeline.by_rank[4].sharding  # no embedding, no head in the middle
    assert 2 * matrix == root_parameters()


@pytest.mark.parametrize("primitive", list(Primitive))
def test_slices_compute_the_pairs_of_their_sequence(primitive: Primitive) -> None:
    cuts = [Slice(sequence=0, start=start, stop=stop) for start, stop in ((0, 200), (200, 420), (420, 500))]
    plan = plan_of_chunks(
        [[cuts[0]], [cuts[1]], [cuts[2], 1]], num_ranks=2, pipelines=[pipeline(gpipe(3, 2))], primitive=primitive
    )
    sequences = specs([500, 60])
    timeline = simulate_plan(plan, sequences, model=MODEL, hardware=machine())
    pairs = 500 * 501 / 2 + 60 * 61 / 2
    assert timeline.attention_flops == pytest.approx(3 * MODEL.attention_flops_per_pair * pairs)
    assert timeline.num_tokens == 560
    first, second, third = (sum(row) for row in timeline.loads.attention_flops)
    whole = first + second + third
    assert first / whole == pytest.approx(200 * 201 / 2 / pairs)
    assert second / whole == pytest.approx((420 * 421 - 200 * 201) / 2 / pairs)


def test_keys_of_context_travel_in_rings() -> None:
    cut = [Slice(sequence=0, start=0, stop=200), Slice(sequence=0, start=200, stop=400)]
    plan = plan_of_chunks([[cut[0]], [cut[1]]], num_ranks=2, pipelines=[pipeline(gpipe(2, 2))])
    sent = simulate_plan(plan, specs([400]), model=MODEL, hardware=machine()).loads.sent_bytes
    assert [sum(row) for row in sent] == pytest.approx([sum(sent[0]), 2 * sum(sent[0])])


def staged_programs(recomputed: list[list[int]]) -> tuple[RankProgram, ...]:
    """A sequence of 90 + 50 + 20 tokens in three chunks, with 30 tokens of another in the last."""
    cut = [Slice(sequence=0, start=start, stop=stop) for start, stop in ((0, 90), (90, 140), (140, 160))]
    plan = plan_of_chunks(
        [[cut[0]], [cut[1]], [cut[2], 1]], num_ranks=1, pipelines=[pipeline(gpipe(3, 2), recomputed=recomputed)]
    )
    return lower(plan, specs([160, 30]))


def test_memory_of_slices_by_hand() -> None:
    """Two layers a stage. Stage 0 peaks in the last chunk's backward pass, where all chunks are there and the gradients
    of all kept keys and values; stage 1, which recomputes all, in that of the largest chunk, when others have gone."""
    programs = staged_programs([[0, 1, 0], [2, 2, 2]])
    timeline = simulate(programs, model=MODEL, hardware=machine())
    each = layer_bytes(MODEL, bytes_per_element=2)
    fixed = [
        stage_state_bytes(
            MODEL,
            layers_of_stage=(2, 2),
            stage=stage,
            num_ranks=1,
            bytes_per_element=2,
            reduce_every="step",
            gather_every="microbatch",
        )
        for stage in range(2)
    ]
    busy = each.working + each.buffers
    first = (2 * 190 - 50) * each.whole + 50 * (each.kept + each.kv) + 2 * 140 * each.kv_gradients + 50 * busy
    second = 2 * 90 * (each.kept + each.kv + each.kv_gradients) + 90 * (each.head + each.whole + busy)
    assert timeline.peak_memory_bytes == (fixed[0] + first, fixed[1] + second)
    for stage, samples in enumerate(timeline.memory):
        times = [at_s for at_s, _ in samples]
        assert times == sorted(times) and times[0] >= 0 and times[-1] <= timeline.iteration_s
        assert samples[0][1] == samples[-1][1] == fixed[stage]


def test_spans_name_stages_and_what_they_wait_for() -> None:
    timeline = simulate(staged_programs([[0] * 3] * 2), model=MODEL, hardware=machine(), detail=True)
    waits = {(span.stage, span.label) for span in timeline.spans if span.kind is SpanKind.WAIT}
    assert {(1, "activation 0"), (0, "gradient 2")} <= waits
    assert {span.stage for span in timeline.spans if span.kind is SpanKind.ATTENTION} == {0, 1}


def without(programs: Programs, stage: int, kind: type) -> Programs:
    """The programs without the instruction of a kind of a stage's microbatch 1."""

    def kept(outlines: list[RankProgram]) -> list[RankProgram]:
        items = outlines[stage].instructions
        left = tuple(item for item in items if not (isinstance(item, kind) and item.microbatch == 1))
        return [*outlines[:stage], replace(outlines[stage], instructions=left), *outlines[stage + 1 :]]

    return with_outlines(programs, kept)


def test_pipelines_that_cannot_run_are_refused() -> None:
    programs = staged_programs([[0] * 3] * 2)
    with pytest.raises(ValueError, match=r"layers_of_stage is .3, 2., must be at least 1 each and 4 together"):
        simulate(programs, model=MODEL, hardware=machine(), layers_of_stage=(3, 2))
    with pytest.raises(ValueError, match="layers_of_stage has 1 entries, must have one for each of 2 stages"):
        simulate(programs, model=MODEL, hardware=machine(), layers_of_stage=(4,))
    with pytest.raises(ValueError, match="node_of_rank has 3 entries, must have one for each of 2"):
        simulate(programs, model=MODEL, hardware=machine(), node_of_rank=(0, 0, 1))
    for stage, lost, named in ((1, Forward, "Forward names microbatches"), (0, Send, "microbatch 1: instructions are")):
        with pytest.raises(ValueError, match=named):
            simulate(without(programs, stage, lost), model=MODEL, hardware=machine())
    crossed: list[tuple[Action, ...]] = [actions("F0 B0 F1 B1"), actions("F0 F1 B0 B1")]
    plan: PipelinePlan = pipeline(crossed)
    with pytest.raises(ValueError, match="would wait forever"):
        simulate_plan(
            plan_of_chunks([[0], [1]], num_ranks=1, pipelines=[plan]), specs([9, 9]), model=MODEL, hardware=machine()
        )
