"""Every way of running a batch gives the loss and the gradients of a single process."""

import copy

import pytest
import torch

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.transport import Fabric, InProcessTransport
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import WholeModel
from rayfcp.program import check_programs, lower
from tests.execute.cases import CASES, SEED, Case, CaseTokens, Gradients, assert_same, expected, library_config
from tests.execute.gloo import run_on_gloo
from tests.execute.test_attention import run_ranks


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_ranks}-ranks-{len(case.microbatches)}")
def test_in_process(case: Case, dtype: str) -> None:
    programs = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)
    check_programs(programs, case.sequences)
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
    assert_same(sum(losses), gradients, want=expected(case, dtype), dtype=dtype)


def test_gloo_processes_sharded() -> None:
    """Real processes, FSDP2 shards, groups made anew for every case in the same processes."""
    found = run_on_gloo(CASES, dtypes=("float32", "float64"))
    for (index, dtype), (loss, gradients) in found.items():
        assert_same(loss, gradients, want=expected(CASES[index], dtype), dtype=dtype, what=(index, dtype))
    assert len(found) == 2 * len(CASES)
