"""Workers that cannot start: the user hears why, as of any other wrong input."""

from pathlib import Path

import pytest

from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.group import WorkerGroup
from rayfcp.cluster.workers.starting import CapacityError, WorkerStart
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


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_devices_are_wrong_input(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, name="many", cluster={"num_workers": 90, "device": "cpu"}, elastic={"start_timeout_s": 1.0}
    )
    with pytest.raises(CapacityError, match=r"num_workers asks for at least 90"):
        launch(config, device="cpu")
