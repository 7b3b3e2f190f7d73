"""Proof of the recurrence in columns: parts of sequences, the states between them, and the tokens before them.

Parts are all that a chain is made of: its ranks, who folds which heads and what travels follow from them
(`rayfcp.program.scans`), for both ends of a message from the same part. The shares of heads of a chain's ranks are
`[H j // m, H (j + 1) // m)`, which cover H heads once, whatever m is.
"""

from collections.abc import Sequence

import numpy as np

from rayfcp.program.pieces import Pieces
from rayfcp.program.programs import Programs
from rayfcp.program.scans import ScanTable
from rayfcp.values import SequenceSpec
from rayfcp.values.arrays import Bools, Ints, expanded
from rayfcp.verify.columns import loaded_by, runs_of


def check_scans(programs: Programs, sequences: Sequence[SequenceSpec]) -> None:
    """Prove that in layers of each recurrent kind each token is in one segment of the rank that loads it, that the
    parts of a sequence follow each other from its start to its end, over microbatches too, and that halo buffers have
    the tokens right before parts.

    Raises:
        ValueError: names the microbatch, the sequence and a rank.
    """
    for tables in programs.scans.values():
        for number, (table, pieces) in enumerate(zip(tables, programs.pieces, strict=True)):
            _Check(table, f"microbatch {number}, recurrence").run(pieces, sequences)
        _check_ends(tables)


class _Check:
    """The checks of one table; errors begin with `where`."""

    def __init__(self, table: ScanTable, where: str) -> None:
        self._table, self._where = table, where

    def run(self, pieces: Pieces, sequences: Sequence[SequenceSpec]) -> None:
        ranks = self._table.parts.rank
        self._refuse((ranks < 0) | (ranks >= len(pieces.first) - 1), "are on a rank that is not there")
        self._rows(pieces)
        self._chains(sequences)
        self._halos()

    def _refuse(self, wrong: Bools, what: str) -> None:
        """
        Raises:
            ValueError: some part is wrong.
        """
        if wrong.any():
            at, parts = int(np.argmax(wrong)), self._table.parts
            raise ValueError(
                f"{self._where}, rank {parts.rank[at]}: tokens [{parts.start[at]}, {parts.stop[at]}) of sequence "
                f"{parts.sequence[at]} {what}; lower the plan again"
            )

    def _rows(self, pieces: Pieces) -> None:
        """Segments are what ranks load, in the order of slot 0."""
        table, parts = self._table, self._table.parts
        rank, *columns = loaded_by(pieces)
        order = np.argsort(rank, kind="stable")
        loaded = runs_of([column[order] for column in (rank, *columns)])
        order, _ = table.by_rank
        segments = order[~(table.is_head | table.is_tail)[order]]
        held = np.stack([column[segments] for column in (parts.rank, parts.sequence, parts.start, parts.stop)], axis=1)
        if len(held) != len(loaded):
            raise ValueError(f"{self._where}: {len(held)} segments of {len(loaded)} runs of tokens; lower again")
        bound = np.append(0, np.cumsum(loaded[:, 3] - loaded[:, 2]))
        row = bound[:-1] - bound[np.searchsorted(loaded[:, 0], loaded[:, 0])]
        wrong = parts.row != 0  # of heads and tails
        wrong[segments] = (held != loaded).any(axis=1) | (parts.row[segments] != row)
        self._refuse(wrong, "are not what the rank loads at their place")

    def _chains(self, sequences: Sequence[SequenceSpec]) -> None:
        """Parts of a sequence follow each other, from its start or a head to its end or a tail."""
        parts, head, tail = self._table.parts, self._table.is_head, self._table.is_tail
        goes_on = parts.sequence[1:] == parts.sequence[:-1]
        first, last = np.append(True, ~goes_on), np.append(~goes_on, True)
        self._refuse(np.append(False, goes_on & (parts.start[1:] != parts.stop[:-1])), "do not follow the part before")
        self._refuse(first & ~head & (parts.start > 0), "have no state before them")
        self._refuse((head & ~first) | (tail & ~last), "are an end of a chain in its middle")
        length = np.ones(max((each.id for each in sequences), default=-1) + 1, np.int64)
        length[[each.id for each in sequences]] = [each.num_tokens for each in sequences]
        ends = np.where(parts.sequence < 0, 1, length[np.maximum(parts.sequence, 0)])
        self._refuse(last & ~tail & (parts.stop != ends), "are not the last ones, and have no tail behind them")

    def _halos(self) -> None:
        """Each row of a halo buffer is filled once, with the token that belongs there."""
        table, parts, rows = self._table, self._table.parts, self._table.halos
        at, step = expanded(np.where(table.is_head, 0, table.halo))
        due = parts.rank[at], table.halo_row[at] + step
        order, found = np.lexsort(due[::-1]), np.lexsort((rows.target, rows.receiver))
        at, step = at[order], step[order]
        ends = zip(due, (rows.receiver, rows.target), strict=True)
        if len(order) != len(found) or not all(np.array_equal(one[order], other[found]) for one, other in ends):
            raise ValueError(f"{self._where}: rows of halo buffers are not filled once; lower the plan again")
        sequence, position = self._tokens(rows.sender[found], rows.source[found])
        wrong = np.zeros(len(parts.rank), bool)
        strange = (sequence != parts.sequence[at]) | (position != parts.start[at] - table.halo[at] + step)
        wrong[at[strange]] = True
        self._refuse(wrong, "have other tokens than those before them in the halo buffer")

    def _tokens(self, rank: Ints, row: Ints) -> tuple[Ints, Ints]:
        """Sequence and position of what lies at rows of slots 0 and, behind them, of heads; -1 where nothing does."""
        table, parts = self._table, self._table.parts
        held = np.flatnonzero(~table.is_tail)
        begin = np.where(table.is_head, parts.start - table.halo, parts.start)[held]
        first = np.where(table.is_head, table.halo_row, parts.row)[held]
        width = int(max(row.max(initial=0), first.max(initial=0))) + 1
        keys = parts.rank[held] * width + first
        order = np.lexsort((parts.stop[held] - begin, keys))  # a head without rows lies before one that has some
        at = order[np.searchsorted(keys[order], rank * width + row, side="right") - 1]
        position = begin[at] + row - first[at]
        inside = (parts.rank[held][at] == rank) & (position < parts.stop[held][at])
        return np.where(inside, parts.sequence[held][at], -1), np.where(inside, position, -1)


def _check_ends(tables: Sequence[ScanTable]) -> None:
    """Each tail is the head of one later microbatch, on the same rank."""
    left: dict[tuple[int, ...], int] = {}
    for number, table in enumerate(tables):
        parts = table.parts
        for is_head, rows in ((True, table.is_head), (False, table.is_tail)):
            for sequence, start, rank, earlier in zip(
                *(each[rows].tolist() for each in (parts.sequence, parts.start, parts.rank, parts.microbatch)),
                strict=True,
            ):
                key = (sequence, start, rank)
                if not is_head:
                    left[key] = number
                elif left.pop(key, -1) != earlier:
                    raise ValueError(
                        f"microbatch {number}, rank {rank}: sequence {sequence} goes on at token {start} from a state "
                        f"that microbatch {earlier} does not leave there; lower the plan again"
                    )
    if left:
        raise ValueError(f"states of (sequence, token, rank) {sorted(left)} are kept and never read; lower again")
