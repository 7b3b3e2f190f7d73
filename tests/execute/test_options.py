"""Options of the optimizer come from the configuration, whatever the state is read from; which parameters decay."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Trainer

from jobs.bench.gpu_plain import one_rank_program
from rayfcp.bench.alone import Alone, alone
from rayfcp.config import Config
from rayfcp.execute.optimization import is_decayed, learning_rate
from rayfcp.execute.parallel.sharding import local_shard
from rayfcp.execute.state import checkpoint
from rayfcp.execute.state.checkpoint import changed_options
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.copying import Copier, Source
from rayfcp.models.library import make_library_model, narrowed
from rayfcp.values.state import StateId
from tests.execute.saving import save

STATE = StateId(version=2, generation=0)
OTHERS = {"weight_decay": 0.5, "beta1": 0.8, "beta2": 0.99}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def config_of(**train: Any) -> Config:
    model = {"architecture": {"num_layers": 1, "hidden_size": 64}}
    return Config.model_validate({"data": {"paths": ["."]}, "model": model, "train": {"learning_rate": 0.01, **train}})


def step(rank: Alone, number: int) -> None:
    program = one_rank_program((9, 5), recomputed_layers=0)
    rank.engine.run_step(program, rank.batch(number, (0, 1)), plan_hash=program.plan_hash)


def options_of(rank: Alone) -> list[dict[str, Any]]:
    groups = rank.engine.generation.optimizer.param_groups
    return [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in groups]


def state_of(rank: Alone) -> dict[str, torch.Tensor]:
    found, states = {}, rank.engine.generation.optimizer.state
    for name, parameter in rank.engine.generation.module.named_parameters():
        kinds = {f"{name}.{kind}": value for kind, value in states[parameter].items()}
        found |= {key: local_shard(value).clone() for key, value in {name: parameter, **kinds}.items()}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Copies of a state, and two checkpoints of it: `usual`, and `foreign` from a torch that lacks an option, where
    other parameters were decayed."""
    folder = tmp_path_factory.mktemp("options")
    config, copies = config_of(), CopyFolder(folder / "copies")
    with alone(config, device=torch.device("cpu"), lengths=(9, 5)) as rank:
        for number in (1, 2):
            step(rank, number)
        generation = rank.engine.generation
        Copier(generation.module, generation.optimizer, position=rank.engine.position, copies=copies).take(STATE)
    save(copies, STATE, nodes=[[0]], folder=folder / "usual", train=config.train)
    known = checkpoint.options_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "is_decayed", lambda name, *, num_dimensions: "q_proj" not in name)
        patch.setattr(checkpoint, "options_of", lambda *args, **keys: without("maximize", known(*args, **keys)))
        save(copies, STATE, nodes=[[0]], folder=folder / "foreign", train=config.train)
    yield folder
    copies.remove()


def without(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def test_a_state_brings_no_options_with_it(saved: Path) -> None:
    """From a checkpoint, whatever groups it has, as from copies in memory; the next step is the same too."""
    copies = CopyFolder(saved / "copies")
    with alone(config_of(**OTHERS), device=torch.device("cpu"), lengths=(9, 5)) as rank:
        want = options_of(rank)
        assert sorted((each["weight_decay"], each["betas"]) for each in want) == [
            (0.0, (0.8, 0.99)),
            (0.5, (0.8, 0.99)),
        ]
        (header,) = copies.headers()
        held = Source(header=header, read=lambda wanted, into: copies.read(STATE, 0, wanted=wanted, into=into))
        found = []
        for read in (
            partial(rank.engine.load_copies, [held]),
            partial(rank.engine.load, str(saved / "usual")),
            partial(rank.engine.load, str(saved / "foreign")),
        ):
            read()
            assert options_of(rank) == want
            before = state_of(rank)
            step(rank, 3)
            found.append([before, state_of(rank)])
            assert options_of(rank) == want
    for other in found[1:]:
        for moment, first in zip(other, found[0], strict=True):
            assert moment.keys() == first.keys()
            assert all(torch.equal(value, first[name]) for name, value in moment.items())


def test_changed_options_are_listed(saved: Path) -> None:
    list_changed = partial(changed_options, step=2)
    assert list_changed(saved / "usual", config=config_of().train) == []
    assert sorted(list_changed(saved / "usual", config=config_of(**OTHERS).train)) == [
        "betas (0.9, 0.95) -> (0.8, 0.99)",
        "weight_decay 0.1 -> 0.5",
    ]
    constant = config_of(learning_rate=0.02, lr_schedule="constant").train
    (rate,) = list_changed(saved / "usual", config=constant)
    assert rate == f"lr {learning_rate(2, config_of().train):.6g} -> 0.02"
    now_decayed, no_longer = sorted(list_changed(saved / "foreign", config=config_of().train))
    assert now_decayed == "weight_decay 0 -> 0.1"
    assert no_longer == "weight_decay 0.1 -> 0 of 5 parameters, such as model.layers.0.self_attn.q_norm.weight"


def test_a_state_before_the_first_update_has_no_options(tmp_path: Path) -> None:
    config, copies, first = config_of(), CopyFolder(tmp_path / "copies"), StateId(version=0, generation=0)
    with alone(config, device=torch.device("cpu"), lengths=(9, 5)) as rank:
        generation = rank.engine.generation
        Copier(generation.module, generation.optimizer, position=rank.engine.position, copies=copies).take(first)
    save(copies, first, nodes=[[0]], folder=tmp_path / "saved", train=config.train)
    assert changed_options(tmp_path / "saved", step=0, config=config_of(**OTHERS).train) == []


NAMED = {
    "gpt_oss": {},  # biases of stacked experts
    "cohere": {"use_qk_norm": True},  # norms with weights for each head
    "axk2": {},  # matrices inside of norms
    "kimi_linear": {},  # decay rates in four dimensions
    "mamba2": {},
    "gpt2": {},
    "phi": {},
    "deepseek_v3": {},
    "ernie4_5_moe": {},
    "olmo2": {},
}


@pytest.mark.parametrize("family", NAMED)
def test_what_is_decayed_is_what_transformers_decays_but_for_vectors_and_decay_rates(family: str) -> None:
    with torch.device("meta"):
        model = make_library_model(narrowed(AutoConfig.for_model(family, **NAMED[family]), 2))
    parameters = {name: each.ndim for name, each in model.named_parameters()}
    theirs = parameters.keys() & Trainer.get_decay_parameter_names(None, model)
    ours = {name for name, ndim in parameters.items() if is_decayed(name, num_dimensions=ndim)}
    assert ours <= theirs
    assert all(parameters[name] < 2 or name.endswith("A_log") for name in theirs - ours)
