"""From where a generation takes up its state, if not from a checkpoint."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rayfcp.cluster.recovery.stores import Keeping, keeper_id
from rayfcp.cluster.runtime import CallError, Runtime
from rayfcp.cluster.workers.facts import Source
from rayfcp.cluster.workers.members import Member
from rayfcp.elastic.recoverable import Held, newest
from rayfcp.values import StateId

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""For workers and keepers to say what they hold; they have threads of their own for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """The newest state of which every shard has a living copy, and one copy of each; `state` is None, and `reason` says
    what is missing, if there is no such state. `generation`: the newest one that left any copy, -1 if none did."""

    state: StateId | None
    sources: tuple[Source, ...]
    reason: str
    generation: int


def restorable(
    members: Sequence[Member], keeping: Keeping, *, runtime: Runtime, up_to: int, patience_s: float
) -> Restorable:
    """Ask all workers and keepers what they hold of states of at most `up_to` steps. After `ANSWER_S` others are waited
    for only while what is known makes no whole state, for `patience_s` at most."""
    keepers = {keeper_id(node): node for node in keeping.keepers}
    holders = {member.id: member.handle for member in members}
    holders |= {id: keeping.keepers[node] for id, node in keepers.items()}
    asking, end_s = Asking(runtime, holders), runtime.now_s() + patience_s
    while True:
        asking.listen(ANSWER_S)
        held = [
            Held(header=each.header, where=each.holder_id, is_keeper=each.holder_id in keepers) for each in asking.told
        ]
        found = newest(each for each in held if each.header.state.version <= up_to)
        if not asking.waiting or found.state is not None or runtime.now_s() > end_s:
            break
    for id in sorted(asking.silent & keepers.keys()):
        logger.warning("the %s does not answer", id)
        keeping.forget(keepers[id])
    copy = {(each.holder_id, each.header.state, each.header.number): each for each in asking.told}
    sources = (
        # A worker takes from its own copies what it can, and of equal copies the first.
        tuple(copy[where[0], found.state, number] for number, where in enumerate(found.sources_for("")))
        if found.state is not None
        else ()
    )
    return Restorable(
        state=found.state,
        sources=sources,
        reason=found.reason,
        generation=max((each.header.state.generation for each in held), default=-1),
    )


class Asking:
    """Holders of copies by id, each asked once. `told`: what was heard; `silent`: who did not answer, or is gone."""

    def __init__(self, runtime: Runtime, holders: Mapping[str, Any]) -> None:
        self._runtime, self._holders = runtime, holders
        self.waiting = {handle.headers.remote(): id for id, handle in holders.items()}
        self.silent = set(holders)
        self.told: list[Source] = []

    def listen(self, timeout_s: float) -> None:
        """To those that answer in time; returns as soon as all did."""
        for ref in self._runtime.wait_all(list(self.waiting), timeout_s=timeout_s):
            id = self.waiting.pop(ref)
            with suppress(CallError):
                headers = self._runtime.get(ref)
                self.told += [Source(header=each, holder=self._holders[id], holder_id=id) for each in headers]
                self.silent.discard(id)
