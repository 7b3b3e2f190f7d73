"""Compiled parts give the losses and gradients of the model as it is, for several lengths, by one compilation."""

import copy
import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from rayfcp.models.build import compile_parts, random_model
from rayfcp.models.causal_lm import CausalLM
from tests.execute.cases import CASES, assert_same, expected
from tests.execute.gloo import run_on_gloo
from tests.models.helpers import NUM_LAYERS, context_of, library_config, loss_sum, rows_of


def results(
    model: CausalLM, lengths: tuple[int, ...], *, recomputed_layers: int = 0
) -> tuple[float, list[torch.Tensor]]:
    """Loss, and gradients of all parameters."""
    model.zero_grad()
    loss = loss_sum(model, rows_of(lengths), context=context_of(lengths, recomputed_layers=recomputed_layers))
    loss.backward()
    return float(loss.detach()), [parameter.grad for parameter in model.parameters()]


def test_equal_for_any_lengths() -> None:
    """Compiled by torch's tracing and its derivatives; the generated code is the compiler's concern. Parts of layers
    are traced a few times, however many layers there are and lengths come."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = random_model(library_config("qwen3"), dtype="float64", seed=0)
    compiled = copy.deepcopy(plain)
    assert compile_parts(compiled, backend=counter) == NUM_LAYERS + 1
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    counts = []
    for lengths, recomputed in (((7, 6), 1), ((30, 1, 4), 1), ((90,), 1), ((3, 3), 2), ((17,), 1)):
        (want, right), (found, have) = (
            results(each, lengths, recomputed_layers=recomputed) for each in (plain, compiled)
        )
        assert found == pytest.approx(want, rel=1e-12)
        for one, other in zip(have, right, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        counts.append(counter.frame_count)
    assert 2 <= counts[2] == counts[-1] <= 12


def test_equal_in_sharded_processes() -> None:
    """FSDP2's hooks stay: parameters are gathered before compiled parts run; so does attention that is kept."""
    case = dataclasses.replace(CASES[1], compiled=True, recomputed=3, keeps=True)
    loss, gradients = run_on_gloo([(case, "float64")])[0]
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")
