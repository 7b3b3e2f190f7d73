"""Schedules of faults, drawn from a seed, so that a run with faults can be repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A fault, in words."""

    KILL = "kill"
    STOP = "stop"
    TWO_KILLS = "two kills"
    KILL_IN_RECOVERY = "kill in recovery"
    NODE_REMOVAL = "node removal"
    DRAIN = "drain notice"
    NODE_JOINS = "node joins"
    DELAY = "delayed network"
    DROP = "dropped network"
    FULL_DISK = "full disk"
    TORN_FILE = "torn file"
    PLANNER_KILL = "planner kill"
    STORE_KILL = "copy store kill"
    CONTROLLER_KILL = "controller kill"


TAKE_A_NODE = (Kind.NODE_REMOVAL, Kind.DRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A fault while `step` runs, `moment` of a usual step after its start. `target` draws the victim: it counts modulo
    how many there are."""

    kind: Kind
    step: int
    moment: float
    target: int


def draw(kinds: Sequence[Kind], *, seed: int, count: int, first_step: int, last_step: int) -> tuple[Planned, ...]:
    """`count` faults in steps `[first_step, last_step]`, in order, spread evenly but for chance; each kind comes at
    least once, and at no time have more than one more nodes been taken than have joined.

    Raises:
        ValueError: too few faults for the kinds, too few steps for the faults, or nodes are taken and none joins.
    """
    if count < len(kinds) + 1:
        raise ValueError(f"count is {count}, must be over {len(kinds)}, one of each kind and a node more; raise it")
    if last_step - first_step + 1 < count:
        raise ValueError(f"steps are {first_step} to {last_step}, must be at least {count}; lower count")
    if any(kind in TAKE_A_NODE for kind in kinds) and Kind.NODE_JOINS not in kinds:
        raise ValueError("kinds take nodes, must have 'node joins' too; add it")
    rng = random.Random(seed)
    drawn = list(kinds)
    while len(drawn) < count:
        kind = rng.choice(kinds)
        drawn.append(Kind.NODE_JOINS if kind in TAKE_A_NODE and _lacking(drawn) >= 1 else kind)
    rng.shuffle(drawn)
    _order_nodes(drawn)
    width = (last_step - first_step + 1) / count
    return tuple(
        Planned(
            kind=kind,
            step=first_step + int(index * width) + rng.randrange(max(1, int(width / 2))),
            moment=rng.random(),
            target=rng.randrange(1 << 16),
        )
        for index, kind in enumerate(drawn)
    )


def _lacking(kinds: Sequence[Kind]) -> int:
    """Nodes taken and not given back."""
    return sum(kind in TAKE_A_NODE for kind in kinds) - kinds.count(Kind.NODE_JOINS)


def _order_nodes(kinds: list[Kind]) -> None:
    """Swap what would take a second node with the next join, if there is one."""
    for index, kind in enumerate(kinds):
        if kind in TAKE_A_NODE and _lacking(kinds[:index]) >= 1 and Kind.NODE_JOINS in kinds[index:]:
            join = kinds.index(Kind.NODE_JOINS, index)
            kinds[index], kinds[join] = kinds[join], kinds[index]
