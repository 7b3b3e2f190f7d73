"""World size: the devices that a run continues with, and their numbers, as a pure function of facts and time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayfcp.elastic.facts import Cause, Device, Facts, Failure
from rayfcp.values import Decision, Move
from rayfcp.values.counted import counted


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """Stages and ranks; ordered by stages, then ranks."""

    num_stages: int
    num_ranks: int

    def __str__(self) -> str:
        ranks = counted(self.num_ranks, "rank")
        return f"{ranks} in {self.num_stages} stages" if self.num_stages > 1 else ranks


def shape_of(num_devices: int, *, facts: Facts, most: int | None = None) -> Shape | None:
    """Return the shape of at most `most` of the devices: the configured number of stages, or the next lower one that
    fits, and all ranks that result. None if the devices are too few."""
    limits = facts.limits
    if num_devices < limits.min_devices:
        return None
    usable = min(num_devices, limits.max_devices, num_devices if most is None else most)
    for fit in sorted(facts.fits, key=lambda fit: -fit.num_stages):
        if fit.num_stages <= limits.num_stages:
            num_ranks = usable // (fit.num_stages * limits.tensor_parallel)
            if num_ranks >= max(fit.min_ranks, 1):
                return Shape(num_stages=fit.num_stages, num_ranks=num_ranks)
    return None


def current_shape(facts: Facts) -> Shape:
    """Shape of the active generation."""
    per_rank = facts.num_stages * facts.limits.tensor_parallel
    return Shape(num_stages=facts.num_stages, num_ranks=len(facts.active) // per_rank)


def fewest_devices(facts: Facts) -> int:
    """Fewest devices that the run can continue with."""
    limits = facts.limits
    ranks = min(max(fit.min_ranks, 1) * fit.num_stages for fit in facts.fits if fit.num_stages <= limits.num_stages)
    return max(limits.min_devices, ranks * limits.tensor_parallel)


Unit = tuple[str, ...]
"""Tensor-parallel devices of a stage of a rank, in order."""


def number_devices(
    devices: Sequence[Device], *, shape: Shape, tensor_parallel: int, active: Sequence[str], before: Shape
) -> tuple[str, ...]:
    """Return the ids of `shape`'s devices by number; `active` were those of the shape `before`.

    Devices that hold state of a stage stay in it, in order, at their positions if there are at least as many ranks as
    before. Devices of one node are neighbours within a stage, and form a unit where there are enough. A stage that
    lacks units takes those of its own nodes first, active ones before others, others in the given order.
    """
    node_of = {device.id: device.node_id for device in devices}
    if shape == before and all(each in node_of for each in active):
        return tuple(active)
    units = [tuple(active[start : start + tensor_parallel]) for start in range(0, len(active), tensor_parallel)]
    whole = {index: unit for index, unit in enumerate(units) if all(each in node_of for each in unit)}
    stages: list[list[Unit | None]] = [[] for _ in range(shape.num_stages)]
    spare: list[Unit] = []
    in_place = shape.num_stages == before.num_stages and shape.num_ranks >= before.num_ranks
    for index, unit in enumerate(units):
        stage = stages[index // before.num_ranks * shape.num_stages // before.num_stages]
        if index not in whole:
            stage.extend([None] * in_place)
        elif len(stage) < shape.num_ranks:
            stage.append(unit)
        else:
            spare.append(unit)
    spare += _grouped(
        devices, active=active, taken={each for unit in whole.values() for each in unit}, size=tensor_parallel
    )
    return tuple(
        each
        for stage in stages
        for unit in _filled(stage, spare, num_ranks=shape.num_ranks, node_of=node_of)
        for each in unit
    )


def _grouped(devices: Sequence[Device], *, active: Sequence[str], taken: Iterable[str], size: int) -> list[Unit]:
    """Group free devices into units of one node, and what remains into units across nodes."""
    place = {each: number for number, each in enumerate(active)}
    free = sorted(
        (device for device in devices if device.id not in set(taken)),
        key=lambda device: place.get(device.id, len(place)),
    )
    on_node: dict[str, list[str]] = {}
    for device in free:
        on_node.setdefault(device.node_id, []).append(device.id)
    units, rest = [], []
    for ids in on_node.values():
        end = len(ids) - len(ids) % size
        units += [tuple(ids[start : start + size]) for start in range(0, end, size)]
        rest += ids[end:]
    return units + [tuple(rest[start : start + size]) for start in range(0, len(rest) - size + 1, size)]


def _filled(stage: Sequence[Unit | None], spare: list[Unit], *, num_ranks: int, node_of: dict[str, str]) -> list[Unit]:
    """Fill missing units of a stage from `spare` (which is consumed), those on its own nodes first."""
    nodes = {node_of[unit[0]] for unit in stage if unit}
    units: list[Unit] = []
    for held in [*stage, *([None] * (num_ranks - len(stage)))]:
        unit = held
        if unit is None:
            unit = next((each for each in spare if node_of[each[0]] in nodes), spare[0])
            spare.remove(unit)
            nodes.add(node_of[unit[0]])
        units.append(unit)
    order = list(dict.fromkeys(node_of[unit[0]] for unit in units))
    return sorted(units, key=lambda unit: order.index(node_of[unit[0]]))


def unstable_devices(facts: Facts, *, now_s: float) -> dict[str, float]:
    """Return devices standing by at places that lose devices often, with the seconds until they may be used."""
    limits = facts.limits
    recent = [loss for loss in facts.losses if now_s - loss.at_s < limits.flap_window_s]
    left_s = {}
    for device in facts.devices:
        lost = [loss.at_s for loss in recent if loss.place == (device.place or device.node_id)]
        if device.id not in facts.active and len(lost) >= limits.flap_losses:
            calm_s = limits.flap_calm_s * 2.0 ** (len(lost) - limits.flap_losses)
            left_s[device.id] = max(lost) + calm_s - now_s
    return {id: seconds for id, seconds in left_s.items() if seconds > 0}


def reason_to_end(facts: Facts) -> str | None:
    """Return why the run should end rather than recover from the failure in `facts`; None if it should recover or
    nothing failed. An error of the program repeats; so does one that followed each of the last recoveries without a
    finished step."""
    failure, limits, setbacks = facts.failure, facts.limits, facts.setbacks
    if failure is None:
        return None
    if failure.cause is Cause.PROGRAM:
        return f"a program error would repeat in the same step: {failure.message}"
    if setbacks.recoveries >= limits.max_recoveries:
        return (
            f"{setbacks.recoveries} recoveries did not finish a step, elastic.max_recoveries is "
            f"{limits.max_recoveries}, and now {what_failed(failure)}; check the workers' logs, or raise it"
        )
    if failure.cause is Cause.COLLECTIVE and not failure.lost and setbacks.collectives >= limits.collective_retries:
        return (
            f"communication among {len(facts.active)} healthy devices failed {setbacks.collectives + 1} times in a "
            f"row ({failure.message}); check the network between their nodes, interfaces and firewall, and "
            "elastic.collective_timeout_s"
        )
    return None


def what_failed(failure: Failure) -> str:
    """Describe a failure."""
    devices = counted(len(failure.lost), "device")
    event = {
        Cause.DIED: f"{devices} died",
        Cause.NODE: f"{devices} lost with a node",
        Cause.HUNG: f"{devices} hung",
        Cause.COLLECTIVE: "communication among devices failed",
        Cause.MEMORY: "a device ran out of memory",
        Cause.PROGRAM: "the program failed",
    }[failure.cause]
    return f"{event} ({failure.message})" if failure.message else event


def decide(facts: Facts, *, now_s: float) -> Decision:
    """Decide about the devices, between two steps or after a failure.

    Between steps: continue; leave nodes that will be removed, replacing their devices or shrinking; grow by whole
    ranks. After a failure, a loss or while waiting: retry with the same devices, replace lost ones, shrink or grow;
    wait up to `wait_s` if they are too few; give up. Devices of nodes that will be removed are never used.
    """
    why = reason_to_end(facts)
    if why is not None:
        return Decision(what=Move.GIVE_UP, reason=why)
    if not facts.active or facts.failure is not None or facts.lost or facts.waiting_since_s is not None:
        return _reform(facts, now_s=now_s)
    on_leave = [device for device in facts.devices if device.node_id in facts.leaving and device.id in facts.active]
    if on_leave:
        return _leave(facts, on_leave, now_s=now_s)
    return _grow(facts, now_s=now_s)


def _reform(facts: Facts, *, now_s: float) -> Decision:
    """Form a new generation of the available devices, or wait for more."""
    most = len(facts.active) if facts.active and not facts.limits.grow else None
    if facts.active:
        lost = f"{len(facts.lost)} of {len(facts.active)} devices lost"
        situation = f"{what_failed(facts.failure)}, {lost}" if facts.failure is not None else lost
    else:
        situation = f"{counted(len(facts.devices), 'device')} ready"
    coming = sum(now_s - since_s < facts.limits.replace_s for since_s in facts.replacing_since_s)
    shape, larger = (shape_of(len(_staying(facts)) + more, facts=facts, most=most) for more in (0, coming))
    if larger is not None and (shape is None or larger > shape):
        processes = f"{coming} fresh {'process' if coming == 1 else 'processes'}"
        return Decision(what=Move.WAIT, reason=f"{situation}; {processes} starting on devices of the run")
    decision = _formed(facts, situation=situation, now_s=now_s, most=most)
    if decision is not None:
        return decision
    limits = facts.limits
    since_s = now_s if facts.waiting_since_s is None else facts.waiting_since_s
    usable = counted(len(_staying(facts)), "device")
    lack = f"{situation}; {usable} can be used, {fewest_devices(facts)} needed to continue"
    if now_s - since_s >= limits.wait_s:
        return Decision(
            what=Move.GIVE_UP,
            reason=f"{lack}, and none came in elastic.wait_s ({limits.wait_s:g} s); add devices and restart",
        )
    return Decision(
        what=Move.WAIT,
        reason=f"{lack}; waited {now_s - since_s:.0f} s for more, {limits.wait_s:g} s at most",
    )


def _leave(facts: Facts, on_leave: Sequence[Device], *, now_s: float) -> Decision:
    """Move off nodes that will be removed, without growing at the same time."""
    left_s = min(facts.leaving[device.node_id] for device in on_leave) - now_s
    situation = (
        f"{len(on_leave)} of {len(facts.active)} devices are on nodes to be removed, the first in {left_s:.0f} s"
    )
    decision = _formed(facts, situation=situation, now_s=now_s, most=len(facts.active))
    if decision is not None:
        return decision
    return Decision(
        what=Move.GO_ON,
        reason=f"{situation}, {counted(len(_staying(facts)), 'other')} can be used and {fewest_devices(facts)} needed; "
        "continuing until they are removed",
    )


def _grow(facts: Facts, *, now_s: float) -> Decision:
    """Grow by whole ranks or back to more stages, once starting devices are ready; else continue."""
    before, limits = current_shape(facts), facts.limits
    unstable = unstable_devices(facts, now_s=now_s)
    steady = [device for device in _staying(facts) if device.id not in unstable]
    shape = shape_of(len(steady), facts=facts)
    standing_by = len(_staying(facts)) - len(facts.active)
    situation = f"{counted(len(facts.active), 'device')} in use as {before}, {standing_by} standing by"
    if shape is None or shape <= before:
        wait = (
            f", {len(unstable)} of them for {max(unstable.values()):.0f} s more since their places lose devices often"
            if unstable
            else ""
        )
        return Decision(what=Move.GO_ON, reason=f"{situation}{wait}, {limits.max_devices} in use at most")
    if not limits.grow:
        return Decision(what=Move.GO_ON, reason=f"{situation}, enough for {shape}, but elastic.grow is off")
    coming = sum(now_s - since_s < limits.gather_s for since_s in facts.starting_since_s)
    larger = shape_of(len(steady) + coming, facts=facts)
    if larger is not None and larger > shape:
        return Decision(
            what=Move.GO_ON, reason=f"{situation}, enough for {shape}; {coming} more starting may make it {larger}"
        )
    return _formation(facts, steady, shape=shape, situation=situation)


def _formed(facts: Facts, *, situation: str, now_s: float, most: int | None) -> Decision | None:
    """Form a generation of at most `most` devices, using unstable places only if the others are too few; None if all
    are too few."""
    unstable = unstable_devices(facts, now_s=now_s)
    staying = _staying(facts)
    for devices in ([device for device in staying if device.id not in unstable], staying):
        shape = shape_of(len(devices), facts=facts, most=most)
        if shape is not None:
            return _formation(facts, devices, shape=shape, situation=situation)
    return None


def _formation(facts: Facts, devices: Sequence[Device], *, shape: Shape, situation: str) -> Decision:
    ids = number_devices(
        devices,
        shape=shape,
        tensor_parallel=facts.limits.tensor_parallel,
        active=facts.active,
        before=current_shape(facts),
    )
    rest = len(devices) - len(ids)
    others = f", {rest} standing by" if rest else ""
    return Decision(
        what=Move.FORM,
        reason=f"{situation}; continuing with {counted(len(ids), 'device')} as {shape}{others}",
        devices=ids,
        num_stages=shape.num_stages,
    )


def _staying(facts: Facts) -> list[Device]:
    """Devices that may be used: neither abandoned nor on a node that will be removed."""
    abandoned = facts.failure.lost if facts.failure is not None else ()
    return [device for device in facts.devices if device.node_id not in facts.leaving and device.id not in abandoned]
