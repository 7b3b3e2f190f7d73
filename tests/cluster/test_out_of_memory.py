"""A worker whose device runs out of memory in a step: one line with what the plan counted on, and the remedy."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayfcp.cluster.dataset import described_model
from rayfcp.cluster.facts.capacity import GIB, cluster_spec
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.facts.measured import analytic_cost
from rayfcp.cluster.facts.out_of_memory import LESS_MEMORY, more_recomputation, predicted_bytes
from rayfcp.cluster.runtime import TaskFailedError
from rayfcp.cluster.workers.calls import GroupCall, Patience
from rayfcp.cluster.workers.worker import DeviceWorker
from rayfcp.config import Config, ConfigError
from rayfcp.cost.fit import PassShape
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.reports import Beat, CollectiveFailedError
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.program import Backward, RankProgram, lower
from rayfcp.values import ClusterSpec, GlobalBatch, ModelProfile, SequenceSpec

TOLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 20.00 GiB of which 1 GiB is free. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
SHAPE = {"num_layers": 12, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 6144}


def planned(num_stages: int) -> tuple[Config, ModelProfile, ClusterSpec, list[DeviceFacts], list[RankProgram]]:
    """A plan that fills the memory of devices of 20 GiB."""
    config = Config.model_validate(
        {
            "data": {"paths": ["."]},
            "model": {"architecture": SHAPE, "dtype": "bfloat16"},
            "cluster": {"num_workers": 4, "device": "cuda", "pipeline_stages": num_stages},
        }
    )
    facts = [DeviceFacts(node_id="a", device="cuda", memory_bytes=20 * GIB, peak_flops=None)] * 4
    _, model = described_model(config, vocab_size=32000)
    cluster = cluster_spec(config, model, facts=facts, generation=0)
    tokens = cluster.max_tokens_per_rank if num_stages == 1 else 8192
    sequences = [SequenceSpec(id=at, num_tokens=tokens, num_targets=tokens - 1) for at in range(8)]
    cost = CostModel.from_profiles(
        model,
        hardware_profile("h100"),
        num_ranks=cluster.num_ranks,
        num_stages=num_stages,
        bytes_per_element=2,
        reduce_every="step",
    )
    strategy = "flex-ring" if num_stages == 1 else "elastic-pipeline"
    plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy)
    return config, model, cluster, facts, lower(plan, sequences)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_plans_count_on_what_they_may_use(num_stages: int) -> None:
    """No more than the share of the devices' memory that plans may use; full ranks nearly all of it."""
    config, model, cluster, _, programs = planned(num_stages)
    found = [predicted_bytes(program, config=config, model=model, cluster=cluster) / GIB for program in programs]
    assert max(found) <= 0.9 * 20
    assert max(found) > (17.9 if num_stages == 1 else 9)


def cost_of(config: Config, model: ModelProfile, cluster: ClusterSpec) -> CostModel:
    return analytic_cost(config, model, device="cuda", cluster=cluster, memory_bytes=18 * GIB)


def test_once_plans_need_less_for_the_same_tokens() -> None:
    config, model, cluster, _, _ = planned(1)
    before = cost_of(config, model, cluster)
    after = more_recomputation(before, config, model=model, device="cuda", cluster=cluster)
    assert after is not None and (after.recomputed_layers, after.keeps_attention) == (12, False)
    sequences = [SequenceSpec(id=at, num_tokens=cluster.max_tokens_per_rank, num_targets=1) for at in range(8)]
    peaks, seconds = [], []
    for cost in (before, after):
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy="flex-ring")
        programs = lower(plan, sequences)
        peaks.append(max(predicted_bytes(each, config=config, model=model, cluster=cluster) for each in programs))
        seconds.append(plan.predicted_s)
    assert peaks[1] < 0.8 * peaks[0] and 1.2 < seconds[1] / seconds[0] < 1.4
    assert more_recomputation(after, config, model=model, device="cuda", cluster=cluster) is None


def test_measured_coefficients_change_as_unmeasured_ones_do() -> None:
    config, model, cluster, _, _ = planned(1)
    cost = cost_of(config, model, cluster)
    slow = dataclasses.replace(cost, linear_s_per_token=3 * cost.linear_s_per_token)
    found = [more_recomputation(each, config, model=model, device="cuda", cluster=cluster) for each in (cost, slow)]
    assert found[0] is not None and found[1] is not None
    assert found[1].linear_s_per_token == pytest.approx(3 * found[0].linear_s_per_token)
    assert found[1].attention_s_per_pair == found[0].attention_s_per_pair > cost.attention_s_per_pair


def test_with_stages_plans_may_use_less_memory() -> None:
    config, model, cluster, _, _ = planned(2)
    before = cost_of(config, model, cluster)
    after = more_recomputation(before, config, model=model, device="cuda", cluster=cluster)
    assert before.pipeline is not None and after is not None and after.pipeline is not None
    for less, more in zip(after.pipeline.budget_bytes, before.pipeline.budget_bytes, strict=True):
        assert less == int(LESS_MEMORY * more)


class Engine:
    """Stand-in that runs out of memory after so many instructions."""

    def __init__(self, num_done: int) -> None:
        self._num_done = num_done

    def beat(self) -> Beat:
        return Beat(step=7, num_done=self._num_done, waiting=False)

    def run_step(self, *_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(TOLD)

    rehearse = run_step
    recomputed_layers, keeps_attention, position = 0, True, MeshPosition(rank=0, num_ranks=1)


def raised(num_stages: int, *, at: type | None) -> ConfigError:
    """In a step, in its first instruction of this type, or its update; and nearly the same in timed passes."""
    config, _, cluster, facts, programs = planned(num_stages)
    worker: Any = DeviceWorker(config, "", vocab_size=32000)
    done = [number for number, item in enumerate(programs[0].instructions) if at is type(item)]
    worker._engine, worker._facts = Engine(done[0] if done else len(programs[0].instructions)), facts[0]
    worker._cluster = cluster
    batch = GlobalBatch(step=7, epoch=0, samples=())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr("rayfcp.cluster.workers.worker.fetched", lambda *_, **__: None)  # Ray would start
        worker.step(programs, batch, place=0, plan_hash=programs[0].plan_hash)
    told = "out of memory in timed passes of up to 300 tokens a rank; plans may use 18 GiB"
    with pytest.raises(ConfigError, match=told):
        worker.time_passes([PassShape(degree=1, lengths=(100, 200)), PassShape(degree=2, lengths=(400,))])
    assert type(caught.value.__cause__) is torch.OutOfMemoryError and str(caught.value.__cause__) == TOLD
    return caught.value


def test_the_line_names_step_microbatch_prediction_and_remedy() -> None:
    told = str(raised(1, at=Backward))
    assert told.startswith("out of memory in step 7, rank 0, stage 0, backward of microbatch 0: its plan counts on ")
    assert "its plan counts on 18 GiB; plans may use 18 GiB, the device has 20 GiB; " in told
    assert "set cluster.memory_gib_per_device below 18, " in told and "train.recompute_layers above 0 (of 12)" in told
    assert told.endswith("of which 1 GiB is free.)") and "\n" not in told
    assert "stage 0, the update: " in str(raised(1, at=None))


def test_with_stages_plans_choose_what_is_recomputed() -> None:
    told = str(raised(2, at=Backward))
    assert "stage 0, backward of microbatch 0" in told
    assert "recompute_layers" not in told and "or add devices" in told


def test_the_run_ends_with_the_workers_line() -> None:
    """A `ConfigError`, at which the command exits with 2, though its neighbour's exchange failed before."""
    errors = {"a": CollectiveFailedError("connection closed"), "b": ConfigError("out of memory in step 7")}

    def get(ref: str) -> None:
        raise TaskFailedError(errors[ref])

    runtime: Any = SimpleNamespace(now_s=lambda: 0.0, wait=lambda refs, **_: list(refs), get=get)
    members: Any = [SimpleNamespace(id=each) for each in errors]
    patience = Patience(deadline_s=None, silent_s=1.0, leave_s=1.0)
    call = GroupCall(members, list(errors), runtime=runtime, names=["rank 0", "rank 1"], patience=patience, end=print)
    with pytest.raises(ConfigError) as caught:
        call.values()
    assert caught.value is errors["b"]
