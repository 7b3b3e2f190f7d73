"""The state of a model that sees, where batches have no images and where its encoder is frozen."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from jobs.bench.gpu_plain import one_rank_program
from rayfcp.bench.alone import Alone, alone
from rayfcp.config import Config
from rayfcp.config.architecture import VISION_FAMILIES
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.copying import Copier
from rayfcp.values.state import StateId
from tests.execute.saving import save

LENGTHS = (9, 5)


@contextmanager
def seeing(family: str, *, freeze: bool) -> Iterator[Alone]:
    shape = {"model_type": family, "num_layers": 1, "hidden_size": 64, "vision": {"num_layers": 1, "image_size": 64}}
    model = {"architecture": shape, "freeze_vision": freeze}
    config = Config.model_validate({"data": {"paths": ["."]}, "model": model, "train": {"learning_rate": 0.01}})
    with alone(config, device=torch.device("cpu"), lengths=LENGTHS) as rank:
        yield rank


def encoder_of(engine: RankEngine) -> dict[str, torch.Tensor]:
    names = ("visual", "vision_tower", "multi_modal_projector")
    named = engine.generation.module.named_parameters()
    return {name: each.full_tensor().clone() for name, each in named if any(part in name for part in names)}


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_steps_without_images(family: str, freeze: bool, tmp_path: Path) -> None:
    """Trained parameters are updated equally often, and their state is kept and comes back; frozen ones never, and they
    are in no copy."""
    with seeing(family, freeze=freeze) as rank:
        engine, program = rank.engine, one_rank_program(LENGTHS, recomputed_layers=0)
        first = encoder_of(engine)
        for step in (1, 2):
            report = engine.run_step(program, rank.batch(step, (0, 1)), plan_hash=program.plan_hash)
            assert math.isfinite(report.loss) and report.grad_norm > 0
        optimizer, parameters = engine.generation.optimizer, dict(engine.generation.module.named_parameters())
        held = {name for name, parameter in parameters.items() if parameter in optimizer.state}
        assert held == {name for name, parameter in parameters.items() if parameter.requires_grad}
        assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
        assert bool(held & first.keys()) != freeze
        with pytest.raises(RuntimeError, match="without a folder for copies"):
            engine.copy_state(StateId(version=2, generation=0))
        module, copies = engine.generation.module, CopyFolder(tmp_path / "copies")
        Copier(module, optimizer, position=engine.position, copies=copies).take(StateId(version=2, generation=0))
        (header,) = copies.headers()
        assert {entry.name for entry in header.entries} == {
            name for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad
        }
        save(copies, header.state, nodes=[[0]], folder=tmp_path / "saved", train=engine._config.train)
        want = {name: parameter.full_tensor().clone() for name, parameter in parameters.items()}
        if freeze:
            assert all(torch.equal(want[name], value) for name, value in first.items())
        engine.run_step(program, rank.batch(3, (0, 1)), plan_hash=program.plan_hash)
        engine.load(str(tmp_path / "saved"))
        assert all(torch.equal(parameter.full_tensor(), want[name]) for name, parameter in parameters.items())
