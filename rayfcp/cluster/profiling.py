"""Measuring the workers: timed passes for a run that starts, and those of `rayfcp profile`."""

import dataclasses
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from rayfcp.cluster.capacity import cluster_spec, device_memory
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.files import prepared_data, with_absolute_paths
from rayfcp.cluster.local import connect
from rayfcp.cluster.measured import BASE_HARDWARE, Measured, combine, measure_cost
from rayfcp.cluster.placement import resolved_device
from rayfcp.cluster.profiled import Profiled, Profiler, Rounds, Say
from rayfcp.cluster.startup import device_peak_flops, join_devices
from rayfcp.cluster.trainer import check_runnable
from rayfcp.config import Config, ConfigError
from rayfcp.plan import CostModel
from rayfcp.plan.primitives import exchange_degrees
from rayfcp.plan.profiles.parts import PartTimings, slowest
from rayfcp.plan.profiles.pictures import picture_shapes
from rayfcp.plan.profiles.shapes import PassShape, exchange_shapes, few_shapes
from rayfcp.values import ClusterSpec, ModelProfile, VisionProfile

START_TOKENS = {"cpu": 1024, "cuda": 16384, "npu": 16384}
"""Tokens of the largest pass of one rank that is timed before a run starts."""
START_ROUNDS = 3


def timed_rounds(crew: Crew, shapes: Sequence[PassShape], *, rounds: int, say: Say) -> Rounds:
    """`rounds` passes of each shape, and one more before them that is thrown away; all ranks at once."""
    found: Rounds = []
    for number in range(rounds + 1):
        say(f"passes of {len(shapes)} shapes: {f'round {number} of {rounds}' if number else 'warming up'}")
        found.append(crew.each(lambda _, worker: worker.time_passes.remote(shapes)))
    return found[1:]


def start_cost(
    crew: Crew,
    guess: CostModel,
    *,
    cluster: ClusterSpec,
    max_seqlen: int,
    primitives: Collection[str],
    vision: VisionProfile | None = None,
) -> Measured:
    """A cost model from few short passes of the primitives that plans may use: what a run that was not profiled starts
    with."""
    exchanges = exchange_degrees(guess, num_ranks=cluster.num_ranks, primitives=primitives)
    tokens = min(START_TOKENS[crew.facts[0].device], max_seqlen, cluster.max_tokens_per_rank)
    if guess.pipeline:  # whose bound knows that plans recompute; these passes do not
        tokens = max(min(tokens, guess.pipeline.tokens_alone), 1)
    shapes = few_shapes(cluster.num_ranks, max_tokens=tokens) + exchange_shapes(exchanges, max_tokens=tokens)
    shapes += picture_shapes(vision, max_tokens=tokens) if vision else []
    shapes = [dataclasses.replace(each, windows=guess.windows) for each in shapes]
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
        timed = _TimedCrew(config, crew, say=say)
        profiler = Profiler(config, timed, model=data.model, cluster=cluster, folder=folder, say=say)
        return profiler.run(rounds, max_tokens=most)


class _TimedCrew:
    """Workers that are joined; see `Timed`."""

    def __init__(self, config: Config, crew: Crew, *, say: Say) -> None:
        self._config, self._crew, self._say = config, crew, say
        self.device = crew.facts[0].device
        self.base = BASE_HARDWARE[self.device]

    def parts(self, model: ModelProfile, *, max_tokens: int) -> PartTimings:
        return slowest(self._crew.each(lambda _, worker: worker.time_parts.remote(model, max_tokens=max_tokens)))

    def rounds(self, shapes: Sequence[PassShape], *, rounds: int) -> Rounds:
        return timed_rounds(self._crew, shapes, rounds=rounds, say=self._say)

    def peak_flops(self) -> float:
        return device_peak_flops(self._config, self._crew)

    def memory_bytes(self) -> int:
        return device_memory(self._config, self._crew.facts)
