"""Which state is safe from losses, and which step may run before the next one is.

Which state a run can go on from, and where its parts are.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rayfcp.values import ShardHeader, StateId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshots:
    """What each device of a generation said that its snapshot store holds: a value, `after` gives the next one.

    The generation starts from version `first`, of which it takes a snapshot, and of every version that is a
    multiple of `every` (0: of none at all). `safe`: the newest state kept for all devices of its generation;
    that of an earlier generation, whose copies live on, until this one has one. `seen`: for each device the states
    that it reported, those older than `safe` left out.
    """

    generation: int
    first: int
    every: int
    safe: StateId | None = None
    seen: tuple[tuple[str, frozenset[StateId]], ...] = ()

    @classmethod
    def start(cls, devices: Iterable[str], *, generation: int, first: int, every: int) -> "StoredSnapshots":
        """Nothing is kept yet."""
        return cls(generation=generation, first=first, every=every, seen=tuple((each, frozenset()) for each in devices))

    def again(self, devices: Iterable[str], *, generation: int, first: int) -> "StoredSnapshots":
        """A new generation, from version `first`. What was safe is no longer if that is of later steps: it was lost."""
        begun = StoredSnapshots.start(devices, generation=generation, first=first, every=self.every)
        return replace(begun, safe=self.safe if self.safe is not None and self.safe.version <= first else None)

    def after(self, reports: Mapping[str, StateId | None]) -> "StoredSnapshots":
        """Devices said that a state of theirs is kept. A state that one device skipped is not safe, whatever newer one
        it has; states of other generations and of devices that are no part of this one change nothing."""
        seen = {device: states | _own(reports.get(device), self.generation) for device, states in self.seen}
        whole = frozenset.intersection(*seen.values()) if seen else frozenset()
        best = max(whole, default=None)
        safe = best if best is not None and (self.safe is None or best > self.safe) else self.safe
        return replace(
            self,
            safe=safe,
            seen=tuple(
                (device, frozenset(each for each in states if safe is None or each >= safe))
                for device, states in seen.items()
            ),
        )

    def due(self, version: int) -> bool:
        """Whether a snapshot is taken of this version."""
        return self.every > 0 and version >= self.first and (version == self.first or version % self.every == 0)

    def needed(self, step: int) -> StateId | None:
        """What must be safe before `step` is dispatched: the newest snapshot of versions up to `step` - 2. So a loss
        makes the run execute at most `every` finished steps again. None: nothing."""
        if self.every == 0 or step - 2 < self.first:
            return None
        version = max(self.first, (step - 2) // self.every * self.every)
        return StateId(version=version, generation=self.generation)

    def may_dispatch(self, step: int) -> bool:
        """Whether what `step` needs is safe."""
        needed = self.needed(step)
        if needed is None:
            return True
        return self.safe is not None and self.safe >= needed

    def without_copies(self, devices: Collection[str]) -> "StoredSnapshots":
        """The snapshot store of these devices is gone: what it held has to be kept anew before the next steps."""
        seen = tuple((device, frozenset() if device in devices else states) for device, states in self.seen)
        mine = self.safe is not None and self.safe.generation == self.generation
        affected = any(device in devices for device, _ in self.seen)
        return replace(self, seen=seen, safe=None if mine and affected else self.safe)


def _own(state: StateId | None, generation: int) -> frozenset[StateId]:
    return frozenset() if state is None or state.generation != generation else frozenset((state,))


NAMED = 3
"""States that a reason speaks of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopy:
    """A complete copy of a shard in the memory of worker or snapshot store `where`."""

    header: ShardHeader
    where: str
    is_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverableState:
    """The newest state of which every shard has a copy, or none; `holders[number]`: who holds that shard, workers
    before snapshot stores."""

    reason: str
    state: StateId | None = None
    holders: tuple[tuple[str, ...], ...] = ()

    @property
    def num_devices(self) -> int:
        """Over which the state is sharded."""
        return len(self.holders)

    def sources_for(self, asker: str) -> tuple[tuple[str, ...], ...]:
        """Return the sources of each shard, the best first: the asker itself, other workers, snapshot stores."""
        return tuple(tuple(sorted(held, key=lambda where: where != asker)) for held in self.holders)


def newest(held: Iterable[ShardCopy]) -> RecoverableState:
    """The newest state of which each number 0 .. num_devices - 1 has a copy somewhere. Copies of different states never
    mix; a state whose copies do not agree on `num_devices` is none."""
    by_state: dict[StateId, list[ShardCopy]] = {}
    for each in held:
        by_state.setdefault(each.header.state, []).append(each)
    lacks: list[str] = []
    for state in sorted(by_state, reverse=True):
        copies = by_state[state]
        lack = _lack(copies)
        if lack is None:
            return RecoverableState(
                reason=_found(state, copies, lacks=lacks),
                state=state,
                holders=tuple(_holders(copies, number) for number in range(copies[0].header.num_devices)),
            )
        lacks.append(f"{_name(state)} {lack}")
    if not lacks:
        return RecoverableState(reason="no state in memory: 0 copies are alive")
    return RecoverableState(reason=f"no state in memory is complete: {_some(lacks)}")


def _lack(copies: Sequence[ShardCopy]) -> str | None:
    """What is wrong with a state, None if nothing."""
    counts = sorted({each.header.num_devices for each in copies})
    if len(counts) > 1:
        return f"has copies for {' and '.join(map(str, counts))} devices"
    numbers = {each.header.number for each in copies}
    missing = [number for number in range(counts[0]) if number not in numbers]
    if not missing:
        return None
    shards = ", ".join(map(str, missing))
    return f"lacks shard{'s' if len(missing) > 1 else ''} {shards} of {counts[0]}"


def _holders(copies: Sequence[ShardCopy], number: int) -> tuple[str, ...]:
    holders = [each for each in copies if each.header.number == number]
    return tuple(dict.fromkeys(each.where for each in sorted(holders, key=lambda each: each.is_store)))


def _found(state: StateId, copies: Sequence[ShardCopy], *, lacks: Sequence[str]) -> str:
    count = copies[0].header.num_devices
    kept = sum(all(each.is_store for each in copies if each.header.number == number) for number in range(count))
    newer = f"; {_some(lacks)}" if lacks else ""
    return f"{_name(state)} has all {count} shards in memory, {kept} of them only at snapshot stores{newer}"


def _some(lacks: Sequence[str]) -> str:
    more = f", and {len(lacks) - NAMED} older ones are incomplete too" if len(lacks) > NAMED else ""
    return "; ".join(lacks[:NAMED]) + more


def _name(state: StateId) -> str:
    return f"the state after step {state.version} (generation {state.generation})"
