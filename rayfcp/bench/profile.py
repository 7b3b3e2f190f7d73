"""`rayfcp profile --alone`: one device times itself, without Ray."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rayfcp.bench.alone import Alone, alone
from rayfcp.bench.machine import base_hardware, device_name
from rayfcp.cluster.capacity import cluster_spec, device_memory
from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.profiled import Profiled, Profiler, Rounds, Say
from rayfcp.config import Config, ConfigError
from rayfcp.execute.calibrate import time_passes
from rayfcp.execute.device import device_kind, measure_flops, peak_flops, resolve_device, total_memory_bytes
from rayfcp.execute.kernels import pick_kernel
from rayfcp.plan.profiles.parts import PartTimings
from rayfcp.plan.profiles.shapes import PassShape
from rayfcp.values import ModelProfile


def profile_alone(config: Config, *, out_dir: str | None, rounds: int, max_tokens: int | None, say: Say) -> Profiled:
    """Time the run's model on one device of this machine, fit, and write `profile.json` and `hardware.yaml`.

    Links between devices stay those of the nearest named profile. Passes hold up to `max_tokens` tokens: as many as
    memory permits, at most `data.max_seqlen`, if absent. `say` hears what is being done.

    Raises:
        ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
    """
    kind = device_kind(config.cluster.device)
    pick_kernel(kind)  # first: it says what to install
    device = resolve_device(kind)
    say(f"one device alone: {device_name(device)}")
    with alone(config, device=device) as rank:
        timed = TimedAlone(config, rank, say=say)
        cluster = cluster_spec(config, rank.model, facts=(timed.facts,), generation=0)
        most = min(max_tokens or config.data.max_seqlen, cluster.max_tokens_per_rank)
        folder = Path(out_dir or config.run_dir).absolute()
        profiler = Profiler(config, timed, model=rank.model, cluster=cluster, folder=folder, say=say)
        return profiler.run(rounds, max_tokens=most)


class TimedAlone:
    """One device in a world of its own; see `Timed`."""

    def __init__(self, config: Config, rank: Alone, *, say: Say = lambda _: None) -> None:
        self._config, self._engine, self._say = config, rank.engine, say
        device = rank.engine.device
        self.device = device.type
        self.base = base_hardware(device)
        self.facts = DeviceFacts(
            node_id="here",
            device=device.type,
            memory_bytes=total_memory_bytes(device),
            peak_flops=peak_flops(device),
        )

    def parts(self, model: ModelProfile, *, max_tokens: int) -> PartTimings:
        return self._engine.time_parts(model, max_tokens=max_tokens)

    def rounds(self, shapes: Sequence[PassShape], *, rounds: int) -> Rounds:
        found: Rounds = []
        for number in range(rounds + 1):
            self._say(f"passes of {len(shapes)} shapes: {f'round {number} of {rounds}' if number else 'warming up'}")
            found.append([time_passes(self._engine, shapes, clock=device_clock(self._engine.device))])
        return found[1:]

    def peak_flops(self) -> float:
        peak = self._config.metrics.peak_flops or self.facts.peak_flops
        if peak is not None:
            return peak
        if self.device != "cpu":
            raise ConfigError(
                f"metrics.peak_flops is not set and no table knows {device_name(self._engine.device)}; set it to the "
                "device's dense FLOP/s in model.dtype"
            )
        return measure_flops(self._engine.device)

    def memory_bytes(self) -> int:
        return device_memory(self._config, (self.facts,))


def device_clock(device: torch.device) -> Callable[[], float]:
    """Seconds, told once the device has done all that it was given."""
    if device.type == "cpu":
        return time.perf_counter
    module: Any = getattr(torch, device.type)

    def clock() -> float:
        module.synchronize()
        return time.perf_counter()

    return clock
