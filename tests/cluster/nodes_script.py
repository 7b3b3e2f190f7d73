"""Three nodes of an own Ray, in a process of its own: snapshot stores on other nodes, a drain notice, a lost node.

Writes what it finds as JSON to the file it is given, for `test_nodes`.
"""

import json
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

from rayfcp.cluster.recovery.stores import SnapshotStores
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.calls import RanksLostError
from rayfcp.cluster.workers.facts import Waited
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import PendingWorkers
from tests.cluster.light import LightWorker, bytes_of, copies_at, light_config, light_start, shard
from tests.forks.patience import nodes_may_take_long
from tests.waiting import PATIENCE_S, until

DRAIN_S = 60.0


def keep_a_copy(worker_group: WorkerGroup) -> None:
    """Each device its own, at its snapshot store."""
    for number, worker in enumerate(worker_group.workers):
        header = shard(1, number=number)
        worker.keep.remote(header, bytes_of(header))
    found = [worker.await_kept.remote(shard(1).state, timeout_s=PATIENCE_S) for worker in worker_group.workers]
    assert set(ray.get(found)) == {Waited.KEPT}


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
    worker_group, pending = WorkerGroup(start, start.open_all()), PendingWorkers(start)
    snapshot_stores = SnapshotStores(config, runtime=RayRuntime(), run_key="k")
    snapshot_stores.assign(worker_group.members)
    worker_group.kill_process = snapshot_stores.kill
    keep_a_copy(worker_group)
    found: dict[str, Any] = {"spread": len({fact.node_id for fact in worker_group.facts})}
    node_of = {number: fact.node_id for number, fact in enumerate(worker_group.facts)}
    found["kept_elsewhere"] = all(
        node_of[source.header.number] != source.holder_id for source in copies_at(snapshot_stores.stores)
    )
    pending.want(1, in_use=2)
    found["pending"] = [len(pending.requested_s), len(pending.ready())]
    third = cluster.add_node(num_cpus=1)
    joined: list[Any] = []
    until(lambda: bool(joined.extend(pending.ready()) or joined))
    found["recruited_on_new_node"] = joined[0].facts.node_id == third.node_id
    worker_group.standby += joined
    found["drain"] = drained(cluster, third)
    refs = [worker.exchange.remote() for worker in worker_group.workers]
    lost_number = next(number for number, node in node_of.items() if node == second.node_id)
    cluster.remove_node(second, allow_graceful=False)
    try:
        worker_group.get(refs)
    except RanksLostError as error:
        found["lost"] = [[each.number == lost_number, each.cause] for each in error.lost]
    found["copies_left"] = sorted(source.header.number == lost_number for source in copies_at(snapshot_stores.stores))
    found["living"] = ray.get([worker.value.remote(5) for worker in worker_group.workers], timeout=PATIENCE_S)
    pending.end()
    worker_group.end()
    snapshot_stores.end()
    Path(sys.argv[1]).write_text(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
