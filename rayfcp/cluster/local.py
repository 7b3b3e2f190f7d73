"""Ray for a run: the cluster that is there, or one of our own on this machine."""

import logging

import ray

from rayfcp.cluster.placement import RESOURCES
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
                f"cluster.address is {config.cluster.address!r}, no Ray lets us in there ({error}); start one with "
                "'ray start --head', set RAY_AUTH_MODE=token if it wants a token, or leave the address out"
            ) from error
        return True
    workers = config.cluster.max_workers * config.train.threads_per_worker
    decoders = config.data.decoder_actors if config.data.processor else 0
    ray.init(
        address="local",
        num_cpus=workers + config.plan.planner_actors + decoders + CONTROLLER_CPUS,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    _check_local(config)
    return True


def _check_local(config: Config) -> None:
    """This machine gets no further devices, so waiting for them would be in vain.

    Raises:
        ConfigError: fewer accelerators than the run needs.
    """
    name = RESOURCES.get(config.cluster.device)
    have = int(ray.cluster_resources().get(name, 0)) if name else 0
    if name and have < config.cluster.min_workers:
        ray.shutdown()
        raise ConfigError(
            f"cluster.num_workers is {config.cluster.min_workers} with cluster.device={config.cluster.device}, this "
            f"machine has {have} {name}; ask for fewer, set cluster.device=cpu, or name a cluster in cluster.address"
        )
