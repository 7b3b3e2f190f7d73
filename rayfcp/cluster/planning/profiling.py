"""`rayfcp profile`: a run's workers, timed."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.planning.capacity import cluster_spec, device_memory
from rayfcp.cluster.planning.costs import Profiled, Profiler, Rounds, Say, timed_rounds
from rayfcp.cluster.planning.measured import BASE_HARDWARE
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.trainer import check_runnable, connect, prepared_data, with_absolute_paths
from rayfcp.cluster.workers.group import Crew, device_peak_flops, join_devices
from rayfcp.cluster.workers.placement import resolved_device
from rayfcp.config import Config, ConfigError
from rayfcp.cost.fit import PartTimings, PassShape, slowest
from rayfcp.values import ModelProfile


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
        data, runtime = open_dataset(config, data_dir=data_dir), RayRuntime()
        device = resolved_device(config, runtime=runtime)
        say(f"starting {config.cluster.max_workers} workers")
        crew = Crew.start(
            config,
            runtime=runtime,
            device=device,
            data_dir=data_dir,
            vocab_size=data.vocab_size,
            stopped=lambda: False,
        )
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
