"""A layer of one rank that gives NaN: no rank updates, none keeps anything of it, and the next step is as any other."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayfcp.cluster.dataset import open_dataset
from rayfcp.data.prepare import prepare_local
from tests.cluster.runs import write_texts
from tests.execute.gloo import on_processes
from tests.execute.test_worlds import Engine, config_of

WORLD = (1, 2, 1)


def test_nothing_of_a_step_that_is_not_finite_stays(tmp_path: Path) -> None:
    write_texts(tmp_path)
    prepare_local(config_of(tmp_path, gather_every="microbatch").data, out_dir=str(tmp_path / "shards"))
    for losses, states in on_processes(_train, tmp_path, size=2):
        assert [math.isfinite(loss) for loss in losses] == [True, False, True]
        first, skipped, third = states
        assert first.keys() == skipped.keys() == third.keys()
        assert {name.rpartition(".")[2] for name in first} >= {"exp_avg", "exp_avg_sq", "step", "weight"}
        for name, value in first.items():
            assert torch.equal(value, skipped[name]), name
            assert torch.isfinite(third[name]).all()
        assert not any(torch.equal(value, third[name]) for name, value in first.items() if value.numel())


def _train(rank: int, client: dist.Store, folder: Path) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses, and what this rank holds after each step."""
    config = config_of(folder, gather_every="microbatch")
    engine = Engine(config, open_dataset(config, data_dir=str(folder / "shards")), number=rank, world=WORLD)
    engine.join(client)
    losses, states = [], []
    for step in range(1, 4):
        handle = None
        if step == 2 and rank == 1:
            handle = engine.model.layers[1].register_forward_hook(lambda _, __, output: output * math.nan)
        losses.append(engine.step(step)["loss"])
        states.append(_state(engine))
        if handle is not None:
            handle.remove()
    engine.engine.close()
    return losses, states


def _state(engine: Engine) -> dict[str, Any]:
    """This rank's shards of parameters and of what the optimizer knows of them, copied."""
    found = {}
    optimizer = engine.engine.generation.optimizer
    for name, parameter in engine.model.named_parameters():
        found[name] = parameter.to_local().detach().clone()
        for kind, value in optimizer.state[parameter].items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name}.{kind}"] = local.detach().clone()
    return found
