"""Devices from Ray: one placement group per worker, so that each can come and go alone."""

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfcp.cluster.naming import DEVICE, actor_name, new_id
from rayfcp.config import Config, ConfigError

RESOURCES = {"cuda": "GPU", "npu": "NPU"}

LOOK_S = 0.2
MORE_WORKERS_WAIT_S = 2.0
"""How long a start with enough workers waits for one more."""


class CapacityError(ConfigError):
    """The cluster has too few devices; the message says what was asked for and what is there."""


def resolved_device(config: Config) -> str:
    """`auto` becomes what the cluster's nodes offer: GPUs, else NPUs, else CPUs."""
    if config.cluster.device != "auto":
        return config.cluster.device
    total = ray.cluster_resources()
    return next((device for device, name in RESOURCES.items() if total.get(name, 0) >= 1), "cpu")


def bundle(device: str, *, threads: int) -> dict[str, float]:
    """What one worker asks of Ray."""
    accelerator = RESOURCES.get(device)
    return {"CPU": float(threads)} | ({accelerator: 1.0} if accelerator else {})


def ask(config: Config, *, device: str, run_key: str = "") -> PlacementGroup:
    """A reservation of one worker's device, which nobody owns, ready once there is one; named after its run."""
    wanted = bundle(device, threads=config.train.threads_per_worker)
    name = actor_name(run_key, DEVICE, id=new_id())
    return placement_group([wanted], strategy="PACK", name=name, lifetime="detached")


def reserve(
    config: Config, *, device: str, run_key: str = "", stopped: Callable[[], bool] = bool
) -> list[PlacementGroup]:
    """As many placement groups as fit, from `num_workers`' minimum to its maximum.

    Waits up to `elastic.start_timeout_s` for the minimum, or until `stopped()`.

    Raises:
        CapacityError: the minimum does not fit by then; nothing stays reserved.
    """
    wanted = bundle(device, threads=config.train.threads_per_worker)
    groups = [ask(config, device=device, run_key=run_key) for _ in range(config.cluster.max_workers)]
    waiting = {group.ready(): group for group in groups}
    kept: list[PlacementGroup] = []
    end_s = time.monotonic() + config.elastic.start_timeout_s
    while waiting and time.monotonic() < end_s and not stopped():
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK_S)
        kept += [waiting.pop(ref) for ref in done]
        if done and len(kept) >= config.cluster.min_workers:
            end_s = min(end_s, time.monotonic() + MORE_WORKERS_WAIT_S)
    if len(kept) < config.cluster.min_workers:
        release(groups)
        raise CapacityError(
            f"cluster.num_workers asks for at least {config.cluster.min_workers} x {wanted}, {len(kept)} fit into "
            f"{_short(ray.cluster_resources())} within {config.elastic.start_timeout_s:.0f} s; add nodes or ask for "
            "fewer"
        )
    release(list(waiting.values()))
    return kept


def release(groups: list[PlacementGroup]) -> None:
    """Give the reservations back."""
    for group in groups:
        remove_placement_group(group)


def options_for(group: PlacementGroup, *, device: str, threads: int) -> dict[str, Any]:
    """Actor options of a worker in its placement group."""
    wanted = bundle(device, threads=threads)
    return {
        "num_cpus": wanted.pop("CPU"),
        "num_gpus": wanted.pop("GPU", 0.0),
        "resources": wanted,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
    }


def _short(resources: dict[str, float]) -> str:
    names = ("CPU", "GPU", "NPU")
    return "{" + ", ".join(f"{name}: {resources[name]:g}" for name in names if name in resources) + "}"
