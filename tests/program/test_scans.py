"""Programs of recurrent layers: every state, gradient of a state and halo reaches its part, in any layout."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import Free, lower, to_text
from rayfcp.program.scan import Chain
from rayfcp.program.scans import Parts, ScanTable, parts_of
from rayfcp.values import FULL, BatchPlan, LayerKind, Primitive, RecurrentKind, SequenceSpec, TokenwiseKind
from rayfcp.verify import check_programs
from tests.examples import examples
from tests.execute.layouts import relayed
from tests.program.helpers import forwards, short_plan, short_sequences
from tests.program.pipelines import random_pipelines, sliced_over_runs, split_split_hybrid
from tests.program.scanning import run


def with_kinds(sequences: Sequence[SequenceSpec], *kinds: LayerKind) -> list[SequenceSpec]:
    """Sequences of a model with two layers of each kind."""
    return [replace(each, layer_kinds=tuple((kind, 2) for kind in sorted(kinds))) for each in sequences]


def assert_scans(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, halo: int, num_heads: int = 2) -> None:
    sequences = with_kinds(sequences, FULL, RecurrentKind(halo=halo))
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
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


@examples(40)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 4), data=st.data())
def test_one_number_changed_is_refused_where_parts_come_out_wrong(
    seed: int, num_ranks: int, data: st.DataObject
) -> None:
    plan, sequences = random_pipelines(seed, num_stages=1, num_ranks=num_ranks)
    if not sequences:
        return
    kind = RecurrentKind(halo=2)
    sequences = with_kinds(sequences, kind)
    programs = lower(plan, sequences)
    tables = list(programs.scans[kind])
    at = data.draw(st.integers(0, len(tables) - 1))
    columns = [np.array(column) for column in tables[at].parts]
    column = data.draw(st.integers(0, len(columns) - 1))
    row = data.draw(st.integers(0, len(columns[column]) - 1))
    before = columns[column][row]
    columns[column][row] += data.draw(st.sampled_from([-2, -1, 1, 2]))
    if max(before, columns[column][row]) < 0:
        return  # another number for none
    tables[at] = ScanTable(kind=kind, parts=Parts(*columns))
    programs.scans[kind] = tuple(tables)
    with pytest.raises(ValueError, match=r"microbatch \d|states of"):
        check_programs(programs, sequences)


def test_slices_print_as_written_down() -> None:
    """A sequence of 17 tokens in three slices on two ranks, the last beside one of 4; no layer attends."""
    plan, sequences = split_split_hybrid(Primitive.RING, num_stages=1)
    programs = lower(plan, with_kinds(sequences, RecurrentKind(halo=3), TokenwiseKind()))
    text = "\n".join(to_text(replace(program, plan_hash="0" * 16)) for program in programs)
    assert text == (Path(__file__).parent / "golden" / "recurrence.txt").read_text()


def test_stages_have_the_scans_of_their_layers() -> None:
    """Stages of softmax layers, of recurrent ones and of both; only those that attend exchange keys and values."""
    plan, sequences = split_split_hybrid(Primitive.RING, num_stages=3)
    kind = RecurrentKind(halo=1)
    sequences = with_kinds(sequences, FULL, kind)
    programs = lower(plan, sequences, kinds_of_stage=[[FULL, FULL], [kind, kind], [FULL, kind]])
    check_programs(programs, sequences)
    first = [forwards(program)[2] for program in programs]
    assert [(item.kind, len(item.scans), len(item.attention.forward)) for item in first] == [
        *[(FULL, 0, 2)] * 2,
        *[(TokenwiseKind(), 1, 0)] * 2,
        *[(FULL, 1, 2)] * 2,
    ]
    assert first[2].attention.num_tokens == first[0].attention.num_tokens
    assert first[2].scans[0] is first[4].scans[0]
    freed = [[item.microbatch for item in program.instructions if isinstance(item, Free)] for program in programs]
    # states are kept on the rank of a slice's last token, keys and values on both
    assert freed == [[1, 0], [1, 0], [1, 0], [], [1, 0], [1, 0]]


@given(num_folders=st.integers(1, 40), num_heads=st.integers(1, 20), num_columns=st.integers(1, 9))
def test_ranks_of_a_chain_fold_each_column_once(num_folders: int, num_heads: int, num_columns: int) -> None:
    chain = Chain(ranks=tuple(range(num_folders)), folders=tuple(range(num_folders)))
    shares = [chain.share(rank, num_heads=num_heads, num_columns=num_columns) for rank in chain.folders]
    folded = Counter(
        (head, column) for share in shares for head in range(*share.heads) for column in range(*share.columns)
    )
    due = [(head, column) for head in range(num_heads) for column in range(num_columns)]
    assert folded == dict.fromkeys(due, 2 if num_folders == 2 else 1)
    assert all((share.heads[0] < share.heads[1]) == (share.columns[0] < share.columns[1]) for share in shares)


def test_tokens_of_a_sequence_come_in_the_order_of_microbatches() -> None:
    plan, sequences = split_split_hybrid(Primitive.RING, num_stages=1)
    pieces = lower(plan, sequences).pieces
    with pytest.raises(ValueError, match=r"microbatch 0: tokens \[.*\) of sequence 0 do not follow those before them"):
        parts_of([pieces[1], pieces[0], pieces[2]])
