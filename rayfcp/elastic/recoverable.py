"""State that survives losses: snapshots that are stored, steps that they permit, and the newest complete state."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfcp.values import ShardHeader, StateId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshots:
    """States that the snapshot stores reported for each device of a generation; immutable, `after` returns the next
    value.

    The generation starts from version `first`, of which it takes a snapshot, and of every version that is a multiple of
    `every` (0: of none at all). `safe`: the newest state stored for all devices of its generation; that of an earlier
    generation, whose copies live on, until this one has one. `stored`: for each device the reported states, those older
    than `safe` left out.
    """

    generation: int
    first: int
    every: int
    safe: StateId | None = None
    stored: Mapping[str, frozenset[StateId]] = field(default_factory=dict)

    @classmethod
    def start(cls, devices: Iterable[str], *, generation: int, first: int, every: int) -> "StoredSnapshots":
        """Return a generation of which nothing is stored yet."""
        return cls(generation=generation, first=first, every=every, stored=dict.fromkeys(devices, frozenset()))

    def again(self, devices: Iterable[str], *, generation: int, first: int) -> "StoredSnapshots":
        """Return a new generation, from version `first`. A safe state of later steps was lost with them."""
        begun = StoredSnapshots.start(devices, generation=generation, first=first, every=self.every)
        return replace(begun, safe=self.safe if self.safe is not None and self.safe.version <= first else None)

    def after(self, reports: Mapping[str, StateId | None]) -> "StoredSnapshots":
        """Add states that devices reported as stored. A state that one device skipped is not safe, however new its
        others are; states of other generations and devices are ignored."""
        stored = {
            device: states | {state}
            if (state := reports.get(device)) is not None and state.generation == self.generation
            else states
            for device, states in self.stored.items()
        }
        complete = frozenset.intersection(*stored.values()) if stored else frozenset()
        safe = max((state for state in (self.safe, *complete) if state is not None), default=None)
        newer = {
            device: frozenset(each for each in states if safe is None or each >= safe)
            for device, states in stored.items()
        }
        return replace(self, safe=safe, stored=newer)

    def due(self, version: int) -> bool:
        """Return true if a snapshot is taken of this version."""
        return self.every > 0 and version >= self.first and (version == self.first or version % self.every == 0)

    def needed(self, step: int) -> StateId | None:
        """Return the state that must be safe before `step` is dispatched, None if none: the newest snapshot of versions
        up to `step` - 2. A loss then makes the run execute at most `every` finished steps again."""
        if self.every == 0 or step - 2 < self.first:
            return None
        version = max(self.first, (step - 2) // self.every * self.every)
        return StateId(version=version, generation=self.generation)

    def may_dispatch(self, step: int) -> bool:
        """Return true if the state that `step` needs is safe."""
        needed = self.needed(step)
        return needed is None or (self.safe is not None and self.safe >= needed)

    def without_copies(self, devices: Collection[str]) -> "StoredSnapshots":
        """Return the value after the snapshot store of these devices is gone: its states have to be stored anew."""
        gone: dict[str, frozenset[StateId]] = dict.fromkeys(self.stored.keys() & devices, frozenset())
        mine = self.safe is not None and self.safe.generation == self.generation
        return replace(self, stored={**self.stored, **gone}, safe=None if mine and gone else self.safe)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopy:
    """A complete copy of a shard, and the worker or snapshot store with it: `holder.pieces.remote(state, number,
    wanted=...)` gives parts of it."""

    header: ShardHeader
    holder: Any
    holder_id: str
    is_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverableState:
    """The newest state with a copy of every shard, and one copy of each; without one `state` is None and `reason` says
    what is missing. `generation`: the newest one that left any copy, -1 if none did."""

    reason: str
    state: StateId | None = None
    copies: tuple[ShardCopy, ...] = ()
    generation: int = -1


def newest(held: Sequence[ShardCopy], *, up_to: int) -> RecoverableState:
    """The newest state of at most `up_to` steps of which each number 0 .. num_devices - 1 has a copy somewhere, at
    workers rather than snapshot stores. Copies of different states never mix; a state whose copies do not agree on
    `num_devices` is none."""
    generation = max((each.header.state.generation for each in held), default=-1)
    by_state: dict[StateId, list[ShardCopy]] = {}
    for each in sorted(held, key=lambda each: each.is_store):
        if each.header.state.version <= up_to:
            by_state.setdefault(each.header.state, []).append(each)
    lacks: list[str] = []
    for state, copies in sorted(by_state.items(), reverse=True):
        name = f"the state after step {state.version} (generation {state.generation})"
        lack = _lack(copies)
        if lack is not None:
            lacks.append(f"{name} {lack}")
            continue
        first = {each.header.number: each for each in reversed(copies)}
        count, only_stored = len(first), sum(each.is_store for each in first.values())
        return RecoverableState(
            reason=f"{name} has all {count} shards in memory, {only_stored} of them only at snapshot stores"
            + "".join(f"; {lack}" for lack in lacks),
            state=state,
            copies=tuple(first[number] for number in range(count)),
            generation=generation,
        )
    lack = f"no state in memory is complete: {'; '.join(lacks)}" if lacks else "no state in memory: 0 copies are alive"
    return RecoverableState(reason=lack, generation=generation)


def _lack(copies: Sequence[ShardCopy]) -> str | None:
    """Return the problem of a state, None if there is none."""
    counts = sorted({each.header.num_devices for each in copies})
    if len(counts) > 1:
        return f"has copies for {' and '.join(map(str, counts))} devices"
    missing = sorted(set(range(counts[0])) - {each.header.number for each in copies})
    if not missing:
        return None
    return f"lacks shard{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {counts[0]}"
