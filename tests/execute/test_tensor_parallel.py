"""Layers split over tensor-parallel devices: loss and gradients of a single process, on real gloo processes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.config import ConfigError
from rayfcp.config.architecture import ArchitectureConfig
from rayfcp.config.models import ModelConfig, TrainConfig
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.optimization import is_split, local_squares, make_optimizer, sum_copies
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.models.build import random_model, sharded_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config
from rayfcp.models.tensor_parallel import check_tensor_parallel
from rayfcp.program import lower
from rayfcp.values import Primitive
from tests.execute.calls import Calls
from tests.execute.cases import SEED, VOCAB, Case, CaseTokens, assert_same, reference
from tests.execute.gloo import joined, on_processes


def architecture(family: str, *, tied: bool) -> ArchitectureConfig:
    return ArchitectureConfig(
        model_type=family,
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=96,
        vocab_size=VOCAB,
        tied_embeddings=tied,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case on ranks of `tensor_parallel` devices each."""

    case: Case
    family: str = "qwen3"
    tied: bool = True
    tensor_parallel: int = 2
    dtype: str = "float64"

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(dtype=self.dtype, architecture=architecture(self.family, tied=self.tied))

    @property
    def num_devices(self) -> int:
        return self.case.num_ranks * self.tensor_parallel


ALONE = Case(num_ranks=1, lengths=(33, 1, 20), microbatches=((((0,), (0, 1, 2)),),))
RING = Case(
    num_ranks=2,
    lengths=(101, 1, 37, 2),
    microbatches=((((0, 1), (0,)),), (((1,), (1, 2)), ((0,), (3,)))),
    recomputed=2,
)
HEADS = Case(
    num_ranks=2,
    lengths=(43, 17),
    microbatches=((((1, 0), (0, 1)),),),
    recomputed=3,
    reduce_every="microbatch",
    primitive=Primitive.ULYSSES,
)
RUNS = (
    Run(case=ALONE),
    Run(case=RING),
    Run(case=RING, family="qwen2", tied=False),
    Run(case=HEADS, family="llama"),
    Run(case=RING, tensor_parallel=1),
    Run(case=HEADS, dtype="float32"),
)
"""Norms of heads, biases of split matrices, neither; heads shared out twice; embeddings tied and not."""

LAYERS = 3


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_processes(_run_all, size=max(run.num_devices for run in RUNS))[0]


def _run_all(number: int, client: dist.Store) -> list[dict[str, Any]]:
    found = []
    for index, run in enumerate(RUNS):
        if number < run.num_devices:
            position = MeshPosition.of(number, num_ranks=run.case.num_ranks, tensor_parallel=run.tensor_parallel)
            with joined(position, client, name=f"{index}") as world:
                found.append(_run(run, world))
    return found


def _run(run: Run, world: ProcessGroups) -> dict[str, Any]:
    """Results of a device; the same on all, except its traffic."""
    case, position = run.case, world.position
    model = sharded_model(model_config(run.model, vocab_size=VOCAB), run=run.model, seed=SEED, world=world)
    first = {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
    interpreter = Interpreter(transport=DistributedTransport(world.attend), kernel=pick_kernel("cpu"), model=model)
    program = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)[position.rank]
    with Calls("_c10d_functional.all_reduce") as sums:
        done = interpreter.run(program, CaseTokens(case), loss_scale=1.0 / case.num_targets)
    if world.tensor is not None:
        parameters = dict(model.named_parameters())
        sum_copies([parameters[name] for name in model.partial_names], world.tensor)
    counted = [each for each in model.parameters() if position.tensor_rank == 0 or is_split(each)]
    totals = torch.stack(
        [torch.tensor(done.loss_sum * (position.tensor_rank == 0), dtype=torch.float64), local_squares(counted)]
    )
    world.sum(totals)
    return {
        "first": first,
        "loss": float(totals[0]) / case.num_targets,
        "squares": float(totals[1]),
        "gradients": {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()},
        "all_reduce": sums.count,
        "meshes": [
            len({parameter.device_mesh for parameter in group["params"]})
            for group in make_optimizer(model, TrainConfig()).param_groups
        ],
        "held": sum(parameter.to_local().numel() for parameter in model.layers.parameters()),
    }


def whole(run: Run) -> CausalLM:
    return random_model(model_config(run.model, vocab_size=VOCAB), dtype=run.dtype, seed=SEED)


@pytest.mark.parametrize("index", range(len(RUNS)))
def test_loss_and_gradients_of_a_single_process(index: int, found: list[dict[str, Any]]) -> None:
    """The norm counts every parameter once."""
    run, have = RUNS[index], found[index]
    want = reference(whole(run), run.case)
    assert_same(have["loss"], have["gradients"], want=want, dtype=run.dtype)
    squares = sum(float(gradient.square().sum()) for gradient in want[1].values())
    assert have["squares"] == pytest.approx(squares, rel=1e-10 if run.dtype == "float64" else 1e-5)


@pytest.mark.parametrize("index", range(len(RUNS)))
def test_first_weights_are_the_same(index: int, found: list[dict[str, Any]]) -> None:
    for name, parameter in whole(RUNS[index]).named_parameters():
        assert torch.equal(found[index]["first"][name], parameter), name


@pytest.mark.parametrize("index", range(len(RUNS)))
def test_two_sums_a_layer_each_way(index: int, found: list[dict[str, Any]]) -> None:
    """After attention and MLP in forward, before them in backward, and those of forward again where they are
    recomputed, the last one of a layer apart: nothing that is saved needs it. Matrices are in parts."""
    run, case = RUNS[index], RUNS[index].case
    if run.tensor_parallel == 1:
        assert found[index]["all_reduce"] == 0
        return
    assert found[index]["all_reduce"] == len(case.microbatches) * (4 * LAYERS + case.recomputed)
    parameters = [each for layer in whole(run).layers for each in layer.parameters()]
    matrices = sum(each.numel() for each in parameters if each.ndim == 2)
    held = found[index]["held"] * case.num_ranks
    assert matrices / run.tensor_parallel <= held < 1.05 * matrices / run.tensor_parallel


@pytest.mark.parametrize("index", range(len(RUNS)))
def test_parameters_that_are_updated_at_once_lie_on_one_mesh(index: int, found: list[dict[str, Any]]) -> None:
    """Matrices split and whole, vectors split and whole, as far as a family has them."""
    meshes, run = found[index]["meshes"], RUNS[index]
    assert set(meshes) == {1}
    assert len(meshes) == (2 if run.tensor_parallel == 1 else 4 if run.family == "qwen2" else 3)


def test_what_cannot_be_split_is_refused() -> None:
    library = model_config(ModelConfig(architecture=architecture("qwen3", tied=True)), vocab_size=VOCAB)
    check_tensor_parallel(library, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel is 4, must divide the model's num_key_value_heads \(2\)"):
        check_tensor_parallel(library, 4)
    with pytest.raises(ConfigError, match=r"tensor_parallel is 3, must divide the model's num_attention_heads \(4\)"):
        check_tensor_parallel(library, 3)
    packed = model_config(ModelConfig(architecture=architecture("phi3", tied=False)), vocab_size=VOCAB)
    check_tensor_parallel(packed, 1)
    with pytest.raises(
        ConfigError,
        match=r"must be 1 with phi3: transformers splits it by colwise_gather_output, rowwise_split_input; set it to 1",
    ):
        check_tensor_parallel(packed, 2)
