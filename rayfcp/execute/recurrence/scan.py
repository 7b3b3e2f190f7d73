"""Rounds of a scan over ranks: summaries of parts go to the ranks that fold, states come back, and gradients the same
way (`rayfcp.program.scan`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.recurrence.messages import Incoming, Outgoing, Shape, exchange
from rayfcp.program import Range
from rayfcp.program.scan import ScanProgram, Share, StateRound

Item = tuple[int, int]
"""(chain, part)."""

States = Mapping[Item, Tensor]
"""Of parts, `[heads, ...]`."""

Shares = Mapping[Item, tuple[Tensor, ...]]
"""Of parts, of a share of the heads and, of their states, of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForm:
    """Shapes of a head's transition T, a matrix, a diagonal or a scalar, and of its state, `[dk, dv]`, of which a layer
    has `heads`. `like`: an empty tensor in the dtype and on the device of all."""

    heads: int
    transition: Shape
    state: Shape
    like: Tensor

    def advance(self, transition: Tensor, state: Tensor) -> Tensor:
        """T S, `[heads, dk, dv]`."""
        if len(self.transition) == 2:
            return transition @ state
        return transition[(..., *[None] * (2 - len(self.transition)))] * state

    def retreat(self, transition: Tensor, gradient: Tensor) -> Tensor:
        """The transpose of T times a gradient, `[heads, dk, dv]`."""
        return self.advance(transition.mT if len(self.transition) == 2 else transition, gradient)


class StateScan:
    """The rounds of one layer's pass on one rank."""

    def __init__(self, scan: ScanProgram, *, context: AttentionContext, form: StateForm) -> None:
        self._scan, self._context, self._form = scan, context, form
        self._folded = {each: len(chain.ranks) for each, chain in scan.chains.items() if scan.rank in chain.folders}

    @property
    def kept_parts(self) -> list[Item]:
        """The parts of whose transitions `gradients` needs this rank's share, in the order in which `states` returns
        them."""
        return [(number, part) for number, count in self._folded.items() for part in range(1, count - 1)]

    def states(
        self, transitions: States, increments: States, *, meanwhile: Callable[[], object]
    ) -> tuple[States, list[Tensor]]:
        """States before parts of this rank but first ones, and what `gradients` needs.

        `increments`: U of the parts of this rank but tails; `transitions`: T of those but first ones. `meanwhile` is
        called while they travel.
        """
        own = {item: (each, transitions[item]) if item[1] else (each,) for item, each in increments.items()}
        parts = self._gather(self._scan.summaries, own, has_transitions=True, meanwhile=meanwhile)
        folded: dict[Item, tuple[Tensor, ...]] = {}
        for number, count in self._folded.items():
            state = parts[number, 0][0]
            folded[number, 1] = (state,)
            for part in range(1, count - 1):
                increment, transition = parts[number, part]
                state = increment + self._form.advance(transition, state)
                folded[number, part + 1] = (state,)
        kept = [parts[each][1].clone() for each in self.kept_parts]  # a share, without the rest of what arrived
        return self._spread(self._scan.states, folded), kept

    def gradients(self, adjoints: States, kept: Sequence[Tensor], *, meanwhile: Callable[[], object]) -> States:
        """Gradients of the states behind parts of this rank but last ones, from `adjoints`, those of the states before
        its parts but first ones through their own outputs. `kept`: from `states`."""
        parts = self._gather(
            self._scan.adjoints, {item: (each,) for item, each in adjoints.items()}, meanwhile=meanwhile
        )
        transitions = dict(zip(self.kept_parts, kept, strict=True))
        folded: dict[Item, tuple[Tensor, ...]] = {}
        for number, count in self._folded.items():
            (gradient,) = parts[number, count - 1]
            folded[number, count - 2] = (gradient,)
            for part in range(count - 2, 0, -1):
                gradient = parts[number, part][0] + self._form.retreat(transitions[number, part], gradient)
                folded[number, part - 1] = (gradient,)
        return self._spread(self._scan.state_grads, folded)

    def _gather(
        self, step: StateRound, own: Shares, *, has_transitions: bool = False, meanwhile: Callable[[], object]
    ) -> Shares:
        """Of all parts of the chains that this rank folds, its share of the heads."""

        def share(item: Item, folder: int) -> tuple[Tensor, ...]:
            state, *transition = own[item]
            part = self._share(item, folder)
            return state[_index(part)], *(each[slice(*part.heads)] for each in transition)

        rank = self._scan.rank
        leaving = [(each.peer, [of for item in each.items for of in share(item, each.peer)]) for each in step.sends]
        coming = [
            (each.peer, [(item, self._share(item, rank), has_transitions and item[1] > 0) for item in each.items])
            for each in step.receives
        ]
        found = {item: share(item, rank) for item in own if item[0] in self._folded}
        return found | {item: of for item, _, of in self._exchange(leaving, coming, meanwhile=meanwhile)}

    def _spread(self, step: StateRound, folded: Shares) -> States:
        """Of parts of this rank, all heads."""
        leaving = [(each.peer, [folded[item][0] for item in each.items]) for each in step.sends]
        coming = [
            (each.peer, [(item, self._share(item, each.peer), False) for item in each.items]) for each in step.receives
        ]
        rank, form, found = self._scan.rank, self._form, dict[Item, Tensor]()

        def place(item: Item, part: Share, share: Tensor) -> None:
            if share.shape == (form.heads, *form.state):
                found[item] = share
                return
            if item not in found:
                found[item] = form.like.new_empty(form.heads, *form.state)
            found[item][_index(part)] = share

        arrived = self._exchange(leaving, coming, meanwhile=lambda: None)
        for item, (share,) in folded.items():
            if self._scan.chains[item[0]].ranks[item[1]] == rank:
                place(item, self._share(item, rank), share)
        for item, part, (share,) in arrived:
            place(item, part, share)
        return found

    def _share(self, item: Item, folder: int) -> Share:
        form = self._form
        return self._scan.chains[item[0]].share(folder, num_heads=form.heads, num_columns=form.state[-1])

    def _exchange(
        self,
        leaving: Sequence[tuple[int, list[Tensor]]],
        coming: Sequence[tuple[int, list[tuple[Item, Share, bool]]]],
        *,
        meanwhile: Callable[[], object],
    ) -> list[tuple[Item, Share, tuple[Tensor, ...]]]:
        """Messages by peer, and what comes of each item: a share of its state, with a flag also of its transition."""
        form, sends, receives, due = self._form, [], [], []
        for peer, tensors in leaving:
            if num_elements := sum(each.numel() for each in tensors):
                sends.append(Outgoing(peer, (num_elements,), partial(_concatenate, tensors)))
        for peer, items in coming:
            shapes = [
                shape
                for _, part, has_transition in items
                for shape in (_state_shape(part, form), (_length(part.heads), *form.transition))[: 1 + has_transition]
            ]
            due.append((items, shapes))
            if num_elements := sum(map(prod, shapes)):
                receives.append(Incoming(peer, (num_elements,)))
        came = iter(exchange(sends, receives, like=form.like, context=self._context, meanwhile=meanwhile))
        found = []
        for items, shapes in due:
            sizes = [prod(shape) for shape in shapes]
            message = next(came) if sum(sizes) else form.like
            views = (each.view(shape) for each, shape in zip(message.split(sizes), shapes, strict=True))
            for item, part, has_transition in items:
                found.append((item, part, tuple(islice(views, 1 + has_transition))))
        return found


def _length(of: Range) -> int:
    return of[1] - of[0]


def _index(part: Share) -> tuple[Any, ...]:
    """Where a share lies in a state, `[heads, dk, dv]`."""
    return slice(*part.heads), ..., slice(*part.columns)


def _state_shape(part: Share, form: StateForm) -> Shape:
    return _length(part.heads), *form.state[:-1], _length(part.columns)


def _concatenate(tensors: list[Tensor], target: Tensor) -> None:
    torch.cat([each.reshape(-1) for each in tensors], out=target)
