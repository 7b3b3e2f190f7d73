"""Workers and snapshot stores of a lost controller, found by their names."""

import logging
from typing import Any

from rayfcp.cluster.runtime import CallError, Runtime
from rayfcp.cluster.workers.facts import DeviceFacts, Member
from rayfcp.cluster.workers.lifetime import DEVICE, STORE, WORKER, actor_name

logger = logging.getLogger(__name__)


def adopt_leftovers(runtime: Runtime, run_key: str, *, timeout_s: float) -> tuple[list[Member], dict[str, Any]]:
    """Abort the workers that are left of a run; return them, idle and in no generation, and the stores by node.

    Those that do not answer within `timeout_s`, or have not opened yet, are ended, and reservations without a worker
    are given back.
    """
    workers, stores = _named(runtime, run_key, WORKER), _named(runtime, run_key, STORE)
    end_s = runtime.now_s() + timeout_s

    def answer(ref: Any) -> Any:
        try:
            return runtime.get(ref, timeout_s=max(0.0, end_s - runtime.now_s()))
        except CallError:
            return None

    def end(handle: Any, *, what: str) -> None:
        logger.warning("%s of the lost controller does not answer and is ended", what)
        runtime.end(handle)

    for worker in workers.values():
        worker.abort.remote()
    answers = {
        id: (worker.facts.remote(), worker.group.remote(), worker.idle.remote()) for id, worker in workers.items()
    }
    opened = {id: store.open.remote() for id, store in stores.items()}
    members = []
    for id, refs in answers.items():
        facts, group, idle = map(answer, refs)
        if isinstance(facts, DeviceFacts) and group is not None and idle is not None:
            members.append(Member(id=id, handle=workers[id], group=group, facts=facts))
        else:
            end(workers[id], what=f"worker {id}")
    by_node: dict[str, Any] = {}
    for id, ref in opened.items():
        node = answer(ref)
        if node is None or node in by_node:
            end(stores[id], what=f"snapshot store {id}")
        else:
            by_node[node] = stores[id]
    _release_all(runtime, run_key, held={runtime.key(member.group) for member in members})
    return members, by_node


def end_leftovers(runtime: Runtime, run_key: str) -> None:
    """End all workers and snapshot stores of a run without controller, and withdraw its request to the autoscaler."""
    for kind in (WORKER, STORE):
        for handle in _named(runtime, run_key, kind).values():
            runtime.end(handle)
    _release_all(runtime, run_key, held=set())
    runtime.request({}, count=0)


def _named(runtime: Runtime, run_key: str, kind: str) -> dict[str, Any]:
    return runtime.named(actor_name(run_key, kind, id=""))


def _release_all(runtime: Runtime, run_key: str, *, held: set[str]) -> None:
    for key, each in runtime.reservations(actor_name(run_key, DEVICE, id="")).items():
        if key not in held:
            runtime.release(each)
