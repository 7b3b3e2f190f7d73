"""VLMs: loss and all gradients are those of the library's own model on each row alone."""

import copy
from collections.abc import Sequence

import pytest
import torch

from rayfcp.config.models import PlanConfig
from rayfcp.execute.interpreter import Execution, Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import BatchLoss
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.describe import profile_of
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.plan.strategies.registry import names
from rayfcp.program import Programs, RankProgram, check_progress, lower
from rayfcp.simulate.simulate import simulate
from rayfcp.values import ClusterSpec, Primitive
from rayfcp.verify import check_plan, check_programs
from tests.execute.cases import Case, Gradients, assert_same
from tests.execute.dense import run_ranks
from tests.execute.encoding import encoded_anywhere
from tests.execute.threads import InProcessTransport
from tests.models.vlm import Row, Show, Shown, by_library, vlm_config, vlm_model

QWEN = (
    Row(words=9, shows=(Show(grid=(4, 6), words=3), Show(grid=(2, 4), frames=3, words=2), Show(grid=(8, 4)))),
    Row(words=17),
    Row(words=5, shows=(Show(grid=(2, 2), words=4),)),
    Row(words=1),
    Row(words=2, shows=(Show(grid=(6, 2), frames=2), Show(grid=(4, 4), words=6))),
)
TILE = (4, 4)
INTERN = (
    Row(words=9, shows=(Show(grid=TILE, words=3), Show(grid=TILE, frames=3, words=2), Show(grid=TILE))),
    Row(words=17),
    Row(words=5, shows=(Show(grid=TILE, words=4),)),
    Row(words=1),
    Row(words=2, shows=(Show(grid=TILE, frames=4), Show(grid=TILE, words=6))),
)
ROWS = {"qwen3_vl": QWEN, "internvl": INTERN}
"""Images, videos and text: mixed, alone, one token."""


def cases(rows: Sequence[Row]) -> list[Case]:
    lengths = tuple(row.num_tokens for row in rows)
    return [
        Case(num_ranks=1, lengths=lengths, microbatches=((((0,), (0, 1)),), (((0,), (2, 3, 4)),)), recomputed=2),
        Case(
            num_ranks=2,
            lengths=lengths,
            microbatches=((((0, 1), (0, 3)),), (((1,), (2, 4)), ((0,), (1,)))),
            recomputed=1,
        ),
        Case(
            num_ranks=3,
            lengths=lengths,
            microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (4, 3)),), (((0,), (1,)),)),
            reduce_every="microbatch",
        ),
        Case(
            num_ranks=2,
            lengths=lengths,
            microbatches=((((1, 0), (0, 1, 2)),), (((0, 1), (3, 4)),)),
            primitive=Primitive.ULYSSES,
        ),
    ]


def run_vlm(
    programs: Sequence[RankProgram], shown: Shown, *, dtype: str, freeze: bool = False
) -> tuple[float, Gradients]:
    """Mean loss, and gradients summed over ranks, each a thread. Every rank sends the bytes that the simulator says."""
    first = vlm_model(vlm_config(shown.family), dtype=dtype, freeze=freeze)
    models = [copy.deepcopy(first) for _ in programs]
    fabric, done = Fabric(len(programs)), dict[int, Execution]()

    def work(rank: int) -> None:
        interpreter = Interpreter(
            transport=InProcessTransport(fabric, rank), kernel=pick_kernel("cpu"), model=models[rank]
        )
        done[rank] = interpreter.run(programs[rank], shown, images=shown, loss_scale=1.0 / shown.num_targets)

    run_ranks(work, num_ranks=len(programs), fabric=fabric)
    gradients: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = gradients.get(name, torch.zeros_like(parameter)) + own
    profile = profile_of(vlm_config(shown.family), name="tiny", freeze_vision=freeze)
    size = getattr(torch, dtype).itemsize
    timeline = simulate(programs, model=profile, hardware=hardware_profile("cpu"), bytes_per_element=size)
    assert [done[rank].bytes_sent for rank in range(len(programs))] == pytest.approx(timeline.sent_bytes)
    return sum(each.loss_sum for each in done.values()) / shown.num_targets, gradients


@pytest.mark.parametrize(("dtype", "freeze"), [("float32", False), ("float64", False), ("float64", True)])
@pytest.mark.parametrize("family", ROWS)
def test_on_any_ranks_as_the_library_computes_it(family: str, dtype: str, freeze: bool) -> None:
    shown = Shown(family=family, rows=ROWS[family])
    want = by_library(shown, dtype=dtype, freeze=freeze)
    for at, case in enumerate(cases(shown.rows)):
        plan = encoded_anywhere(case.plan(), shown.sequences, seed=at)
        programs = lower(plan, shown.sequences, reduce_every=case.reduce_every)
        check_programs(programs, shown.sequences)
        loss, gradients = run_vlm(programs, shown, dtype=dtype, freeze=freeze)
        assert_same(loss, gradients, want=want, dtype=dtype, what=(family, at))


@pytest.mark.parametrize("family", ROWS)
def test_losses_of_evaluation_are_those_of_training(family: str) -> None:
    """Images are encoded, and their features exchanged, without gradients."""
    shown = Shown(family=family, rows=ROWS[family])
    want, _ = by_library(shown, dtype="float64", freeze=False)
    model = vlm_model(vlm_config(family), dtype="float64", freeze=False)
    for at, case in enumerate(cases(shown.rows)):
        plan = encoded_anywhere(case.plan(), shown.sequences, seed=at)
        programs = lower(plan, shown.sequences, forward_only=True)
        check_progress(programs, forward_only=True)
        fabric, sums = Fabric(case.num_ranks), torch.zeros(case.num_ranks, len(shown.rows), dtype=torch.float64)

        def work(rank: int, fabric: Fabric = fabric, programs: Programs = programs, sums: torch.Tensor = sums) -> None:
            transport = InProcessTransport(fabric, rank)
            interpreter = Interpreter(transport=transport, kernel=pick_kernel("cpu"), model=model)
            loss = BatchLoss(loss=CrossEntropy(), row_of=range(len(shown.rows)), num_rows=len(shown.rows))
            sums[rank] = interpreter.score(programs[rank], shown, images=shown, loss=loss).row_sums

        run_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
        assert float(sums.sum()) / shown.num_targets == pytest.approx(want, rel=1e-9), (family, at)
    assert all(parameter.grad is None for parameter in model.parameters())


def cost_of(shown: Shown, *, num_ranks: int, freeze: bool) -> CostModel:
    model = profile_of(vlm_config(shown.family), name="tiny", freeze_vision=freeze)
    return CostModel.from_profiles(
        model, hardware_profile("cpu"), num_ranks=num_ranks, bytes_per_element=8, reduce_every="step"
    )


STRATEGIES = sorted(set(names()) - {"elastic-pipeline", "seq1f1b", "dapple"})


@pytest.mark.parametrize("family", ROWS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_without_stages(strategy: str, family: str) -> None:
    """Planned, proven, lowered and run on 1 and 3 ranks; little memory makes groups and microbatches."""
    shown = Shown(family=family, rows=ROWS[family])
    freeze = family == "internvl"
    want = by_library(shown, dtype="float64", freeze=freeze)
    for num_ranks in (1, 3):
        cost = cost_of(shown, num_ranks=num_ranks, freeze=freeze)
        cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=60 if freeze else 150)
        options = PlanConfig(search_moves=300, primitives=("ring", "ulysses"))
        plan = plan_batch(shown.sequences, cluster=cluster, cost=cost, strategy=strategy, options=options)
        check_plan(plan, shown.sequences, cluster=cluster)
        programs = lower(plan, shown.sequences)
        loss, gradients = run_vlm(programs, shown, dtype="float64", freeze=freeze)
        assert_same(loss, gradients, want=want, dtype="float64", what=(strategy, num_ranks))
