"""Ray for a run: the cluster that is there, or one of our own on this machine."""

import logging

import ray

from rayfcp.config import Config, ConfigError

CONTROLLER_CPUS = 1


def connect(config: Config) -> bool:
    """Make Ray usable; True if it was started here and should be shut down at the end.

    A Ray that this process already uses is taken. Otherwise `cluster.address` is joined, or a local
    Ray is started with as many logical CPUs as the run's actors ask for, whatever the machine has.

    Raises:
        ConfigError: nothing answers at `cluster.address`.
    """
    if ray.is_initialized():
        return False
    if config.cluster.address is not None:
        try:
            ray.init(address=config.cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"cluster.address is {config.cluster.address!r}, no Ray answers there ({error}); start one with "
                "'ray start --head', or leave the address out"
            ) from error
        return True
    workers = config.cluster.max_workers * config.train.threads_per_worker
    ray.init(
        address="local",
        num_cpus=workers + config.plan.planner_actors + CONTROLLER_CPUS,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    return True
