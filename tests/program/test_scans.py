"""Programs of recurrent layers: every state, gradient of a state and halo reaches its part, in any layout."""

import pickle
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import lower
from rayfcp.values import FULL, BatchPlan, LayerKind, RecurrentKind, SequenceSpec
from tests.examples import examples
from tests.execute.layouts import relayed
from tests.program.helpers import short_plan, short_sequences
from tests.program.pipelines import random_pipelines, sliced_over_runs
from tests.program.scanning import run


def with_kinds(sequences: Sequence[SequenceSpec], *kinds: LayerKind) -> list[SequenceSpec]:
    """Sequences of a model with two layers of each kind."""
    return [replace(each, layer_kinds=tuple((kind, 2) for kind in sorted(kinds))) for each in sequences]


def assert_scans(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, halo: int, num_heads: int = 2) -> None:
    sequences = with_kinds(sequences, FULL, RecurrentKind(halo=halo))
    programs = lower(plan, sequences)
    run(programs[: plan.num_ranks], {each.id: each.num_tokens for each in sequences}, num_heads=num_heads)
    assert pickle.loads(pickle.dumps(programs)) == programs


HALO = st.integers(0, 5)


@examples(25)
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(1, 5),
    halo=HALO,
    heads=st.integers(1, 6),
    kind=st.sampled_from("gsx"),
)
def test_whole_sequences(seed: int, num_ranks: int, halo: int, heads: int, kind: str) -> None:
    plan, sequences = short_plan(seed, num_ranks=num_ranks, kind=kind)
    assert_scans(plan, sequences, halo=halo, num_heads=heads)


@examples(25)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4), heads=st.integers(1, 2), halo=HALO)
def test_blocks_in_any_order(seed: int, num_ranks: int, heads: int, halo: int) -> None:
    sequences = short_sequences(seed)
    assert_scans(relayed(sequences, num_ranks=num_ranks, heads=heads, seed=seed), sequences, halo=halo)


@examples(25)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4), halo=HALO)
def test_slices_over_microbatches(seed: int, num_ranks: int, halo: int) -> None:
    plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    if sequences:
        assert_scans(plan, sequences, halo=halo)


@examples(15)
@given(seed=st.integers(0, 10_000), num_runs=st.integers(1, 3), heads=st.integers(2, 3), halo=HALO)
def test_slices_over_runs(seed: int, num_runs: int, heads: int, halo: int) -> None:
    plan, sequences = sliced_over_runs(seed, num_runs=num_runs, heads=heads)
    assert_scans(plan, sequences, halo=halo)
