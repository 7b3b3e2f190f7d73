"""State that survives losses: which copies are complete, steps that they permit, and the newest complete state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfcp.values import KeptStates, ShardHeader, StateId


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedStates:
    """States of a generation with complete copies; immutable, each method returns the next value.

    The generation starts from version `first`. `here`: the newest state that every device has copied to its node's
    memory. `away`: the newest one of which each node's copies are on another node too; that of an earlier generation,
    whose copies live on, until this one has one. `under_way`: the state whose copies are being sent. `leased`: the one
    whose copies are being written to a checkpoint, of any generation. `copied`: for each device the reported states,
    those older than `here` left out.
    """

    generation: int
    first: int
    here: StateId | None = None
    away: StateId | None = None
    under_way: StateId | None = None
    leased: StateId | None = None
    copied: Mapping[str, frozenset[StateId]] = field(default_factory=dict)

    @classmethod
    def start(cls, devices: Iterable[str], *, generation: int, first: int) -> "CopiedStates":
        """Return a generation of which nothing is copied yet."""
        return cls(generation=generation, first=first, copied=dict.fromkeys(devices, frozenset()))

    def again(self, devices: Iterable[str], *, generation: int, first: int) -> "CopiedStates":
        """Return a new generation, from version `first`. States of later steps were lost with them."""
        begun = CopiedStates.start(devices, generation=generation, first=first)
        left = [each for each in (self.here, self.away) if each is not None and each.version <= first]
        return replace(
            begun, here=max(left, default=None), away=self.away if self.away in left else None, leased=self.leased
        )

    def after(self, reports: Mapping[str, StateId | None]) -> "CopiedStates":
        """Add states that devices reported as copied. A state that one device skipped is not complete, however new its
        others are; states of other generations and devices are ignored."""
        copied = {
            device: states | {state}
            if (state := reports.get(device)) is not None and state.generation == self.generation
            else states
            for device, states in self.copied.items()
        }
        complete = frozenset.intersection(*copied.values()) if copied else frozenset()
        here = max((state for state in (self.here, *complete) if state is not None), default=None)
        told = replace(self, here=here, copied=copied)
        newer = {
            device: frozenset(each for each in states if told._since is None or each >= told._since)
            for device, states in copied.items()
        }
        return replace(told, copied=newer)

    def sending(self, state: StateId | None) -> "CopiedStates":
        """Return the value while this state's copies are sent; None: sending failed."""
        return replace(self, under_way=state)

    def sent(self) -> "CopiedStates":
        """Return the value after the copies under way have arrived."""
        assert self.under_way is not None
        newest = max(each for each in (self.away, self.under_way) if each is not None)
        return replace(self, away=newest, under_way=None)

    def without_here(self) -> "CopiedStates":
        """Return the value after somebody removed the newest copies."""
        return replace(self, here=None, under_way=None, copied=dict.fromkeys(self.copied, frozenset()))

    def without_away(self) -> "CopiedStates":
        """Return the value after a node with copies of others is gone."""
        return replace(self, away=None, under_way=None)

    @property
    def kept(self) -> KeptStates:
        """States whose copies are needed."""
        states = (self.here, self.away, self.under_way, self.leased)
        return KeptStates(since=self._since, states=frozenset(each for each in states if each is not None))

    @property
    def _since(self) -> StateId | None:
        """The oldest state that may become complete, or is. Of states that a device has skipped, for want of memory,
        the others keep none but the newest."""
        newest = max((each.version for states in self.copied.values() for each in states), default=None)
        if newest is None:
            return self.here
        recent = StateId(version=newest - 1, generation=self.generation)
        return recent if self.here is None else max(self.here, recent)

    def to_send(self, *, every: int) -> StateId | None:
        """Return the state whose copies should be sent to other nodes now, if any."""
        here, away = self.here, self.away
        if self.under_way is not None or here is None or here.generation != self.generation:
            return None
        is_due = away is None or away.generation != self.generation or here.version - away.version >= every
        return here if is_due else None

    def may_dispatch(self, step: int, *, every: int) -> bool:
        """Return true if at most `every` finished steps have to run again if a node is lost during `step`."""
        oldest = step - 1 - every
        return oldest < self.first or (self.away is not None and self.away.version >= oldest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopy:
    """A copy of a shard in the memory of node `node_id`, and the peer there that parts of it are read from (see
    `rayfcp.execute.state.transfer`)."""

    header: ShardHeader
    peer: Any
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverableState:
    """The newest state with a copy of every shard, and one copy of each; without one `state` is None and `reason` says
    what is missing. `generation`: the newest one that left any copy, -1 if none did."""

    reason: str
    state: StateId | None = None
    copies: tuple[ShardCopy, ...] = ()
    generation: int = -1


def newest(
    held: Sequence[ShardCopy], *, up_to: int, belongs: Callable[[StateId], bool] = lambda _: True
) -> RecoverableState:
    """The newest state of at most `up_to` steps that `belongs` to the run and of which each number 0 ..
    num_devices - 1 has a copy somewhere. Copies of different states never mix; a state whose copies do not agree on
    `num_devices` is none."""
    generation = max((each.header.state.generation for each in held), default=-1)
    by_state: dict[StateId, list[ShardCopy]] = {}
    for each in held:
        if each.header.state.version <= up_to and belongs(each.header.state):
            by_state.setdefault(each.header.state, []).append(each)
    lacks: list[str] = []
    for state, copies in sorted(by_state.items(), reverse=True):
        name = f"the state after step {state.version} (generation {state.generation})"
        lack = _lack(copies)
        if lack is not None:
            lacks.append(f"{name} {lack}")
            continue
        first = {each.header.number: each for each in reversed(copies)}
        count, nodes = len(first), len({each.node_id for each in first.values()})
        return RecoverableState(
            reason=f"{name} has all {count} shards in the memory of {nodes} node{'s' if nodes > 1 else ''}"
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
