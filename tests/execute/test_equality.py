"""Every way of running a batch gives the loss and the gradients of a single process."""

import copy
from collections.abc import Sequence

import pytest
import torch

from rayfcp.config.plan import PlanConfig
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.transport import Fabric, InProcessTransport
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import WholeModel
from rayfcp.plan import CostModel, plan_batch
from rayfcp.program import Forward, HeadProgram, RankProgram, check_plan, check_programs, lower
from rayfcp.values import ClusterSpec
from tests.execute.cases import (
    ARCHITECTURE,
    CASES,
    SEED,
    Case,
    CaseTokens,
    Gradients,
    assert_same,
    expected,
    library_config,
)
from tests.execute.gloo import run_on_gloo
from tests.execute.test_attention import run_ranks


def run_in_process(programs: Sequence[RankProgram], case: Case, dtype: str) -> tuple[float, Gradients]:
    """Mean loss and summed gradients of all ranks, each a thread."""
    first = random_model(library_config(dtype), dtype=dtype, seed=SEED)
    models = [copy.deepcopy(first) for _ in programs]
    fabric, tokens, losses = Fabric(case.num_ranks), CaseTokens(case), [0.0] * case.num_ranks

    def work(rank: int) -> None:
        interpreter = Interpreter(
            transport=InProcessTransport(fabric, rank), kernel=pick_kernel("cpu"), model=WholeModel(models[rank])
        )
        done = interpreter.run(programs[rank], tokens, loss_scale=1.0 / case.num_targets)
        losses[rank] = done.loss_sum / case.num_targets

    run_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
    gradients: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + parameter.grad
    return sum(losses), gradients


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.num_ranks}-ranks-{len(case.lengths)}-{case.primitive}-{case.heads}"
)
def test_in_process(case: Case, dtype: str) -> None:
    programs = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)
    check_programs(programs, case.sequences)
    loss, gradients = run_in_process(programs, case, dtype)
    assert_same(loss, gradients, want=expected(case, dtype), dtype=dtype)


def test_gloo_processes_sharded() -> None:
    """Real processes, FSDP2 shards, groups made anew for every case in the same processes."""
    found = run_on_gloo(CASES, dtypes=("float32", "float64"))
    for (index, dtype), (loss, gradients) in found.items():
        assert_same(loss, gradients, want=expected(CASES[index], dtype), dtype=dtype, what=(index, dtype))
    assert len(found) == 2 * len(CASES)


HEADS = CostModel(
    attention_s_per_cell=1e-3,
    linear_s_per_token=1e-2,
    fixed_s=0.5,
    ring_intra_s_per_token=2e-2,
    ring_inter_s_per_token=3e-2,
    ring_s_per_round=0.2,
    ranks_per_node=4,
    ulysses_intra_s_per_token=4e-3,
    ulysses_inter_s_per_token=8e-3,
    ulysses_kv_share=0.3,
    ulysses_s=0.1,
    num_heads=ARCHITECTURE.num_heads,
    num_kv_heads=ARCHITECTURE.num_kv_heads,
)


@pytest.mark.parametrize("strategy", ["ulysses", "flexsp", "flex-ring"])
def test_strategies_that_plan_ulysses_groups(strategy: str) -> None:
    """Planned, proved, lowered and run: on 4 ranks that hold 60 tokens each, the longest sequence needs three."""
    case = Case(num_ranks=4, lengths=(131, 17, 1, 45, 7, 33, 58), microbatches=())
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=60)
    options = PlanConfig(primitives=("ring", "ulysses"), search_moves=1000)
    plan = plan_batch(case.sequences, cluster=cluster, cost=HEADS, strategy=strategy, options=options)
    check_plan(plan, case.sequences, cluster=cluster)
    programs = lower(plan, case.sequences)
    forwards = [item for program in programs for item in program.instructions if isinstance(item, Forward)]
    assert any(isinstance(item.attention, HeadProgram) for item in forwards)
    loss, gradients = run_in_process(programs, case, "float64")
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")
