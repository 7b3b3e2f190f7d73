"""`rayfcp profile --alone`: time one device in this process, without Ray, as the only rank of a run."""

import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.distributed as dist
from pyarrow import parquet
from transformers import PreTrainedConfig

from rayfcp.cluster.planning.capacity import cluster_spec, device_memory
from rayfcp.cluster.planning.costs import Log, Profiled, Profiler
from rayfcp.cluster.workers.facts import DeviceFacts
from rayfcp.config import Config, ConfigError
from rayfcp.config.models import DataConfig
from rayfcp.cost.fit import PartTimings, PassShape, Timing
from rayfcp.data import prepare_local, tokenizer_of
from rayfcp.execute.calibrate import time_parts, time_passes
from rayfcp.execute.devices.backend import backend_of, device_kind, resolve_device
from rayfcp.execute.devices.cpu import measure_flops
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.models.build import sharded_model
from rayfcp.models.describe import check_limits, model_config, profile_of
from rayfcp.models.library import text_of
from rayfcp.values import GlobalBatch, ModelProfile, Sample
from rayfcp.values.devices import DEVICES

SIZE, WINDOWS, WINDOW_S = 512, 3, 0.2
"""Size of the matrix products, number and length of the windows that measure a CPU's peak."""

CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """As its driver, or the kernel for a CPU, gives it."""
    if not DEVICES[device.type].is_host:
        return backend_of(device).device_name(device)
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    return found.group(1) if found else platform.machine()


def base_hardware(device: torch.device) -> str:
    """The shipped profile that is nearest to a device."""
    return nearest_hardware(device_name(device), kind=device.type)


def nearest_hardware(name: str, *, kind: str) -> str:
    """The shipped profile that an accelerator's name holds as a word, else that of its kind.

    >>> nearest_hardware("NVIDIA H200", kind="cuda"), nearest_hardware("NVIDIA L4", kind="cuda")
    ('h200', 'h100')
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    device = DEVICES[kind]
    return next((known for known in device.hardware if known in words), device.base_hardware)


def peak_of(device: torch.device, *, dtype: str) -> float | None:
    """FLOP/s: of the table for 16-bit numbers on accelerators, of matrix products in single precision on a thread of a
    CPU; None for others."""
    if DEVICES[device.type].is_host:
        return _thread_flops() if dtype == "float32" else None
    return backend_of(device).peak_flops(device) if dtype in ("bfloat16", "float16") else None


def _thread_flops() -> float:
    """The best of some windows, by this thread's own seconds, as attention is measured."""
    left, right = (torch.randn(SIZE, SIZE) for _ in range(2))
    rates = []
    with one_thread(torch.device("cpu")):
        for _ in range(WINDOWS):
            products, start_s = 0, time.thread_time()
            while time.thread_time() - start_s < WINDOW_S:
                torch.mm(left, right)
                products += 1
            rates.append(2.0 * SIZE**3 * products / (time.thread_time() - start_s))
    return max(rates)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, so that ranks are what they are where each has a core."""
    before = torch.get_num_threads()
    if DEVICES[device.type].is_host:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


ONE_RANK = ("pipeline_stages", "tensor_parallel", "max_workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """`engine` has joined a world of one. Samples of `lengths` are its data, in this order."""

    engine: RankEngine
    library: PreTrainedConfig
    model: ModelProfile
    lengths: tuple[int, ...]

    def batch(self, step: int, rows: Sequence[int]) -> GlobalBatch:
        """Samples `rows`, as an engine wants them."""
        samples = tuple(
            Sample(id=row, shard=0, row=row, start=0, stop=self.lengths[row], num_targets=self.lengths[row] - 1)
            for row in rows
        )
        return GlobalBatch(step=step, epoch=0, samples=samples)


def alone_config(config: Config) -> Config:
    """
    Raises:
        ConfigError: the configuration wants more than one device.
    """
    for field in ONE_RANK:
        if getattr(config.cluster, field) > 1:
            name = field.replace("max_workers", "num_workers")
            found = getattr(config.cluster, field)
            raise ConfigError(f"cluster.{name} is {found}, must be 1 for one device alone; set cluster.{name}=1")
    return config


@contextmanager
def alone(config: Config, *, device: torch.device, lengths: Sequence[int] = (2,)) -> Iterator[Alone]:
    """The run's model with first weights, in a world of one device, until the end of the `with` block.

    Raises:
        ConfigError: no such model, or one that cannot run.
    """
    config = alone_config(config)
    library = model_config(config.model, vocab_size=tokenizer_of(config.data).vocab_size)
    check_limits(library, config)
    name = config.model.name or config.model.path or library.model_type
    model = profile_of(library, name=name, freeze_vision=config.model.freeze_vision)
    torch.set_num_threads(config.train.threads_per_worker)
    with TemporaryDirectory() as folder:
        random_shards(Path(folder), lengths, vocab_size=model.vocab_size, seed=config.run.seed)
        engine = RankEngine(config, device=device, data_dir=str(Path(folder) / "shards"))
        _join(engine, config, library)
        try:
            yield Alone(engine=engine, library=library, model=model, lengths=tuple(lengths))
        finally:
            engine.close()


def random_shards(folder: Path, lengths: Sequence[int], *, vocab_size: int, seed: int) -> None:
    """A prepared folder `shards` with one row of random token ids of each length."""
    rows = random_rows(lengths, vocab_size=vocab_size, seed=seed)
    parquet.write_table(pa.table({"input_ids": rows}), folder / "rows.parquet")
    data = DataConfig(paths=(str(folder / "rows.parquet"),), format="parquet")
    prepare_local(data, out_dir=str(folder / "shards"))


def random_rows(lengths: Sequence[int], *, vocab_size: int, seed: int) -> list[npt.NDArray[np.int32]]:
    """Token ids, as many as each length says."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length, np.int32) for length in lengths]


def _join(engine: RankEngine, config: Config, library: PreTrainedConfig) -> None:
    # Libraries would listen where the host's name points, or look for a network.
    names = [name for _, name in socket.if_nameindex()]
    loopback = next(name for name in ("lo", "lo0") if name in names)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, loopback)
    store = dist.HashStore()
    engine.join(
        MeshPosition(rank=0, num_ranks=1),
        store=lambda: store,
        make_model=lambda world: sharded_model(library, run=config.model, seed=config.run.seed, world=world),
        hidden_size=text_of(library).hidden_size,
        layers_of_stage=(text_of(library).num_hidden_layers,),
    )


def profile_alone(config: Config, *, out_dir: str | None, rounds: int, max_tokens: int | None, log: Log) -> Profiled:
    """Time the run's model on one device of this machine, fit, and write `profile.json` and `hardware.yaml`.

    Links between devices stay those of the nearest named profile. Passes hold up to `max_tokens` tokens: as many as
    memory permits, at most `data.max_seqlen`, if absent. `log` hears what is being done.

    Raises:
        ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
    """
    kind = device_kind(config.cluster.device)
    pick_kernel(kind)  # first: it says what to install
    device = resolve_device(kind)
    log(f"one device alone: {device_name(device)}")
    with alone(config, device=device) as rank:
        timed = TimedAlone(config, rank)
        cluster = cluster_spec(config, rank.model, facts=(timed.facts,), generation=0)
        most = min(max_tokens or config.data.max_seqlen, cluster.max_tokens_per_rank)
        folder = Path(out_dir or config.run_dir).absolute()
        profiler = Profiler(config, timed, model=rank.model, cluster=cluster, folder=folder, log=log)
        return profiler.run(rounds, max_tokens=most)


class TimedAlone:
    """One device in a world of its own, as `TimedRanks`."""

    def __init__(self, config: Config, rank: Alone) -> None:
        self._config, self._engine = config, rank.engine
        device = rank.engine.device
        self.device = device.type
        self.base = base_hardware(device)
        self.facts = DeviceFacts(
            node_id="here",
            device=device.type,
            memory_bytes=backend_of(device).total_memory_bytes(device),
            peak_flops=backend_of(device).peak_flops(device),
        )

    def parts(self, model: ModelProfile, *, max_tokens: int) -> PartTimings:
        return time_parts(self._engine, model, max_tokens=max_tokens)

    def passes(self, shapes: Sequence[PassShape]) -> list[list[Timing]]:
        return [time_passes(self._engine, shapes, clock=device_clock(self._engine.device))]

    def peak_flops(self) -> float:
        peak = self._config.metrics.peak_flops or self.facts.peak_flops
        if peak is not None:
            return peak
        if not DEVICES[self.device].is_host:
            raise ConfigError(
                f"metrics.peak_flops is not set and no table knows {device_name(self._engine.device)}; set it to the "
                "device's dense FLOP/s in model.dtype"
            )
        return measure_flops(self._engine.device)

    def memory_bytes(self) -> int:
        return device_memory(self._config, (self.facts,))


def device_clock(device: torch.device) -> Callable[[], float]:
    """Seconds, told once the device has done all that it was given."""
    backend = backend_of(device)

    def clock() -> float:
        backend.synchronize()
        return time.perf_counter()

    return clock
