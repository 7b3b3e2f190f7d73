"""Measured costs: of the first plans of a run, and `profile.json` and `hardware.yaml` of `rayfcp profile`."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rayfcp.cluster.facts.capacity import as_run_on, cluster_spec, device_memory
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.facts.measured import (
    BYTES,
    COMMAND,
    MeasuredCost,
    about_run,
    analytic_cost,
    combine,
    measure_cost,
    pass_seconds,
    profiled_cost,
    without_shards,
    write_measured,
)
from rayfcp.config import Config
from rayfcp.cost.fit import (
    PartTimings,
    PassShape,
    Timing,
    attention_half_tokens,
    exchange_shapes,
    few_shapes,
    half_tokens,
    image_shapes,
    line,
    many_image_shapes,
    many_shapes,
    measured_hardware,
)
from rayfcp.plan import HARDWARE, CostModel, hardware_profile
from rayfcp.plan.assembly import exchange_degrees
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile
from rayfcp.values.devices import DEVICES

HOLD_OUT_EVERY = 4

START_ROUNDS = 2
"""Timed passes of each shape at the start of a run: one more costs seconds, one less lets a hiccup decide."""

Log = Callable[[str], None]


Passes = Callable[[Sequence[PassShape]], Sequence[Sequence[Timing]]]
"""Times one pass of each shape on all ranks at once: `[rank][shape]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRanks:
    """Ranks that are timed all at once, with functions that time them.

    `base`: named profile of the device; `parts(model, max_tokens=...)`: parts of a pass, of the slowest rank;
    `peak_flops`: of one device.
    """

    facts: Sequence[DeviceFacts]
    base: str
    parts: Callable[..., PartTimings]
    passes: Passes
    peak_flops: Callable[[], float]


def time_shapes(passes: Passes, shapes: Sequence[PassShape], *, rounds: int, log: Log = lambda _: None) -> list[Timing]:
    """Time `rounds` passes of each shape, after a warm-up."""
    found = []
    for number in range(rounds + 1):
        log(f"passes of {len(shapes)} shapes: {f'round {number} of {rounds}' if number else 'warming up'}")
        found.append(passes(shapes))
    return combine(found[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Result of `rayfcp profile` and its files. `simulation_error`: mean error of the simulator over passes."""

    measured: MeasuredCost
    parts: PartTimings
    hardware: HardwareProfile
    simulation_error: float
    profile_path: Path
    hardware_path: Path


def profile_ranks(
    config: Config,
    timed: TimedRanks,
    *,
    model: ModelProfile,
    out_dir: str | None,
    rounds: int,
    max_tokens: int | None,
    log: Log,
) -> Profiled:
    """Time the ranks, fit the cost model, and write `profile.json` and `hardware.yaml`; arguments as `profile_run`."""
    folder, device = Path(out_dir or config.run_dir).absolute(), timed.facts[0].device
    cluster = cluster_spec(config, model, facts=timed.facts, generation=0)
    max_tokens = min(max_tokens or config.data.max_seqlen, cluster.max_tokens_per_rank)
    log("attention, linear layers, messages and gathers alone")
    parts = timed.parts(model, max_tokens=max_tokens)
    guess = dataclasses.replace(
        analytic_cost(config, model, device=device, cluster=cluster),
        attention_half_tokens=attention_half_tokens(parts.attention_s),
    )
    shapes, num_text = _profile_shapes(guess, config, model=model, num_ranks=cluster.num_ranks, max_tokens=max_tokens)
    timings = time_shapes(timed.passes, shapes, rounds=rounds, log=log)
    measured = measure_cost(guess, timings, hold_out_every=HOLD_OUT_EVERY)
    cost = measured.fit.cost
    hardware = _profile_hardware(config, timed, parts=parts, cost=cost, model=model, cluster=cluster, log=log)
    simulation_error = fmean(
        abs(pass_seconds(shape, cluster=cluster, model=model, hardware=hardware, cost=cost) / timing.seconds - 1)
        for shape, timing in zip(shapes[:num_text], timings, strict=False)
    )
    profiled = Profiled(
        measured=measured,
        parts=parts,
        hardware=hardware,
        simulation_error=simulation_error,
        profile_path=folder / "profile.json",
        hardware_path=folder / "hardware.yaml",
    )
    _write(profiled, config=config, timed=timed, model=model, cluster=cluster, rounds=rounds)
    return profiled


def _profile_shapes(
    guess: CostModel, config: Config, *, model: ModelProfile, num_ranks: int, max_tokens: int
) -> tuple[list[PassShape], int]:
    """Shapes of text, then those for the vision encoder; and the number of the former."""
    exchanges = exchange_degrees(guess, num_ranks=num_ranks, primitives=config.plan.primitives)
    text = many_shapes(num_ranks, max_tokens=max_tokens) + exchange_shapes(exchanges, max_tokens=max_tokens)
    images = many_image_shapes(model.vision, max_tokens=max_tokens) if model.vision else []
    return [_with_model(each, model) for each in (*text, *images)], len(text)


def _with_model(shape: PassShape, model: ModelProfile) -> PassShape:
    return dataclasses.replace(shape, layer_kinds=model.layer_kinds, head_fraction=model.head_fraction)


def _too_fast(hardware: HardwareProfile, facts: DeviceFacts) -> str | None:
    """Warning that passes of an accelerator explain more FLOP/s than its data sheet has, None otherwise."""
    found = hardware.peak_flops
    if DEVICES[facts.device].is_host or facts.peak_flops is None or found <= facts.peak_flops:
        return None
    return (
        f"warning: by these passes the device computes {found / 1e12:,.0f} TFLOP/s, more than its peak "
        f"({facts.peak_flops / 1e12:,.0f}): the host, which enqueues the work, is the bound of most of them, so that "
        "seconds hardly grow with tokens; do not use this profile, time more tokens (--max-tokens) or a larger model"
    )


def _profile_hardware(
    config: Config,
    timed: TimedRanks,
    *,
    parts: PartTimings,
    cost: CostModel,
    model: ModelProfile,
    cluster: ClusterSpec,
    log: Log,
) -> HardwareProfile:
    log("peak of the devices")
    hardware = measured_hardware(
        hardware_profile(timed.base),
        cost,
        model=model,
        name=f"{config.run.name}-{timed.facts[0].device}",
        peak_flops=timed.peak_flops(),
        memory_bytes=device_memory(config, timed.facts),
        bytes_per_element=BYTES[config.model.dtype],
        linear_half_tokens=half_tokens(parts.linear_s),
        num_nodes=len(set(cluster.node_of_rank)),
    )
    if warning := _too_fast(hardware, timed.facts[0]):
        log(warning)
    return without_shards(hardware, cost, cluster=cluster, model=model)


def _write(
    profiled: Profiled, *, config: Config, timed: TimedRanks, model: ModelProfile, cluster: ClusterSpec, rounds: int
) -> None:
    """Write both files."""
    device, count = timed.facts[0].device, cluster.num_ranks
    profiled.profile_path.parent.mkdir(parents=True, exist_ok=True)
    write_measured(
        profiled.profile_path,
        profiled.measured,
        about=about_run(config, model, device=device, cluster=cluster),
        made_by=COMMAND,
        rounds=rounds,
        parts=dataclasses.asdict(profiled.parts),
        hardware=dataclasses.asdict(profiled.hardware),
        simulation_error=profiled.simulation_error,
    )
    ranks = f"{count} {device} {'rank' if count == 1 else 'ranks'}"
    where = f"measured on {ranks} with {model.name}, {rounds} rounds"
    profiled.hardware_path.write_text(hardware_text(profiled.hardware, base=timed.base, where=where))


def hardware_text(hardware: HardwareProfile, *, base: str, where: str) -> str:
    """Hardware profile as YAML for `rayfcp compare --hardware`, with the source of each figure."""
    named, given = hardware_profile(base), HARDWARE.sources(base)
    fields = {name: value for name, value in dataclasses.asdict(hardware).items() if name != "source"}
    same = {name for name, value in fields.items() if value == getattr(named, name)}
    sources: dict[str, Any] = {
        name: f"{base}: {given.get(name, 'see that profile')}" if name in same else where
        for name in fields
        if name != "name"
    }
    return str(yaml.safe_dump({**fields, "sources": sources}, sort_keys=False, width=110))


def profile_table(profiled: Profiled) -> str:
    """Table of the results."""
    cost, measured, parts = profiled.measured.fit.cost, profiled.measured, profiled.parts
    attention_s, linear_s = parts.attention_s[0], parts.linear_s[0]
    rows = [
        ("passes", f"{len(measured.passes)} shapes, {len(measured.held_out)} of them held out"),
        ("attention", f"{1e9 * cost.attention_s_per_pair:.4g} ns a pair, half tokens {cost.attention_half_tokens:.0f}"),
        ("linear layers", f"{1e6 * cost.linear_s_per_token:.4g} us a token"),
        ("microbatch", f"{1e3 * cost.fixed_s:.4g} ms fixed"),
        ("kernel alone", f"{1e3 * attention_s[1]:.4g} ms for a layer over {attention_s[0]} tokens"),
        ("linear alone", f"{1e3 * linear_s[1]:.4g} ms for a layer over {linear_s[0]} tokens"),
    ]
    if cost.encoder is not None:
        patch_us, pair_ns = 1e6 * cost.encoder.s_per_patch, 1e9 * cost.encoder.s_per_pair
        rows.append(("vision encoder", f"{patch_us:.4g} us a patch, {pair_ns:.4g} ns a pair"))
    if parts.message_s:
        ring_us, hop_ms = 1e6 * cost.ring_intra_s_per_token, 1e3 * cost.ring_s_per_round
        rows.append(("ring", f"{ring_us:.4g} us a token and hop, {hop_ms:.4g} ms a hop"))
        rows.append(("overlap", f"{cost.overlap:.2f} of the shorter of ring and attention"))
        for label, points in (("message alone", parts.message_s), ("gather alone", parts.gather_s)):
            latency_s, bytes_per_s = line(points)
            rows.append((label, f"{bytes_per_s / 1e9:.3g} GB/s, {1e6 * latency_s:.3g} us latency"))
    rows.append(("fit error", f"{measured.fit.mean_error:.1%} mean over fitted passes"))
    held = [measured.passes[at] for at in measured.held_out]
    rows.append(("held-out error", f"{measured.held_out_error:.1%} mean" if held else "nothing was held out"))
    rows.append(
        ("simulator", f"{profiled.simulation_error:.1%} mean error over all passes, with the measured hardware")
    )
    rows += [("note", note) for note in measured.fit.notes]
    rows += [("profile", str(profiled.profile_path)), ("hardware", str(profiled.hardware_path))]
    return "\n".join(f"  {label:<15} {text}" for label, text in rows)


def start_cost(
    passes: Passes,
    guess: CostModel,
    *,
    device: str,
    cluster: ClusterSpec,
    max_seqlen: int,
    primitives: Collection[str],
    model: ModelProfile,
) -> MeasuredCost:
    """Cost model from few short passes of the primitives that plans may use, for runs that were not profiled."""
    exchanges = exchange_degrees(guess, num_ranks=cluster.num_ranks, primitives=primitives)
    tokens = min(DEVICES[device].start_tokens, max_seqlen, cluster.max_tokens_per_rank)
    if guess.pipeline:  # its bound assumes recomputation; these passes do not recompute
        tokens = max(min(tokens, guess.pipeline.tokens_alone), 1)
    shapes = few_shapes(cluster.num_ranks, max_tokens=tokens) + exchange_shapes(exchanges, max_tokens=tokens)
    shapes += image_shapes(model.vision, max_tokens=tokens) if model.vision else []
    shapes = [_with_model(each, model) for each in shapes]
    return measure_cost(guess, time_shapes(passes, shapes, rounds=START_ROUNDS))


class StartCosts:
    """Analytic cost model of any generation, and measured ones of generations that have joined."""

    def __init__(self, config: Config, model: ModelProfile, *, device: str, profile_path: Path, log: Log) -> None:
        self._config, self.model, self._device, self.profile_path, self._log = config, model, device, profile_path, log

    def guess(self, facts: Sequence[DeviceFacts], cluster: ClusterSpec) -> CostModel:
        """Return the analytic cost model of these devices."""
        return analytic_cost(
            self._config,
            as_run_on(facts, self.model),
            device=self._device,
            cluster=cluster,
            memory_bytes=device_memory(self._config, facts),
        )

    def measure(self, passes: Passes, facts: Sequence[DeviceFacts], *, cluster: ClusterSpec) -> CostModel:
        """Return the cost model of `rayfcp profile` for the same model and ranks, else one measured now by `passes`,
        also after a resume, since ranks may differ. Steps refit it.

        Errors are those of `passes`.
        """
        self._log("measuring devices")
        config = self._config
        about = about_run(config, self.model, device=self._device, cluster=cluster)
        cost = profiled_cost(self.profile_path, about=about, log=self._log)
        if cost is not None:
            self._log(f"cost model of {COMMAND} in {self.profile_path}")
            return cost
        measured = start_cost(
            passes,
            self.guess(facts, cluster),
            device=self._device,
            cluster=cluster,
            max_seqlen=config.data.max_seqlen,
            primitives=config.plan.primitives,
            model=self.model,
        )
        for note in measured.fit.notes:
            self._log(note)
        try:
            write_measured(self.profile_path, measured, about=about)
        except OSError as error:  # no reason to end a run, which does not need it
            self._log(f"{self.profile_path} could not be written: {error.strerror}")
        return measured.fit.cost
