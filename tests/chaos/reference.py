"""The undisturbed run: the same steps on one device in this process, without Ray."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import open_dataset
from rayfcp.cluster.driver.preparing import prepared_data
from rayfcp.cluster.facts.capacity import cluster_spec
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.facts.measured import analytic_cost
from rayfcp.config import Config
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.models.build import sharded_model
from rayfcp.plan import plan_batch
from rayfcp.program import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Expected values of a step, whatever happens to the run."""

    step: int
    loss: float
    grad_norm: float
    samples_hash: str


def undisturbed(config: Config, *, num_steps: int) -> tuple[Wanted, ...]:
    """The first `num_steps` steps of the run on one rank."""
    with closing(Undisturbed(config)) as alone:
        return alone.first(num_steps)


class Undisturbed:
    """The run on one rank, as far as it was asked for; no step is computed twice."""

    def __init__(self, config: Config) -> None:
        self._known: list[Wanted] = []
        self._more = _steps(config)

    def first(self, num_steps: int) -> tuple[Wanted, ...]:
        self._known += islice(self._more, max(0, num_steps - len(self._known)))
        return tuple(self._known[:num_steps])

    def close(self) -> None:
        self._more.close()


def _steps(config: Config) -> Generator[Wanted, None, None]:
    """Until it is closed."""
    data_dir = prepared_data(config, log=lambda _: None)
    data = open_dataset(config, data_dir=data_dir)
    device = torch.device("cpu")
    one = config.model_copy(update={"cluster": config.cluster.model_copy(update={"num_workers": 1})})
    facts: dict[str, Any] = {"node_id": "here", "device": "cpu", "peak_flops": None}
    cluster = cluster_spec(
        one,
        data.model,
        facts=[DeviceFacts(memory_bytes=backend_of(device).total_memory_bytes(device), **facts)],
        generation=0,
    )
    cost = analytic_cost(one, data.model, device="cpu", cluster=cluster)
    engine = RankEngine(one, device=device, data_dir=data_dir)
    engine.join(
        MeshPosition(rank=0, num_ranks=1),
        store=dist.HashStore,
        make_model=lambda world: sharded_model(data.library, run=one.model, seed=one.run.seed, world=world),
        hidden_size=data.library.hidden_size,
        layers_of_stage=(data.library.num_hidden_layers,),
    )
    try:
        for step in count(1):
            batch = data.sampler.batch(step)
            sequences = sequences_of(batch, layer_kinds=data.model.layer_kinds)
            plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="flex-ring", options=one.plan)
            (program,) = lower(plan, sequences, reduce_every=one.train.reduce_every)
            report = engine.run_step(program, batch, plan_hash=program.plan_hash)
            yield Wanted(step=step, loss=report.loss, grad_norm=report.grad_norm, samples_hash=batch.samples_hash)
    finally:
        engine.close()
