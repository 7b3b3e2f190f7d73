"""What all tests share: one Ray cluster per session, started by the first test that needs it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            address="local",
            num_cpus=7,
            resources={"NPU": 1},
            include_dashboard=False,
            logging_level="WARNING",
            log_to_driver=False,
        )
    yield
    if started:
        ray.shutdown()
