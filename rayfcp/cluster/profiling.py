"""Measuring the workers: timed passes for a run that starts, and all of `rayfcp profile`."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayfcp.cluster.capacity import cluster_spec, device_memory
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.dataset import Dataset, open_dataset
from rayfcp.cluster.files import prepared_data, with_absolute_paths
from rayfcp.cluster.local import connect
from rayfcp.cluster.measured import (
    BASE_HARDWARE,
    BYTES,
    COMMAND,
    Measured,
    about_run,
    analytic_cost,
    combine,
    measure_cost,
    ranks_per_node,
    write_measured,
)
from rayfcp.cluster.placement import resolved_device
from rayfcp.cluster.simulated import simulation_error, without_shards
from rayfcp.cluster.startup import device_peak_flops, join_devices
from rayfcp.cluster.trainer import check_runnable
from rayfcp.config import Config, ConfigError
from rayfcp.plan import HARDWARE, CostModel, hardware_profile
from rayfcp.plan.primitives import exchange_degrees
from rayfcp.plan.profiles.device import measured_hardware
from rayfcp.plan.profiles.fit import Timing
from rayfcp.plan.profiles.parts import PartTimings, attention_half_tokens, half_tokens, line, slowest
from rayfcp.plan.profiles.shapes import PassShape, exchange_shapes, few_shapes, many_shapes
from rayfcp.values import ClusterSpec, HardwareProfile

START_TOKENS = {"cpu": 1024, "cuda": 16384, "npu": 16384}
"""Tokens of the largest pass of one rank that is timed before a run starts."""
START_ROUNDS = 3
HOLD_OUT_EVERY = 4

Say = Callable[[str], None]
Rounds = list[list[list[Timing]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What `rayfcp profile` found, and where it is kept. `simulation_error`: of the simulator, mean over passes."""

    measured: Measured
    parts: PartTimings
    hardware: HardwareProfile
    simulation_error: float
    profile_path: Path
    hardware_path: Path


def timed_rounds(crew: Crew, shapes: Sequence[PassShape], *, rounds: int, say: Say) -> Rounds:
    """`rounds` passes of each shape, and one more before them that is thrown away; all ranks at once."""
    found: Rounds = []
    for number in range(rounds + 1):
        say(f"passes of {len(shapes)} shapes: {f'round {number} of {rounds}' if number else 'warming up'}")
        found.append(crew.each(lambda _, worker: worker.time_passes.remote(shapes)))
    return found[1:]


def start_cost(
    crew: Crew, guess: CostModel, *, cluster: ClusterSpec, max_seqlen: int, primitives: Collection[str]
) -> Measured:
    """A cost model from few short passes of the primitives that plans may use: what a run that was not profiled starts
    with."""
    exchanges = exchange_degrees(guess, num_ranks=cluster.num_ranks, primitives=primitives)
    tokens = min(START_TOKENS[crew.facts[0].device], max_seqlen, cluster.max_tokens_per_rank)
    if guess.pipeline:  # whose bound knows that plans recompute; these passes do not
        tokens = max(min(tokens, guess.pipeline.tokens_alone), 1)
    shapes = few_shapes(cluster.num_ranks, max_tokens=tokens) + exchange_shapes(exchanges, max_tokens=tokens)
    return measure_cost(guess, combine(timed_rounds(crew, shapes, rounds=START_ROUNDS - 1, say=lambda _: None)))


def profile_run(config: Config, *, out_dir: str | None, rounds: int, max_tokens: int | None, say: Say) -> Profiled:
    """Start the run's workers, time them, fit, and write `profile.json` and `hardware.yaml`.

    Passes hold up to `max_tokens` tokens a rank: as many as memory permits, at most `data.max_seqlen`, if
    absent. `say` hears what is being done.

    Raises:
        ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
        WorkerFailedError: a worker raised or died.
    """
    check_runnable(config)
    for field in ("pipeline_stages", "tensor_parallel"):
        if getattr(config.cluster, field) > 1:
            raise ConfigError(
                f"cluster.{field} is {getattr(config.cluster, field)}, must be 1 for rayfcp profile; leave it out: a "
                "run with it measures itself when it starts"
            )
    config = with_absolute_paths(config)
    folder = Path(out_dir or config.run_dir).absolute()
    started_here = connect(config)
    with ExitStack() as ending:
        if started_here:
            import ray

            ending.callback(ray.shutdown)
        data_dir = prepared_data(config, say=say)
        data, device = open_dataset(config, data_dir=data_dir), resolved_device(config)
        say(f"starting {config.cluster.max_workers} workers")
        crew = Crew.start(config, device=device, data_dir=data_dir, vocab_size=data.vocab_size, stopped=lambda: False)
        ending.callback(crew.end)
        say(f"joining {len(crew)} ranks")
        cluster = cluster_spec(config, data.model, facts=crew.facts, generation=0)
        _store, _joined = join_devices(crew, cluster)
        most = min(max_tokens or config.data.max_seqlen, cluster.max_tokens_per_rank)
        return _Profiler(config, crew, data=data, cluster=cluster, folder=folder, say=say).run(rounds, max_tokens=most)


class _Profiler:
    """Workers that are joined, and what is to be known of them."""

    def __init__(
        self, config: Config, crew: Crew, *, data: Dataset, cluster: ClusterSpec, folder: Path, say: Say
    ) -> None:
        self._config, self._crew, self._cluster, self._folder, self._say = config, crew, cluster, folder, say
        self._model, self._device = data.model, crew.facts[0].device

    def run(self, rounds: int, *, max_tokens: int) -> Profiled:
        crew, model = self._crew, self._model
        self._say("attention, linear layers, messages and gathers alone")
        parts = slowest(crew.each(lambda _, worker: worker.time_parts.remote(model, max_tokens=max_tokens)))
        guess = dataclasses.replace(
            analytic_cost(self._config, model, device=self._device, cluster=self._cluster),
            ranks_per_node=ranks_per_node(self._cluster),
            attention_half_tokens=attention_half_tokens(parts.attention_s),
        )
        exchanges = exchange_degrees(guess, num_ranks=len(crew), primitives=self._config.plan.primitives)
        shapes = many_shapes(len(crew), max_tokens=max_tokens) + exchange_shapes(exchanges, max_tokens=max_tokens)
        timings = combine(timed_rounds(crew, shapes, rounds=rounds, say=self._say))
        measured = measure_cost(guess, timings, hold_out_every=HOLD_OUT_EVERY)
        self._say("peak of the devices")
        peak_flops = device_peak_flops(self._config, crew)
        hardware = measured_hardware(
            hardware_profile(BASE_HARDWARE[self._device]),
            measured.fit.cost,
            model=model,
            name=f"{self._config.run.name}-{self._device}",
            peak_flops=peak_flops,
            memory_bytes=device_memory(self._config, crew.facts),
            bytes_per_element=BYTES[self._config.model.dtype],
            linear_half_tokens=half_tokens(parts.linear_s),
            num_nodes=len(set(self._cluster.node_of_rank)),
        )
        hardware = without_shards(hardware, measured.fit.cost, cluster=self._cluster, model=model)
        found = simulation_error(
            shapes, timings, cluster=self._cluster, model=model, hardware=hardware, cost=measured.fit.cost
        )
        return self._written(measured, parts, hardware=hardware, rounds=rounds, simulation_error=found)

    def _written(
        self,
        measured: Measured,
        parts: PartTimings,
        *,
        hardware: HardwareProfile,
        rounds: int,
        simulation_error: float,
    ) -> Profiled:
        self._folder.mkdir(parents=True, exist_ok=True)
        profile_path, hardware_path = self._folder / "profile.json", self._folder / "hardware.yaml"
        about = about_run(self._config, self._model, device=self._device, cluster=self._cluster)
        write_measured(
            profile_path,
            measured,
            about=about,
            made_by=COMMAND,
            rounds=rounds,
            parts=dataclasses.asdict(parts),
            hardware=dataclasses.asdict(hardware),
            simulation_error=simulation_error,
        )
        base = BASE_HARDWARE[self._device]
        where = f"measured on {len(self._crew)} {self._device} ranks with {self._model.name}, {rounds} rounds"
        hardware_path.write_text(hardware_text(hardware, base=base, where=where))
        return Profiled(
            measured=measured,
            parts=parts,
            hardware=hardware,
            simulation_error=simulation_error,
            profile_path=profile_path,
            hardware_path=hardware_path,
        )


def hardware_text(hardware: HardwareProfile, *, base: str, where: str) -> str:
    """A hardware profile as YAML that `rayfcp compare --hardware` reads; each figure with where it comes from."""
    named, told = hardware_profile(base), HARDWARE.sources(base)
    fields = {name: value for name, value in dataclasses.asdict(hardware).items() if name != "source"}
    same = {name for name, value in fields.items() if value == getattr(named, name)}
    sources: dict[str, Any] = {
        name: f"{base}: {told.get(name, 'see that profile')}" if name in same else where
        for name in fields
        if name != "name"
    }
    return str(yaml.safe_dump({**fields, "sources": sources}, sort_keys=False, width=110))


def profile_table(profiled: Profiled) -> str:
    """What was found, for people."""
    cost, measured, parts = profiled.measured.fit.cost, profiled.measured, profiled.parts
    attention_s, linear_s = parts.attention_s[0], parts.linear_s[0]
    rows = [
        ("passes", f"{len(measured.passes)} shapes, {len(measured.held_out)} of them held out"),
        ("attention", f"{1e9 * cost.attention_s_per_cell:.4g} ns a cell, half tokens {cost.attention_half_tokens:.0f}"),
        ("linear layers", f"{1e6 * cost.linear_s_per_token:.4g} us a token"),
        ("microbatch", f"{1e3 * cost.fixed_s:.4g} ms fixed"),
        (
            "ring",
            f"{1e6 * cost.ring_intra_s_per_token:.4g} us a token and hop, {1e3 * cost.ring_s_per_round:.4g} ms a hop",
        ),
        ("overlap", f"{cost.overlap:.2f} of the shorter of ring and attention"),
        ("kernel alone", f"{1e3 * attention_s[1]:.4g} ms for a layer over {attention_s[0]} tokens"),
        ("linear alone", f"{1e3 * linear_s[1]:.4g} ms for a layer over {linear_s[0]} tokens"),
    ]
    if parts.message_s:
        for label, points in (("message alone", parts.message_s), ("gather alone", parts.gather_s)):
            found = line(points)
            rows.append((label, f"{found.units_per_s / 1e9:.3g} GB/s, {1e6 * found.constant_s:.3g} us latency"))
    rows.append(("fit error", f"{measured.fit.mean_error:.1%} mean over fitted passes"))
    held = [measured.passes[at] for at in measured.held_out]
    rows.append(("held-out error", f"{measured.held_out_error:.1%} mean" if held else "nothing was held out"))
    rows.append(
        ("simulator", f"{profiled.simulation_error:.1%} mean error over all passes, with the measured hardware")
    )
    rows += [("profile", str(profiled.profile_path)), ("hardware", str(profiled.hardware_path))]
    return "\n".join(f"  {label:<15} {text}" for label, text in rows)
