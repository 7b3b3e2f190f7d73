"""Compiled parts give the losses and gradients of the model as it is, for several lengths, by one compilation; where
they do not, they are not used."""

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import ModelConfig
from rayfcp.cost.memory import layer_bytes
from rayfcp.execute.devices.cpu import BACKEND
from rayfcp.execute.devices.cuda import BACKEND as CUDA_BACKEND
from rayfcp.execute.kernels import pick_kernel
from rayfcp.models import compiling
from rayfcp.models.build import WITHOUT_ADAPTERS, compile_parts, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config, profile_of
from tests.execute.cases import CASES, assert_same, expected
from tests.execute.gloo import run_on_gloo
from tests.models.helpers import NUM_LAYERS, architecture, context_of, library_config, loss_sum, rows_of


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
    are traced a few times, however many layers there are, and whatever lengths come, and how many."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = random_model(library_config("qwen3"), dtype="float64", seed=0)
    compiled = copy.deepcopy(plain)
    assert compile_parts(compiled, backend=counter) == NUM_LAYERS + 1
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    counts = []
    for lengths, recomputed in (((7, 6), 1), ((30, 1, 4), 1), ((90,), 1), ((3, 3), 2), ((5, 1, 9, 2, 4), 1)):
        (want, right), (found, have) = (
            results(each, lengths, recomputed_layers=recomputed) for each in (plain, compiled)
        )
        assert found == pytest.approx(want, rel=1e-12)
        for one, other in zip(have, right, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        counts.append(counter.frame_count)
    assert 2 <= counts[2] == counts[-1] <= 12


def test_equal_in_sharded_processes() -> None:
    """FSDP2's hooks stay: parameters are gathered before compiled parts run; so does attention that is kept. One rank
    of the two compiles nothing: messages are the same."""
    case = dataclasses.replace(CASES[1], compiled=True, recomputed=3, keeps=True)
    loss, gradients = run_on_gloo([(case, "float64")])[0]
    assert_same(loss, gradients, want=expected(case, "float64"), dtype="float64")


def chosen(choice: bool | str, backend: Any = None, *, tensor_parallel: int = 1) -> bool:
    """What a run on the CPU makes of `train.compile`."""
    config = Config(
        data={"paths": ["stdlib"]},
        model={"dtype": "float64", "architecture": architecture("qwen3")},
        cluster={"num_workers": 2, "tensor_parallel": tensor_parallel},
        train={"compile": choice},
    )
    return compiling.runs_compiled(
        config, vocab_size=61, device=torch.device("cpu"), kernel=pick_kernel("cpu"), backend=backend
    )


def test_auto_compiles_on_devices_that_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, with tensor parallelism and with `false` nothing is compiled, not even to see whether it could be."""
    asked: list[str] = []
    monkeypatch.setattr(compiling, "fault_of_compiled", lambda *_, dtype, **__: asked.append(dtype))
    assert CUDA_BACKEND.info.compiles
    assert not chosen("auto") and not chosen(False) and not asked
    assert chosen(True) and asked == ["float64"]
    monkeypatch.setattr(BACKEND, "info", dataclasses.replace(BACKEND.info, compiles=True))
    assert not chosen(False) and not chosen("auto", tensor_parallel=2) and len(asked) == 1
    assert chosen("auto") and len(asked) == 2


Graph = Callable[..., Sequence[torch.Tensor]]


def right(graph: Graph, _inputs: Any) -> Graph:
    return graph


def wrong_gradient(graph: Graph, _inputs: Any) -> Graph:
    return lambda *given: [
        each + 1e-6 * (each.detach() - each) if torch.is_tensor(each) else each for each in graph(*given)
    ]


def fails(_graph: Graph, _inputs: Any) -> Graph:
    raise RuntimeError("no C++ compiler,\n install one")


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (right, None),
        (wrong_gradient, r"of layer 1 compiled, the gradient of .* differs by .*e-06 of its norm, by more than 1e-09"),
        (fails, r"layer 1 cannot be compiled, BackendCompilerFailed: .*no C\+\+ compiler, install one.*"),
    ],
)
def test_layers_that_differ_or_fail_are_not_compiled(
    backend: Any, told: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` goes on without, `true` does not start."""
    fault = compiling.fault_of_compiled(
        library_config("qwen3"),
        dtype="float64",
        device=torch.device("cpu"),
        kernel=pick_kernel("cpu"),
        backend=backend,
    )
    assert fault is told is None or re.fullmatch(told or "", fault or "")
    monkeypatch.setattr(BACKEND, "info", dataclasses.replace(BACKEND.info, compiles=True))
    monkeypatch.setattr(compiling, "fault_of_compiled", lambda *_, **__: fault)
    assert chosen("auto") is (fault is None)
    lines = [record.getMessage() for record in caplog.records if record.name == compiling.logger.name]
    if fault is None:
        assert not lines and chosen(True)
        return
    assert lines == [f"layers are not compiled: {fault}; set train.compile=false to silence this"]
    with pytest.raises(ConfigError) as caught:
        chosen(True)
    assert str(caught.value) == f"train.compile is true, must be false here: {fault}; set train.compile=false"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_saves_what_the_memory_model_counts(compiled: bool) -> None:
    """Beside positions' cosines and sines, which layers share, and a number per norm. Norms of heads are among them."""
    torch._dynamo.reset()
    given = architecture("qwen3").model_copy(update={"hidden_size": 64, "head_dim": 32, "ffn_size": 160})
    library = model_config(ModelConfig(architecture=given), vocab_size=61)
    model = compiling._one_layer(library, dtype="bfloat16", device=torch.device("cpu"), lora=WITHOUT_ADAPTERS)
    if compiled:  # by the compiler's choice of what is saved, without its code
        compile_parts(model, backend="aot_eager_decomp_partition")
    held = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage
        return tensor

    lengths = (300, 100)
    hidden = torch.randn(sum(lengths), 64, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(hidden, positions, None, context_of(lengths))
    profile = dataclasses.replace(profile_of(library, name="tiny"), compiled=compiled)
    counted = layer_bytes(profile, bytes_per_element=2).whole
    per_token = sum(each.nbytes() for each in saved.values()) / sum(lengths)
    shared = 2 * 2 * profile.head_dim + 4 * (2 + profile.num_heads + profile.num_kv_heads)
    assert counted <= per_token <= counted + shared
