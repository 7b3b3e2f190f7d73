"""State that survives losses: snapshots that are stored, steps that they permit, and the newest complete state."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    stored: tuple[tuple[str, frozenset[StateId]], ...] = ()

    @classmethod
    def start(cls, devices: Iterable[str], *, generation: int, first: int, every: int) -> "StoredSnapshots":
        """Return a generation of which nothing is stored yet."""
        stored = tuple((each, frozenset[StateId]()) for each in devices)
        return cls(generation=generation, first=first, every=every, stored=stored)

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
            for device, states in self.stored
        }
        complete = frozenset.intersection(*stored.values()) if stored else frozenset()
        safe = max((state for state in (self.safe, *complete) if state is not None), default=None)
        kept = {
            device: frozenset(each for each in held if safe is None or each >= safe) for device, held in stored.items()
        }
        return replace(self, safe=safe, stored=tuple(kept.items()))

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
        stored = tuple((device, frozenset() if device in devices else states) for device, states in self.stored)
        mine = self.safe is not None and self.safe.generation == self.generation
        affected = any(device in devices for device, _ in self.stored)
        return replace(self, stored=stored, safe=None if mine and affected else self.safe)


NAMED = 3
"""Incomplete states that a reason names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopy:
    """A complete copy of a shard in the memory of worker or snapshot store `where`."""

    header: ShardHeader
    where: str
    is_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverableState:
    """The newest state of which every shard has a copy, or none; `holders[number]`: workers, then snapshot stores, that
    hold that shard."""

    reason: str
    state: StateId | None = None
    holders: tuple[tuple[str, ...], ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices over which the state is sharded."""
        return len(self.holders)

    def sources_for(self, worker: str) -> tuple[tuple[str, ...], ...]:
        """Return the sources of each shard, the best first: the worker itself, other workers, snapshot stores."""
        return tuple(tuple(sorted(held, key=lambda where: where != worker)) for held in self.holders)


def newest(held: Iterable[ShardCopy]) -> RecoverableState:
    """The newest state of which each number 0 .. num_devices - 1 has a copy somewhere. Copies of different states never
    mix; a state whose copies do not agree on `num_devices` is none."""
    by_state: dict[StateId, list[ShardCopy]] = {}
    for each in sorted(held, key=lambda each: each.is_store):
        by_state.setdefault(each.header.state, []).append(each)
    lacks: list[str] = []
    for state in sorted(by_state, reverse=True):
        copies = by_state[state]
        name = f"the state after step {state.version} (generation {state.generation})"
        lack = _lack(copies)
        if lack is not None:
            lacks.append(f"{name} {lack}")
            continue
        count = copies[0].header.num_devices
        of_number = [[each for each in copies if each.header.number == number] for number in range(count)]
        only_stored = sum(found[0].is_store for found in of_number)
        newer = f"; {_some(lacks)}" if lacks else ""
        return RecoverableState(
            reason=f"{name} has all {count} shards in memory, {only_stored} of them only at snapshot stores{newer}",
            state=state,
            holders=tuple(tuple(dict.fromkeys(each.where for each in found)) for found in of_number),
        )
    if not lacks:
        return RecoverableState(reason="no state in memory: 0 copies are alive")
    return RecoverableState(reason=f"no state in memory is complete: {_some(lacks)}")


def _lack(copies: Sequence[ShardCopy]) -> str | None:
    """Return the problem of a state, None if there is none."""
    counts = sorted({each.header.num_devices for each in copies})
    if len(counts) > 1:
        return f"has copies for {' and '.join(map(str, counts))} devices"
    missing = sorted(set(range(counts[0])) - {each.header.number for each in copies})
    if not missing:
        return None
    return f"lacks shard{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {counts[0]}"


def _some(lacks: Sequence[str]) -> str:
    more = f", and {len(lacks) - NAMED} older ones are incomplete too" if len(lacks) > NAMED else ""
    return "; ".join(lacks[:NAMED]) + more
