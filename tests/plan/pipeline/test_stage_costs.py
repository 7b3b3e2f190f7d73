"""Seconds and bytes of chunks on stages against those of the whole model, and against sums by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.reproduce.chunks import chunks_of
from rayfcp.cost.memory import layer_bytes
from rayfcp.cost.microbatches import chunk_bytes, chunk_passes, stage_times
from rayfcp.cost.stages import outer_parameters, split_by_cost, split_layers
from rayfcp.plan import model_profile
from rayfcp.plan.pipeline.schedule import one_forward_one_backward, peak_bytes
from rayfcp.values import Group, InfeasiblePlanError, MicrobatchPlan, Primitive, Slice
from tests.plan.helpers import batch_of
from tests.plan.pipeline.helpers import descending, staged_cost

BATCH = batch_of([17, 4])


def microbatch(*sequences: int, part: tuple[int, int] | None = None) -> MicrobatchPlan:
    slices = () if part is None else (Slice(sequence=0, start=part[0], stop=part[1]),)
    group = Group(ranks=(0, 1), sequences=sequences)
    return MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0, slices=slices)


SPLIT = [microbatch(0, part=(0, 8)), microbatch(0, part=(8, 14)), microbatch(0, 1, part=(14, 17))]


def test_columns_of_split_and_hybrid_chunks() -> None:
    chunks = chunks_of(SPLIT, by_id={each.id: each for each in BATCH})
    assert chunks.tokens.tolist() == [8, 6, 7]
    assert chunks.pairs.tolist() == [36, 21 + 48, 6 + 42 + 10]
    assert chunks.pairs.sum() == sum(each.attention_pairs for each in BATCH)
    assert chunks.sides.tolist() == [0, 8, 8 + 6]
    assert chunks.context.tolist() == [0, 8, 14]
    assert chunks.longest.tolist() == [0, 8, 8]
    assert chunks.kept.tolist() == [8, 6, 0]
    assert chunks.finished.tolist() == [0, 0, 14]


@given(
    num_stages=st.integers(2, 4),
    primitive=st.sampled_from(Primitive),
    degree=st.sampled_from([1, 2]),
    recomputed=st.sampled_from([0, 16]),
)
def test_stages_share_what_the_whole_model_takes(
    num_stages: int, primitive: Primitive, degree: int, recomputed: int
) -> None:
    cost = staged_cost(num_stages=num_stages, num_ranks=2, recomputed_layers=recomputed)
    bare = cost.with_coefficients(shard_s=0.0)
    assert bare.pipeline is not None
    chunks = chunks_of([microbatch(0, 1)], by_id={each.id: each for each in BATCH})
    passes = chunk_passes(chunks, cost=cost, degree=degree, primitive=primitive)
    layers_s, head_s, backward_s = cost.passes_s(chunks.pairs, chunks.tokens, degree=degree, primitive=primitive)
    assert passes.forward_s == pytest.approx(layers_s + head_s)
    times = stage_times(passes, cost=cost)
    again_s = 0.0 if not recomputed else recomputed * times.layer_s
    assert passes.backward_s + again_s == pytest.approx(backward_s, rel=1e-3)
    assert (times.forward_s.sum(axis=0) >= passes.forward_s * (1 - 1e-12)).all()  # traffic comes on top
    assert (times.backward_s.sum(axis=0) >= passes.backward_s * (1 - 1e-12)).all()


@given(length=st.integers(2, 4000), cuts=st.lists(st.integers(1, 3999), max_size=4, unique=True))
def test_slices_have_all_pairs_and_cost_no_less(length: int, cuts: list[int]) -> None:
    batch = batch_of([length])
    ends = [*sorted(cut for cut in cuts if cut < length), length]
    parts = [microbatch(0, part=(start, stop)) for start, stop in zip([0, *ends], ends, strict=False)]
    cost = staged_cost()
    chunks = chunks_of(parts, by_id={0: batch[0]})
    assert chunks.pairs.sum() == batch[0].attention_pairs
    whole = chunks_of([microbatch(0)], by_id={0: batch[0]})
    for primitive in Primitive:
        sliced, one = (chunk_passes(each, cost=cost, degree=2, primitive=primitive) for each in (chunks, whole))
        assert sliced.forward_s.sum() >= one.forward_s.sum() * (1 - 1e-9)


@pytest.mark.parametrize("tied", ["gpt-7b", "qwen3-8b"])
def test_parameters_of_stages_are_the_model_s(tied: str) -> None:
    model = model_profile(tied)
    layers = split_layers(model.num_layers, 4)
    again = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    inner = sum(layers) * model.layer_parameters
    assert inner + sum(outer_parameters(model, num_stages=4)) == model.num_parameters + again
    assert inner + outer_parameters(model, num_stages=1)[0] == model.num_parameters
    assert len(outer_parameters(model, num_stages=3)) == 3


@given(num_layers=st.integers(1, 40), num_stages=st.integers(1, 40))
def test_even_split(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(ValueError, match="pipeline_stages"):
            split_layers(num_layers, num_stages)
        return
    split = split_layers(num_layers, num_stages)
    assert sum(split) == num_layers
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


@pytest.mark.parametrize("name", ["gpt-7b", "qwen3-1.7b", "qwen3-8b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_split_by_cost_is_the_best_of_all(name: str, num_stages: int) -> None:
    model = model_profile(name)
    head = model.vocab_size * model.hidden_size / model.layer_matmul_parameters
    split = split_by_cost(model, num_stages)
    assert sum(split) == model.num_layers
    if num_stages > 1:
        slowest = [
            max(-(-(model.num_layers - last) // (num_stages - 1)), last + head) for last in range(1, model.num_layers)
        ]
        assert max(*split[:-1], split[-1] + head) == pytest.approx(min(slowest))


def test_states_that_do_not_fit_are_named() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"stage 1 of model gpt-7b on 2 ranks needs .* GiB"):
        staged_cost(memory_bytes=1 << 30)


def test_a_microbatch_alone_fits_with_nothing_recomputed_and_no_token_more() -> None:
    cost = staged_cost(num_stages=2)
    assert cost.pipeline is not None
    order = one_forward_one_backward([1], num_stages=2)
    fits = []
    for more in (0, 1):
        batch = batch_of([cost.pipeline.tokens_alone + more])
        part = MicrobatchPlan(groups=(Group(ranks=(0,), sequences=(0,)),), group_s=(1.0,), predicted_s=1.0)
        held = chunk_bytes(chunks_of([part], by_id={0: batch[0]}), cost=cost, degree=1, primitive=Primitive.RING)
        fits.append(bool((peak_bytes(order, held=held) <= held.budget).all()))
    assert fits == [True, False]


@given(runs=descending, recomputed=st.integers(0, 16), ahead=st.integers(1, 2))
def test_peaks_are_what_a_list_of_what_is_held_says(runs: list[int], recomputed: int, ahead: int) -> None:
    lengths = [10 * length for length in runs]
    batch = batch_of(lengths)
    parts = [
        microbatch_of(each.id, at, length=length)
        for each, length in zip(batch, runs, strict=True)
        for at in range(length)
    ]
    cost = staged_cost(num_stages=2)
    assert cost.pipeline is not None
    chunks = chunks_of(parts, by_id={each.id: each for each in batch})
    held = chunk_bytes(chunks, cost=cost, degree=2, primitive=Primitive.RING)
    order = one_forward_one_backward(runs, num_stages=2, ahead=ahead)
    each = layer_bytes(model_profile("gpt-7b"), bytes_per_element=2)
    last = {
        at: stop - 1 for stop, length in zip(np.cumsum(runs), runs, strict=True) for at in range(stop - length, stop)
    }
    for stage, codes in enumerate(order.tolist()):
        alive, summed, most = set(), set(), 0
        for code in codes:
            m = code if code >= 0 else -1 - code
            if code >= 0:
                alive.add(m)
            else:
                summed |= {at for at in last if last[at] == m and at != m}
            stored = sum(
                5 * ((16 - recomputed) * each.whole + recomputed * (each.kept + (each.kv if last[at] != at else 0)))
                + (5 * each.head if stage == 1 else 0)
                for at in alive
            )
            work = held.working[m] + (5 * each.whole if code < 0 and recomputed == 16 else 0)
            # gradients of five tokens a slice, and of one that rounding may add
            most = max(most, stored + 16 * 6 * each.kv_gradients * len(summed) + work)
            if code < 0:
                alive.remove(m)
                summed.discard(m)
        assert peak_bytes(order, held=held, recomputed=recomputed)[stage] == pytest.approx(most)


def microbatch_of(sequence: int, at: int, *, length: int) -> MicrobatchPlan:
    group = Group(ranks=(0, 1), sequences=(sequence,))
    slices = (Slice(sequence=sequence, start=10 * at, stop=10 * at + 10),) if length > 1 else ()
    return MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0, slices=slices)


@pytest.mark.parametrize("gather_every", ["microbatch", "step"])
@pytest.mark.parametrize("reduce_every", ["microbatch", "step"])
def test_traffic_of_a_step_comes_once(gather_every: str, reduce_every: str) -> None:
    cost = staged_cost(gather_every=gather_every, reduce_every=reduce_every)
    batch = batch_of([4, 4, 4])
    chunks = chunks_of([microbatch(each.id) for each in batch], by_id={each.id: each for each in batch})
    passes = chunk_passes(chunks, cost=cost, degree=2, primitive=Primitive.RING)
    times = stage_times(passes, cost=cost, gathers=0, reduces=2)
    forward, backward = times.forward_s[0], times.backward_s[0]
    assert forward[0] == pytest.approx(forward[1]) if gather_every == "microbatch" else forward[0] > forward[1]
    assert forward[1] == forward[2]
    assert backward[2] == pytest.approx(backward[1]) if reduce_every == "microbatch" else backward[2] > backward[1]
    neither = stage_times(passes, cost=cost)
    assert (neither.forward_s[0] == forward[1]).all()
