"""Fixtures of all tests: one Ray cluster per process, started by the first test that needs it, processors of images
likewise, the profiles of properties, how tests are split over processes, and one thread per process for the arithmetic
of small models: more of them wait for each other longer than they work."""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples import register_profiles
from tests.waiting import PATIENT_RAY

if TYPE_CHECKING:
    from rayfcp.data.vision.processors import ImageTokenizer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, also for processes that tests start
os.environ.update(PATIENT_RAY)  # before Ray is imported, likewise

register_profiles()

WITH_PROCESSES = ("chaos", "ray", "cluster", "dashboards", "browser", "docs", "execute", "jobs")
"""Folders of tests that start processes: the longest, so they begin first and the shortest fill up what is left. All
modules that share a Ray are `ray`: it ends with the last of them."""

ON_RAY: set[Path] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    ON_RAY.update(item.path for item in items if "ray_cluster" in getattr(item, "fixturenames", ()))

    def rank(item: pytest.Item) -> int:
        top = item.path.relative_to(folder).parts[0] if item.path.is_relative_to(folder) else ""
        top = "ray" if item.path in ON_RAY else top
        return WITH_PROCESSES.index(top) if top in WITH_PROCESSES else len(WITH_PROCESSES) + (top == "simulated")

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # all that is imported by now stays: no collection of a test has to look at it again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        """Sends a process the tests of a module together, since they share fixtures."""

        def _split_scope(self, nodeid: str) -> str:
            apart = nodeid.startswith("tests/simulated/")  # these share nothing, and are long
            return nodeid if apart else nodeid.partition("::")[0]

    return ByModule(config, log) if config.getoption("dist") == "loadscope" else None


class SharedRay:
    """A small cluster for the tests of this process, started when one needs it."""

    def __init__(self) -> None:
        self._ending: ExitStack | None = None

    def start(self) -> None:
        from tests.forks.cluster import cluster_of_forks

        if self._ending is None:
            self._ending = ExitStack()
            self._ending.enter_context(
                cluster_of_forks(
                    address="local",
                    num_cpus=7,
                    resources={"NPU": 1},
                    include_dashboard=False,
                    logging_level="WARNING",
                    log_to_driver=False,
                )
            )

    def end(self) -> None:
        if self._ending is not None:
            self._ending.close()
            self._ending = None


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    shared = SharedRay()
    yield shared
    shared.end()


@pytest.fixture(scope="module")
def ray_cluster(shared_ray: SharedRay) -> None:
    shared_ray.start()


@pytest.fixture(scope="module", autouse=True)
def no_idle_ray(request: pytest.FixtureRequest, shared_ray: SharedRay) -> None:
    if request.path not in ON_RAY:
        shared_ray.end()


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> "ImageTokenizer":
    from tests.data.vision import makers

    return makers.qwen(tmp_path_factory.mktemp("processors"))


@pytest.fixture(scope="session")
def intern(tmp_path_factory: pytest.TempPathFactory) -> "ImageTokenizer":
    from tests.data.vision import makers

    return makers.intern(tmp_path_factory.mktemp("processors"))
