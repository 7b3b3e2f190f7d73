"""Three nodes of an own Ray, in a process of its own: copy stores on other nodes, a drain notice, a lost node.

Writes what it finds as JSON to the file it is given, for `test_nodes`.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.worker import global_worker
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from rayfcp.cluster.recovery.stores import CopyStores
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.calls import GroupFailedError
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import PendingWorkers
from tests.cluster.light import LightWorker, bytes_of, light_config, light_start, light_stores, shard
from tests.forks.patience import nodes_may_take_long
from tests.waiting import PATIENCE_S, until

DRAIN_S = 60.0


def send_copies(worker_group: WorkerGroup, copy_stores: CopyStores) -> bool:
    """Each device makes one, and each node sends those of its own to the other; whether they arrived."""
    numbers: dict[str, list[int]] = {}
    for number, member in enumerate(worker_group.members):
        header = shard(1, number=number, num_devices=2)
        ray.get(member.handle.keep.remote(header, bytes_of(header)))
        numbers.setdefault(member.facts.node_id, []).append(number)
    until(lambda: (pushes := copy_stores.push(header.state, numbers)) is not None and bool(ray.get(pushes)))
    copies = ray.get([store.shard_copies.remote() for store in copy_stores.stores.values()])
    return [[each.header.number for each in found] for found in copies] == [[0, 1], [0, 1]]


def drained(cluster: Cluster, node: Any) -> dict[str, Any]:
    """Draining nodes as the runtime lists them, of one that is told to leave."""
    runtime = RayRuntime()
    before = dict(runtime.nodes().draining)
    now_s = time.time()
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    global_worker.gcs_client.drain_node(node.node_id, reason, "leaves", int((now_s + DRAIN_S) * 1000))
    until(lambda: bool(runtime.nodes().draining))
    (found,) = runtime.nodes().draining.items()
    return {"before": before, "is_it": found[0] == node.node_id, "left_s": found[1] - now_s}


def main() -> None:
    nodes_may_take_long(pytest.MonkeyPatch())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    config = light_config(Path(tempfile.mkdtemp()), name="nodes", num_workers=2, hang_min_s=PATIENCE_S)
    start = light_start(config, run_key="nodes", worker=LightWorker)
    copy_stores = light_stores(config, run_key="nodes")
    worker_group = WorkerGroup(start, start.open_all(), kill=copy_stores.kill)
    pending = PendingWorkers(start)
    copy_stores.assign(worker_group.members)
    found: dict[str, Any] = {"spread": len({fact.node_id for fact in worker_group.facts})}
    found["kept_elsewhere"] = send_copies(worker_group, copy_stores)
    node_of = {number: fact.node_id for number, fact in enumerate(worker_group.facts)}
    pending.want(1, in_use=2)
    found["pending"] = [len(pending.requested_s), len(pending.ready())]
    third = cluster.add_node(num_cpus=1)
    joined: list[Any] = []
    until(lambda: bool(joined.extend(pending.ready()) or joined))
    found["recruited_on_new_node"] = joined[0].facts.node_id == third.node_id
    worker_group.standby += joined
    found["drain"] = drained(cluster, third)
    lost_number = next(number for number, node in node_of.items() if node == second.node_id)
    memory = Path(ray.get(worker_group.workers[lost_number].folder.remote()))
    refs = [worker.exchange.remote() for worker in worker_group.workers]
    cluster.remove_node(second, allow_graceful=False)
    shutil.rmtree(memory)  # as with a real node
    try:
        worker_group.get(refs)
    except GroupFailedError as error:
        found["lost"] = [[each.number == lost_number, each.cause] for each in error.lost]
    left = copy_stores.newest_state(worker_group.all, up_to=1)
    found["copies_left"] = [copy.node_id != second.node_id for copy in left.copies]
    found["living"] = ray.get([worker.value.remote(5) for worker in worker_group.workers], timeout=PATIENCE_S)
    pending.end()
    worker_group.end()
    copy_stores.end()
    Path(sys.argv[1]).write_text(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
