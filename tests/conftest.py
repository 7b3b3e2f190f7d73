"""What all tests share: one Ray cluster per session, started by the first test that needs it, processors of pictures
likewise, examples of properties that may take any time, since machines are shared, and one thread per process for the
arithmetic of small models: more of them wait for each other longer than they work."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from rayfcp.data.vision.loading import PictureTokenizer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, also for processes that tests start

settings.register_profile("any time", deadline=None)
settings.load_profile("any time")


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
