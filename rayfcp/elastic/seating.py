"""Which device gets which number in a generation."""

from collections.abc import Iterable, Sequence

from rayfcp.elastic.facts import Device
from rayfcp.elastic.shapes import Shape

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
