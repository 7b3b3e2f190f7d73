"""Reservations of devices: one per worker, so that each can come and go by itself."""

from collections.abc import Callable
from typing import Any

from rayfcp.cluster.runtime import Runtime
from rayfcp.cluster.workers.lifetime import DEVICE, actor_name
from rayfcp.config import Config, ConfigError
from rayfcp.values.devices import AUTO, DEVICES, device_in

LOOK_S = 0.2
MORE_WORKERS_WAIT_S = 2.0
"""Time that a start with enough workers waits for one more."""


class CapacityError(ConfigError):
    """The cluster has too few devices; names what was requested and what exists."""


def resolved_device(config: Config, *, runtime: Runtime) -> str:
    """`auto` becomes what the cluster's nodes offer: GPUs, else NPUs, else CPUs."""
    if config.cluster.device != AUTO:
        return config.cluster.device
    return device_in(runtime.resources()).name


def bundle(device: str, *, threads: int) -> dict[str, float]:
    """Ray resources of one worker."""
    accelerator = DEVICES[device].resource
    return {"CPU": float(threads)} | ({accelerator: 1.0} if accelerator else {})


def reserve_device(config: Config, *, runtime: Runtime, device: str, run_key: str = "") -> Any:
    """Reserve one worker's device, granted once there is one; detached, and named after its run."""
    wanted = bundle(device, threads=config.train.threads_per_worker)
    return runtime.reserve(wanted, name=actor_name(run_key, DEVICE, id=runtime.new_id()))


def reserve(
    config: Config, *, runtime: Runtime, device: str, run_key: str = "", stopped: Callable[[], bool] = bool
) -> list[Any]:
    """Reserve as many devices as fit, from the minimum of `cluster.num_workers` to its maximum.

    Waits up to `elastic.start_timeout_s` for the minimum, or until `stopped()`.

    Raises:
        CapacityError: the minimum does not fit by then; nothing stays reserved.
    """
    wanted = bundle(device, threads=config.train.threads_per_worker)
    requested = [
        reserve_device(config, runtime=runtime, device=device, run_key=run_key)
        for _ in range(config.cluster.max_workers)
    ]
    waiting = {runtime.granted(each): each for each in requested}
    kept: list[Any] = []
    end_s = runtime.now_s() + config.elastic.start_timeout_s
    while waiting and runtime.now_s() < end_s and not stopped():
        done = runtime.wait(list(waiting), timeout_s=LOOK_S)
        kept += [waiting.pop(ref) for ref in done]
        if done and len(kept) >= config.cluster.min_workers:
            end_s = min(end_s, runtime.now_s() + MORE_WORKERS_WAIT_S)
    if len(kept) < config.cluster.min_workers:
        for each in requested:
            runtime.release(each)
        raise CapacityError(
            f"cluster.num_workers asks for at least {config.cluster.min_workers} x {wanted}, {len(kept)} fit into "
            f"{_short(runtime.resources())} within {config.elastic.start_timeout_s:.0f} s; add nodes or ask for fewer"
        )
    for each in waiting.values():
        runtime.release(each)
    return kept


def _short(resources: dict[str, float]) -> str:
    names = ("CPU", *(info.resource for info in DEVICES.values() if info.resource))
    return "{" + ", ".join(f"{name}: {resources[name]:g}" for name in names if name in resources) + "}"
