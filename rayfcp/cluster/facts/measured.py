"""The cost model of a run: analytic, with coefficients measured by the workers; and `profile.json`."""

import dataclasses
import json
import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfcp.config import Config
from rayfcp.cost.analytic import ShardTraffic, device_model
from rayfcp.cost.fit import OVERLAPS, Fit, PassShape, Timing, fit_cost, fit_encoder, mean_error, pass_plan, predicted_s
from rayfcp.plan import CostModel, hardware_profile
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.telemetry.files import write_whole
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile
from rayfcp.values.devices import DEVICES

logger = logging.getLogger(__name__)

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
COMMAND = "rayfcp profile"

LEAST_SHARE = 0.1
"""Share of the analytic coefficients used where timed passes show no computation at all."""


def pass_seconds(
    shape: PassShape, *, cluster: ClusterSpec, model: ModelProfile, hardware: HardwareProfile, cost: CostModel
) -> float:
    """Simulated seconds of a timed pass, which recomputes as many layers as passes of `cost`."""
    plan, sequences = pass_plan(
        shape,
        num_ranks=cluster.num_ranks,
        recomputed_layers=cost.recomputed_layers,
        keeps_attention=cost.keeps_attention,
    )
    programs = lower(plan, sequences)
    return simulate(programs, model=model, hardware=hardware, node_of_rank=cluster.node_of_rank).iteration_s


def without_shards(
    hardware: HardwareProfile, cost: CostModel, *, cluster: ClusterSpec, model: ModelProfile
) -> HardwareProfile:
    """`hardware` with a fixed cost that excludes gathers and reductions, which the simulator adds itself.

    For a pass of one token per rank, simulator and cost model then agree, as far as an overhead of at least 0 allows,
    and without the host, which would hide that.
    """
    shape = PassShape(degree=1, lengths=(1,))
    cost = dataclasses.replace(cost, host_s=0.0, host_s_per_round=0.0)
    alone = dataclasses.replace(hardware, host_layer_s=0.0, host_round_s=0.0)
    simulated_s = pass_seconds(shape, cluster=cluster, model=model, hardware=alone, cost=cost)
    more_s = simulated_s - float(cost.group_s(1.0, 1.0, degree=1))
    return dataclasses.replace(hardware, microbatch_overhead_s=max(0.0, hardware.microbatch_overhead_s - more_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """A fitted cost model, the timed passes, and the positions of those that it was not fitted to (`held_out`)."""

    fit: Fit
    passes: tuple[Timing, ...]
    held_out: tuple[int, ...]

    @property
    def held_out_error(self) -> float:
        """Mean of |predicted - measured| / measured over held-out passes; 0 without any."""
        return mean_error(self.fit.cost, [self.passes[at] for at in self.held_out])


def analytic_cost(
    config: Config,
    model: ModelProfile,
    *,
    device: str,
    cluster: ClusterSpec,
    memory_bytes: int | None = None,
    hardware: HardwareProfile | None = None,
) -> CostModel:
    """Unmeasured cost model, from `hardware` or the device's named profile. All-reduces of tensor parallelism are not
    included: they are measured."""
    cost = CostModel.from_profiles(
        device_model(model, cluster.tensor_parallel),
        hardware or hardware_profile(DEVICES[device].base_hardware),
        num_ranks=cluster.num_ranks,
        num_stages=cluster.num_stages,
        layers_of_stage=cluster.layers_of_stage,
        memory_bytes=memory_bytes,
        gather_every=config.train.gather_every,
        recomputed_layers=config.train.recompute_layers,
        bytes_per_element=BYTES[config.model.dtype],
        reduce_every=config.train.reduce_every,
    )
    return dataclasses.replace(cost, ranks_per_node=ranks_per_node(cluster)) if cluster.node_of_rank else cost


def ranks_per_node(cluster: ClusterSpec) -> int:
    """Largest number of ranks of one stage on one node."""
    nodes, size = cluster.node_of_rank, cluster.num_ranks
    stages = [Counter(nodes[start : start + size]) for start in range(0, len(nodes), size)]
    return max((max(stage.values()) for stage in stages), default=size)


def about_run(config: Config, model: ModelProfile, *, device: str, cluster: ClusterSpec) -> dict[str, Any]:
    """Everything that measured coefficients depend on: a profile with equal values can be reused."""
    shape = dataclasses.asdict(model) | {"name": ""}
    del shape["compiled"]  # by the devices
    about = {
        "cluster": _layout(cluster),
        "device": device,
        "dtype": config.model.dtype,
        "model": shape,
        "node_of_rank": list(cluster.node_of_rank),
        "gather_every": config.train.gather_every,
        "primitives": list(config.plan.primitives),
        "recompute_layers": config.train.recompute_layers,
        "reduce_every": config.train.reduce_every,
        "threads_per_worker": config.train.threads_per_worker,
    }
    found: dict[str, Any] = json.loads(json.dumps(about))  # as it is in a file
    return found


def _layout(cluster: ClusterSpec) -> list[int]:
    """Stages, tensor-parallel size and layer split."""
    return [cluster.num_stages, cluster.tensor_parallel, *cluster.layers_of_stage]


def combine(rounds: Sequence[Sequence[Sequence[Timing]]]) -> list[Timing]:
    """One timing per shape from `rounds[round][rank]`: of the slowest rank in each round, the median over rounds.

    Raises:
        ValueError: ranks or rounds that timed different shapes.
    """
    slowest = [[max(each, key=lambda timing: timing.seconds) for each in zip(*ranks, strict=True)] for ranks in rounds]
    return [
        dataclasses.replace(each[0], seconds=statistics.median(timing.seconds for timing in each))
        for each in zip(*slowest, strict=True)
    ]


def measure_cost(guess: CostModel, passes: Sequence[Timing], *, hold_out_every: int = 0) -> MeasuredCost:
    """Fit the cost model to passes timed on all ranks at once.

    A ring over all ranks crosses the slowest link, so one link speed stands for all. Without overlap in `guess` none
    is fitted. Repeated passes count once, with the median. With `hold_out_every` k, every k-th pass of each degree, by
    its pairs, is held out.
    """
    seconds: dict[Timing, list[float]] = defaultdict(list)
    for each in passes:
        seconds[dataclasses.replace(each, seconds=0.0)].append(each.seconds)
    passes = tuple(dataclasses.replace(each, seconds=statistics.median(times)) for each, times in seconds.items())
    held_out = _held_out(passes, every=hold_out_every) if hold_out_every else ()
    fitted = [timing for at, timing in enumerate(passes) if at not in held_out]
    text = [timing for timing in fitted if not timing.num_images]
    fit = fit_cost(guess, text, overlaps=OVERLAPS if guess.overlap > 0 else (0.0,))
    cost = fit.cost
    if cost.linear_s_per_token == 0.0 and cost.attention_s_per_pair == 0.0:
        # A noisy machine yields coefficients of 0: plans with free computation are useless.
        cost = cost.with_coefficients(
            linear_s_per_token=LEAST_SHARE * guess.linear_s_per_token,
            attention_s_per_pair=LEAST_SHARE * guess.attention_s_per_pair,
        )
    cost = _with_encoder(_with_stages(cost, guess), guess, passes=passes)
    fit = dataclasses.replace(fit, cost=cost, mean_error=mean_error(cost, fitted))
    return MeasuredCost(fit=fit, passes=passes, held_out=held_out)


def _with_encoder(fitted: CostModel, guess: CostModel, *, passes: Sequence[Timing]) -> CostModel:
    """Add the encoder, fitted to passes with images. Its features are sent like keys and values."""
    if guess.encoder is None or not any(timing.num_images for timing in passes):
        return fitted
    link, latency = (
        getattr(fitted, name) / getattr(guess, name) if getattr(guess, name) else 1.0
        for name in ("ring_intra_s_per_token", "ring_s_per_round")
    )
    alone = [timing for timing in passes if timing.degree == 1]
    return dataclasses.replace(fitted, encoder=fit_encoder(guess.encoder, alone, link=link, latency=latency))


def _with_stages(fitted: CostModel, guess: CostModel) -> CostModel:
    """Distribute over stages. Timed passes go through all stages in turn, with the transfers between them and the
    traffic of parameters; the head keeps its analytic share of the linear layers."""
    if guess.pipeline is None:
        return fitted
    scale = fitted.linear_s_per_token / guess.linear_s_per_token
    still = ShardTraffic(**{field.name: 0.0 for field in dataclasses.fields(ShardTraffic)})
    pipeline = dataclasses.replace(
        guess.pipeline,
        head_s_per_token=guess.pipeline.head_s_per_token * scale,
        traffic=(still,) * guess.pipeline.num_stages,
    )
    return dataclasses.replace(fitted, pipeline=pipeline)


def _held_out(passes: Sequence[Timing], *, every: int) -> tuple[int, ...]:
    """Positions of held-out passes; never the smallest or largest of a degree, to interpolate only."""
    chosen: list[int] = []
    for kind in sorted({(timing.primitive, timing.degree) for timing in passes}):
        alike = [(timing.primitive, timing.degree) == kind and not timing.num_images for timing in passes]
        at_degree = [at for at, is_alike in enumerate(alike) if is_alike]
        ordered = sorted(at_degree, key=lambda at: (passes[at].num_pairs, passes[at].num_tokens))
        chosen += ordered[every // 2 : -1 : every] if len(ordered) > 2 else []
    return tuple(sorted(set(chosen)))


def write_measured(path: Path, measured: MeasuredCost, *, about: dict[str, Any], **more: Any) -> None:
    """Write `profile.json`: the cost model, its errors, and every timed pass with its prediction; and `more`.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    cost = measured.fit.cost
    profile = {
        "about": about,
        "cost": dataclasses.asdict(cost),
        "mean_error": measured.fit.mean_error,
        "notes": measured.fit.notes,
        "held_out_error": measured.held_out_error if measured.held_out else None,
        "passes": [
            dataclasses.asdict(each) | {"predicted_s": predicted_s(cost, each), "fitted": at not in measured.held_out}
            for at, each in enumerate(measured.passes)
        ],
        **more,
    }
    write_whole(path, json.dumps(profile, indent=1) + "\n")


def read_cost(profile_path: Path) -> CostModel:
    """The cost model that a run measured, refitted if its steps did so.

    Raises:
        ValueError: the profile is of another version of rayfcp.
    """
    profile = json.loads(profile_path.read_text())
    return CostModel.of_fields(profile.get("refitted") or profile["cost"])


def read_measured_cost(profile_path: Path) -> CostModel | None:
    """The cost model before the run's steps refitted it; None if they did not. Errors as of `read_cost`."""
    profile = json.loads(profile_path.read_text())
    return CostModel.of_fields(profile["cost"]) if profile.get("refitted") else None


def cost_of_layout(profile_path: Path, cluster: ClusterSpec) -> CostModel | None:
    """`read_cost` of a profile with the same parallel layout; None without one, or if it is of another version."""
    profile = _profile_at(profile_path)
    if profile.get("about", {}).get("cluster") != _layout(cluster):
        return None
    return _reused(profile_path, profile.get("refitted") or profile["cost"], log=logger.warning)


def profiled_cost(
    profile_path: Path, *, about: dict[str, Any], log: Callable[[str], None] = logger.warning
) -> CostModel | None:
    """The cost model of an earlier `rayfcp profile` with equal `about`; None without one, or if it is of another
    version."""
    profile = _profile_at(profile_path)
    same = profile.get("made_by") == COMMAND and profile.get("about") == about
    return _reused(profile_path, profile["cost"], log=log) if same else None


def _profile_at(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _reused(profile_path: Path, fields: dict[str, Any], *, log: Callable[[str], None]) -> CostModel | None:
    try:
        return CostModel.of_fields(fields)
    except ValueError as error:
        log(f"{profile_path} is of another version and is not used: {error}")
        return None


def write_refitted(profile_path: Path, cost: CostModel, *, num_steps: int) -> None:
    """Add the refitted cost model to the measured one, if that could be written. A full disk must not keep the run from
    saving its last checkpoint."""
    profile = _profile_at(profile_path)
    if not profile:
        return
    profile |= {"refitted": dataclasses.asdict(cost), "refitted_steps": num_steps}
    try:
        write_whole(profile_path, json.dumps(profile, indent=1) + "\n")
    except OSError as error:
        logger.warning("%s could not be written: %s", profile_path, error.strerror)
