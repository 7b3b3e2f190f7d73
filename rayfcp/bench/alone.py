"""`rayfcp profile --alone`: time one device in this process, without Ray, as the only rank of a run."""

import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.distributed as dist
from pyarrow import parquet
from transformers import PreTrainedConfig

from rayfcp.cluster.dataset import described_model
from rayfcp.cluster.facts.costs import Log, Profiled, TimedRanks, profile_ranks
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.config import Config, ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data import prepare_local, tokenizer_of
from rayfcp.execute.calibrate import time_parts, time_passes
from rayfcp.execute.devices.backend import backend_of, device_kind, resolve_device
from rayfcp.execute.devices.cpu import measure_flops
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.models.build import sharded_model
from rayfcp.models.compiling import runs_compiled
from rayfcp.models.describe import check_limits
from rayfcp.models.library import text_of
from rayfcp.values import GlobalBatch, ModelProfile, Sample
from rayfcp.values.devices import DEVICES

CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """Name by the driver, or by the kernel for a CPU."""
    if not DEVICES[device.type].is_host:
        return backend_of(device).device_name(device)
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    found = re.search(r"(?m)^model name\s*:\s*(.+)$", text)
    return found.group(1) if found else platform.machine()


def base_hardware(device: torch.device) -> str:
    """The shipped profile that an accelerator's name holds as a word, else that of its kind."""
    words, known = re.findall(r"[a-z0-9]+", device_name(device).lower()), DEVICES[device.type]
    return next((name for name in known.hardware if name in words), known.base_hardware)


def peak_of(device: torch.device, *, dtype: str) -> float | None:
    """FLOP/s: of the table for 16-bit numbers on accelerators, of matrix products in single precision on a thread of a
    CPU; None for others."""
    if not DEVICES[device.type].is_host:
        return backend_of(device).peak_flops(device) if dtype in ("bfloat16", "float16") else None
    with one_thread(device):  # by the thread's own seconds, as attention is measured
        return measure_flops(device, clock=time.thread_time) if dtype == "float32" else None


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Use one thread on a CPU, as ranks that have a core each."""
    before = torch.get_num_threads()
    if DEVICES[device.type].is_host:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """An engine that has joined a world of one. Samples of `lengths` are its data, in this order."""

    engine: RankEngine
    library: PreTrainedConfig
    model: ModelProfile
    lengths: tuple[int, ...]

    def batch(self, step: int, rows: Sequence[int]) -> GlobalBatch:
        """The samples `rows` as the batch of a step."""
        samples = tuple(
            Sample(id=row, shard=0, row=row, start=0, stop=self.lengths[row], num_targets=self.lengths[row] - 1)
            for row in rows
        )
        return GlobalBatch(step=step, epoch=0, samples=samples)


def model_of(config: Config) -> tuple[PreTrainedConfig, ModelProfile]:
    """Configuration of the run's model by the library, and its profile, with the name that the run gives it.

    Raises:
        ConfigError: no such model.
    """
    library, model = described_model(config, vocab_size=tokenizer_of(config.data).vocab_size)
    return library, replace(model, name=config.model.name or model.name)


@contextmanager
def alone(config: Config, *, device: torch.device, lengths: Sequence[int] = (2,)) -> Iterator[Alone]:
    """Build the run's model with random weights, drawn on the device, in a world of one that lasts for the `with`
    block.

    Raises:
        ConfigError: no such model, one that cannot run, or a configuration for more than one device.
    """
    for field, name in (("pipeline_stages",) * 2, ("tensor_parallel",) * 2, ("max_workers", "num_workers")):
        if (found := getattr(config.cluster, field)) > 1:
            raise ConfigError(f"cluster.{name} is {found}, must be 1 for one device alone; set cluster.{name}=1")
    config = config.changed(model={"init": "random"})  # times do not depend on the weights
    library, model = model_of(config)
    check_limits(library, config)
    torch.set_num_threads(config.train.threads_per_worker)
    kernel = pick_kernel(device.type, sm_margin=config.cluster.communication_sms)
    compiled = runs_compiled(config, vocab_size=model.vocab_size, device=device, kernel=kernel)
    model = replace(model, compiled=compiled)
    with TemporaryDirectory() as folder:
        random_shards(Path(folder), lengths, vocab_size=model.vocab_size, seed=config.run.seed)
        engine = RankEngine(config, device=device, data_dir=str(Path(folder) / "shards"))
        store = _local_store()
        engine.join(
            MeshPosition(rank=0, num_ranks=1),
            store=lambda: store,
            make_model=lambda world: sharded_model(
                library, run=config.model, seed=config.run.seed, world=world, draw_on=device, compiled=compiled
            ),
            hidden_size=text_of(library).hidden_size,
            layers_of_stage=(text_of(library).num_hidden_layers,),
        )
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
    """Rows of random token ids, one of each length."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length, np.int32) for length in lengths]


def _local_store() -> dist.Store:
    # Libraries would listen at the address of the host's name, or search for a network.
    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, loopback)
    return dist.HashStore()


def profile_alone(config: Config, *, out_dir: str | None, rounds: int, max_tokens: int | None, log: Log) -> Profiled:
    """Time the run's model on one device of this machine, fit, and write `profile.json` and `hardware.yaml`.

    Links between devices stay those of the nearest named profile. Passes hold up to `max_tokens` tokens, by default as
    many as memory permits and at most `data.max_seqlen`.

    Raises:
        ConfigError, InfeasiblePlanError: the configuration cannot be run; one clear line.
    """
    kind = device_kind(config.cluster.device)
    pick_kernel(kind)  # first: its error names the package to install
    device = resolve_device(kind)
    log(f"one device alone: {device_name(device)}")
    backend = backend_of(device)
    with alone(config, device=device) as rank:
        facts = DeviceFacts(
            node_id="here",
            device=device.type,
            memory_bytes=backend.total_memory_bytes(device),
            peak_flops=backend.peak_flops(device),
            compiles=rank.model.compiled,
        )
        timed = TimedRanks(
            facts=(facts,),
            base=base_hardware(device),
            parts=partial(time_parts, rank.engine),
            passes=lambda shapes: [time_passes(rank.engine, shapes, clock=device_clock(device))],
            peak_flops=lambda: _peak_flops(config, device),
        )
        return profile_ranks(
            config, timed, model=rank.model, out_dir=out_dir, rounds=rounds, max_tokens=max_tokens, log=log
        )


def _peak_flops(config: Config, device: torch.device) -> float:
    peak = config.metrics.peak_flops or backend_of(device).peak_flops(device)
    if peak is None and not DEVICES[device.type].is_host:
        raise ConfigError(
            f"metrics.peak_flops is not set and no table knows {device_name(device)}; set it to the device's dense "
            "FLOP/s in model.dtype"
        )
    return measure_flops(device) if peak is None else peak


def device_clock(device: torch.device) -> Callable[[], float]:
    """Clock in seconds that waits for the device's work before it is read."""
    backend = backend_of(device)

    def clock() -> float:
        backend.synchronize()
        return time.perf_counter()

    return clock
