"""With which devices a run goes on: a pure function of facts and time."""

from collections.abc import Sequence

from rayfcp.elastic.facts import Device, Facts
from rayfcp.elastic.failure import hopeless, what_failed
from rayfcp.elastic.flapping import unsteady
from rayfcp.elastic.seating import seated
from rayfcp.elastic.shapes import Shape, current_shape, fewest_devices, shape_of
from rayfcp.elastic.words import counted
from rayfcp.values import Decision, Move


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
