"""Which state a run can go on from, and where its parts are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayfcp.values import ShardHeader, StateId

NAMED = 3
"""States that a reason speaks of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A complete copy of a shard in the memory of worker or keeper `where`."""

    header: ShardHeader
    where: str
    is_keeper: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoverable:
    """The newest state of which every shard has a copy, or none; `holders[number]`: who holds that shard, workers
    before keepers."""

    reason: str
    state: StateId | None = None
    holders: tuple[tuple[str, ...], ...] = ()

    @property
    def num_devices(self) -> int:
        """Over which the state is sharded."""
        return len(self.holders)

    def sources_for(self, asker: str) -> tuple[tuple[str, ...], ...]:
        """For each number who to ask for that shard, the best first: the asker itself, other workers, keepers."""
        return tuple(tuple(sorted(held, key=lambda where: where != asker)) for held in self.holders)


def newest(held: Iterable[Held]) -> Recoverable:
    """The newest state of which each number 0 .. num_devices - 1 has a copy somewhere. Copies of different states never
    mix; a state whose copies do not agree on `num_devices` is none."""
    by_state: dict[StateId, list[Held]] = {}
    for each in held:
        by_state.setdefault(each.header.state, []).append(each)
    lacks: list[str] = []
    for state in sorted(by_state, reverse=True):
        copies = by_state[state]
        lack = _lack(copies)
        if lack is None:
            return Recoverable(
                reason=_found(state, copies, lacks=lacks),
                state=state,
                holders=tuple(_holders(copies, number) for number in range(copies[0].header.num_devices)),
            )
        lacks.append(f"{_name(state)} {lack}")
    if not lacks:
        return Recoverable(reason="no state in memory: 0 copies are alive")
    return Recoverable(reason=f"no state in memory is complete: {_some(lacks)}")


def _lack(copies: Sequence[Held]) -> str | None:
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


def _holders(copies: Sequence[Held], number: int) -> tuple[str, ...]:
    holders = [each for each in copies if each.header.number == number]
    return tuple(dict.fromkeys(each.where for each in sorted(holders, key=lambda each: each.is_keeper)))


def _found(state: StateId, copies: Sequence[Held], *, lacks: Sequence[str]) -> str:
    count = copies[0].header.num_devices
    kept = sum(all(each.is_keeper for each in copies if each.header.number == number) for number in range(count))
    newer = f"; {_some(lacks)}" if lacks else ""
    return f"{_name(state)} has all {count} shards in memory, {kept} of them only at keepers{newer}"


def _some(lacks: Sequence[str]) -> str:
    more = f", and {len(lacks) - NAMED} older ones are incomplete too" if len(lacks) > NAMED else ""
    return "; ".join(lacks[:NAMED]) + more


def _name(state: StateId) -> str:
    return f"the state after step {state.version} (generation {state.generation})"
