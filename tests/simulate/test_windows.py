"""Layers with windows on simulated machines: pairs, messages, time and memory are those of each kind of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cost.analytic import attention_flops, model_flops
from rayfcp.program import AttentionProgram, Forward, lower
from rayfcp.simulate import Timeline, simulate
from rayfcp.values import FULL, LayerKind, ModelProfile, SpanKind
from tests.examples import examples
from tests.masks import kinds, specs
from tests.program.pipelines import random_pipelines
from tests.simulate.helpers import MODEL, machine, plan_of

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=4)
LAYERS = st.lists(st.sampled_from([0, 1, 5, 40, 1000]), min_size=4, max_size=4).map(tuple)


def ring(lengths: list[int], model: ModelProfile, *, num_ranks: int, recomputed: int = 0) -> tuple:
    """One ring over all sequences, lowered for the model's layers."""
    plan = plan_of(
        [[(tuple(range(num_ranks)), tuple(range(len(lengths))))]], num_ranks=num_ranks, recomputed_layers=recomputed
    )
    sequences = [replace(each, layer_kinds=model.layer_kinds) for each in specs(lengths)]
    return lower(plan, sequences), sequences


def played(lengths: list[int], layers: tuple[int, ...], *, num_ranks: int, recomputed: int = 0) -> Timeline:
    model = replace(MODEL, kind_of_layer=kinds(*layers))
    programs, _ = ring(lengths, model, num_ranks=num_ranks, recomputed=recomputed)
    return simulate(programs, model=model, hardware=machine())


@examples(20)
@given(lengths=LENGTHS, layers=LAYERS, num_ranks=st.integers(1, 4), recomputed=st.integers(0, 4))
def test_flops_and_messages_are_those_of_every_layer(
    lengths: list[int], layers: tuple[int, ...], num_ranks: int, recomputed: int
) -> None:
    model = replace(MODEL, kind_of_layer=kinds(*layers))
    programs, sequences = ring(lengths, model, num_ranks=num_ranks, recomputed=recomputed)
    timeline = simulate(programs, model=model, hardware=machine())
    pairs = sum(LayerKind(window=window).work(0, each.num_tokens).pairs for each in sequences for window in layers)
    assert attention_flops(model, sequences) == pytest.approx(3 * 4 * 8 * 8 * pairs)
    assert timeline.attention_flops == pytest.approx(attention_flops(model, sequences))
    assert timeline.model_flops == pytest.approx(model_flops(model, sequences))
    assert sum(map(sum, timeline.loads.attention_flops)) >= timeline.attention_flops * (1 - 1e-9)
    for rank, program in enumerate(programs):
        (item,) = (each for each in program.instructions if isinstance(each, Forward))
        attention = {each.kind.window: each.attention.inner for each in item.kinds}
        assert timeline.loads.sent_bytes[0][rank] == pytest.approx(sent(attention, layers, recomputed))


def sent(attention: Mapping[int, AttentionProgram], layers: Sequence[int], recomputed: int) -> float:
    """Bytes of keys and values in 2 bytes, of gradients in 4, of all layers."""
    size = {"kv": 2 * 2 * 8 * 2, "grad": 2 * 2 * 8 * 4}
    return float(
        sum(
            message.num_tokens * size[message.payload.value]
            for layer, window in enumerate(layers)
            for rounds in (*[attention[window].forward] * (1 + (layer < recomputed)), attention[window].backward)
            for step in rounds
            for message in step.sends
        )
    )


@examples(20)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 4), recomputed=st.integers(0, 4))
def test_windows_that_cut_nothing_cost_what_none_cost(lengths: list[int], num_ranks: int, recomputed: int) -> None:
    found = played(lengths, (1000,) * 4, num_ranks=num_ranks, recomputed=recomputed)
    assert found == played(lengths, (), num_ranks=num_ranks, recomputed=recomputed)
    mixed = played(lengths, (0, 1000, 400, 0), num_ranks=num_ranks, recomputed=recomputed)
    assert mixed.iteration_s == pytest.approx(found.iteration_s, rel=1e-9)
    assert mixed.by_rank[0].compute == pytest.approx(found.by_rank[0].compute)
    assert mixed.memory == tuple(tuple((pytest.approx(at), size) for at, size in each) for each in found.memory)


@given(window=st.integers(1, 64))
@examples(10)
def test_one_rank_takes_the_seconds_of_its_pairs(window: int) -> None:
    layers = (window, 0, window, window)
    whole, cut = (played([64], each, num_ranks=1) for each in ((), layers))
    fewer = 3 * (FULL.work(0, 64).pairs - LayerKind(window=window).work(0, 64).pairs)
    assert whole.iteration_s - cut.iteration_s == pytest.approx(3.5 * fewer * 4 * 8 * 8 / (1e9 * 0.25), abs=1e-12)
    forward = [next(each for each in one.spans if each.kind is SpanKind.FORWARD) for one in (whole, cut)]
    assert forward[0].amount - forward[1].amount == pytest.approx(fewer * 4 * 8 * 8)


def test_stages_replay_the_kinds_that_they_have() -> None:
    model = replace(MODEL, kind_of_layer=kinds(3, 3, 0, 7))
    plan, sequences = random_pipelines(5, num_stages=2, num_ranks=2)
    sequences = [replace(each, layer_kinds=model.layer_kinds) for each in sequences]
    timelines = [
        simulate(lower(plan, sequences, kinds_of_stage=stages), model=model, hardware=machine(), detail=True)
        for stages in ((), [kinds(3), kinds(0, 7)])
    ]
    assert timelines[0] == timelines[1]
    assert timelines[0].attention_flops == pytest.approx(attention_flops(model, sequences))


def test_programs_without_the_model_s_windows_are_refused() -> None:
    programs, _ = ring([20], MODEL, num_ranks=2)
    with pytest.raises(ValueError, match=r"the model has ..full attention., .window 4..; give"):
        simulate(programs, model=replace(MODEL, kind_of_layer=kinds(0, 4, 4, 4)), hardware=machine())
