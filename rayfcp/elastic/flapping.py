"""Devices that come and go: a place that lost several lately has to stay calm before the run grows by it."""

from rayfcp.elastic.facts import Facts


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
