"""A reward model on one world after another, each going on from the checkpoint of the one before: losses, gradient
norms and rewards of plain torch on whole sequences. On real gloo processes."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid

from rayfcp.cluster.dataset import open_dataset
from rayfcp.config import Config
from rayfcp.data import TokenReader
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.optimization import learning_rate, make_optimizer
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.models.build import random_model
from rayfcp.values import StateId
from tests.cluster.runs import run_config
from tests.execute.gloo import on_processes, wait_for_all
from tests.execute.saving import save
from tests.execute.test_worlds import Engine

WORLDS = ((1, 3, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1))
"""Stages, ranks, tensor-parallel devices: a step each. All but one rank of a stage have nothing of the head."""

RUNS = {"whole": {}, "adapters": {"lora": {"rank": 4}}}
CENTER = 0.05
BOUND = 1e-9
"""Of relative errors of fp64."""

SIZE = max(math.prod(world) for world in WORLDS)

Numbers = tuple[float, float, float, float, float]
"""Loss, gradient norm, mean rewards of chosen and rejected answers, accuracy."""


def config_of(folder: Path, what: str) -> Config:
    architecture = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    return run_config(
        folder,
        name=what,
        model={"architecture": architecture | {"ffn_size": 96}, "dtype": "float64"} | RUNS[what],
        data={"paths": [str(folder / "pairs.jsonl")], "max_seqlen": 128, "global_batch_sequences": 8},
        loss={"type": "reward", "center": CENTER},
        train={"steps": len(WORLDS), "grad_clip": 1e3, "learning_rate": 1e-2, "reduce_every": "microbatch"},
    )


def worlds_of(what: str) -> list[tuple[int, int, int]]:
    """Adapters are not split."""
    return [world for world in WORLDS if world[2] == 1 or what != "adapters"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    write_pairs(folder)
    prepare_local(config_of(folder, "whole").data, out_dir=str(folder / "shards"))
    return folder


def write_pairs(folder: Path) -> None:
    """Answers of unequal lengths."""
    rng = random.Random(0)
    pairs = [
        {"prompt": "say ", "chosen": "a" * rng.randint(1, 90), "rejected": "b" * rng.randint(0, 120)} for _ in range(32)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def plain(config: Config, *, data_dir: str, num_steps: int) -> tuple[list[Numbers], Any]:
    """A loop of plain torch, one whole sequence at a time; and the library's model that it leaves."""
    data, run = open_dataset(config, data_dir=data_dir), config.model
    path = run.path if run.init == "pretrained" else None
    whole = random_model(data.library, dtype=run.dtype, seed=config.run.seed, lora=run.lora, path=path)
    whole.model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(make_optimizer(whole, config.train).param_groups)
    reader, found = TokenReader.open(data_dir), []
    for step in range(1, num_steps + 1):
        samples = data.sampler.batch(step).samples
        rows = [torch.from_numpy(reader.read(each, start=0, stop=each.num_tokens)[0])[None] for each in samples]
        rewards = torch.cat([whole.model(input_ids=row).logits[0] for row in rows])
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = (-logsigmoid(chosen - rejected) + CENTER * (chosen + rejected) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in whole.parameters() if each.requires_grad])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train)
        optimizer.step()
        accuracy = (chosen > rejected).double().mean()
        numbers = (loss, norm, chosen.mean(), rejected.mean(), accuracy)
        found.append(tuple(float(each.detach()) for each in numbers))
    return found, whole.model


def test_steps_are_those_of_plain_torch(folder: Path) -> None:
    for number, process in enumerate(on_processes(_train_both, folder, size=SIZE)):
        for what, steps in process.items():
            worlds = worlds_of(what)
            want, _ = plain(config_of(folder, what), data_dir=str(folder / "shards"), num_steps=len(worlds))
            assert want[-1][0] < want[0][0] - 0.1, "it learns"
            for step, numbers in steps.items():
                assert numbers == pytest.approx(want[step - 1], rel=BOUND), (what, number, worlds[step - 1])


def _train_both(number: int, client: dist.Store, folder: Path) -> dict[str, dict[int, Numbers]]:
    return {what: _train(number, client, folder, what) for what in RUNS}


def _train(number: int, client: dist.Store, folder: Path, what: str) -> dict[int, Numbers]:
    config, found = config_of(folder, what), {}
    data = open_dataset(config, data_dir=str(folder / "shards"))
    copies = CopyFolder(folder / "copies")
    for step, world in enumerate(worlds_of(what), 1):
        size, state = math.prod(world), StateId(version=step, generation=step)
        if number < size:
            made = Engine(config, data, number=number, world=world)
            made.join(dist.PrefixStore(f"{what} {step}", client))
            if step > 1:
                made.engine.load(str(folder / f"{what}-{step - 1}"))
            found[step] = _step(made, step)
            assert made.engine.copy_state(state) == state
            made.engine.close()
        wait_for_all(client, f"{what} copied {step}", number=number, size=SIZE)
        if number == 0:
            save(copies, state, nodes=[list(range(size))], folder=folder / f"{what}-{step}", train=config.train)
        wait_for_all(client, f"{what} left {step}", number=number, size=SIZE)
    return found


def _step(made: Any, number: int) -> Numbers:
    programs, batch = made._programs(number), made._data.sampler.batch(number)
    scores = programs.forward_part()[made.place]
    report = made.engine.run_step(programs[made.place], batch, plan_hash=programs.plan_hash, scores=scores)
    pairs = report.pairs
    return report.loss, report.grad_norm, pairs.chosen, pairs.rejected, pairs.accuracy
