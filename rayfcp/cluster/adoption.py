"""Workers and keepers of a run whose controller is gone, found again by their names."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.members import Member
from rayfcp.cluster.naming import DEVICE, KEEPER, NAMESPACE, WORKER, actor_name, ids_of
from rayfcp.cluster.placement import release

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """`members` are idle and in no world any more; `keepers` by node."""

    members: tuple[Member, ...] = ()
    keepers: Mapping[str, Any]


def find_living(run_key: str, *, timeout_s: float) -> Living:
    """Who is left of a run, each free from what it was in. Who does not answer within `timeout_s`, or did not open
    yet, is ended, and reservations of the run without a worker are given back."""
    workers, keepers = _handles(run_key, WORKER), _handles(run_key, KEEPER)
    end_s = time.monotonic() + timeout_s
    for worker in workers.values():
        worker.abort.remote()
    asked = {id: (worker.facts.remote(), worker.group.remote(), worker.idle.remote()) for id, worker in workers.items()}
    opened = {id: keeper.open.remote() for id, keeper in keepers.items()}
    members = [
        member for id, refs in asked.items() if (member := _member(id, workers[id], refs=refs, end_s=end_s)) is not None
    ]
    by_node = {}
    for id, ref in opened.items():
        node = _answer(ref, end_s=end_s)
        if node is None or node in by_node:
            _end(keepers[id], what=f"keeper {id}")
        else:
            by_node[node] = keepers[id]
    _give_back(run_key, held={member.group.id.hex() for member in members})
    return Living(members=tuple(members), keepers=by_node)


def end_leftovers(run_key: str) -> None:
    """End all workers and keepers of a run that has no controller and shall get none."""
    for kind in (WORKER, KEEPER):
        for handle in _handles(run_key, kind).values():
            ray.kill(handle, no_restart=True)
    _give_back(run_key, held=set())


def _handles(run_key: str, kind: str) -> dict[str, Any]:
    found = {}
    for id in ids_of(run_key, kind):
        try:
            found[id] = ray.get_actor(actor_name(run_key, kind, id=id), namespace=NAMESPACE)
        except ValueError:
            continue  # ended meanwhile
    return found


def _member(id: str, handle: Any, *, refs: tuple[Any, Any, Any], end_s: float) -> Member | None:
    facts: DeviceFacts | None = _answer(refs[0], end_s=end_s)
    group: PlacementGroup | None = _answer(refs[1], end_s=end_s)
    if facts is None or group is None or _answer(refs[2], end_s=end_s) is None:
        _end(handle, what=f"worker {id}")
        return None
    return Member(id=id, handle=handle, group=group, facts=facts)


def _answer(ref: Any, *, end_s: float) -> Any:
    try:
        return ray.get(ref, timeout=max(0.0, end_s - time.monotonic()))
    except RayError:
        return None


def _end(handle: Any, *, what: str) -> None:
    logger.warning("%s of the run before does not answer and is ended", what)
    ray.kill(handle, no_restart=True)


def _give_back(run_key: str, *, held: set[str]) -> None:
    for id, each in placement_group_table().items():
        if (
            each["name"].startswith(actor_name(run_key, DEVICE, id=""))
            and each["state"] != "REMOVED"
            and id not in held
        ):
            release([PlacementGroup(ray.PlacementGroupID.from_hex(id))])
