"""Rounds of a scan over ranks: summaries of parts go to the ranks that fold, states come back, and gradients the same
way (`rayfcp.program.scan`)."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.recurrence.messages import Incoming, Outgoing, exchange
from rayfcp.execute.recurrence.schedule import Item, MessageLayout, StateRounds
from rayfcp.program.scan import Share

States = Mapping[Item, Tensor]
"""Of parts, `[heads, ...]`."""

Shares = Mapping[Item, tuple[Tensor, ...]]
"""Of parts, of a share of the heads and, of their states, of the columns."""

Round = tuple[tuple[MessageLayout, ...], tuple[MessageLayout, ...]]


class StateScan:
    """The rounds of one layer's pass on one rank."""

    def __init__(self, rounds: StateRounds, *, context: AttentionContext) -> None:
        self._rounds, self._form, self._context = rounds, rounds.form, context

    def states(self, transitions: States, increments: States) -> tuple[States, list[Tensor]]:
        """States before parts of this rank but first ones, and its share of the transitions of `kept_parts`.

        `increments`: U of the parts of this rank but last ones; `transitions`: T of those but first ones.
        """
        own = {item: (each, transitions[item]) if item[1] else (each,) for item, each in increments.items()}
        parts = self._gather(self._rounds.summaries, own)
        folded: dict[Item, tuple[Tensor, ...]] = {}
        for number, count in self._rounds.folded.items():
            state = parts[number, 0][0]
            folded[number, 1] = (state,)
            for part in range(1, count - 1):
                increment, transition = parts[number, part]
                state = increment + self._form.advance(transition, state)
                folded[number, part + 1] = (state,)
        kept = [parts[each][1].clone() for each in self._rounds.kept_parts]  # without the rest of what arrived
        return self._spread(self._rounds.states, folded), kept

    def gradients(self, adjoints: States, kept: Sequence[Tensor]) -> States:
        """Gradients of the states behind parts of this rank but last ones, from `adjoints`, those of the states before
        its parts but first ones through their own outputs. `kept`: from `states`."""
        parts = self._gather(self._rounds.adjoints, {item: (each,) for item, each in adjoints.items()})
        transitions = dict(zip(self._rounds.kept_parts, kept, strict=True))
        folded: dict[Item, tuple[Tensor, ...]] = {}
        for number, count in self._rounds.folded.items():
            (gradient,) = parts[number, count - 1]
            folded[number, count - 2] = (gradient,)
            for part in range(count - 2, 0, -1):
                gradient = parts[number, part][0] + self._form.retreat(transitions[number, part], gradient)
                folded[number, part - 1] = (gradient,)
        return self._spread(self._rounds.state_grads, folded)

    def _gather(self, step: Round, own: Shares) -> Shares:
        """Of all parts of the chains that this rank folds, its share of the heads."""

        def cut(item: Item, share: Share) -> tuple[Tensor, ...]:
            state, *transition = own[item]
            return state[_index(share)], *(each[slice(*share.heads)] for each in transition)

        sends, receives = step
        leaving = [[each for item, share, _ in layout.items for each in cut(item, share)] for layout in sends]
        rank, folded = self._rounds.rank, self._rounds.folded
        found = {item: cut(item, self._rounds.share(item, rank)) for item in own if item[0] in folded}
        return found | {item: of for item, _, of in self._exchange(sends, leaving, receives)}

    def _spread(self, step: Round, folded: Shares) -> States:
        """Of parts of this rank, all heads."""
        rounds, form, found = self._rounds, self._form, dict[Item, Tensor]()

        def place(item: Item, share: Share, own: Tensor) -> None:
            if own.shape == (form.heads, *form.state):
                found[item] = own
                return
            if item not in found:
                found[item] = form.empty(form.heads, *form.state)
            found[item][_index(share)] = own

        sends, receives = step
        arrived = self._exchange(sends, [[folded[item][0] for item, *_ in layout.items] for layout in sends], receives)
        for item, (own,) in folded.items():
            if rounds.chains[item[0]].ranks[item[1]] == rounds.rank:
                place(item, rounds.share(item, rounds.rank), own)
        for item, share, (own,) in arrived:
            place(item, share, own)
        return found

    def _exchange(
        self, sends: Sequence[MessageLayout], leaving: Sequence[list[Tensor]], receives: Sequence[MessageLayout]
    ) -> list[tuple[Item, Share, tuple[Tensor, ...]]]:
        """What comes of each item."""
        out = [
            Outgoing(layout.peer, (sum(layout.sizes),), partial(_concatenate, tensors))
            for layout, tensors in zip(sends, leaving, strict=True)
        ]
        due = [Incoming(layout.peer, (sum(layout.sizes),)) for layout in receives]
        came = exchange(out, due, like=self._form.empty(0), context=self._context)
        found = []
        for layout, message in zip(receives, came, strict=True):
            split = iter(message.split(layout.sizes))
            for item, share, shapes in layout.items:
                own = islice(split, len(shapes))
                found.append((item, share, tuple(each.view(of) for each, of in zip(own, shapes, strict=True))))
        return found


def _index(share: Share) -> tuple[Any, ...]:
    """Where a share lies in a state, `[heads, dk, dv]`."""
    return slice(*share.heads), ..., slice(*share.columns)


def _concatenate(tensors: list[Tensor], target: Tensor) -> None:
    torch.cat([each.reshape(-1) for each in tensors], out=target)
