"""The programs of all stages and ranks as one value in columns, of which each rank's program is a view."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Encode,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    LayerAttention,
    Load,
    RankProgram,
    Receive,
    Send,
    StageFlow,
)
from rayfcp.program.pieces import Pieces
from rayfcp.program.scan import ScanProgram
from rayfcp.program.scans import ScanTable, parts_of
from rayfcp.program.table import AttentionTable
from rayfcp.values import LayerKind, RecurrentKind
from rayfcp.values.arrays import Bools, Ints

Attention = Mapping[LayerKind, tuple[AttentionTable, ...]]
"""The attention of layers of each kind, by microbatch."""


class Programs(Sequence[RankProgram]):
    """Programs of all stages and ranks, that of rank r on stage p at index p x num_ranks + r.

    `outlines[p]`: the instructions that all ranks of stage p run, those of a rank that has a token of padding and no
    messages; with a `Free` for each microbatch of which any rank keeps keys and values. `pieces` and `encodes` by
    microbatch; `encodes[m][r]` is rank r's, empty where microbatch m encodes nothing. Stages without softmax attention
    have one of `TokenwiseKind`, which says how many tokens there are. `scans` follow from `pieces`.

    A value travels as one buffer of 32-bit numbers, which is not copied where it is read.
    """

    def __init__(
        self,
        *,
        plan_hash: str,
        outlines: Sequence[RankProgram],
        attention: Attention,
        pieces: Sequence[Pieces],
        encodes: Sequence[Sequence[Encode]],
    ) -> None:
        self.plan_hash, self.outlines, self.attention = plan_hash, tuple(outlines), dict(attention)
        self.pieces, self.encodes = tuple(pieces), tuple(encodes)
        self.num_ranks, self.num_stages = len(pieces[0].first) - 1, len(outlines)
        self._views: dict[tuple[int, int], AttentionProgram | HeadProgram] = {}
        self._scanned: dict[tuple[int, int], ScanProgram] = {}

    @property
    def num_microbatches(self) -> int:
        return len(self.pieces)

    @property
    def forward_only(self) -> bool:
        """True if no microbatch is passed backward."""
        return not any(isinstance(item, Backward) for item in self.outlines[0].instructions)

    @property
    def tables(self) -> tuple[AttentionTable, ...]:
        """The tables of all kinds and microbatches, each once."""
        return tuple({id(table): table for of_kind in self.attention.values() for table in of_kind}.values())

    @cached_property
    def scans(self) -> dict[RecurrentKind, tuple[ScanTable, ...]]:
        """The recurrence of layers of each recurrent kind of any stage, by microbatch."""
        kinds = sorted({kind for outline in self.outlines for kind in scans_of(outline)})
        return scan_tables(self.pieces, kinds)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers of all stages that exchange something, ascending."""
        return tuple(sorted([*self.attention, *self.scans]))

    @property
    def tokens(self) -> Ints:
        """`[microbatch, rank]`: tokens, 1 of padding where there is none."""
        return np.stack([table.tokens for table in next(iter(self.attention.values()))]).astype(np.int64)

    def replaced(
        self, *, plan_hash: str | None = None, encodes: Sequence[Sequence[Encode]] | None = None
    ) -> "Programs":
        """Return the same programs of a plan with another hash, or with other encodings."""
        plan_hash = self.plan_hash if plan_hash is None else plan_hash
        outlines = tuple(replace(outline, plan_hash=plan_hash) for outline in self.outlines)
        encodes = self.encodes if encodes is None else tuple(encodes)
        return self._with(plan_hash=plan_hash, outlines=outlines, encodes=encodes)

    def forward_part(self) -> "Programs":
        """Return the programs that pass all microbatches forward, in order, and none backward.

        Nothing is recomputed, reduced or handed back to an earlier stage. What a microbatch keeps is freed after the
        forward pass of the last microbatch that reads it.
        """
        of_kinds: list[tuple[AttentionTable | ScanTable, ...]] = [*self.attention.values(), *self.scans.values()]
        of_microbatch = enumerate(zip(*of_kinds, strict=True))
        last_reader = {earlier: at for at, tables in of_microbatch for each in tables for earlier in each.earlier}
        outlines = tuple(
            replace(outline, instructions=_forward_instructions(outline, last_reader=last_reader))
            for outline in self.outlines
        )
        return self._with(outlines=outlines)

    def _with(self, **changes: Any) -> "Programs":
        found = object.__new__(Programs)  # views that were made are shared
        vars(found).update(vars(self) | changes)
        return found

    def __len__(self) -> int:
        return self.num_ranks * self.num_stages

    @overload
    def __getitem__(self, index: int) -> RankProgram: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankProgram, ...]: ...
    def __getitem__(self, index: int | slice) -> RankProgram | tuple[RankProgram, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        stage, rank = divmod(range(len(self))[index], self.num_ranks)
        outline = self.outlines[stage]
        kinds, scans = kinds_of(outline), scans_of(outline)
        instructions = (self._of_rank(item, rank, kinds=kinds, scans=scans) for item in outline.instructions)
        found = tuple(item for item in instructions if item is not None)
        return replace(outline, rank=rank, num_ranks=self.num_ranks, instructions=found)

    def __iter__(self) -> Iterator[RankProgram]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(RankProgram.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _of_rank(
        self, item: Instruction, rank: int, *, kinds: Sequence[LayerKind], scans: Sequence[RecurrentKind]
    ) -> Instruction | None:
        at = item.microbatch
        if isinstance(item, Load):
            return replace(item, pieces=self.pieces[at].of_rank(rank))
        if isinstance(item, Encode):
            return self.encodes[at][rank]
        if isinstance(item, Forward):
            views = [LayerAttention(kind=kind, attention=self._view(self.attention[kind][at], rank)) for kind in kinds]
            scanned = tuple(self._scan(self.scans[kind][at], rank) for kind in scans)
            return replace(item, attention=views[0].attention, others=tuple(views[1:]), scans=scanned)
        if isinstance(item, Send | Receive):
            return replace(item, num_tokens=int(self.attention[kinds[0]][at].tokens[rank]))
        if isinstance(item, Free):
            keeps = any(self.attention[kind][at].keeps(rank) for kind in kinds)
            return item if keeps or any(self.scans[kind][at].keeps(rank) for kind in scans) else None
        return item

    def _view(self, table: AttentionTable, rank: int) -> AttentionProgram | HeadProgram:
        """A rank's attention, the same object on all stages."""
        key = id(table), rank
        if key not in self._views:
            self._views[key] = table.program(rank)
        return self._views[key]

    def _scan(self, table: ScanTable, rank: int) -> ScanProgram:
        """A rank's recurrence, the same object on all stages."""
        key = id(table), rank
        if key not in self._scanned:
            self._scanned[key] = table.program(rank)
        return self._scanned[key]

    def __reduce__(self) -> tuple[Any, ...]:
        tables = self.tables
        number = {id(table): at for at, table in enumerate(tables)}
        columns: list[Ints | Bools] = [column for pieces in self.pieces for column in pieces]
        columns += [column for table in tables for column in table.arrays()]
        sizes = tuple(column.size for column in columns)
        buffer = np.concatenate([column.ravel() for column in columns], dtype=np.int32, casting="unsafe")
        attention = {kind: tuple(number[id(table)] for table in own) for kind, own in self.attention.items()}
        kinds = tuple(table.kind for table in tables)
        return _restored, (self.plan_hash, self.outlines, attention, kinds, self.encodes, sizes, buffer)


def _forward_instructions(outline: RankProgram, *, last_reader: Mapping[int, int]) -> tuple[Instruction, ...]:
    """Return the instructions of an outline's forward passes, microbatch by microbatch; each `Free` follows the pass of
    the last reader."""

    def turn(item: Instruction) -> tuple[int, bool, int]:
        at, frees = item.microbatch, isinstance(item, Free)
        return last_reader[at] if frees else at, frees, at

    def is_backward(item: Instruction) -> bool:
        return isinstance(item, Backward) or (isinstance(item, Send | Receive) and item.flow is StageFlow.GRADIENT)

    left = (item for item in outline.instructions if not is_backward(item))
    items = (
        replace(item, recomputed_layers=0, keeps_attention=False) if isinstance(item, Forward) else item
        for item in left
    )
    return tuple(sorted(items, key=turn))


def kinds_of(program: RankProgram) -> tuple[LayerKind, ...]:
    """The kinds of the stage's attention, ascending."""
    return tuple(each.kind for each in _first_pass(program).kinds)


def scans_of(program: RankProgram) -> tuple[RecurrentKind, ...]:
    """The kinds of the stage's recurrent layers, ascending."""
    return tuple(each.kind for each in _first_pass(program).scans)


def _first_pass(program: RankProgram) -> Forward:
    return next(item for item in program.instructions if isinstance(item, Forward))


def scan_tables(pieces: Sequence[Pieces], kinds: Sequence[RecurrentKind]) -> dict[RecurrentKind, tuple[ScanTable, ...]]:
    """The recurrence of all microbatches in layers of each of these kinds.

    Raises:
        ValueError: tokens of a sequence are not there in their order (`parts_of`).
    """
    parts = parts_of(pieces) if kinds else ()
    return {kind: tuple(ScanTable(kind=kind, parts=each) for each in parts) for kind in kinds}


def _restored(
    plan_hash: str,
    outlines: tuple[RankProgram, ...],
    numbers: Mapping[LayerKind, tuple[int, ...]],
    kinds: tuple[LayerKind, ...],
    encodes: tuple[tuple[Encode, ...], ...],
    sizes: tuple[int, ...],
    buffer: Ints,
) -> Programs:
    """The programs whose columns are parts of `buffer`, of these sizes."""
    columns = iter(np.split(buffer, np.cumsum(sizes)[:-1]))
    pieces = [Pieces(*itertools.islice(columns, len(Pieces._fields))) for _ in encodes]
    tables = [AttentionTable.of(kind, columns) for kind in kinds]
    attention = {kind: tuple(tables[at] for at in own) for kind, own in numbers.items()}
    return Programs(plan_hash=plan_hash, outlines=outlines, attention=attention, pieces=pieces, encodes=encodes)
