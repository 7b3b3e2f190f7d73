"""Workers that cannot start: the user hears why, as of any other wrong input."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rayfcp.cluster.crew import Crew
from rayfcp.cluster.files import prepared_data
from rayfcp.cluster.placement import CapacityError
from rayfcp.cluster.training import TrainingRun
from rayfcp.config import ConfigError
from tests.cluster.runs import run_config, write_texts


@pytest.mark.usefixtures("ray_cluster")
def test_a_device_without_its_library_is_wrong_input(tmp_path: Path) -> None:
    config = run_config(tmp_path, name="npu", cluster={"num_workers": 1, "device": "npu"})
    with pytest.raises(ConfigError, match=r"torch.npu"):
        Crew.start(config, device="npu", data_dir=str(tmp_path), vocab_size=256, stopped=lambda: False)


@pytest.mark.usefixtures("ray_cluster")
def test_too_few_devices_are_wrong_input(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, name="many", cluster={"num_workers": 90, "device": "cpu"}, elastic={"start_timeout_s": 1.0}
    )
    with pytest.raises(CapacityError, match=r"num_workers asks for at least 90"):
        Crew.start(config, device="cpu", data_dir=str(tmp_path), vocab_size=256, stopped=lambda: False)


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_stopped_while_it_waits_for_devices_ends_in_order(tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = run_config(tmp_path, name="stopped", cluster={"num_workers": 90, "device": "cpu"})
    stopping = threading.Event()
    run = TrainingRun(config, data_dir=prepared_data(config, say=lambda _: None), stopping=stopping)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(run.execute)
        while not any("starting 90 workers" in line for line in run.messages(0)) and not outcome.done():
            time.sleep(0.01)
        time.sleep(0.5)
        stopping.set()
        assert outcome.result(timeout=60).last_step == 0
