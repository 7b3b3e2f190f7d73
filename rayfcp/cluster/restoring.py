"""From where a generation takes up its state: copies of shards, a checkpoint, or the first weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.cluster.facts import Source
from rayfcp.cluster.keeping import Keeping, sources_of
from rayfcp.cluster.members import Member
from rayfcp.elastic.recoverable import Held, newest
from rayfcp.values import StateId


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """The newest state of which every shard has a living copy, and one copy of each; `state` is None, and `reason` says
    what is missing, if there is no such state."""

    state: StateId | None
    sources: tuple[Source, ...]
    reason: str


def restorable(members: Sequence[Member], keeping: Keeping) -> Restorable:
    """Ask all workers and keepers what they hold."""
    holders = [(source, False) for source in sources_of(members)] + [(source, True) for source in keeping.sources()]
    held = [
        Held(header=source.header, where=str(number), is_keeper=is_keeper)
        for number, (source, is_keeper) in enumerate(holders)
    ]
    found = newest(held)
    if found.state is None:
        return Restorable(state=None, sources=(), reason=found.reason)
    # A worker takes from its own copies what it can, and of equal copies the first.
    first = [holders[int(copies[0])][0] for copies in found.sources_for("")]
    return Restorable(state=found.state, sources=tuple(first), reason=found.reason)
