"""One device as a whole run's only rank, in this process: the engine that workers have, on random tokens."""

import os
import socket
from collections.abc import Iterator, Sequence
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

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import DataConfig
from rayfcp.data import prepare_local, tokenizer_of
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.groups import Place
from rayfcp.models.build import sharded_model
from rayfcp.models.describe import check_limits, model_config, profile_of
from rayfcp.models.library import text_of
from rayfcp.values import GlobalBatch, ModelProfile, Sample

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
    prepare_local(data, out_dir=str(folder / "shards"), vocab_size=vocab_size)


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
    store = dist.HashStore()  # type: ignore[attr-defined]
    engine.join(
        Place(rank=0, num_ranks=1),
        store=lambda: store,
        make_model=lambda world: sharded_model(library, run=config.model, seed=config.run.seed, world=world),
        hidden_size=text_of(library).hidden_size,
        layers_of_stage=(text_of(library).num_hidden_layers,),
    )
