"""What all tests share: one Ray cluster per session, started by the first test that needs it, processors of pictures
likewise, the profiles of properties, how tests are split over processes, and one thread per process for the arithmetic
of small models: more of them wait for each other longer than they work."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples import register_profiles
from tests.waiting import PATIENT_RAY

if TYPE_CHECKING:
    from rayfcp.data.vision.loading import PictureTokenizer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, also for processes that tests start
os.environ.update(PATIENT_RAY)  # before Ray is imported, likewise

register_profiles()

WITH_RAY = {"browser", "chaos", "cluster", "dashboards"}
"""Folders whose tests start clusters, and use the one of the session."""
RAY = "ray"
"""Group of the tests that use the cluster of the session, so that one process has it."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        inside = item.path.relative_to(folder).parts if item.path.is_relative_to(folder) else ("",)
        if inside[0] in WITH_RAY or "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(RAY))
    # The longest group begins first; within it those who start a Ray of their own, before that of the session is there.
    items.sort(key=lambda item: (item.get_closest_marker("xdist_group") is None, "chaos" not in item.path.parts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadGroupScheduling

    class ByModule(LoadGroupScheduling):
        """Sends a process the tests of a module together, since they share fixtures, and those of a group."""

        def _split_scope(self, nodeid: str) -> str:
            _, at, group = nodeid.rpartition("@")
            apart = nodeid.startswith("tests/simulated/")  # these share nothing, and are long
            return group if at and group == RAY else nodeid if apart else nodeid.partition("::")[0]

    return ByModule(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    from tests.forks.cluster import cluster_of_forks

    if ray.is_initialized():
        yield
        return
    with cluster_of_forks(
        address="local",
        num_cpus=7,
        resources={"NPU": 1},
        include_dashboard=False,
        logging_level="WARNING",
        log_to_driver=False,
    ):
        yield


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> "PictureTokenizer":
    from tests.data.vision import makers

    return makers.qwen(tmp_path_factory.mktemp("processors"))


@pytest.fixture(scope="session")
def intern(tmp_path_factory: pytest.TempPathFactory) -> "PictureTokenizer":
    from tests.data.vision import makers

    return makers.intern(tmp_path_factory.mktemp("processors"))
