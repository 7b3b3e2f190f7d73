"""A run on a cluster that Ray's autoscaler (v2) makes larger and smaller, with nodes that a fake provider starts."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from rayfcp.telemetry.steps import read_steps
from tests.cluster.jobs.head import Head, below, overrides, ray_head

PATIENCE_S = 240.0
MOST = 4
COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
"""Which the configuration has to hold, and a fake provider does not run."""

IDLE_S = 25.0
WORKER_CPUS = 2
HEAD_CPUS = 2 + WORKER_CPUS  # controller, planner, and one worker; what one of the former leaves is no second worker's


def scaling(address: str, *, most_nodes: int = 0) -> dict[str, Any]:
    """Nodes of one worker's CPU each beside the head; idle ones go after a while."""
    return {
        "cluster_name": "fake",
        "max_workers": most_nodes,
        "idle_timeout_minutes": IDLE_S / 60,
        "upscaling_speed": 100.0,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": address,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": HEAD_CPUS}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": WORKER_CPUS},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most_nodes,
            },
        },
        "head_node_type": "ray.head.default",
        **{key: [] for key in COMMANDS},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
    }


@pytest.fixture
def head() -> Iterator[Head]:
    with ray_head(
        num_cpus=HEAD_CPUS,
        scaling=scaling,
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        RAY_FAKE_CLUSTER="1",
        RAY_enable_autoscaler_v2="1",
        RAY_CLOUD_INSTANCE_ID=FAKE_HEAD_NODE_ID,
        RAY_OVERRIDE_NODE_ID_FOR_TESTING=FAKE_HEAD_NODE_ID,
    ) as started:
        yield started


def processes(head: Head, is_meant: Callable[[str], bool]) -> set[int]:
    """Ids of the cluster's processes by their command line."""
    found = set()
    for pid in below(head.pid):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if is_meant(line):
            found.add(pid)
    return found


def workers(head: Head) -> set[int]:
    return processes(head, lambda line: line.startswith("ray::RankWorker"))


def num_nodes(head: Head) -> int:
    return len(processes(head, lambda line: line.split(" ")[0].endswith("/raylet")))


def until(is_so: Callable[[], bool], *, what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.2)


def sizes(run_dir: Path) -> list[int]:
    """Devices in use, step by step."""
    log = run_dir / "steps.jsonl"
    return [report.world_size for report in read_steps(log)] if log.exists() else []


@pytest.mark.timeout(900)
def test_a_run_makes_its_cluster_grow_and_lets_it_shrink(head: Head) -> None:
    """It begins on one node, for there are no others to have. Once there are, its demand brings them; it takes their
    devices, its first worker's process all along, and gives the nodes back at its end."""
    run_dir = head.folder / "runs" / "growing"
    until(lambda: num_nodes(head) == 1, what="no node")
    train = head.start(
        *("rayfcp", "train", "jobs/quickstart.yaml", *overrides(run_dir, "train.steps=100000")),
        f"train.threads_per_worker={WORKER_CPUS}",
        *(f"cluster.address={head.address}", f"cluster.num_workers=[1,{MOST}]"),
    )
    until(lambda: len(sizes(run_dir)) > 0 or train.poll() is not None, what="no step")
    first = workers(head)
    assert sizes(run_dir)[0] == len(first) == num_nodes(head) == 1, train.poll()
    (head.folder / "scaling.json").write_text(json.dumps(scaling(head.address, most_nodes=MOST - 1)))
    until(lambda: MOST in sizes(run_dir) or train.poll() is not None, what=f"never {MOST} devices")
    assert train.poll() is None, train.communicate()[0]
    assert first <= workers(head) and num_nodes(head) == MOST
    until(lambda: sizes(run_dir).count(MOST) >= 3, what="no steps on all devices")

    train.send_signal(signal.SIGINT)
    output, _ = train.communicate(timeout=PATIENCE_S)
    reports = read_steps(run_dir / "steps.jsonl")
    assert [report.step for report in reports] == list(range(1, len(reports) + 1)), output
    assert sizes(run_dir) == sorted(sizes(run_dir)), output
    assert not any(report.recovered for report in reports)
    until(lambda: num_nodes(head) == 1, what=f"{num_nodes(head)} nodes are still there")
    assert not workers(head)
