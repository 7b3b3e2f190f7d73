"""The loss behind the head: the same numbers as autograd's, few logits at a time, computed once, no waiting."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rayfcp.cost.memory import LOSS_CHUNK_TOKENS, loss_bytes, loss_chunk_tokens
from rayfcp.data.rows import IGNORED
from rayfcp.execute.losses.base import Targets
from rayfcp.execute.losses.cross_entropy import CrossEntropy, cross_entropies
from rayfcp.models.head import head_loss
from rayfcp.values import ModelProfile
from tests.examples import examples
from tests.execute.live import Peak

Inputs = tuple[nn.Linear, Tensor, Targets]


def inputs(
    num_tokens: int,
    *,
    hidden_size: int = 12,
    vocab: int = 31,
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    gathers: bool = False,
) -> Inputs:
    """A head, hidden states and targets, a third of which do not count. Odd numbers of tokens have weights. `gathers`:
    the head runs on the first row and on those that count."""
    generator = torch.Generator().manual_seed(num_tokens)
    head = nn.Linear(hidden_size, vocab, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    targets[torch.rand(num_tokens, generator=generator) < 0.3] = IGNORED
    weights = torch.randn(num_tokens, generator=generator, dtype=torch.float64) if num_tokens % 2 else None
    counted = (targets != IGNORED) | (torch.arange(num_tokens) == 0)
    rows = counted.nonzero().squeeze(1) if gathers else None
    return head, hidden, targets_of(targets, weights=weights, rows=rows)


def targets_of(words: Tensor, *, weights: Tensor | None = None, rows: Tensor | None = None) -> Targets:
    if rows is not None:
        words, weights = words[rows], None if weights is None else weights[rows]
    terms = torch.full((len(words),), torch.nan).double()
    return Targets(loss=CrossEntropy(), words=words, terms=terms, weights=weights, rows=rows)


def loss_of(given: Inputs, *, chunk_tokens: int, keep_logits: bool = True) -> Tensor:
    head, hidden, targets = given
    return head_loss(head, hidden, targets=targets, chunk_tokens=chunk_tokens, keep_logits=keep_logits)


def gradients(loss: Tensor, given: Inputs, *, scale: float) -> list[Tensor]:
    """Gradients of a scaled loss with respect to hidden states, weight and bias."""
    head, hidden, _ = given
    trained = [each for each in (hidden, *head.parameters()) if each.requires_grad]
    return list(torch.autograd.grad(loss * scale, trained))


def by_autograd(given: Inputs) -> Tensor:
    """The weighted sum of cross entropies by torch alone."""
    head, hidden, targets = given
    own = hidden if targets.rows is None else hidden[targets.rows]
    each = torch.nn.functional.cross_entropy(head(own), targets.words, ignore_index=IGNORED, reduction="none")
    return each.sum() if targets.weights is None else (each * targets.weights).sum()


@examples(60)
@given(
    num_tokens=st.integers(1, 40),
    chunk=st.integers(1, 45),
    bias=st.booleans(),
    scale=st.floats(-2.0, 2.0),
    keep_logits=st.booleans(),
    gathers=st.booleans(),
    frozen=st.sampled_from(["", "head", "hidden"]),
)
def test_loss_and_gradients_are_autograd_s(
    num_tokens: int, chunk: int, bias: bool, scale: float, keep_logits: bool, gathers: bool, frozen: str
) -> None:
    made = inputs(num_tokens, bias=bias, gathers=gathers)
    made[0].requires_grad_(frozen != "head")
    made[1].requires_grad_(frozen != "hidden")
    found, want = loss_of(made, chunk_tokens=chunk, keep_logits=keep_logits), by_autograd(made)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(found, made, scale=scale), gradients(want, made, scale=scale), strict=True)
    for own, theirs in pairs:
        torch.testing.assert_close(own, theirs, rtol=1e-11, atol=1e-12)


@examples(20)
@given(num_tokens=st.integers(1, 40), chunk=st.integers(1, 45))
def test_terms_are_those_of_single_tokens(num_tokens: int, chunk: int) -> None:
    head, hidden, targets = inputs(num_tokens)
    want = torch.nn.functional.cross_entropy(head(hidden), targets.words, ignore_index=IGNORED, reduction="none")
    for keep_logits in (True, False):
        whole = head_loss(head, hidden, targets=targets, chunk_tokens=chunk, keep_logits=keep_logits)
        torch.testing.assert_close(targets.terms, want.detach(), rtol=1e-12, atol=1e-12)
        weights = 1.0 if targets.weights is None else targets.weights
        torch.testing.assert_close(whole, (weights * want).sum(), rtol=1e-11, atol=1e-12)
        targets.terms.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_evaluation_is_the_training_loss_to_the_last_bit(dtype: torch.dtype) -> None:
    made = inputs(60, vocab=5003, dtype=dtype)
    found = {}
    for how in ("keep", "repeat", "evaluate"):
        with torch.set_grad_enabled(how != "evaluate"):
            loss = loss_of(made, chunk_tokens=16, keep_logits=how == "keep")
        found[how] = (loss.detach(), made[2].terms.clone())
    for loss, terms in found.values():
        assert torch.equal(loss, found["keep"][0]) and torch.equal(terms, found["keep"][1])


def test_cross_entropies_over_many_words_keep_the_precision_of_fp32() -> None:
    """torch's own lose 8e-6 on CPUs, by a sum of all words one after the other."""
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0))
    words = torch.arange(64)
    want = torch.nn.functional.cross_entropy(logits.double(), words, reduction="none")
    torch.testing.assert_close(cross_entropies(logits, words).double(), want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("weight", [None, 1 / 387])
def test_the_weight_s_gradient_is_rounded_once(weight: float | None, keep_logits: bool, mean: float) -> None:
    """Over 512 chunks, as of a million tokens; its error is that of casting one product in fp64."""
    num_tokens, vocab, size = 8192, 96, 48
    generator = torch.Generator().manual_seed(0)
    shift = mean * torch.randn(size, generator=generator)
    hidden = (torch.randn(num_tokens, size, generator=generator) + shift).bfloat16().requires_grad_()
    words = torch.multinomial(1.0 / torch.arange(1, vocab + 1), num_tokens, replacement=True, generator=generator)
    head = nn.Linear(size, vocab, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(head.weight, std=0.1, generator=generator)
    slopes = (hidden @ head.weight.t()).detach()
    CrossEntropy().into_gradient(slopes, targets_of(words))
    exact = slopes.double().t() @ hidden.detach().double() * (weight or 1.0)
    weights = None if weight is None else torch.full((num_tokens,), weight, dtype=torch.float64)
    made = head, hidden, targets_of(words, weights=weights)
    _, found = gradients(loss_of(made, chunk_tokens=16, keep_logits=keep_logits), made, scale=1.0)
    error, once = (float((each.double() - exact).norm()) for each in (found, exact.bfloat16()))
    assert error < 1.05 * once


@pytest.mark.parametrize("keep_logits", [True, False])
def test_weights_of_rows_bias_no_gradient(keep_logits: bool) -> None:
    """A weight between two numbers of bf16, where all slopes are alike: tokens without any probability."""
    num_tokens, weight = 512, 1 / 387
    head, hidden, _ = inputs(num_tokens, hidden_size=32, vocab=4096, dtype=torch.bfloat16)
    words = torch.arange(num_tokens)
    found = []
    for each in (1.0, weight):
        made = head, hidden, targets_of(words, weights=torch.full((num_tokens,), each, dtype=torch.float64))
        found.append(gradients(loss_of(made, chunk_tokens=100, keep_logits=keep_logits), made, scale=1.0))
    for plain, weighed in zip(*found, strict=True):
        slope = float((plain.double() * weighed.double()).sum() / plain.double().square().sum())
        assert slope == pytest.approx(weight, rel=1e-4)


@pytest.mark.parametrize("keep_logits", [True, False])
def test_the_head_runs_on_rows_with_targets_alone(keep_logits: bool) -> None:
    flops = []
    for gathers in (True, False):
        made = inputs(160, vocab=200, dtype=torch.float32, gathers=gathers)
        with FlopCounterMode(display=False) as counted:
            loss_of(made, chunk_tokens=16, keep_logits=keep_logits).backward()
        flops.append(counted.get_total_flops() / len(made[2]))
        rows = torch.arange(160) if made[2].rows is None else made[2].rows
        others = torch.ones(160, dtype=torch.bool).index_fill_(0, rows[made[2].words != IGNORED], False)
        assert others.sum() > 40 and not made[1].grad[others].any()
    assert flops[0] == flops[1]


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


@pytest.mark.parametrize("gathers", [False, True])
def test_logits_are_few_and_computed_once_and_nothing_waits(gathers: bool) -> None:
    chunk, vocab = 16, 200
    made = inputs(80, vocab=vocab, dtype=torch.float32, gathers=gathers)
    chunks = -(-len(made[2]) // chunk)
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
    casts = (itemsize < 4) * 4 * chunk * hidden_size  # of rows: few beside real vocabularies
    assert (0.9 if itemsize < 4 else 0.5) * counted < forward - casts < 1.05 * counted
    assert live.peak_bytes - (1 + 4 // itemsize) * made[1].nbytes < counted  # of hidden states, and in fp32 to scale


def test_wide_heads_leave_room_for_fewer_tokens() -> None:
    for hidden_size in (64, 1024, 2048, 4096, 8192):
        for itemsize in (2, 4):
            tokens = loss_chunk_tokens(hidden_size, bytes_per_element=itemsize)
            used = tokens * (itemsize + 4) + itemsize * hidden_size
            assert 512 <= tokens <= LOSS_CHUNK_TOKENS
            assert used <= 2 * LOSS_CHUNK_TOKENS * 4 or tokens == 512
