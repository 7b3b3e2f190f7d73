"""The loss behind the head: the same numbers as autograd's, few logits at a time, computed once, no waiting."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfcp.cost.memory import LOSS_CHUNK_TOKENS, loss_bytes, loss_chunk_tokens
from rayfcp.data.rows import IGNORED
from rayfcp.execute.losses.base import Targets
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.models.causal_lm import head_loss, weighted_terms
from rayfcp.values import ModelProfile
from tests.examples import examples
from tests.execute.live import Peak

Inputs = tuple[nn.Linear, Tensor, Targets]


def inputs(
    num_tokens: int, *, hidden_size: int = 12, vocab: int = 31, bias: bool = False, dtype: torch.dtype = torch.float64
) -> Inputs:
    """A head, hidden states and targets, a third of which do not count, and each second of which has a weight."""
    generator = torch.Generator().manual_seed(num_tokens)
    head = nn.Linear(hidden_size, vocab, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    targets[torch.rand(num_tokens, generator=generator) < 0.3] = IGNORED
    weights = torch.randn(num_tokens, generator=generator, dtype=torch.float64) if num_tokens % 2 else None
    return head, hidden, targets_of(targets, weights=weights)


def targets_of(words: Tensor, *, weights: Tensor | None = None) -> Targets:
    return Targets(
        loss=CrossEntropy(), words=words, terms=torch.full((len(words),), torch.nan).double(), weights=weights
    )


def loss_of(given: Inputs, *, chunk_tokens: int) -> Tensor:
    head, hidden, targets = given
    return head_loss(head, hidden, targets=targets, chunk_tokens=chunk_tokens)


def gradients(loss: Tensor, given: Inputs, *, scale: float) -> list[Tensor]:
    """Gradients of a scaled loss with respect to hidden states, weight and bias."""
    head, hidden, _ = given
    return list(torch.autograd.grad(loss * scale, [hidden, *head.parameters()]))


def by_autograd(given: Inputs) -> Tensor:
    """The weighted sum of cross entropies by torch alone."""
    head, hidden, targets = given
    each = torch.nn.functional.cross_entropy(head(hidden), targets.words, ignore_index=IGNORED, reduction="none")
    return each.sum() if targets.weights is None else (each * targets.weights).sum()


@examples(40)
@given(num_tokens=st.integers(1, 40), chunk=st.integers(1, 45), bias=st.booleans(), scale=st.floats(-2.0, 2.0))
def test_loss_and_gradients_are_autograd_s(num_tokens: int, chunk: int, bias: bool, scale: float) -> None:
    made = inputs(num_tokens, bias=bias)
    found, want = (
        loss_of(made, chunk_tokens=chunk),
        by_autograd(made),
    )
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(found, made, scale=scale), gradients(want, made, scale=scale), strict=True)
    for own, theirs in pairs:
        torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-12)


@examples(20)
@given(num_tokens=st.integers(1, 40), chunk=st.integers(1, 45))
def test_terms_are_those_of_single_tokens(num_tokens: int, chunk: int) -> None:
    head, hidden, targets = inputs(num_tokens)
    want = torch.nn.functional.cross_entropy(head(hidden), targets.words, ignore_index=IGNORED, reduction="none")
    for compute in (partial(head_loss, chunk_tokens=chunk), weighted_terms):
        whole = compute(head, hidden, targets=targets)
        torch.testing.assert_close(targets.terms, want.detach(), rtol=1e-12, atol=1e-12)
        weights = 1.0 if targets.weights is None else targets.weights
        torch.testing.assert_close(whole, (weights * want).sum(), rtol=1e-11, atol=1e-12)
        targets.terms.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_stay_near_wide_ones(dtype: torch.dtype) -> None:
    """A scale that lies between two numbers of bf16 moves no gradient by its rounding."""
    scale = 1.0 / 387
    made = inputs(64, dtype=dtype)
    wide: Inputs = (nn.Linear(12, 31, bias=False, dtype=torch.float64), made[1].detach().double(), made[2])
    wide[0].load_state_dict(made[0].state_dict())
    wide[1].requires_grad_()
    found, want = loss_of(made, chunk_tokens=20), by_autograd(wide)
    assert found.dtype is torch.float32
    bound = 1e-6 if dtype is torch.float32 else 4e-3
    assert float(found.detach()) == pytest.approx(float(want.detach()), rel=bound)
    unscaled = gradients(loss_of(made, chunk_tokens=20), made, scale=1.0)
    scaled, exact = gradients(found, made, scale=scale), gradients(want, wide, scale=scale)
    for own, alike, theirs in zip(scaled, unscaled, exact, strict=True):
        assert own.dtype is dtype
        assert float((own.double() - theirs).norm() / theirs.norm()) < 2 * bound
        slope = float((own.double() * alike.double()).sum() / alike.double().square().sum())
        assert slope == pytest.approx(scale, rel=bound / 8)


def test_targets_that_do_not_count_cost_nothing() -> None:
    head, hidden, targets = inputs(9)
    none = targets_of(torch.full_like(targets.words, IGNORED))
    loss = head_loss(head, hidden, targets=none, chunk_tokens=4)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden.grad.any() and not head.weight.grad.any()


class Recorded(TorchDispatchMode):
    """Operators, and the elements of the largest tensor that any of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.most_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket._qualified_op_name)
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.most_elements = max(self.most_elements, *sizes, 0)
        return result


def test_logits_are_few_and_computed_once_and_nothing_waits() -> None:
    chunk, chunks, vocab = 16, 5, 200
    made = inputs(chunk * chunks, vocab=vocab, dtype=torch.float32)
    with Recorded() as recorded:
        loss_of(made, chunk_tokens=chunk).backward()
    assert recorded.most_elements == chunk * vocab
    products = [name for name in recorded.names if name in ("aten::mm", "aten::addmm", "aten::addmm_")]
    assert len(products) == 3 * chunks  # logits, gradients of hidden states, gradients of weights
    waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::equal"}
    assert not waits & set(recorded.names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_what_the_memory_model_counts(dtype: torch.dtype) -> None:
    """Forward and backward; hidden states' gradients are counted with those of layers. An upper bound in fp32, whose
    logits become probabilities in place."""
    vocab, hidden_size, itemsize = 400, 1024 * 4 // dtype.itemsize, dtype.itemsize
    chunk = loss_chunk_tokens(hidden_size, bytes_per_element=itemsize)
    shape = ModelProfile(
        name="head",
        num_layers=1,
        hidden_size=hidden_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        ffn_size=1,
        vocab_size=vocab,
    )
    made = inputs(2 * chunk, vocab=vocab, hidden_size=hidden_size, dtype=dtype)
    with Peak(lambda: [made[0].weight, made[1]]) as live:
        loss = loss_of(made, chunk_tokens=chunk)
        forward = live.peak_bytes - made[1].nbytes
        live.peak_bytes = 0
        loss.backward()
    counted = loss_bytes(shape, bytes_per_element=itemsize)
    assert (0.9 if itemsize < 4 else 0.5) * counted < forward < 1.05 * counted
    assert live.peak_bytes - (2 + 4 // itemsize) * made[1].nbytes < counted  # saved, scaled, and in fp32 between


def test_wide_heads_leave_room_for_fewer_tokens() -> None:
    for hidden_size in (64, 1024, 2048, 4096, 8192):
        for itemsize in (2, 4):
            tokens = loss_chunk_tokens(hidden_size, bytes_per_element=itemsize)
            used = tokens * (itemsize + 4) + itemsize * hidden_size
            assert 512 <= tokens <= LOSS_CHUNK_TOKENS
            assert used <= 2 * LOSS_CHUNK_TOKENS * 4 or tokens == 512
