"""Checks on injected facts: a machine that lacks nothing is well; whatever is taken away is found, with a remedy."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.cluster.tools.doctor.checks import CHECKPOINT_BYTES, STATE_BYTES, examine
from rayfcp.cluster.tools.doctor.facts import (
    GIB,
    PYTHON,
    REQUIRED,
    Accelerators,
    AccessFacts,
    ClusterFacts,
    Facts,
    Finding,
    NodeFacts,
    Storage,
    Verdict,
)
from rayfcp.config import parse_config
from rayfcp.execute.devices.cuda import CudaKernel
from rayfcp.execute.kernels.chunked import ChunkedKernel
from rayfcp.execute.kernels.convolution import CausalConv1d
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.flash import TorchFlashKernel
from rayfcp.execute.kernels.linear import FlashLinearKernel

SLOWER = CudaKernel(half=TorchFlashKernel(), single=CutlassKernel()).name

CONFIG = parse_config(
    {
        "data": {"paths": ["/s/d"]},
        "run": {"dir": "/s/r"},
        "cluster": {"device": "cuda", "num_workers": [8, 16]},
        "metrics": {"port": 90},
    }
)
NODE = NodeFacts(
    name="a",
    python=(3, 11, 2),
    versions={package: f"{least}.1" for package, least in REQUIRED.items()},
    accelerators=Accelerators(
        kind="cuda", count=8, names=("H100",), kernel="flash-attn 2, torch's memory-efficient in fp32"
    ),
    memory_bytes=64 * GIB,
    shm_bytes=32 * GIB,
    open_files=1 << 20,
    storage=Storage(folder="/s", free_bytes=100 * GIB, sees_marker=True),
    reaches_driver=True,
    devices={"GPU": 8.0, "CPU": 16.0, "object_store_memory": 8.0 * GIB},
)
CLUSTER = ClusterFacts(address="auto", resources={"GPU": 16.0, "CPU": 32.0})
ACCESS = AccessFacts(mode="token", token_from="~/.ray/auth_token")
WELL = Facts(nodes=(NODE, replace(NODE, name="b")), cluster=CLUSTER, access=ACCESS, config=CONFIG, num_parameters=10**8)


def is_well(findings: tuple[Finding, ...]) -> bool:
    return all(each.verdict is not Verdict.FAIL for each in findings)


def problems(facts: Facts) -> list[Finding]:
    return [each for each in examine(facts) if each.verdict is not Verdict.OK]


def test_what_lacks_nothing_is_well() -> None:
    assert problems(WELL) == [] and is_well(examine(WELL))
    assert not any(each.node for each in examine(WELL)), "what is the same on all nodes is told once"


def on_node(**change: Any) -> Facts:
    """The second node is changed."""
    return replace(WELL, nodes=(NODE, replace(NODE, name="b", **change)))


def accelerators(**change: Any) -> Facts:
    return on_node(accelerators=replace(NODE.accelerators, **change))


def store(**change: Any) -> Facts:
    assert NODE.storage is not None
    return on_node(storage=replace(NODE.storage, **change))


def versions(**change: str | None) -> Facts:
    return on_node(versions={**NODE.versions, **change})


def cluster(**change: Any) -> Facts:
    return replace(WELL, cluster=replace(CLUSTER, **change))


def access(**change: Any) -> Facts:
    return replace(WELL, access=replace(ACCESS, **change))


FAILS = {
    "old Python": (replace(WELL, nodes=(replace(NODE, python=(3, 10, 1)),)), "Python 3.10.1, must be 3.11 or newer"),
    "missing package": (versions(numba=None), "numba is missing"),
    "old package": (versions(transformers="4.57.1"), "transformers 4.57.1, must be 5 or newer"),
    "Ray without extra": (on_node(missing_modules=("aiohttp_cors",)), "extra 'default' is incomplete (aiohttp_cors)"),
    "few files": (on_node(open_files=1024), "1024 open files permitted"),
    "no kernel": (accelerators(kernel=None, error="no CANN"), "no attention kernel for cuda: no CANN"),
    "devices unseen": (accelerators(count=0), "Ray offers 8 GPU, torch sees 0"),
    "no rights": (store(error="Permission denied"), "nothing can be written in /s: Permission denied"),
    "not shared": (store(sees_marker=False), "is not the same storage"),
    "no data": (on_node(missing_paths=("/s/d",)), "/s/d does not exist or may not be read"),
    "other Ray": (versions(ray="2.59.0"), "ray differs between nodes: 2.50.1 on a, 2.59.0 on b"),
    "other Python": (on_node(python=(3, 12, 0)), "Python differs between nodes: 3.11 on a, 3.12 on b"),
    "clock far off": (on_node(clock_ahead_s=-100.0), "the clock differs from the driver's by 100.0 s"),
    "closed ports": (on_node(reaches_driver=False), "cannot be reached"),
    "too few devices": (cluster(resources={"GPU": 4.0, "CPU": 32.0}), "4 GPU in the cluster, the run asks for 8 to 16"),
    "too few CPUs": (cluster(resources={"GPU": 16.0, "CPU": 9.0}), "9 CPU in the cluster, the run asks for 10 to 18"),
    "broken node": (cluster(broken={"c": "No module named 'rayfcp'"}), "could not be examined: No module named"),
    "no token": (access(token_from=""), "RAY_AUTH_MODE is token, and there is none"),
    "port taken": (access(metrics_port_taken=True), "port 90 on 127.0.0.1 is taken"),
}
WARNS = {
    "little shared memory": (replace(on_node(shm_bytes=GIB // 16), num_parameters=10**6), "/dev/shm has 64.0 MiB"),
    "rather few files": (on_node(open_files=20000), "20000 open files permitted"),
    "small object store": (on_node(devices={"GPU": 8.0, "object_store_memory": 1e8}), "object store has 95.4 MiB"),
    "slower kernel": (accelerators(kernel=SLOWER), "on cuda: torch's flash, "),
    "more devices than offered": (accelerators(count=16), "Ray offers 8 GPU, torch sees 16"),
    "clock off": (on_node(clock_ahead_s=1.6, clock_within_s=0.1), "differs from the driver's by 1.5 s"),
    "environment": (
        on_node(environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_NVLS_ENABLE": "0"}),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING is 1 there, rayfcp would set 0",
    ),
    "devices to come": (cluster(resources={"CPU": 32.0}, autoscales=True), "0 GPU in the cluster"),
    "no dashboard": (cluster(dashboard=False), "has no dashboard"),
    "open token": (access(token_open=True), "other users can read Ray's token"),
    "mode not set": (access(mode=""), "RAY_AUTH_MODE is not set"),
    "mode disabled": (access(mode="disabled", token_from=""), "RAY_AUTH_MODE is disabled"),
}


@pytest.mark.parametrize("case", FAILS)
def test_what_keeps_a_run_from_working(case: str) -> None:
    facts, expected = FAILS[case]
    assert not is_well(examine(facts))
    found = problems(facts)
    assert [each.verdict for each in found] == [Verdict.FAIL]
    assert expected in found[0].what and found[0].remedy


@pytest.mark.parametrize("case", WARNS)
def test_what_is_worth_a_word(case: str) -> None:
    facts, expected = WARNS[case]
    assert is_well(examine(facts))
    found = problems(facts)
    assert [each.verdict for each in found] == [Verdict.WARN]
    assert expected in found[0].what and found[0].remedy


def test_copies_of_the_state_need_shared_memory() -> None:
    """Four of the whole state on one node, seven of its half on each of two; for checkpoints alone one."""
    for nodes, copies in (((NODE,), 4), (WELL.nodes, 3.5)):
        least = int(copies * 12 * 10**8)
        for shm_bytes, verdicts in ((least, []), (least - 10, [Verdict.FAIL])):
            room = tuple(replace(node, shm_bytes=max(shm_bytes, 0), memory_bytes=8 * GIB) for node in nodes)
            found = problems(replace(WELL, nodes=room))
            assert [each.verdict for each in found] == verdicts, found
    off = replace(WELL, nodes=room, config=CONFIG.changed(elastic={"snapshot_every_steps": 0}))
    assert problems(off) == []


def test_a_problem_of_one_node_names_it() -> None:
    assert problems(on_node(open_files=1024))[0].node == "b"
    everywhere = replace(WELL, nodes=tuple(replace(each, open_files=1024) for each in WELL.nodes))
    assert [each.node for each in problems(everywhere)] == [""]


@given(free=st.integers(0, 5 * GIB), num_parameters=st.integers(1, GIB // 6), kept=st.integers(1, 3))
def test_space_for_checkpoints(free: int, num_parameters: int, kept: int) -> None:
    """Those that are kept and the one being written; without space for one the run cannot save."""
    assert NODE.storage is not None
    node = replace(NODE, storage=replace(NODE.storage, free_bytes=free))
    config, each = CONFIG.changed(checkpoint={"keep": kept}), CHECKPOINT_BYTES * num_parameters
    facts = replace(WELL, nodes=(node,), config=config, num_parameters=num_parameters)
    verdicts = [found.verdict for found in problems(facts)]
    expected = [] if free >= (kept + 1) * each else [Verdict.FAIL if free < each else Verdict.WARN]
    assert verdicts == expected


@given(ahead=st.floats(-0.5, 0.5), within=st.floats(0.0, 200.0))
def test_a_slow_answer_is_no_wrong_clock(ahead: float, within: float) -> None:
    """The node's clock is known but for half of the round trip."""
    clock_ahead_s = ahead + (within if ahead > 0 else -within)
    assert problems(on_node(clock_ahead_s=clock_ahead_s, clock_within_s=within)) == []


@pytest.mark.parametrize(
    ("workers", "state_gib", "verdicts"),
    [
        (4, 0, []),
        (8, 0, [Verdict.WARN]),
        (64, 0, [Verdict.FAIL, Verdict.FAIL]),
        (2, 7, []),
        (4, 7, [Verdict.FAIL]),
    ],
)
def test_workers_need_cores_and_memory(workers: int, state_gib: int, verdicts: list[Verdict]) -> None:
    """Of a machine with four cores and 8 GiB, without accelerators."""
    node = replace(
        NODE, devices=None, accelerators=Accelerators(kind="cpu", kernel="x"), num_cpus=4, memory_bytes=8 * GIB
    )
    without_copies = {"snapshot_every_steps": 0}
    config = CONFIG.changed(cluster={"device": "cpu", "num_workers": (workers, 64)}, elastic=without_copies)
    facts = Facts(nodes=(node,), access=ACCESS, config=config, num_parameters=state_gib * GIB // STATE_BYTES)
    assert [each.verdict for each in problems(facts)] == verdicts


@pytest.mark.parametrize("by_torch", [False, True])
def test_kernels_of_recurrent_layers_are_named(by_torch: bool) -> None:
    kernels = ChunkedKernel.name if by_torch else FlashLinearKernel.name, CausalConv1d.name
    seen = replace(NODE.accelerators, recurrence=kernels)
    (found,) = (
        each.what
        for each in examine(replace(WELL, nodes=(replace(NODE, accelerators=seen),)))
        if "recurrent" in each.what
    )
    assert ", ".join(kernels) in found and ("rayfcp[linear]" in found) is by_torch


def test_a_head_without_devices_needs_no_kernel() -> None:
    head = replace(NODE, name="head", devices={"CPU": 8.0}, accelerators=Accelerators(kind="cuda", error="none"))
    assert problems(replace(WELL, nodes=(head, NODE))) == []


def test_the_table_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    wanted = {}
    for each in project["dependencies"]:
        name, _, bounds = each.partition(">=")
        wanted[name.partition("[")[0]] = bounds.partition(",")[0]
    assert wanted == REQUIRED
    assert project["requires-python"] == f">={PYTHON[0]}.{PYTHON[1]}"
