"""Engines of one run on one world after another, each going on from the checkpoint of the one before: the losses of a
run on one device. On real gloo processes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import Dataset, open_dataset
from rayfcp.config import Config
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.parallel.sharding import parameter_groups, sharded_modules
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.models.build import sharded_model
from rayfcp.plan import plan_batch
from rayfcp.program import Forward, Programs, lower
from rayfcp.values import ClusterSpec, StateId
from tests.cluster.runs import run_config, write_texts
from tests.execute.calls import Calls
from tests.execute.gloo import on_processes, wait_for_all
from tests.execute.pipelined import pipelined
from tests.execute.saving import save
from tests.plan.helpers import UNIT

CPU = torch.device("cpu")

WORLDS = ((2, 2, 1), (1, 2, 2), (3, 1, 1), (2, 1, 2), (1, 1, 1))
"""Stages, ranks, tensor-parallel devices."""

WORLDS_OF = {"microbatch": WORLDS, "step": WORLDS[:2]}
"""Worlds grouped by how often parameters are gathered: the others have no one to gather from."""

STEPS = 2
"""Steps on each world."""

NUM_PROCESSES = max(math.prod(world) for world in WORLDS)

LAYERS = {1: (3,), 2: (2, 1), 3: (1, 1, 1)}
"""Layers of each stage, by number of stages."""


def config_of(folder: Path, *, gather_every: str) -> Config:
    """Gradients are reduced the other way than parameters are gathered."""
    architecture = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    return run_config(
        folder,
        name="worlds",
        model={"architecture": architecture | {"ffn_size": 96, "tied_embeddings": True}},
        data={"max_seqlen": 128, "global_batch_sequences": 4},
        train={
            "steps": STEPS * len(WORLDS),
            "grad_clip": 0.5,
            "gather_every": gather_every,
            "reduce_every": "step" if gather_every == "microbatch" else "microbatch",
        },
    )


class Engine:
    """A `RankEngine` on one device of a world."""

    def __init__(self, config: Config, data: Dataset, *, number: int, world: tuple[int, int, int]) -> None:
        self._data, (stages, ranks, tensor) = data, world
        self.position = MeshPosition.of(number, num_ranks=ranks, num_stages=stages, tensor_parallel=tensor)
        self._config = config
        folder = Path(config.run_dir).parent
        copies = CopyFolder(folder / "copies")
        self.engine = RankEngine(config, device=CPU, data_dir=str(folder / "shards"), copies=copies)

    def join(self, store: dist.Store) -> None:
        layers = LAYERS[self.position.num_stages]

        def make(world: Any) -> Any:
            self.model = sharded_model(
                self._data.library, run=self._config.model, seed=0, world=world, layers_of_stage=layers
            )
            return self.model

        self.engine.join(self.position, store=lambda: store, make_model=make, hidden_size=48, layers_of_stage=layers)

    def step(self, number: int) -> dict[str, Any]:
        program, batch = self._programs(number)[self.place], self._data.sampler.batch(number)
        with Calls("c10d._allgather_base_") as gathers:
            report = self.engine.run_step(program, batch, plan_hash=program.plan_hash)
        groups = [group for part in sharded_modules(self.model) for group in parameter_groups(part)]
        return {
            "loss": report.loss,
            "norm": report.grad_norm,
            "place": (report.number, report.stage, report.rank, report.tensor_rank),
            "stages": sorted({span.stage for span in report.spans}),
            "gathered": sum(group.is_unsharded for group in groups),
            "groups": len(groups),
            "layers": len(self.model.layers),
            "gathers": gathers.count,
            "microbatches": sum(isinstance(item, Forward) for item in program.instructions),
            "kept": self._config.train.gather_every == "step",
        }

    @property
    def place(self) -> int:
        return self.position.stage * self.position.num_ranks + self.position.rank

    def _programs(self, number: int) -> Programs:
        position, sequences = (
            self.position,
            sequences_of(self._data.sampler.batch(number), layer_kinds=self._data.model.layer_kinds),
        )
        if position.num_stages == 1:
            cluster = ClusterSpec(num_ranks=position.num_ranks, max_tokens_per_rank=256)
            plan = plan_batch(sequences, cluster=cluster, cost=UNIT)
        else:
            plan = pipelined(
                sequences,
                num_stages=position.num_stages,
                num_ranks=position.num_ranks,
                recomputed=LAYERS[position.num_stages],
            )
        return lower(plan, sequences, reduce_every=self._config.train.reduce_every)


@pytest.fixture(scope="module", params=list(WORLDS_OF))
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    """`found[process]`: what each step reported there; the last process runs all steps alone."""
    folder = tmp_path_factory.mktemp("worlds")
    write_texts(folder)
    prepare_local(config_of(folder, gather_every=request.param).data, out_dir=str(folder / "shards"))
    return on_processes(_train, folder, request.param, size=NUM_PROCESSES + 1)


def _train(number: int, client: dist.Store, folder: Path, gather_every: str) -> list[dict[str, Any]]:
    config = config_of(folder, gather_every=gather_every)
    data = open_dataset(config, data_dir=str(folder / "shards"))
    worlds, done = WORLDS_OF[gather_every], []
    if number == NUM_PROCESSES:
        alone = Engine(config, data, number=0, world=(1, 1, 1))
        alone.join(dist.HashStore())
        done = [alone.step(step) for step in range(1, STEPS * len(worlds) + 1)]
        alone.engine.close()
    for index, world in enumerate(worlds):
        if number < math.prod(world):
            made = Engine(config, data, number=number, world=world)
            made.join(dist.PrefixStore(str(index), client))
            if index:
                made.engine.load(str(folder / f"saved-{index - 1}"))
            done += [made.step(STEPS * index + each) | {"world": index} for each in range(1, STEPS + 1)]
            state = StateId(version=STEPS * (index + 1), generation=index)
            assert made.engine.copy_state(state) == state
            made.engine.close()
        wait_for_all(client, f"copied-{index}", number=number, size=NUM_PROCESSES + 1)
        if number == 0:
            numbers = list(range(math.prod(world)))
            nodes, copies = [numbers[1:], numbers[:1]], CopyFolder(folder / "copies")
            save(copies, state, nodes=nodes, folder=folder / f"saved-{index}", train=config.train)
        wait_for_all(client, f"left-{index}", number=number, size=NUM_PROCESSES + 1)
    return done


def test_losses_and_norms_of_one_device(found: list[list[dict[str, Any]]]) -> None:
    """Results agree on every device, whatever the worlds on the way."""
    alone, devices = found[-1], found[:-1]
    assert len(devices[0]) == len(alone)
    worlds = WORLDS[: len(alone) // STEPS]
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.04 * len(alone)
    for number, device in enumerate(devices):
        steps = [step for index, world in enumerate(worlds) if number < math.prod(world) for step in _steps(index)]
        for have, step in zip(device, steps, strict=True):
            assert have["loss"] == pytest.approx(alone[step]["loss"], rel=1e-4), (number, step)
            assert have["norm"] == pytest.approx(alone[step]["norm"], rel=1e-3), (number, step)


def _steps(world: int) -> range:
    return range(STEPS * world, STEPS * (world + 1))


def test_reports_say_where_they_are_from(found: list[list[dict[str, Any]]]) -> None:
    for number, device in enumerate(found[:-1]):
        for report in device:
            stages, ranks, tensor = WORLDS[report["world"]]
            position = MeshPosition.of(number, num_ranks=ranks, num_stages=stages, tensor_parallel=tensor)
            assert report["place"] == (number, position.stage, position.rank, position.tensor_rank)
            assert report["stages"] == [position.stage]


def test_parameters_are_gathered_as_often_as_asked_and_in_shards_between_steps(
    found: list[list[dict[str, Any]]],
) -> None:
    """Parameters are gathered once a step; or layers in each pass of every microbatch, and the rest once for both. The
    last layer, with which backward begins, is still there."""
    for device in found[:-1]:
        for report in device:
            assert report["gathered"] == 0
            if WORLDS[report["world"]][1] == 1:
                assert report["gathers"] == 0
            elif report["kept"]:
                assert report["gathers"] == report["groups"]
            else:
                stages, least = WORLDS[report["world"]][0], 2 * report["layers"] - 1
                assert report["gathers"] >= least * report["microbatches"]
                assert report["gathers"] == (least + 1) * report["microbatches"] or stages > 1
