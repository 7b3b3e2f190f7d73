"""Distillation: terms and gradients of a plain reference, on any ranks and stages; memory as it is planned."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rayfcp.cost.memory import loss_bytes, loss_chunk_tokens
from rayfcp.data.rows import IGNORED, TeacherRows
from rayfcp.execute.losses.base import ABSENT, Targets, Teacher
from rayfcp.execute.losses.distillation import Distillation
from rayfcp.models.head import head_loss
from rayfcp.values import ModelProfile
from tests.examples import examples
from tests.execute.cases import VOCAB, Case, CaseTokens, assert_same
from tests.execute.live import Peak
from tests.execute.staged import StagedCase, expected, random_case, run_in_process, typical_case

SETTINGS = ((1.0, 1.0), (2.5, 1.0), (0.5, 0.25), (1.0, 0.0))
"""Temperatures and shares."""
LAYERS = {1: (3,), 2: (1, 2), 3: (2, 1, 1)}


def plain(
    logits: Tensor, following: Tensor, *, words: Tensor, known: Tensor, temperature: float, share: float
) -> Tensor:
    """Losses `[tokens]`, word by word: share T^2 sum_w p_w log(p_w / q_w) - (1 - share) log q_next."""
    found = []
    for own, target, ids, stored in zip(logits, following.tolist(), words, known, strict=True):
        if target == IGNORED:
            found.append(own.sum() * 0)
            continue
        weights = [torch.exp(each / temperature) for each in stored]
        soft = torch.exp(own / temperature) / torch.exp(own / temperature).sum()
        total = own.new_zeros(())
        for word, weight in zip(ids.tolist(), weights, strict=True):
            of_teacher = weight / sum(weights)
            total = total + share * temperature**2 * of_teacher * torch.log(of_teacher / soft[word])
        hard = torch.exp(own[target]) / torch.exp(own).sum()
        found.append(total - (1 - share) * torch.log(hard))
    return torch.stack(found)


def made(num_tokens: int, *, words: int, setting: tuple[float, float], vocab: int = 17) -> tuple[Tensor, Targets]:
    """Logits, and targets of which a third do not count."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, vocab, generator=generator).double() * 3
    following = torch.randint(0, vocab, (num_tokens,), generator=generator)
    following[torch.rand(num_tokens, generator=generator) < 0.3] = IGNORED
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:words] for _ in range(num_tokens)]).int()
    known = torch.randn(num_tokens, words, generator=generator).float()
    temperature, share = setting
    targets = Targets(
        loss=Distillation(temperature=temperature, share=share),
        words=following,
        terms=torch.full((num_tokens,), torch.nan).double(),
        weights=torch.randn(num_tokens, generator=generator).double() if num_tokens % 2 else None,
        teacher=Teacher(words=ids, logits=known),
    )
    return logits, targets


@pytest.mark.parametrize("setting", SETTINGS)
@examples(15)
@given(num_tokens=st.integers(1, 30), words=st.integers(1, 6), chunk=st.integers(1, 33))
def test_terms_and_gradients_are_those_of_the_formula(
    setting: tuple[float, float], num_tokens: int, words: int, chunk: int
) -> None:
    """By chunks through the head with its gradient, by autograd, and with words that are not there."""
    logits, targets = made(num_tokens, words=words, setting=setting)
    assert targets.teacher is not None
    head = nn.Linear(17, 17, bias=False, dtype=torch.float64)
    nn.init.eye_(head.weight)
    given = logits.clone().requires_grad_()
    want = plain(
        given,
        targets.words,
        words=targets.teacher.words,
        known=targets.teacher.logits.double(),
        temperature=setting[0],
        share=setting[1],
    )
    want_sum = targets.weighted(want)
    (gradient,) = torch.autograd.grad(want_sum, given)
    for keep_logits in (True, False):
        own = logits.clone().requires_grad_()
        found = head_loss(head, own, targets=targets, chunk_tokens=chunk, keep_logits=keep_logits)
        torch.testing.assert_close(targets.terms, want.detach(), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(found.detach(), want_sum.detach(), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(found, own)[0], gradient, rtol=1e-10, atol=1e-12)
        targets.terms.fill_(torch.nan)
    padded = (
        nn.functional.pad(targets.teacher.words, (0, 2)),
        nn.functional.pad(targets.teacher.logits, (0, 2), value=ABSENT),
    )
    wider = Targets(
        loss=targets.loss, words=targets.words, terms=targets.terms, teacher=Teacher(words=padded[0], logits=padded[1])
    )
    torch.testing.assert_close(targets.loss.terms(logits, wider), want.detach(), rtol=1e-11, atol=1e-12)


def test_a_model_that_is_its_teacher_has_no_loss() -> None:
    """Neither terms nor gradients, if all words are stored, at any temperature."""
    logits, targets = made(9, words=17, setting=(3.0, 1.0))
    assert targets.teacher is not None
    stored = logits.gather(1, targets.teacher.words.long()) + 5.0  # constants do not count
    targets.teacher.logits.copy_(stored)
    own = logits.clone()
    terms = targets.loss.into_gradient(own, targets)
    assert float(terms.abs().max()) < 1e-10 and float(own.abs().max()) < 1e-6  # logits are stored in fp32


class TaughtTokens(CaseTokens):
    """Tokens of a case with random words of a teacher, of each sequence another number of them."""

    def __init__(self, case: Case | StagedCase) -> None:
        super().__init__(case)
        rng = np.random.default_rng(1)
        self.taught = [
            (
                np.stack([rng.permutation(VOCAB)[: 1 + 2 * number] for _ in row]).astype(np.int32),
                rng.normal(size=(len(row), 1 + 2 * number)).astype(np.float32),
            )
            for number, row in enumerate(self.rows)
        ]

    def teacher(self, sequence: int, *, start: int, stop: int) -> TeacherRows:
        words, logits = self.taught[sequence]
        return words[start:stop], logits[start:stop]


def assert_alike(case: StagedCase, *, temperature: float, share: float) -> None:
    """On the case's ranks and stages, and by one process."""
    tokens = TaughtTokens(case)

    def loss_sum(sequence: int, ids: Tensor, logits: Tensor) -> Tensor:
        words, known = (torch.from_numpy(each) for each in tokens.taught[sequence])
        following = torch.cat([ids[1:], torch.tensor([IGNORED])])
        settings = {"temperature": temperature, "share": share}
        return plain(logits, following, words=words, known=known.double(), **settings).sum()

    loss = Distillation(temperature=temperature, share=share)
    found, gradients, _ = run_in_process(case, "float64", loss=loss, tokens=tokens)
    assert_same(found, gradients, want=expected(case, "float64", loss_sum=loss_sum), dtype="float64")


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_any_ranks_and_stages(num_stages: int, num_ranks: int) -> None:
    case = typical_case(num_ranks, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages], is_tied=num_stages == 2)
    assert_alike(case, temperature=1.0 + num_stages / 2, share=1.0 / num_ranks)


@examples(3)
@given(seed=st.integers(0, 100_000), num_stages=st.integers(1, 3), num_ranks=st.integers(1, 3))
def test_random_plans(seed: int, num_stages: int, num_ranks: int) -> None:
    """Ranks without tokens among them."""
    case = random_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages])
    if case.num_targets:
        assert_alike(case, temperature=2.0, share=0.5)


@pytest.mark.parametrize("setting", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_what_the_memory_model_counts(dtype: torch.dtype, setting: tuple[float, float]) -> None:
    """A chunk at a time, as `tests/models/test_loss.py` has it of cross entropy."""
    vocab, hidden_size, itemsize = 400, 1024 * 4 // dtype.itemsize, dtype.itemsize
    chunk = loss_chunk_tokens(hidden_size, bytes_per_element=itemsize)
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "ffn_size": 1, "vocab_size": vocab}
    profile = ModelProfile(name="head", num_layers=1, hidden_size=hidden_size, **shape)
    counted = loss_bytes(profile, bytes_per_element=itemsize)
    _, targets = made(2 * chunk, words=4, setting=setting, vocab=vocab)
    head = nn.Linear(hidden_size, vocab, bias=False, dtype=dtype)
    hidden = torch.randn(2 * chunk, hidden_size, dtype=dtype, requires_grad=True)
    with Peak(lambda: [head.weight, hidden]) as live:
        head_loss(head, hidden, targets=targets, chunk_tokens=chunk)
    casts = (itemsize < 4) * 4 * chunk * hidden_size  # of rows: few beside real vocabularies
    assert 0.7 * counted < live.peak_bytes - hidden.nbytes - casts < 1.05 * counted
