"""`rayfcp profile` on the workers of a run."""

from contextlib import ExitStack

from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.driver.connecting import connected
from rayfcp.cluster.driver.preparing import check_runnable, prepared_data, with_absolute_paths
from rayfcp.cluster.facts.capacity import cluster_spec
from rayfcp.cluster.facts.costs import Log, Profiled, TimedRanks, profile_ranks
from rayfcp.cluster.facts.resources import resolved_device
from rayfcp.cluster.runtime.lifetime import run_key
from rayfcp.cluster.runtime.on_ray import RayRuntime
from rayfcp.cluster.workers.group import WorkerGroup, device_peak_flops, join_devices, passes_of
from rayfcp.cluster.workers.starting import WorkerStart
from rayfcp.config import Config, ConfigError
from rayfcp.cost.fit import PartTimings, slowest
from rayfcp.values import ModelProfile
from rayfcp.values.devices import DEVICES


def profile_run(config: Config, *, out_dir: str | None, rounds: int, max_tokens: int | None, log: Log) -> Profiled:
    """Start the run's workers, time them, fit, and write `profile.json` and `hardware.yaml`.

    Passes have up to `max_tokens` tokens per rank, by default as many as memory permits and at most
    `data.max_seqlen`.

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
    with ExitStack() as ending:
        ending.enter_context(connected(config))
        data_dir = prepared_data(config, log=log)
        data, runtime = open_dataset(config, data_dir=data_dir), RayRuntime()
        log(f"starting {config.cluster.max_workers} workers")
        start = WorkerStart(
            config,
            runtime=runtime,
            device=resolved_device(config, runtime=runtime),
            data_dir=data_dir,
            vocab_size=data.vocab_size,
            run_key=run_key(config),
        )
        worker_group = WorkerGroup(start, start.open_all())
        ending.callback(worker_group.end)
        log(f"joining {len(worker_group)} ranks")
        _store, _joined = join_devices(
            worker_group, cluster_spec(config, data.model, facts=worker_group.facts, generation=0)
        )
        timed = _timed_workers(config, worker_group)
        return profile_ranks(
            config, timed, model=data.model, out_dir=out_dir, rounds=rounds, max_tokens=max_tokens, log=log
        )


def _timed_workers(config: Config, worker_group: WorkerGroup) -> TimedRanks:
    def parts(model: ModelProfile, *, max_tokens: int) -> PartTimings:
        return slowest(worker_group.call(lambda _, worker: worker.time_parts.remote(model, max_tokens=max_tokens)))

    return TimedRanks(
        facts=worker_group.facts,
        base=DEVICES[worker_group.facts[0].device].base_hardware,
        parts=parts,
        passes=passes_of(worker_group),
        peak_flops=lambda: device_peak_flops(config, worker_group),
    )
