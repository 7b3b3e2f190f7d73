"""The update: learning rate by step, clipping, which parameters decay, and batches that teach nothing."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import open_dataset
from rayfcp.config import Config
from rayfcp.config.models import TrainConfig
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.optimization import learning_rate, local_squares, make_optimizer, scale_gradients, update
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.sharding import StageModule
from rayfcp.execute.reports import DeviceReport
from rayfcp.models.build import sharded_model
from rayfcp.plan import plan_batch
from rayfcp.program import lower
from rayfcp.values import ClusterSpec
from tests.cluster.runs import run_config, write_texts
from tests.examples import examples
from tests.plan.helpers import UNIT

SCHEDULES = ("constant", "linear", "cosine")


@st.composite
def schedules(draw: st.DrawFn) -> TrainConfig:
    steps = draw(st.integers(1, 60))
    return TrainConfig(
        steps=steps,
        warmup_steps=draw(st.integers(0, steps)),
        learning_rate=draw(st.floats(1e-6, 10)),
        lr_schedule=draw(st.sampled_from(SCHEDULES)),
    )


@examples(100)
@given(config=schedules())
def test_rates_rise_to_the_peak_and_then_fall(config: TrainConfig) -> None:
    peak, warm = config.learning_rate, config.warmup_steps
    rates = [learning_rate(step, config) for step in range(1, config.steps + 1)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates), "every update moves something"
    assert rates[:warm] == pytest.approx([peak * step / warm for step in range(1, warm + 1)])
    after = rates[warm:]
    if after:
        assert after[0] == pytest.approx(peak)
        assert all(later <= earlier for earlier, later in pairwise(after))
        if config.lr_schedule == "constant":
            assert set(after) == {peak}
        else:
            assert learning_rate(config.steps + 1, config) == pytest.approx(0.0, abs=1e-12 * peak)


def test_linear_falls_by_the_same_amount_and_cosine_is_half_way_in_the_middle() -> None:
    linear = TrainConfig(steps=12, warmup_steps=2, learning_rate=1.0, lr_schedule="linear")
    assert [learning_rate(step, linear) for step in (3, 4, 8, 12)] == pytest.approx([1.0, 0.9, 0.5, 0.1])
    cosine = linear.model_copy(update={"lr_schedule": "cosine"})
    assert learning_rate(8, cosine) == pytest.approx(0.5)
    assert learning_rate(4, cosine) > learning_rate(4, linear)
    assert learning_rate(11, cosine) < learning_rate(11, linear)


def with_gradients(seed: int, *, scale: float) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    for parameter in module.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    module[2].weight.grad = None
    return module


@examples(40)
@given(seed=st.integers(0, 100), scale=st.floats(1e-3, 1e3), max_norm=st.floats(1e-2, 1e2))
def test_gradients_are_clipped_to_the_norm_and_keep_their_direction(seed: int, scale: float, max_norm: float) -> None:
    module = with_gradients(seed, scale=scale)
    before = [p.grad.double().clone() for p in module.parameters() if p.grad is not None]
    norm = math.sqrt(float(local_squares(module.parameters())))
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in before]).norm()))
    scale_gradients(module.parameters(), norm=norm, max_norm=max_norm)
    after = [p.grad.double() for p in module.parameters() if p.grad is not None]
    assert math.sqrt(float(local_squares(module.parameters()))) == pytest.approx(min(norm, max_norm), rel=1e-5)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old * min(1.0, max_norm / norm), rtol=1e-5, atol=0.0)
    assert module[2].weight.grad is None


def test_no_gradients_have_norm_zero() -> None:
    assert float(local_squares(nn.Linear(2, 2).parameters())) == 0.0


def test_matrices_decay_and_vectors_and_rates_of_decay_do_not() -> None:
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    module.A_log = nn.Parameter(torch.ones(1, 1, 2, 1))
    module[1].bias.requires_grad_(False)
    config = TrainConfig(learning_rate=0.5, weight_decay=0.2, beta1=0.7, beta2=0.8)
    optimizer = make_optimizer(module, config)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {
        id(module[0].weight): 0.2,
        id(module[1].weight): 0.2,
        id(module[2].weight): 0.0,
        id(module[2].bias): 0.0,
        id(module.A_log): 0.0,
    }
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(0.5, (0.7, 0.8))}
    assert len(make_optimizer(nn.Linear(3, 2, bias=False), config).param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_updates_are_adamw(dtype: torch.dtype) -> None:
    """Clipped or not, one of four skipped, parameters without gradients or elements: as torch's AdamW, with its state
    dict."""
    config = TrainConfig(learning_rate=0.05, weight_decay=0.2, grad_clip=1.0)
    modules = [with_gradients(0, scale=1.0).to(dtype) for _ in range(2)]
    for module in modules:
        module.empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
    modules[1].load_state_dict(modules[0].state_dict())
    fused, plain = (make_optimizer(module, config) for module in modules)
    plain.is_fused = False
    for step, scale in enumerate((0.1, 5.0, math.nan, 2.0)):
        found = []
        for module, optimizer in zip(modules, (fused, plain), strict=True):
            for at, parameter in enumerate(module.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9 * step + at))
                parameter.grad = scale * noise.to(dtype)
            module[2].weight.grad = None
            sums = torch.stack([torch.ones((), dtype=torch.float64), local_squares(module.parameters())])
            found.append(update(optimizer, sums, num_targets=2, max_norm=config.grad_clip))
        assert found[0] == pytest.approx(found[1], nan_ok=True) and found[0][0] == 0.5
        torch.testing.assert_close(modules[0].state_dict(), modules[1].state_dict(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(fused.state_dict()["state"], plain.state_dict()["state"], rtol=1e-5, atol=1e-8)
    assert {float(state["step"]) for state in fused.state.values()} == {3.0}
    plain.load_state_dict(fused.state_dict())


class Alone:
    """A `RankEngine` as the only rank, in this process, on real shards."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        data_dir = str(folder / "shards")
        prepare_local(config.data, out_dir=data_dir)
        self.data = open_dataset(config, data_dir=data_dir)
        self.engine = RankEngine(config, device=torch.device("cpu"), data_dir=data_dir)
        self.engine.join(
            MeshPosition(rank=0, num_ranks=1),
            store=dist.HashStore,
            make_model=self._make,
            hidden_size=48,
            layers_of_stage=(2,),
        )

    def _make(self, world: ProcessGroups) -> StageModule:
        self.model = sharded_model(self.data.library, run=self.config.model, seed=0, world=world)
        return self.model

    def step(self, number: int) -> DeviceReport:
        batch = self.data.sampler.batch(number)
        sequences = sequences_of(batch, layer_kinds=self.data.model.layer_kinds)
        plan = plan_batch(sequences, cluster=ClusterSpec(num_ranks=1, max_tokens_per_rank=4096), cost=UNIT)
        (program,) = lower(plan, sequences)
        return self.engine.run_step(program, batch, plan_hash=program.plan_hash)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.full_tensor().detach().clone() for name, parameter in self.model.named_parameters()}


@pytest.fixture
def alone(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Alone]:
    write_texts(tmp_path)
    made = Alone(run_config(tmp_path, name="alone", data=request.param), tmp_path)
    yield made
    made.engine.close()


def test_a_batch_without_targets_updates_nothing(tmp_path: Path) -> None:
    """Not even by weight decay or momentum."""
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100] if at == 0 else [-100] * 3} for at in range(24)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = Alone(run_config(tmp_path, name="alone"), tmp_path)
    number = next(each for each in range(1, 5) if not alone.data.sampler.batch(each).num_targets)
    before = alone.weights()
    report = alone.step(number)
    assert (report.loss, report.grad_norm) == (None, 0.0)
    for name, weight in alone.weights().items():
        assert torch.equal(weight, before[name]), name
    alone.engine.close()


@pytest.mark.parametrize("alone", [{"max_seqlen": 64}], indirect=True)
def test_a_batch_with_targets_updates_everything(alone: Alone) -> None:
    before = alone.weights()
    report = alone.step(1)
    assert report.loss == pytest.approx(math.log(258), rel=0.05), "random weights know nothing"
    assert report.grad_norm > 0 and report.learning_rate == learning_rate(1, alone.config.train)
    for name, weight in alone.weights().items():
        assert not torch.equal(weight, before[name]), name
    assert alone.step(2).loss < report.loss


@pytest.mark.parametrize("alone", [{"max_seqlen": 64}], indirect=True)
def test_a_plan_that_was_not_dispatched_is_refused(alone: Alone) -> None:
    batch = alone.data.sampler.batch(1)
    sequences = sequences_of(batch, layer_kinds=alone.data.model.layer_kinds)
    plan = plan_batch(sequences, cluster=ClusterSpec(num_ranks=1, max_tokens_per_rank=4096), cost=UNIT)
    (program,) = lower(plan, sequences)
    with pytest.raises(ValueError, match="dispatched was 0123"):
        alone.engine.run_step(program, batch, plan_hash="0123")
