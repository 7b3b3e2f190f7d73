"""The newest state that copies in memory can restore."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rayfcp.cluster.recovery.stores import SnapshotStores, store_id
from rayfcp.cluster.runtime import CallError, Runtime
from rayfcp.cluster.workers.facts import Source
from rayfcp.cluster.workers.members import Member
from rayfcp.elastic.recoverable import ShardCopy, newest
from rayfcp.values import StateId

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Time for workers and snapshot stores to list their copies, for which they have threads of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """The newest state with a copy of every shard, and one copy of each. Without one `state` is None and `reason` says
    what is missing. `generation`: the newest one that left any copy, -1 if none did."""

    state: StateId | None
    sources: tuple[Source, ...]
    reason: str
    generation: int


def restorable(
    members: Sequence[Member], snapshot_stores: SnapshotStores, *, runtime: Runtime, up_to: int, patience_s: float
) -> Restorable:
    """Query all workers and snapshot stores for states of at most `up_to` steps. After `ANSWER_S` wait for further
    answers only while no state is complete, for `patience_s` at most."""
    stores = {store_id(node): node for node in snapshot_stores.stores}
    holders = {member.id: member.handle for member in members}
    holders |= {id: snapshot_stores.stores[node] for id, node in stores.items()}
    query, end_s = CopyQuery(runtime, holders), runtime.now_s() + patience_s
    while True:
        query.collect(ANSWER_S)
        held = [
            ShardCopy(header=each.header, where=each.holder_id, is_store=each.holder_id in stores)
            for each in query.copies
        ]
        found = newest(each for each in held if each.header.state.version <= up_to)
        if not query.pending or found.state is not None or runtime.now_s() > end_s:
            break
    for id in sorted(query.silent & stores.keys()):
        logger.warning("the %s does not answer", id)
        snapshot_stores.forget(stores[id])
    copy = {(each.holder_id, each.header.state, each.header.number): each for each in query.copies}
    sources = (
        # Workers prefer their own copies, and of equal copies take the first.
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


class CopyQuery:
    """Asks each holder of copies once. `copies`: the answers; `silent`: holders that did not answer or are gone."""

    def __init__(self, runtime: Runtime, holders: Mapping[str, Any]) -> None:
        self._runtime, self._holders = runtime, holders
        self.pending = {handle.headers.remote(): id for id, handle in holders.items()}
        self.silent = set(holders)
        self.copies: list[Source] = []

    def collect(self, timeout_s: float) -> None:
        """Take the answers that come in time; return once all did."""
        for ref in self._runtime.wait_all(list(self.pending), timeout_s=timeout_s):
            id = self.pending.pop(ref)
            with suppress(CallError):
                headers = self._runtime.get(ref)
                self.copies += [Source(header=each, holder=self._holders[id], holder_id=id) for each in headers]
                self.silent.discard(id)
