"""Every way of running a batch gives the loss and the gradients of a single process."""

import copy
from collections.abc import Sequence

import pytest
import torch

from rayfcp.config.models import PlanConfig
from rayfcp.execute.interpreter import Execution, Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.build import random_model
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.program import Forward, HeadProgram, RankProgram, lower
from rayfcp.simulate.simulate import simulate
from rayfcp.values import ClusterSpec, ModelProfile
from rayfcp.verify import check_plan, check_programs
from tests.execute.cases import (
    ARCHITECTURE,
    CASES,
    SEED,
    VOCAB,
    Case,
    CaseTokens,
    Gradients,
    assert_same,
    expected,
    library_config,
)
from tests.execute.dense import run_ranks
from tests.execute.gloo import run_on_gloo
from tests.execute.threads import InProcessTransport

PROFILE = ModelProfile(
    name="cases",
    num_layers=ARCHITECTURE.num_layers,
    hidden_size=ARCHITECTURE.hidden_size,
    num_heads=ARCHITECTURE.num_heads,
    num_kv_heads=ARCHITECTURE.num_kv_heads,
    head_dim=ARCHITECTURE.head_dim,
    ffn_size=ARCHITECTURE.ffn_size,
    vocab_size=VOCAB,
)
BYTES = {"float32": 4, "float64": 8}


def run_in_process(programs: Sequence[RankProgram], case: Case, dtype: str) -> tuple[float, Gradients, list[Execution]]:
    """Mean loss and summed gradients of all ranks, each a thread; and what each did."""
    first = random_model(library_config(dtype), dtype=dtype, seed=SEED)
    models = [copy.deepcopy(first) for _ in programs]
    fabric, tokens = Fabric(case.num_ranks), CaseTokens(case)
    done: dict[int, Execution] = {}

    def work(rank: int) -> None:
        interpreter = Interpreter(
            transport=InProcessTransport(fabric, rank), kernel=pick_kernel("cpu"), model=models[rank]
        )
        done[rank] = interpreter.run(programs[rank], tokens, loss_scale=1.0 / case.num_targets)

    run_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
    gradients: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + parameter.grad
    executions = [done[rank] for rank in range(case.num_ranks)]
    return sum(each.loss_sum for each in executions) / case.num_targets, gradients, executions


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.num_ranks}-ranks-{len(case.lengths)}-{case.primitive}-{case.heads}"
)
def test_in_process(case: Case, dtype: str) -> None:
    """Every rank sends the bytes that the simulator predicts."""
    programs = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)
    check_programs(programs, case.sequences)
    loss, gradients, executions = run_in_process(programs, case, dtype)
    timeline = simulate(programs, model=PROFILE, hardware=hardware_profile("cpu"), bytes_per_element=BYTES[dtype])
    assert [each.bytes_sent for each in executions] == pytest.approx(timeline.sent_bytes)
    forwards = [item for program in programs for item in program.instructions if isinstance(item, Forward)]
    times = 2 * ARCHITECTURE.num_layers + (0 if case.keeps else case.recomputed)
    assert sum(each.num_pairs for each in executions) == pytest.approx(
        times * sum(item.attention.num_pairs for item in forwards)
    )
    assert_same(loss, gradients, want=expected(case, dtype), dtype=dtype)


def test_gloo_processes_sharded() -> None:
    """Real processes, FSDP2 shards, groups made anew for every case in the same processes; one case of each primitive
    in float32, as all are in one process."""
    assert_same_on_gloo([(case, "float64") for case in CASES] + [(CASES[2], "float32"), (CASES[6], "float32")])


def assert_same_on_gloo(runs: Sequence[tuple[Case, str]]) -> None:
    found = run_on_gloo(runs)
    for index, (case, dtype) in enumerate(runs):
        loss, gradients = found[index]
        assert_same(loss, gradients, want=expected(case, dtype), dtype=dtype, what=(index, dtype))


HEADS = CostModel(
    attention_s_per_pair=1e-3,
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
    loss, gradients, _ = run_in_process(programs, case, "float64")
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")
