"""The connection of a user's process to Ray, joined or started."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

from rayfcp.cluster.facts.resources import other_cpus
from rayfcp.config import Config, ConfigError
from rayfcp.values.devices import AUTO, DEVICES

if TYPE_CHECKING:
    pass


@contextmanager
def connected(config: Config) -> Iterator[None]:
    """Connect to Ray; one that was not connected before is left at the end.

    A Ray that this process already uses is taken. Otherwise `cluster.address` is joined, or a local Ray is started
    with as many logical CPUs as the run's actors request, whatever the machine has; more planners than the fewest
    only get those that it has.

    Raises:
        ConfigError: nothing answers at `cluster.address`, or a local Ray has fewer accelerators than the run needs.
    """
    if ray.is_initialized():
        yield
        return
    address = config.cluster.address
    if address is None:
        _start_local(config)
    else:
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"cluster.address is {address!r}, no Ray accepts connections there ({error}); start one with 'ray "
                "start --head', set RAY_AUTH_MODE=token if it wants a token, or leave the address out"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _start_local(config: Config) -> None:
    cluster = config.cluster
    others = other_cpus(config)
    least, most = config.plan.planner_bounds
    ray.init(
        address="local",
        num_cpus=others + max(least, min(most, (os.cpu_count() or 1) - others)),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    name = None if cluster.device == AUTO else DEVICES[cluster.device].resource
    have = int(ray.cluster_resources().get(name, 0)) if name else 0
    if name and have < cluster.min_workers:
        ray.shutdown()
        raise ConfigError(
            f"cluster.num_workers is {cluster.min_workers} with cluster.device={cluster.device}, this machine has "
            f"{have} {name}; ask for fewer, set cluster.device=cpu, or name a cluster in cluster.address"
        )
