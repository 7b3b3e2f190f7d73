"""Ray resources of a run's actors."""

from rayfcp.cluster.runtime import Runtime
from rayfcp.config import Config, ConfigError
from rayfcp.values.devices import AUTO, DEVICES, device_in

CONTROLLER_CPUS = 1


def resolved_device(config: Config, *, runtime: Runtime) -> str:
    """`auto` becomes what the cluster's nodes offer: GPUs, else NPUs, else CPUs."""
    if config.cluster.device != AUTO:
        return config.cluster.device
    return device_in(runtime.resources()).name


def other_cpus(config: Config) -> int:
    """CPUs of all that a run starts beside planners: its most workers, decoders, the controller."""
    decoders = config.data.decoder_actors if config.data.processor else 0
    return config.cluster.max_workers * config.train.threads_per_worker + decoders + CONTROLLER_CPUS


def bundle(device: str, *, threads: int, share: float = 1.0) -> dict[str, float]:
    """Ray resources of one worker; `share`: of its accelerator, if it has one."""
    accelerator = DEVICES[device].resource
    return {"CPU": float(threads)} | ({accelerator: share} if accelerator else {})


def nsight_options(config: Config, *, device: str) -> dict[str, str]:
    """Options of the `nsys profile` that starts workers, empty if none does. It records what workers mark as ranges of
    the CUDA profiler API, one report each, in `logs/nsight` of Ray's session on their node.

    Raises:
        ConfigError: the devices are no CUDA devices.
    """
    profiler = config.metrics.profiler
    if not profiler.steps or profiler.tool != "nsys":
        return {}
    if device != "cuda":
        raise ConfigError(f"metrics.profiler.tool is 'nsys', must be 'torch' on devices of kind {device!r}; change it")
    return {
        "t": "cuda,nvtx,cublas,cudnn",
        "o": f"{config.run.name}-%p",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",  # the default ends the process with the first range
    }
