"""Reshuffles against token by token counting, and local attends moved around them."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import Attend, Piece, ReshuffleProgram, lower_reshuffle
from rayfcp.values import Block, Layout
from tests.examples import examples
from tests.execute.layouts import random_layout
from tests.execute.loops import random_pieces
from tests.masks import specs

Token = tuple[int, int]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def tokens_of(pieces: Sequence[Piece | Block]) -> list[Token]:
    return [(piece.sequence, at) for piece in pieces for at in range(piece.start, piece.stop)]


def placed(layout: Layout, *, num_ranks: int) -> list[list[Token]]:
    return [tokens_of([block for block in layout.blocks if block.rank == rank]) for rank in range(num_ranks)]


def moved(programs: Sequence[ReshuffleProgram], rows: Sequence[list[Token]], *, out: bool) -> list[list[Token | None]]:
    """Places to which the reshuffle moves rows; each round must be a matching."""
    sizes = [each.num_tokens if out else each.num_placed for each in programs]
    result: list[list[Token | None]] = [[None] * size for size in sizes]
    for rank, program in enumerate(programs):
        for there, here in program.kept:
            source, target = (here, there) if out else (there, here)
            result[rank][slice(*target)] = rows[rank][slice(*source)]
    for steps in zip(*(program.rounds for program in programs), strict=True):
        ends = [(step.receive, step.send) if out else (step.send, step.receive) for step in steps]
        met = 0
        for rank, (send, _) in enumerate(ends):
            if send:
                arriving = ends[send.peer][1]
                assert arriving and arriving.peer == rank and send.peer != rank
                carried = [token for span in send.ranges for token in rows[rank][slice(*span)]]
                at = [index for span in arriving.ranges for index in range(*span)]
                for index, token in zip(at, carried, strict=True):
                    result[send.peer][index] = token
                met += 1
        assert met == sum(receive is not None for _, receive in ends)
    return result


@examples(150)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_tokens_arrive_in_order_in_the_fewest_matchings(lengths: list[int], num_ranks: int, seed: int) -> None:
    sequences = specs(lengths)
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    theirs = random_pieces(sequences, num_ranks=num_ranks, seed=seed + 1)
    programs = lower_reshuffle(theirs, layout)
    brought, wanted = [tokens_of(pieces) for pieces in theirs], placed(layout, num_ranks=num_ranks)
    assert moved(programs, brought, out=False) == wanted
    assert moved(programs, wanted, out=True) == brought

    owner = {token: rank for rank, tokens in enumerate(wanted) for token in tokens}
    away = [(rank, owner[token]) for rank, tokens in enumerate(brought) for token in tokens if owner[token] != rank]
    pairs = set(away)
    degree = max([sum(pair[end] == rank for pair in pairs) for rank in range(num_ranks) for end in (0, 1)])
    assert {len(program.rounds) for program in programs} == {degree}
    sent = [step.send.num_tokens for program in programs for step in program.rounds if step.send]
    assert sum(sent) == len(away) and len(sent) == len(pairs)


@examples(60)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_the_plans_own_order_moves_nothing(lengths: list[int], num_ranks: int, seed: int) -> None:
    sequences = specs(lengths)
    layout = random_layout(sequences, num_ranks=num_ranks, seed=seed)
    theirs: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        theirs[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    for program in lower_reshuffle(theirs, layout):
        assert program.rounds == () and program.is_identity == (program.num_tokens > 0)


def counted(rounds: Sequence[Sequence[Attend]], *, num_rows: int) -> dict[int, np.ndarray]:
    """Number of times that each pair (query row, key row) is computed, by slot."""
    pairs: dict[int, np.ndarray] = {}
    for attends in rounds:
        for each in attends:
            count = pairs.setdefault(each.slot, np.zeros((num_rows, 2000), np.int64))
            (start, stop), (key_start, key_stop) = each.query, each.key
            block = np.ones((stop - start, key_stop - key_start), np.int64)
            count[start:stop, key_start:key_stop] += np.tril(block) if each.causal else block
    return pairs


def piece(start: int, stop: int, *, sequence: int = 0) -> Piece:
    return Piece(sequence=sequence, start=start, stop=stop)


LAYOUT = Layout(
    blocks=(Block(sequence=0, start=0, stop=4, rank=0), Block(sequence=0, start=4, stop=8, rank=1)), rounds=()
)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([[piece(0, 4)], []], r"tokens \[4, 8\) of sequence 0 are on no rank"),
        ([[piece(0, 5)], [piece(4, 8)]], "token 4 of sequence 0 is on rank 0 and again on rank 1"),
        ([[piece(0, 8)], [piece(0, 2, sequence=3)]], r"tokens \[0, 2\) of sequence 3 are on rank 1, but the layout"),
        ([[piece(0, 9)], []], r"tokens \[8, 9\) of sequence 0 are on rank 0, but the layout does not"),
        ([[piece(0, 8), piece(3, 3)], []], r"rank 0 has tokens \[3, 3\) of sequence 0"),
        ([[piece(0, 8)]], r"the layout places tokens on rank 1, must be one of \[0, 1\)"),
    ],
)
def test_what_does_not_fit_is_named(theirs: list[list[Piece]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lower_reshuffle(theirs, LAYOUT)
