"""Kernels of recurrent layers equal the recurrence token by token; libraries are used as they document, where they
agree."""

import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayfcp.execute.devices import cuda
from rayfcp.execute.devices.cuda import BACKEND
from rayfcp.execute.kernels.chunked import ChunkedKernel
from rayfcp.execute.kernels.convolution import CausalConv1d, ConvolutionKernel, TorchConvolution, agrees
from rayfcp.execute.kernels.linear import FlashLinearKernel
from rayfcp.execute.kernels.recurrence import Gated, RecurrenceKernel
from tests.examples import examples
from tests.execute import fake_linear
from tests.execute.recurrent import convolved

BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def random_inputs(
    lengths: list[int],
    *,
    delta: bool,
    diagonal: bool,
    groups: int = 2,
    strength: float = 1.0,
    dk: int = 5,
    seed: int = 0,
) -> tuple[Gated, Tensor]:
    """In fp64, two key heads, and states before the sequences; `strength`: of the decay."""
    generator, tokens, heads = torch.Generator().manual_seed(seed), sum(lengths), 2 * groups

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gates = (heads, dk) if diagonal else (heads,)
    inputs = Gated(
        query=drawn(tokens, 2, dk),
        key=torch.nn.functional.normalize(drawn(tokens, 2, dk), dim=-1),
        value=drawn(tokens, heads, 3),
        log_decay=-strength * torch.nn.functional.softplus(drawn(tokens, *gates) - 1),
        beta=torch.sigmoid(drawn(tokens, heads)) if delta else None,
        scale=0.6,
    )
    return inputs, drawn(len(lengths), heads, dk, 3)


def stepwise(inputs: Gated, *, lengths: tuple[int, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, `I - b k k^T` as a matrix."""
    times = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = (each.repeat_interleave(times, dim=1) for each in (inputs.query, inputs.key))
    decay = inputs.log_decay.exp().unflatten(1, (-1, 1)) if inputs.log_decay.dim() == 2 else inputs.log_decay.exp()
    outs, finals, at = [], [], 0
    for own, length in zip(state, lengths, strict=True):
        for token in range(at, at + length):
            added = key[token].unsqueeze(-1) * inputs.value[token].unsqueeze(-2)
            own = decay[token].unsqueeze(-1) * own  # noqa: PLW2901
            if inputs.beta is not None:
                beta = inputs.beta[token][:, None, None]
                outer = key[token].unsqueeze(-1) * key[token].unsqueeze(-2)
                own, added = own - beta * outer @ own, beta * added  # noqa: PLW2901
            own = own + added  # noqa: PLW2901
            outs.append(inputs.scale * (query[token].unsqueeze(-2) @ own).squeeze(-2))
        at += length
        finals.append(own)
    return torch.stack(outs), torch.stack(finals)


def assert_conforms(
    kernel: RecurrenceKernel, inputs: Gated, state: Tensor, *, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Results and every gradient; gates and states in fp32 at least."""
    results = []
    for one, cast in ((stepwise, torch.float64), (kernel, dtype)):
        wide = torch.promote_types(cast, torch.float32)
        given = [each.to(cast).double() if cast is not dtype else each for each in inputs.tensors]
        given = [each.to(cast if at < 3 else wide).detach().requires_grad_() for at, each in enumerate(given)]
        before = state.to(wide).requires_grad_()
        found = one(inputs.of(given), lengths=lengths, state=before)
        assert one is stepwise or (found[0].dtype, found[1].dtype) == (dtype, wide)
        generator = torch.Generator().manual_seed(1)
        total = sum((each * torch.randn(each.shape, generator=generator)).sum(dtype=wide) for each in found)
        results.append([*found, *torch.autograd.grad(total, [*given, before])])
    for at, (want, have) in enumerate(zip(*results, strict=True)):
        error = float((want - have).norm() / want.norm().clamp_min(1e-2))
        assert error <= BOUNDS[dtype], f"result {at}: relative error {error:.1e}"


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    delta=st.booleans(),
    diagonal=st.booleans(),
    groups=st.integers(1, 2),
    strength=st.sampled_from([0.1, 1.0, 100.0]),
    dtype=st.sampled_from(list(BOUNDS)),
    seed=st.integers(0, 100),
)
def test_chunks(
    lengths: list[int], delta: bool, diagonal: bool, groups: int, strength: float, dtype: torch.dtype, seed: int
) -> None:
    inputs, state = random_inputs(lengths, delta=delta, diagonal=diagonal, groups=groups, strength=strength, seed=seed)
    if dtype is not torch.float64:  # what is compared is computed from the same numbers
        dtypes = (dtype, dtype, dtype, torch.float32, torch.float32)
        inputs = inputs.of([each.to(cast).double() for each, cast in zip(inputs.tensors, dtypes, strict=False)])
        state = state.float().double()
    assert_conforms(ChunkedKernel(), inputs, state, lengths=tuple(lengths), dtype=dtype)


RULES = [(delta, diagonal) for delta in (False, True) for diagonal in (False, True)]


@pytest.mark.parametrize(("delta", "diagonal"), RULES)
def test_flash_linear_attention(delta: bool, diagonal: bool) -> None:
    lengths = [3, 17, 1]
    inputs, state = random_inputs(lengths, delta=delta, diagonal=diagonal, dk=16)
    inputs = inputs.of([each.bfloat16().double() if at < 3 else each for at, each in enumerate(inputs.tensors)])
    kernel = FlashLinearKernel(fake_linear, other=Refusing())
    kernel._agrees = dict.fromkeys(vars(fake_linear), True)
    assert_conforms(kernel, inputs, state, lengths=tuple(lengths), dtype=torch.bfloat16)


class Refusing:
    """Is not to be called."""

    name = "none"

    def __call__(self, inputs: Gated, **options: object) -> tuple[Tensor, Tensor]:
        raise AssertionError(inputs)


@pytest.mark.parametrize(("delta", "diagonal"), RULES)
def test_rules_that_do_not_agree_are_not_used(delta: bool, diagonal: bool, caplog: pytest.LogCaptureFixture) -> None:
    inputs, state = random_inputs([4], delta=delta, diagonal=diagonal, dk=16)
    inputs = inputs.of([each.float() for each in inputs.tensors])
    run: Callable[..., tuple[Tensor, Tensor]] = FlashLinearKernel(fake_linear, other=ChunkedKernel())
    found = run(inputs, lengths=(4,), state=state.float())
    assert not caplog.records
    wrong = SimpleNamespace(
        **{name: doubled(each) for name, each in vars(fake_linear).items() if name.startswith("chunk_")}
    )
    with caplog.at_level(logging.WARNING):
        again = FlashLinearKernel(wrong, other=ChunkedKernel())(inputs, lengths=(4,), state=state.float())
    assert "differs from torch's operators" in caplog.text
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other)


def doubled(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *args, **options: tuple(2 * each for each in function(*args, **options))


def test_wide_numbers_and_odd_sizes_stay_with_torch() -> None:
    kernel = FlashLinearKernel(None, other=ChunkedKernel())
    for dk, dtype in ((16, torch.float64), (5, torch.float32), (260, torch.float32)):
        inputs, _ = random_inputs([4], delta=True, diagonal=False, dk=dk)
        inputs = inputs.of([each.to(dtype) for each in inputs.tensors])
        assert kernel(inputs, lengths=(4,), state=None)[0].dtype is dtype


@pytest.mark.parametrize("width", [1, 2, 4, 6])
@pytest.mark.parametrize("channels", [8, 5])
@pytest.mark.parametrize(("bias", "activation"), [(True, "silu"), (False, None)])
def test_convolutions(width: int, channels: int, bias: bool, activation: str | None) -> None:
    by_torch = TorchConvolution()
    kernels: tuple[ConvolutionKernel, ...] = (by_torch, CausalConv1d(fake_linear, other=by_torch))
    rows, weight, shift = torch.randn(9, channels), torch.randn(channels, width), torch.randn(channels)
    results = []
    for run in (convolved, *kernels):
        leaves = [each.double().requires_grad_() for each in (rows, weight, shift)]
        if run is not convolved:
            leaves = [each.float().detach().requires_grad_() for each in leaves]
        out = run(*leaves[:2], leaves[2] if bias else None, activation=activation)
        out = out[width - 1 :] if run is convolved else out
        out.sum().backward()
        results.append([out, *(each.grad for each in leaves[: 2 + bias])])
    for found in results[1:]:
        for want, have in zip(results[0], found, strict=True):
            torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)


def test_convolution_that_does_not_agree_is_found() -> None:
    by_torch = TorchConvolution()
    assert agrees(CausalConv1d(fake_linear, other=by_torch), by_torch, device="cpu")
    wrong = SimpleNamespace(
        causal_conv1d_fn=lambda *args, **options: 2 * fake_linear.causal_conv1d_fn(*args, **options)
    )
    assert not agrees(CausalConv1d(wrong, other=by_torch), by_torch, device="cpu")


def test_order_of_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries where a GPU has them; torch's operators are always the last."""
    here: dict[str, object] = {}
    monkeypatch.setattr(cuda, "_library", lambda names: here.get(names[0]))
    monkeypatch.setattr(type(BACKEND), "is_available", lambda self: True)
    monkeypatch.setattr(cuda, "convolutions_agree", lambda *args, **options: True)
    assert [type(each) for each in BACKEND.recurrences()] == [ChunkedKernel]
    assert [type(each) for each in BACKEND.convolutions()] == [TorchConvolution]
    here |= {"fla.ops": fake_linear, "causal_conv1d": fake_linear}
    assert [type(each) for each in BACKEND.recurrences()] == [FlashLinearKernel, ChunkedKernel]
    assert [type(each) for each in BACKEND.convolutions()] == [CausalConv1d, TorchConvolution]
