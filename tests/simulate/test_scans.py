"""Simulated recurrences: their messages against programs of ranks item by item, their seconds against formulas."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.analytic import LINEAR_BACKWARD
from rayfcp.program import Programs, lower
from rayfcp.program.ledger import scan_bytes
from rayfcp.program.scan import ScanProgram
from rayfcp.program.scans import ScanWork
from rayfcp.simulate import simulate
from rayfcp.simulate.machine import machine_of
from rayfcp.simulate.scans import rounds_of
from rayfcp.values import FULL, LayerProfile, ModelProfile, Primitive, RecurrenceProfile, RecurrentKind, SpanKind
from tests.examples import examples
from tests.masks import specs
from tests.program.changes import with_parts
from tests.program.helpers import forwards, short_plan
from tests.program.pipelines import pipeline, random_pipelines
from tests.program.pipelines import plan_of as pipelines_of
from tests.program.test_scans import with_kinds
from tests.simulate.helpers import machine, plan_of

KIND = RecurrentKind(halo=3)
SCALAR = RecurrenceProfile(
    kind=KIND, parameters=4096, num_heads=6, key_dim=4, value_dim=8, transition_size=1, conv_channels=10
)
DELTA = replace(SCALAR, transition_size=16)


def model_of(mixer: RecurrenceProfile, *, num_layers: int = 1) -> ModelProfile:
    """A model of which all layers have this recurrence and no MLP to speak of."""
    layer = LayerProfile(mixers=(mixer,), hidden_size=1, ffn_size=1)
    return ModelProfile.of_layers([layer] * num_layers, name="recurrent", vocab_size=1)


def lowered(num_tokens: int, *, degree: int, num_short: int = 0) -> Programs:
    """A sequence laid end to end over ranks, one part each, and as many short ones on ranks of their own."""
    groups = [((0,), ()), *(((degree + at,), (1 + at,)) for at in range(num_short))]
    groups[0] = (tuple(range(degree)), (0,))
    plan = plan_of([groups], num_ranks=degree + num_short, primitive=Primitive.ULYSSES)
    return lower(plan, with_kinds(specs([num_tokens, *[num_tokens // degree] * num_short]), KIND))


def sent(scan: ScanProgram, name: str, *, mixer: RecurrenceProfile) -> Counter[tuple[int, int]]:
    """Bytes of a round that leave a rank, by source and target, item by item."""
    found: Counter[tuple[int, int]] = Counter()
    for message in getattr(scan, name).sends:
        for number, part in message.items:
            chain = scan.chains[number]
            folder = message.peer if name in ("summaries", "adjoints") else scan.rank
            share = chain.share(folder, num_heads=mixer.num_heads, num_columns=mixer.value_dim)
            columns, has_transition = share.columns[1] - share.columns[0], name == "summaries" and part > 0
            size = mixer.key_dim * columns + mixer.transition_size * has_transition
            found[scan.rank, message.peer] += 4 * (share.heads[1] - share.heads[0]) * size
    return found


@examples(30)
@given(
    seed=st.integers(0, 10_000), num_ranks=st.integers(1, 5), num_heads=st.integers(1, 9), kind=st.sampled_from("gsxp")
)
def test_messages_are_those_of_programs(seed: int, num_ranks: int, num_heads: int, kind: str) -> None:
    if kind == "p":
        plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    else:
        plan, sequences = short_plan(seed, num_ranks=num_ranks, kind=kind)
    if not sequences:
        return
    programs, mixer = lower(plan, with_kinds(sequences, FULL, KIND)), replace(DELTA, num_heads=num_heads)
    small = machine_of(model_of(mixer), machine(), num_ranks=plan.num_ranks)
    for number, table in enumerate(programs.scans[KIND]):
        scans = [forwards(program)[number].scans[0] for program in programs]
        work = ScanWork.of(table)
        halos = Counter[tuple[int, int]]()
        for scan in scans:
            for copy in scan.halos:
                if copy.sender == scan.rank != copy.receiver:
                    halos[copy.sender, copy.receiver] += 10 * 2 * copy.num_tokens
        due = {name: +sum((sent(scan, name, mixer=mixer) for scan in scans), Counter()) for name in ROUNDS}
        forward, backward = (
            [
                {(a, b): moved for (a, b), moved in np.ndenumerate(each.moved) if moved}
                for each in rounds_of(work, mixer, machine=small, backward=back)
            ]
            for back in (False, True)
        )
        if len(work.folders) == 0:
            assert forward == backward == [{}] and not any(due.values()) and not halos
            continue
        assert forward == [pytest.approx(dict(each)) for each in (halos, {}, due["summaries"], due["states"], {})]
        back = {(target, source): size for (source, target), size in halos.items()}
        due_back = ({}, due["adjoints"], due["state_grads"], {}, back)
        assert backward == [pytest.approx(dict(each)) for each in due_back]


ROUNDS = ("summaries", "states", "adjoints", "state_grads")


@pytest.mark.parametrize("mixer", [SCALAR, DELTA])
@pytest.mark.parametrize("link", [1e3, 1e9])
def test_seconds_of_a_sequence_over_two_ranks(mixer: RecurrenceProfile, link: float) -> None:
    """U of the first part goes to the second rank, which sends R back: one message a pass and the halos. The first
    rank is done earlier, and waits."""
    hardware, tokens = machine(intra_node_bandwidth=link, microbatch_overhead_s=0.0), 500
    rate = hardware.peak_flops * hardware.linear_efficiency
    state, token = 6 * 4 * 8, mixer.token_flops
    message_s, halo_s = (hardware.latency_s + size / link for size in (4 * state, 3 * 10 * 2))
    product_s = 2 * state * tokens / rate
    wider = 6 * (2 * 64 * 4 + 4 * 4 * 4)  # by 4 of keys: 64 of a chunk by both widths twice, the state read and written
    local_s = (token + wider) * tokens / rate if mixer is DELTA else product_s
    forward_s = halo_s + local_s + message_s + token * tokens / rate
    backward_s = product_s + message_s + LINEAR_BACKWARD * token * tokens / rate + halo_s
    timeline = simulate(lowered(2 * tokens, degree=2), model=model_of(mixer), hardware=hardware, detail=True)
    spans = [span for span in timeline.spans if span.kind in (SpanKind.ATTENTION, SpanKind.TRANSFER, SpanKind.WAIT)]
    for name, due_s in (("forward", forward_s), ("backward", backward_s)):
        rounds = [span for span in spans if span.label.startswith(f"{name} 0 round") and span.rank == 1]
        found_s = max(span.stop_s for span in rounds) - min(span.start_s for span in rounds)
        assert found_s == pytest.approx(due_s, rel=1e-9)
    sizes = 4 * state + 3 * 10 * 2
    assert timeline.sent_bytes == timeline.received_bytes == (sizes, sizes)


def test_short_sequences_beside_hide_what_travels() -> None:
    """Over two ranks at a slow link; a third one, with short sequences alone, does not wait."""
    hardware = machine(intra_node_bandwidth=1e4, microbatch_overhead_s=0.0)
    model = model_of(DELTA, num_layers=3)
    timeline = simulate(lowered(300, degree=2, num_short=1), model=model, hardware=hardware)
    assert [each.ring > 0 for each in timeline.by_rank] == [True, True, False]
    assert timeline.sent_bytes[2] == 0


@pytest.mark.parametrize("recomputed", [0, 2])
def test_recomputed_layers_pass_their_states_again_unless_they_are_kept(recomputed: int) -> None:
    hardware, model = machine(), model_of(DELTA, num_layers=3)
    programs = lowered(400, degree=4)
    bytes_once = sum(simulate(programs, model=model, hardware=hardware).sent_bytes)
    outlines = [
        replace(
            outline,
            instructions=tuple(
                replace(item, recomputed_layers=recomputed, keeps_attention=keeps) if hasattr(item, "kinds") else item
                for item in outline.instructions
            ),
        )
        for keeps in (False, True)
        for outline in programs.outlines
    ]
    again, kept = (
        sum(simulate(with_parts(programs, outlines=[each]), model=model, hardware=hardware).sent_bytes)
        for each in outlines
    )
    work = ScanWork.of(programs.scans[KIND][0])
    small = machine_of(model, hardware, num_ranks=4)
    forward = sum(each.moved.sum() for each in rounds_of(work, DELTA, machine=small, backward=False))
    assert kept == pytest.approx(bytes_once)
    assert again == pytest.approx(bytes_once + recomputed * forward)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_memory_of_states(num_stages: int) -> None:
    """A zig-zag ring of four ranks, seven parts: the ranks in the middle keep two states with their halos, the others
    one, and all a head of each of five transitions. Where parts are long, what is counted by token covers that."""
    mixer, halo_bytes = replace(DELTA, num_heads=4), 3 * 10 * 2
    state_bytes, transition_bytes = 4 * 4 * 4 * 8, 4 * 5 * 4 * 4
    model = model_of(mixer, num_layers=num_stages)
    microbatch = replace(plan_of([[((0, 1, 2, 3), (0,))]], num_ranks=4).microbatches[0], predicted_s=1.0)
    stages = pipeline([microbatch], start=0, stop=1, recomputed_layers=[[0]] * num_stages)
    plan = pipelines_of([microbatch], [stages], num_ranks=4)
    more = []
    for num_tokens in (64, 64_000):
        programs = lower(plan, with_kinds(specs([num_tokens]), KIND))
        kept = scan_bytes(ScanWork.of(programs.scans[KIND][0]), mixer, bytes_per_element=2)
        assert kept.tolist() == [each * (state_bytes + halo_bytes) + transition_bytes for each in (1, 2, 2, 1)]
        peak = simulate(programs, model=model, hardware=machine()).peak_memory_bytes
        more.append([peak[at + 1] - peak[at] for at in range(0, len(peak), 4)])
    assert more == [[state_bytes + halo_bytes] * num_stages, [0] * num_stages]
