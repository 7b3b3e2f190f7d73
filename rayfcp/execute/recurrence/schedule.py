"""What the layers of a microbatch share of a recurrence: rows and lengths of kernel calls, places of halos, and what
messages consist of. All of it is found once per microbatch, for every layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from rayfcp.execute.kernels import Lengths
from rayfcp.program import Range
from rayfcp.program.scan import HaloCopy, ScanProgram, Segment, Share, StateMessage

Item = tuple[int, int]
"""(chain, part)."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForm:
    """Shapes of a head's transition T, a matrix, a diagonal or a scalar, and of its state, `[dk, dv]`, of which a layer
    has `heads`."""

    heads: int
    transition: Shape
    state: Shape
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """A tensor that is not filled."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def advance(self, transition: Tensor, state: Tensor) -> Tensor:
        """T S, `[heads, dk, dv]`."""
        if len(self.transition) == 2:
            return transition @ state
        return transition[(..., *[None] * (2 - len(self.transition)))] * state

    def retreat(self, transition: Tensor, gradient: Tensor) -> Tensor:
        """The transpose of T times a gradient, `[heads, dk, dv]`."""
        return self.advance(transition.mT if len(self.transition) == 2 else transition, gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLayout:
    """A message of a round to or from `peer`: of each of `items` in turn its share of the state, and of those with two
    shapes also that of the transition; `sizes`: numbers of each. One of nothing, which both ends know, is not sent."""

    peer: int
    items: tuple[tuple[Item, Share, tuple[Shape, ...]], ...]
    sizes: tuple[int, ...]


class StateRounds:
    """The four rounds of layers with states of one form, and who folds which share."""

    def __init__(self, scan: ScanProgram, form: StateForm) -> None:
        self.form, self.rank, self.chains = form, scan.rank, scan.chains
        self._shares = {
            (number, folder): chain.share(folder, num_heads=form.heads, num_columns=form.state[-1])
            for number, chain in scan.chains.items()
            for folder in chain.folders
        }
        self.folded = {
            each: len(chain.ranks)
            for each, chain in scan.chains.items()
            if scan.rank in chain.folders and self._shares[each, scan.rank].heads != (0, 0)
        }
        self.kept_parts = tuple((each, part) for each, count in self.folded.items() for part in range(1, count - 1))
        """Parts of whose transitions the backward pass needs this rank's share."""
        rounds = (scan.summaries, scan.states, scan.adjoints, scan.state_grads)
        self.summaries, self.states, self.adjoints, self.state_grads = (
            (self._layouts(each.sends, back=back, both=both), self._layouts(each.receives, back=not back, both=both))
            for each, back, both in zip(rounds, (False, True) * 2, (True, False, False, False), strict=True)
        )

    def share(self, item: Item, folder: int) -> Share:
        """What a rank folds of a part."""
        return self._shares[item[0], folder]

    def _layouts(self, messages: Iterable[StateMessage], *, back: bool, both: bool) -> tuple[MessageLayout, ...]:
        """`back`: this rank folds what they are about; otherwise the peer does."""
        found = []
        for each in messages:
            folder = self.rank if back else each.peer
            shares = [(item, self.share(item, folder)) for item in each.items]
            items = tuple((item, share, self._shapes(share, both=both and item[1] > 0)) for item, share in shares)
            sizes = tuple(prod(shape) for _, _, shapes in items for shape in shapes)
            if any(sizes):
                found.append(MessageLayout(peer=each.peer, items=items, sizes=sizes))
        return tuple(found)

    def _shapes(self, share: Share, *, both: bool) -> tuple[Shape, ...]:
        heads, columns = (stop - start for start, stop in share)
        state = (heads, *self.form.state[:-1], columns)
        return (state, (heads, *self.form.transition)) if both else (state,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Segments in one call of a kernel: which parts they are, their rows of slot 0, and their tokens."""

    items: tuple[Item, ...]
    rows: tuple[Range, ...]
    lengths: Lengths

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "Segments":
        """Those of a program."""
        rows = tuple(each.rows for each in segments)
        return cls(
            items=tuple((each.chain, each.part) for each in segments),
            rows=rows,
            lengths=tuple(stop - start for start, stop in rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Rows of all segments, each behind its halo: of `num_rows`, `own` are those of slot 0 and `halo` those of the rows
    `buffer` of the halo buffer, range by range; the others, before the start of a sequence, are zero. A convolution
    gives the outputs of `own` at `behind`."""

    own: tuple[Range, ...]
    halo: tuple[Range, ...]
    buffer: tuple[Range, ...]
    behind: tuple[Range, ...]
    num_rows: int

    @classmethod
    def of(cls, scan: ScanProgram) -> "Places":
        """Those of a program."""
        own, halo, at, width = list[Range](), list[Range](), 0, scan.kind.halo
        for each in scan.segments:
            first = at + width
            halo.append((first - (each.halo[1] - each.halo[0]), first))
            at = first + each.rows[1] - each.rows[0]
            own.append((first, at))
        return cls(
            own=tuple(own),
            halo=tuple(halo),
            buffer=tuple(each.halo for each in scan.segments),
            behind=tuple((start - width, stop - width) for start, stop in own),
            num_rows=at,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanSchedule:
    """A program of recurrent layers, and what follows from it for each of them."""

    program: ScanProgram

    @cached_property
    def every(self) -> Segments:
        """All segments."""
        return Segments.of(self.program.segments)

    @cached_property
    def opening(self) -> Segments:
        """Those with state 0 before them: whole sequences and first parts."""
        return Segments.of([each for each in self.program.segments if each.part == 0])

    @cached_property
    def later(self) -> Segments:
        """The others."""
        return Segments.of([each for each in self.program.segments if each.part > 0])

    @cached_property
    def leading(self) -> Segments:
        """Parts of cut sequences but last ones: those whose U somebody needs."""
        chains = self.program.chains
        return Segments.of(
            [
                each
                for each in self.program.segments
                if each.chain >= 0 and each.part < len(chains[each.chain].ranks) - 1
            ]
        )

    @cached_property
    def places(self) -> Places:
        """Of the rows of convolutions."""
        return Places.of(self.program)

    @cached_property
    def copies(self) -> tuple[list[HaloCopy], list[HaloCopy], list[HaloCopy]]:
        """Halos that leave this rank, arrive, and stay."""
        rank, halos = self.program.rank, self.program.halos
        return (
            [each for each in halos if each.sender == rank != each.receiver],
            [each for each in halos if each.receiver == rank != each.sender],
            [each for each in halos if each.sender == rank == each.receiver],
        )

    @cached_property
    def _rounds(self) -> dict[StateForm, StateRounds]:
        return {}

    def rounds(self, form: StateForm) -> StateRounds:
        """The rounds of layers with states of this form."""
        if form not in self._rounds:
            self._rounds[form] = StateRounds(self.program, form)
        return self._rounds[form]
