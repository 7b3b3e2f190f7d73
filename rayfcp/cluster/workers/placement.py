"""Devices for a run: one reservation per worker, so that each can come and go alone."""

from collections.abc import Callable
from typing import Any

from rayfcp.cluster.runtime import Runtime
from rayfcp.cluster.workers.lifetime import DEVICE, actor_name
from rayfcp.config import Config, ConfigError

RESOURCES = {"cuda": "GPU", "npu": "NPU"}

LOOK_S = 0.2
MORE_WORKERS_WAIT_S = 2.0
"""How long a start with enough workers waits for one more."""


class CapacityError(ConfigError):
    """The cluster has too few devices; the message says what was asked for and what is there."""


def resolved_device(config: Config, *, runtime: Runtime) -> str:
    """`auto` becomes what the cluster's nodes offer: GPUs, else NPUs, else CPUs."""
    if config.cluster.device != "auto":
        return config.cluster.device
    total = runtime.resources()
    return next((device for device, name in RESOURCES.items() if total.get(name, 0) >= 1), "cpu")


def bundle(device: str, *, threads: int) -> dict[str, float]:
    """What one worker asks of Ray."""
    accelerator = RESOURCES.get(device)
    return {"CPU": float(threads)} | ({accelerator: 1.0} if accelerator else {})


def ask(config: Config, *, runtime: Runtime, device: str, run_key: str = "") -> Any:
    """Reservation of one worker's device, which nobody owns, granted once there is one; named after its run."""
    wanted = bundle(device, threads=config.train.threads_per_worker)
    return runtime.reserve(wanted, name=actor_name(run_key, DEVICE, id=runtime.new_id()))


def reserve(
    config: Config, *, runtime: Runtime, device: str, run_key: str = "", stopped: Callable[[], bool] = bool
) -> list[Any]:
    """As many reservations as fit, from `num_workers`' minimum to its maximum.

    Waits up to `elastic.start_timeout_s` for the minimum, or until `stopped()`.

    Raises:
        CapacityError: the minimum does not fit by then; nothing stays reserved.
    """
    wanted = bundle(device, threads=config.train.threads_per_worker)
    asked = [ask(config, runtime=runtime, device=device, run_key=run_key) for _ in range(config.cluster.max_workers)]
    waiting = {runtime.granted(each): each for each in asked}
    kept: list[Any] = []
    end_s = runtime.now_s() + config.elastic.start_timeout_s
    while waiting and runtime.now_s() < end_s and not stopped():
        done = runtime.wait(list(waiting), timeout_s=LOOK_S)
        kept += [waiting.pop(ref) for ref in done]
        if done and len(kept) >= config.cluster.min_workers:
            end_s = min(end_s, runtime.now_s() + MORE_WORKERS_WAIT_S)
    if len(kept) < config.cluster.min_workers:
        release(asked, runtime=runtime)
        raise CapacityError(
            f"cluster.num_workers asks for at least {config.cluster.min_workers} x {wanted}, {len(kept)} fit into "
            f"{_short(runtime.resources())} within {config.elastic.start_timeout_s:.0f} s; add nodes or ask for fewer"
        )
    release(list(waiting.values()), runtime=runtime)
    return kept


def release(reservations: list[Any], *, runtime: Runtime) -> None:
    """Give the reservations back."""
    for each in reservations:
        runtime.release(each)


def _short(resources: dict[str, float]) -> str:
    names = ("CPU", "GPU", "NPU")
    return "{" + ", ".join(f"{name}: {resources[name]:g}" for name in names if name in resources) + "}"
