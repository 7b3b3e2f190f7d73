"""Workers that cannot start: the user hears why, as of any other wrong input."""

from pathlib import Path

import pytest
from ray._private.runtime_env.nsight import parse_nsight_config
from ray.runtime_env import RuntimeEnv

from rayfcp.cluster.errors import CapacityError
from rayfcp.cluster.facts.resources import nsight_options
from rayfcp.cluster.runtime import ActorSpec, Role
from rayfcp.cluster.runtime.on_ray import RayRuntime, _options
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import WorkerStart
from rayfcp.config import Config, ConfigError
from tests.cluster.runs import run_config


def launch(config: Config, *, device: str) -> WorkerGroup:
    start = WorkerStart(
        config, runtime=RayRuntime(), device=device, data_dir=config.run_dir, vocab_size=256, run_key=config.run.name
    )
    return WorkerGroup(start, start.open_all())


@pytest.mark.usefixtures("ray_cluster")
def test_a_device_without_its_library_is_wrong_input(tmp_path: Path) -> None:
    config = run_config(tmp_path, name="npu", cluster={"num_workers": 1, "device": "npu"})
    with pytest.raises(ConfigError, match=r"torch.npu"):
        launch(config, device="npu")


def test_nsight_systems_starts_workers_that_it_shall_profile(tmp_path: Path) -> None:
    """By Ray's runtime environments, whose command this is; there is no `nsys` here to start one."""
    profiler = {"steps": [3], "tool": "nsys"}
    config = run_config(tmp_path, name="seen", metrics={"profiler": profiler})
    options = nsight_options(config, device="cuda")
    spec = ActorSpec(role=Role.WORKER, nsight=options)
    assert RuntimeEnv(**_options(spec)["runtime_env"]).nsight() == options
    assert " ".join(parse_nsight_config(options)) == (
        "nsys profile -t cuda,nvtx,cublas,cudnn -o seen-%p --capture-range=cudaProfilerApi --capture-range-end=repeat"
    )
    assert not nsight_options(config.changed(metrics={"profiler": profiler | {"steps": []}}), device="cuda")
    with pytest.raises(
        ConfigError, match=r"metrics\.profiler\.tool is 'nsys', must be 'torch' on devices of kind 'cpu'"
    ):
        nsight_options(config, device="cpu")


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_devices_are_wrong_input(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, name="many", cluster={"num_workers": 90, "device": "cpu"}, elastic={"start_timeout_s": 1.0}
    )
    with pytest.raises(CapacityError, match=r"num_workers asks for at least 90"):
        launch(config, device="cpu")
