"""Which stages and ranks a number of devices makes.

Which device gets which number in a generation.

Devices that come and go: a place that lost several lately has to stay calm before the run grows by it.

With which devices a run goes on: a pure function of facts and time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayfcp.elastic.facts import Device, Facts, counted
from rayfcp.elastic.failure import hopeless, what_failed
from rayfcp.values import Decision, Move


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """Of two shapes the larger has more stages, or as many and more ranks."""

    num_stages: int
    num_ranks: int

    def __str__(self) -> str:
        ranks = counted(self.num_ranks, "rank")
        return f"{ranks} in {self.num_stages} stages" if self.num_stages > 1 else ranks


def shape_of(num_devices: int, *, facts: Facts, most: int | None = None) -> Shape | None:
    """The configured number of stages if the devices, at most `most` of them, make a rank with it, the next lower
    one that fits if not; as many ranks as they make. None if they are too few."""
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
    """Of the active generation."""
    per_rank = facts.num_stages * facts.limits.tensor_parallel
    return Shape(num_stages=facts.num_stages, num_ranks=len(facts.active) // per_rank)


def fewest_devices(facts: Facts) -> int:
    """To go on with."""
    limits = facts.limits
    ranks = min(max(fit.min_ranks, 1) * fit.num_stages for fit in facts.fits if fit.num_stages <= limits.num_stages)
    return max(limits.min_devices, ranks * limits.tensor_parallel)


Unit = tuple[str, ...]
"""The tensor-parallel devices of a rank's stage, in order."""


def seated(
    devices: Sequence[Device], *, shape: Shape, tensor_parallel: int, active: Sequence[str], before: Shape
) -> tuple[str, ...]:
    """Ids of `shape`'s devices in the order of their numbers; `active` were those of the shape `before`.

    Devices that hold parts of a stage stay in it, in their order, at their places where there are as many ranks as
    before or more; devices of one node are neighbours within a stage, and make up a unit where there are enough. A
    stage that lacks units gets those of its own nodes first, active ones before others, others in the order given.
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
    """Devices that are not taken as units, of one node first, then of what is left over on all nodes."""
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
    """The stage's units and as many of the spare ones, which are used up, as it lacks: of its own nodes first."""
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


def unsteady(facts: Facts, *, now_s: float) -> dict[str, float]:
    """Ids of devices standing by that should not be taken yet, and the seconds each has to stay calm for still."""
    limits = facts.limits
    times: dict[str, list[float]] = {}
    for loss in facts.losses:
        if now_s - loss.at_s < limits.flap_window_s:
            times.setdefault(loss.place, []).append(loss.at_s)
    found = {}
    for device in facts.devices:
        lost = times.get(device.place or device.node_id, [])
        if device.id in facts.active or len(lost) < limits.flap_losses:
            continue
        calm_s = limits.flap_calm_s * 2.0 ** (len(lost) - limits.flap_losses)
        left_s = max(device.ready_s, *lost) + calm_s - now_s
        if left_s > 0:
            found[device.id] = left_s
    return found


def decide(facts: Facts, *, now_s: float) -> Decision:
    """What to do about the devices, between two steps or after a failure.

    Between steps: go on; leave nodes that are announced to go, for devices standing by or with fewer; grow by whole
    ranks. After a failure, a loss or while waiting: retry with the same devices, replace the lost ones, go on with
    fewer or more; wait for devices where they are too few, up to `wait_s`; give up. Devices of nodes that are about to
    go are never taken.
    """
    why = hopeless(facts)
    if why is not None:
        return Decision(what=Move.GIVE_UP, reason=why)
    if not facts.active or facts.failure is not None or facts.lost or facts.waiting_since_s is not None:
        return _reform(facts, now_s=now_s)
    gone = {leaving.node_id for leaving in facts.leaving}
    on_leave = [device for device in facts.devices if device.node_id in gone and device.id in facts.active]
    if on_leave:
        return _leave(facts, on_leave, now_s=now_s)
    return _grow(facts, now_s=now_s)


def _reform(facts: Facts, *, now_s: float) -> Decision:
    """A new generation of what is there, or none yet."""
    most = len(facts.active) if facts.active and not facts.limits.grow else None
    staying = _staying(facts)
    said = _what_happened(facts)
    decision = _formed(facts, said=said, now_s=now_s, most=most)
    if decision is not None:
        return decision
    limits = facts.limits
    since_s = now_s if facts.waiting_since_s is None else facts.waiting_since_s
    lack = f"{said}; {counted(len(staying), 'device')} can be used, {fewest_devices(facts)} needed to go on"
    if now_s - since_s >= limits.wait_s:
        return Decision(
            what=Move.GIVE_UP,
            reason=f"{lack}, and none came in elastic.wait_s ({limits.wait_s:g} s); add devices and start again",
        )
    return Decision(
        what=Move.WAIT,
        reason=f"{lack}; waited {now_s - since_s:.0f} s for more, {limits.wait_s:g} s at most",
    )


def _leave(facts: Facts, on_leave: Sequence[Device], *, now_s: float) -> Decision:
    """Off the nodes that are about to go, no larger than before: growth comes after it."""
    nodes = {device.node_id for device in on_leave}
    left_s = min(leaving.deadline_s for leaving in facts.leaving if leaving.node_id in nodes) - now_s
    said = f"{len(on_leave)} of {len(facts.active)} devices are on nodes that leave, the first in {left_s:.0f} s"
    decision = _formed(facts, said=said, now_s=now_s, most=len(facts.active))
    if decision is not None:
        return decision
    return Decision(
        what=Move.GO_ON,
        reason=f"{said}, {counted(len(_staying(facts)), 'other')} can be used and {fewest_devices(facts)} needed; "
        "going on while they last",
    )


def _grow(facts: Facts, *, now_s: float) -> Decision:
    """Larger by whole ranks or back to more stages, once all that are starting are there; or as before."""
    before, limits = current_shape(facts), facts.limits
    wary = unsteady(facts, now_s=now_s)
    steady = [device for device in _staying(facts) if device.id not in wary]
    shape = shape_of(len(steady), facts=facts)
    standing_by = len(_staying(facts)) - len(facts.active)
    said = f"{counted(len(facts.active), 'device')} in use as {before}, {standing_by} standing by"
    if shape is None or shape <= before:
        wait = f", {len(wary)} of them for {max(wary.values()):.0f} s more as places lose devices often" if wary else ""
        return Decision(what=Move.GO_ON, reason=f"{said}{wait}, {limits.max_devices} in use at most")
    if not limits.grow:
        return Decision(what=Move.GO_ON, reason=f"{said}, enough for {shape}, but elastic.grow is off")
    coming = sum(now_s - each.since_s < limits.gather_s for each in facts.starting)
    larger = shape_of(len(steady) + coming, facts=facts)
    if larger is not None and larger > shape:
        return Decision(
            what=Move.GO_ON, reason=f"{said}, enough for {shape}; {coming} more starting may make it {larger}"
        )
    return _formation(facts, steady, shape=shape, said=said)


def _formed(facts: Facts, *, said: str, now_s: float, most: int | None) -> Decision | None:
    """A generation of at most `most` devices; one with devices of places that lose them often only where the others
    are too few. None if all are too few."""
    wary = unsteady(facts, now_s=now_s)
    staying = _staying(facts)
    for devices in ([device for device in staying if device.id not in wary], staying):
        shape = shape_of(len(devices), facts=facts, most=most)
        if shape is not None:
            return _formation(facts, devices, shape=shape, said=said)
    return None


def _formation(facts: Facts, devices: Sequence[Device], *, shape: Shape, said: str) -> Decision:
    ids = seated(
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
        reason=f"{said}; on with {counted(len(ids), 'device')} as {shape}{others}",
        devices=ids,
        num_stages=shape.num_stages,
    )


def _staying(facts: Facts) -> list[Device]:
    """Devices that may be taken: neither given up nor on a node that is about to go."""
    gone = {leaving.node_id for leaving in facts.leaving}
    return [device for device in facts.devices if device.node_id not in gone and device.id not in _given_up(facts)]


def _given_up(facts: Facts) -> tuple[str, ...]:
    return facts.failure.lost if facts.failure is not None else ()


def _what_happened(facts: Facts) -> str:
    if not facts.active:
        return f"{counted(len(facts.devices), 'device')} ready"
    lost = f"{len(facts.lost)} of {len(facts.active)} devices lost"
    return f"{what_failed(facts.failure)}, {lost}" if facts.failure is not None else lost
