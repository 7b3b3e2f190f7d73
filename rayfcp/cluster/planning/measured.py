"""A measured hardware profile made to agree with the simulator, which counts the traffic of shards itself.

The cost model of a run: analytic from profiles, its coefficients replaced by what the workers measured.
"""

import dataclasses
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rayfcp.config import Config
from rayfcp.cost.analytic import ShardTraffic, device_model
from rayfcp.cost.fit import OVERLAPS, Fit, PassShape, Timing, fit_cost, fit_encoder, mean_error, pass_plan, predicted_s
from rayfcp.plan import CostModel, hardware_profile
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.telemetry.files import write_whole
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile


def pass_seconds(
    shape: PassShape, *, cluster: ClusterSpec, model: ModelProfile, hardware: HardwareProfile, recomputed_layers: int
) -> float:
    """What the simulator says of a timed pass."""
    plan, sequences = pass_plan(shape, num_ranks=cluster.num_ranks, recomputed_layers=recomputed_layers)
    programs = lower(plan, sequences)
    return simulate(programs, model=model, hardware=hardware, node_of_rank=cluster.node_of_rank).iteration_s


def without_shards(
    hardware: HardwareProfile, cost: CostModel, *, cluster: ClusterSpec, model: ModelProfile
) -> HardwareProfile:
    """`hardware` whose fixed cost is what is left of the measured one beside the simulated gathers and reductions.

    Of the simulated pass of one token a rank, only that traffic is not in the cost model: with the overhead
    that is returned, both say the same of it, as far as an overhead of at least 0 can.
    """
    shape = PassShape(degree=1, lengths=(1,))
    simulated_s = pass_seconds(
        shape, cluster=cluster, model=model, hardware=hardware, recomputed_layers=cost.recomputed_layers
    )
    more_s = simulated_s - float(cost.group_s(1.0, 1.0, degree=1))
    return dataclasses.replace(hardware, microbatch_overhead_s=max(0.0, hardware.microbatch_overhead_s - more_s))


def simulation_error(
    shapes: Sequence[PassShape],
    timings: Sequence[Timing],
    *,
    cluster: ClusterSpec,
    model: ModelProfile,
    hardware: HardwareProfile,
    cost: CostModel,
) -> float:
    """Mean of |simulated - measured| / measured over timed passes."""
    again = cost.recomputed_layers
    simulated = [
        pass_seconds(shape, cluster=cluster, model=model, hardware=hardware, recomputed_layers=again)
        for shape in shapes
    ]
    return fmean(abs(one - each.seconds) / each.seconds for one, each in zip(simulated, timings, strict=True))


logger = logging.getLogger(__name__)

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
BASE_HARDWARE = {"cpu": "cpu", "cuda": "h100", "npu": "ascend-910c"}
COMMAND = "rayfcp profile"

LEAST_SHARE = 0.1
"""Of the guessed seconds of computation, where passes show none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A fitted cost model, the timed passes, and which of them (`held_out`, by position) it was not fitted to."""

    fit: Fit
    passes: tuple[Timing, ...]
    held_out: tuple[int, ...]

    @property
    def held_out_error(self) -> float:
        """Mean of |predicted - measured| / measured of what was held out; 0 where nothing was."""
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
    """From `hardware`, or the device's named profile: a first guess, and what an unmeasured plan is made with.
    Of a rank's device of each stage, with `memory_bytes`: sums over tensor-parallel devices are left out, and
    measured."""
    return CostModel.from_profiles(
        device_model(model, cluster.tensor_parallel),
        hardware or hardware_profile(BASE_HARDWARE[device]),
        num_ranks=cluster.num_ranks,
        num_stages=cluster.num_stages,
        layers_of_stage=cluster.layers_of_stage,
        memory_bytes=memory_bytes,
        gather_every=config.train.gather_every,
        recomputed_layers=config.train.recompute_layers,
        bytes_per_element=BYTES[config.model.dtype],
        reduce_every=config.train.reduce_every,
    )


def about_run(config: Config, model: ModelProfile, *, device: str, cluster: ClusterSpec) -> dict[str, Any]:
    """What measured coefficients depend on: with all of it equal, an earlier profile still holds."""
    about = {
        "cluster": _layout(cluster),
        "device": device,
        "dtype": config.model.dtype,
        "model": dataclasses.asdict(model) | {"name": ""},
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
    """Into what a rank's layers are cut."""
    return [cluster.num_stages, cluster.tensor_parallel, *cluster.layers_of_stage]


def ranks_per_node(cluster: ClusterSpec) -> int:
    """Ranks of one stage on the largest node that it has."""
    nodes, size = cluster.node_of_rank, cluster.num_ranks
    stages = [nodes[start : start + size] for start in range(0, len(nodes), size)]
    return max((stage.count(node) for stage in stages for node in set(stage)), default=size)


def combine(rounds: Sequence[Sequence[Sequence[Timing]]]) -> list[Timing]:
    """One timing a shape from `rounds[round][rank]`: the slowest rank's in each round, the median over rounds.

    Raises:
        ValueError: ranks or rounds that timed different shapes.
    """
    slowest = [[max(each, key=lambda timing: timing.seconds) for each in zip(*ranks, strict=True)] for ranks in rounds]
    return [
        dataclasses.replace(each[0], seconds=statistics.median(timing.seconds for timing in each))
        for each in zip(*slowest, strict=True)
    ]


def measure_cost(guess: CostModel, passes: Sequence[Timing], *, hold_out_every: int = 0) -> Measured:
    """Fit what all ranks timed at once. A ring over all ranks crosses the slowest link, so one link speed
    stands for all. Where the guess says that nothing overlaps, that stays. Passes that were timed again and again count
    once, with the median.

    With `hold_out_every` k, every k-th pass of each degree, by its cells, is not fitted but predicted.
    """
    passes = _once(passes)
    held_out = _held_out(passes, every=hold_out_every) if hold_out_every else ()
    fitted = [timing for at, timing in enumerate(passes) if at not in held_out and not timing.num_pictures]
    fit = fit_cost(guess, fitted, overlaps=OVERLAPS if guess.overlap > 0 else (0.0,))
    if fit.cost.linear_s_per_token == 0.0 and fit.cost.attention_s_per_cell == 0.0:
        cost = _with_computation(fit.cost, guess)
        fit = Fit(cost=cost, mean_error=mean_error(cost, fitted))
    cost = _with_encoder(_with_stages(fit.cost, guess), guess, passes=passes)
    fit = Fit(cost=cost, mean_error=mean_error(cost, [each for at, each in enumerate(passes) if at not in held_out]))
    return Measured(fit=fit, passes=passes, held_out=held_out)


def _once(passes: Sequence[Timing]) -> tuple[Timing, ...]:
    """Otherwise what is held out may have been fitted."""
    seconds: dict[Timing, list[float]] = defaultdict(list)
    for each in passes:
        seconds[dataclasses.replace(each, seconds=0.0)].append(each.seconds)
    return tuple(dataclasses.replace(each, seconds=statistics.median(times)) for each, times in seconds.items())


def _with_computation(fitted: CostModel, guess: CostModel) -> CostModel:
    """On a machine so noisy that nothing is seen of computation, a little of what the guess says of it: a plan for
    which it is free is worthless."""
    return fitted.with_coefficients(
        linear_s_per_token=LEAST_SHARE * guess.linear_s_per_token,
        attention_s_per_cell=LEAST_SHARE * guess.attention_s_per_cell,
    )


def _with_encoder(fitted: CostModel, guess: CostModel, *, passes: Sequence[Timing]) -> CostModel:
    """And what passes with pictures say of the encoder. Its features travel as keys and values do."""
    if guess.encoder is None or not any(timing.num_pictures for timing in passes):
        return fitted
    link = _times(fitted.ring_intra_s_per_token, guess.ring_intra_s_per_token)
    latency = _times(fitted.ring_s_per_round, guess.ring_s_per_round)
    alone = [timing for timing in passes if timing.degree == 1]
    return dataclasses.replace(fitted, encoder=fit_encoder(guess.encoder, alone, link=link, latency=latency))


def _times(found_s: float, guessed_s: float) -> float:
    """How many times as long as guessed; 1 where nothing was."""
    return found_s / guessed_s if guessed_s else 1.0


def _with_stages(fitted: CostModel, guess: CostModel) -> CostModel:
    """What was timed went through all stages, one after the other: its seconds are those of all layers, with the
    hops between stages and the traffic of parameters. The head's share of the linear layers stays the guess's."""
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
    """Never the least or most of a primitive's degree: a fit is asked between what it saw, not beyond."""
    chosen: list[int] = []
    for kind in sorted({(timing.primitive, timing.degree) for timing in passes}):
        alike = [(timing.primitive, timing.degree) == kind and not timing.num_pictures for timing in passes]
        at_degree = [at for at, is_alike in enumerate(alike) if is_alike]
        ordered = sorted(at_degree, key=lambda at: (passes[at].num_cells, passes[at].num_tokens))
        chosen += ordered[every // 2 : -1 : every] if len(ordered) > 2 else []
    return tuple(sorted(set(chosen)))


def write_measured(path: Path, measured: Measured, *, about: dict[str, Any], **more: Any) -> None:
    """`profile.json`: the cost model, its errors, and every timed pass with what it predicts; `more` as it is."""
    cost = measured.fit.cost
    profile = {
        "about": about,
        "cost": dataclasses.asdict(cost),
        "mean_error": measured.fit.mean_error,
        "held_out_error": measured.held_out_error if measured.held_out else None,
        "passes": [
            dataclasses.asdict(each) | {"predicted_s": predicted_s(cost, each), "fitted": at not in measured.held_out}
            for at, each in enumerate(measured.passes)
        ],
        **more,
    }
    path.write_text(json.dumps(profile, indent=1) + "\n")


def read_cost(profile_path: Path) -> CostModel:
    """The cost model that a run measured; after steps that were refitted, what they made of it."""
    profile = json.loads(profile_path.read_text())
    return CostModel.of_fields(profile.get("refitted") or profile["cost"])


def cost_of_layout(profile_path: Path, cluster: ClusterSpec) -> CostModel | None:
    """`read_cost` of a run with the same stages and tensor-parallel devices; None if there is none."""
    if not profile_path.exists():
        return None
    about = json.loads(profile_path.read_text()).get("about", {})
    return read_cost(profile_path) if about.get("cluster") == _layout(cluster) else None


def profiled_cost(profile_path: Path, *, about: dict[str, Any]) -> CostModel | None:
    """The cost model of an earlier `rayfcp profile` of the same model on the same ranks; None if there is none."""
    if not profile_path.exists():
        return None
    profile = json.loads(profile_path.read_text())
    same = profile.get("made_by") == COMMAND and profile.get("about") == about
    return CostModel.of_fields(profile["cost"]) if same else None


def write_refitted(profile_path: Path, cost: CostModel, *, num_steps: int) -> None:
    """Keep beside the measured coefficients those that the last steps were planned with. A disk that has no room for
    them is no reason to end before the last checkpoint."""
    profile = json.loads(profile_path.read_text())
    profile |= {"refitted": dataclasses.asdict(cost), "refitted_steps": num_steps}
    try:
        write_whole(profile_path, json.dumps(profile, indent=1) + "\n")
    except OSError as error:
        logger.warning("%s could not be written: %s", profile_path, error.strerror)
