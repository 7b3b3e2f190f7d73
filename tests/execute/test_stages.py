"""Batches on pipeline stages give the loss and the gradients of a single process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.program import Send, StageFlow
from rayfcp.verify import check_programs
from tests.examples import examples
from tests.execute.cases import CaseTokens, assert_same
from tests.execute.gloo_stages import Run, run_on_gloo
from tests.execute.staged import HIDDEN_SIZE, Fabrics, expected, random_case, run_in_process, typical_case, with_windows
from tests.execute.threads import InProcessTransport

LAYERS = {1: (3,), 2: (1, 2), 3: (2, 1, 1), 4: (1, 1, 2, 1)}


@examples(5)
@given(seed=st.integers(0, 100_000), num_stages=st.integers(1, 4), num_ranks=st.integers(1, 3))
def test_in_process(seed: int, num_stages: int, num_ranks: int) -> None:
    case = random_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages])
    if not case.num_targets:
        return
    loss, gradients, _ = run_in_process(case, "float64")
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_typical_chunks(num_stages: int, num_ranks: int) -> None:
    """Their programs pass the static check."""
    seed = num_stages + num_ranks  # even for rings
    dtype = ("float32", "float64")[(num_stages // 2 + num_ranks) % 2]  # either with either primitive
    case = typical_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages], is_tied=seed % 3 == 0)
    check_programs(case.programs, case.sequences)
    loss, gradients, _ = run_in_process(case, dtype)
    assert_same(loss, gradients, want=expected(case, dtype), dtype=dtype, what=(seed,))


RUNS = tuple(
    Run(
        steps=tuple(
            typical_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages], is_tied=is_tied)
            for seed in seeds
        ),
        dtype=dtype,
        is_kept=is_kept,
    )
    for num_stages, num_ranks, seeds, is_tied, dtype, is_kept in (
        (2, 2, (0, 1), True, "float64", False),
        (2, 2, (1, 2), False, "float32", True),
        (3, 1, (0, 2), False, "float64", False),
        (4, 1, (0, 3), True, "float64", True),
    )
)


SLIDING = typical_case(1, num_ranks=2, layers_of_stage=LAYERS[2], is_tied=False)
RUNS += (Run(steps=(with_windows(SLIDING, (0, 6, 6)),), dtype="float64", is_kept=False),)


def test_gloo_processes_sharded() -> None:
    """Real processes, FSDP2 shards inside a stage, a fresh plan each step in the same processes; with windows too."""
    found = run_on_gloo(RUNS)
    for index, run in enumerate(RUNS):
        for step, ((loss, gradients), case) in enumerate(zip(found[index], run.steps, strict=True)):
            want = expected(case, run.dtype)
            assert_same(loss, gradients, want=want, dtype=run.dtype, what=(index, step))


def test_programs_of_other_stages_and_activations_of_other_shapes_are_named() -> None:
    case = typical_case(0, num_ranks=1, layers_of_stage=(1, 1), is_tied=False)
    fabrics = Fabrics(num_stages=2, num_ranks=1)
    pipes = fabrics.pipes_of(0, stage=1, dtype="float32")
    keywords = {"transport": InProcessTransport(Fabric(1), 0), "kernel": pick_kernel("cpu")}
    model = case.models("float32")[0]
    with pytest.raises(ValueError, match="program is for stage 0 of 2, this is stage 1 with others; send it there"):
        Interpreter(**keywords, model=model, pipes=pipes).run(case.programs[0], CaseTokens(case))
    with pytest.raises(ValueError, match="program is for stage 0 of 2, this is stage 0 without others"):
        Interpreter(**keywords, model=model).run(case.programs[0], CaseTokens(case))
    item = Send(microbatch=3, flow=StageFlow.GRADIENT, stage=0, num_tokens=5)
    with pytest.raises(ValueError, match=r"gradient of microbatch 3 is \(4, 32\) in torch.float32, must be \(5, 32\)"):
        pipes.send(item, torch.zeros(4, HIDDEN_SIZE))
