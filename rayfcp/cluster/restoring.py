"""From where a generation takes up its state, if not from a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.cluster.facts import Source
from rayfcp.cluster.keeping import Keeping, sources_of
from rayfcp.cluster.members import Member
from rayfcp.elastic.recoverable import Held, newest
from rayfcp.values import StateId

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


def restorable(members: Sequence[Member], keeping: Keeping, *, up_to: int) -> Restorable:
    """Ask all workers and keepers what they hold of states of at most `up_to` steps."""
    ours, theirs = sources_of(members, timeout_s=ANSWER_S), keeping.sources(timeout_s=ANSWER_S)
    held = [Held(header=each.header, where=each.holder_id) for each in ours]
    held += [Held(header=each.header, where=each.holder_id, is_keeper=True) for each in theirs]
    found = newest(each for each in held if each.header.state.version <= up_to)
    copy = {(each.holder_id, each.header.state, each.header.number): each for each in (*ours, *theirs)}
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
