"""Figures of a timeline, traces, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rayfcp
from rayfcp.plan import model_flops
from rayfcp.program import lower
from rayfcp.simulate import simulate, simulate_plan
from rayfcp.telemetry.trace import write_trace
from rayfcp.values import Primitive, SpanKind
from tests.masks import specs
from tests.program.changes import with_outlines, with_parts
from tests.simulate.helpers import MODEL, cost_of, lone_group, machine, plan_of

LENGTHS = [400, 100, 60, 40, 30]
PLAN = plan_of([[((0, 1), (0,)), ((2,), (1,))], [((0,), (2,)), ((1,), (3, 4))]], num_ranks=3)


def test_figures_follow_their_definitions() -> None:
    sequences = specs(LENGTHS)
    timeline = simulate_plan(PLAN, sequences, model=MODEL, hardware=machine())
    assert timeline.model_flops == pytest.approx(model_flops(MODEL, sequences))
    assert timeline.mfu == pytest.approx(timeline.model_flops / (timeline.iteration_s * 1e9 * 3))
    assert timeline.tokens_per_s_per_rank == pytest.approx(sum(LENGTHS) / timeline.iteration_s / 3)
    assert timeline.loads.num_tokens == ((200, 200, 100), (60, 70, 0))
    assert timeline.imbalance.memory == pytest.approx(((200 - 500 / 3) + (70 - 130 / 3)) / (200 + 70))
    half = 400 * 401 / 4
    pairs = [[half, half, 5050], [60 * 61 / 2, 40 * 41 / 2 + 30 * 31 / 2, 1]]
    excess = sum(max(row) - sum(row) / 3 for row in pairs) / sum(max(row) for row in pairs)
    assert timeline.imbalance.attention == pytest.approx(excess)
    assert timeline.bubble == timeline.breakdown.bubble / timeline.iteration_s


def test_bytes_count_keys_values_and_partial_gradients_of_all_layers() -> None:
    timeline = simulate(lone_group(400, degree=4), model=MODEL, hardware=machine())
    each = MODEL.num_layers * 300 * (2 * MODEL.kv_bytes_per_token(2) + MODEL.kv_bytes_per_token(4))
    assert timeline.sent_bytes == timeline.received_bytes == (each,) * 4
    assert timeline.imbalance.communication == 0.0
    heads = simulate(lone_group(400, degree=4, primitive=Primitive.ULYSSES), model=MODEL, hardware=machine())
    own = cost_of(machine(), num_ranks=4).ulysses_intra_s_per_token * machine().intra_node_bandwidth
    grown = 1 + MODEL.num_kv_heads / (MODEL.num_heads + MODEL.num_kv_heads)
    assert heads.sent_bytes == pytest.approx((own * grown * 100 * 3 / 4,) * 4)


def test_the_public_function_is_the_room() -> None:
    sequences = specs(LENGTHS)
    timeline = rayfcp.simulate(PLAN, sequences, model="qwen3-1.7b", hardware="h100")
    assert timeline == rayfcp.simulate(PLAN, sequences, model="qwen3-1.7b", hardware="h100")
    assert timeline.iteration_s > 0
    with pytest.raises(ValueError, match="did you mean 'qwen3-8b'"):
        rayfcp.simulate(PLAN, sequences, model="qwen-8b", hardware="h100")


def test_wider_numbers_take_longer() -> None:
    programs = lone_group(200, degree=2)
    two, four = (
        simulate(programs, model=MODEL, hardware=machine(), bytes_per_element=each).breakdown.compute for each in (2, 4)
    )
    assert four - machine().microbatch_overhead_s == pytest.approx(2 * (two - machine().microbatch_overhead_s))


def test_nodes_are_those_that_are_named() -> None:
    programs, hardware = lone_group(400, degree=2), machine(inter_node_bandwidth=1e6)
    together, apart = (
        simulate(programs, model=MODEL, hardware=hardware, node_of_rank=nodes).iteration_s for nodes in ((7, 7), (3, 9))
    )
    assert together < 0.8 * apart
    with pytest.raises(ValueError, match="node_of_rank has 1 entries, must have one for each of 2"):
        simulate(programs, model=MODEL, hardware=hardware, node_of_rank=(0,))


def test_a_trace_holds_every_span(tmp_path: Path) -> None:
    timeline = simulate(lone_group(400, degree=3), model=MODEL, hardware=machine(), detail=True)
    write_trace(tmp_path / "trace.json", {"predicted": timeline.spans})
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(timeline.spans)
    sent = sum(span.amount for span in timeline.spans if span.kind is SpanKind.TRANSFER)
    assert sent == 2 * 400 * (2 * MODEL.kv_bytes_per_token(2) + MODEL.kv_bytes_per_token(4))  # of one layer
    flops = sum(span.amount for span in timeline.spans if span.kind is SpanKind.FORWARD)
    assert flops == pytest.approx(model_flops(MODEL, specs([400])) / 3)


def test_programs_that_disagree_are_refused() -> None:
    programs = lower(PLAN, specs(LENGTHS))
    unfinished = with_outlines(
        programs, lambda outlines: [replace(each, instructions=each.instructions[:3]) for each in outlines]
    )
    with pytest.raises(ValueError, match=r"Load names microbatches \[0\]"):
        simulate(unfinished, model=MODEL, hardware=machine())
    other = with_parts(programs, pieces=lower(PLAN, specs([each + 9 for each in LENGTHS])).pieces)
    with pytest.raises(ValueError, match="ranks attend over other numbers of tokens than they load"):
        simulate(other, model=MODEL, hardware=machine())
    with pytest.raises(ValueError, match="intra_node_bandwidth is 0"):
        simulate(programs, model=MODEL, hardware=machine(intra_node_bandwidth=0))
