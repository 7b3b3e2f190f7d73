"""The head on tokens with targets alone: the losses and gradients of one process, on any ranks and stages."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayfcp.data.rows import IGNORED
from rayfcp.execute.interpreter import Interpreter, Tokens, head_rows
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import BatchLoss, Targets
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.transport import LoneTransport
from rayfcp.models import causal_lm
from rayfcp.models.build import random_model
from rayfcp.program import lower
from tests.examples import examples
from tests.execute.cases import CASES, SEED, Case, CaseTokens, assert_same, library_config
from tests.execute.staged import StagedCase, expected, random_case, run_in_process, typical_case

LAYERS = {1: (3,), 2: (1, 2), 3: (2, 1, 1)}


class FewTargets(CaseTokens):
    """Tokens of a case of which some count, about a `share`, and of each third sequence none."""

    def __init__(self, case: Case | StagedCase, *, share: float = 0.2) -> None:
        super().__init__(case)
        rng = np.random.default_rng(2)
        self.masks = [(rng.random(len(row)) < share) & (number % 3 > 0) for number, row in enumerate(self.rows)]

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        ids, targets = super().read(sequence, start=start, stop=stop)
        return ids, np.where(self.masks[sequence][start:stop], targets, IGNORED)

    def loss_sum(self, sequence: int, ids: Tensor, logits: Tensor) -> Tensor:
        """The loss of a sequence by all of its logits."""
        following = torch.from_numpy(self.read(sequence, start=0, stop=len(ids))[1])
        return F.cross_entropy(logits, following, ignore_index=IGNORED, reduction="sum")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each call of the head."""
    rows, head_loss = [], causal_lm.head_loss

    def loss(head: torch.nn.Linear, hidden: Tensor, *, targets: Targets, **settings: object) -> Tensor:
        rows.append(len(targets))
        return head_loss(head, hidden, targets=targets, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(causal_lm, "head_loss", loss)
        yield rows


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_any_ranks_and_stages(num_stages: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and microbatches without targets among them: each runs one row of the head."""
    case = typical_case(num_ranks, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages], is_tied=num_stages == 2)
    tokens = FewTargets(case)
    with counted(monkeypatch) as rows:
        found, gradients, _ = run_in_process(case, "float64", tokens=tokens)
    assert_same(found, gradients, want=expected(case, "float64", loss_sum=tokens.loss_sum), dtype="float64")
    num_targets = sum(int(mask[:-1].sum()) for mask in tokens.masks)
    assert num_targets <= sum(rows) <= num_targets + len(rows) and min(rows) == 1


@examples(4)
@given(seed=st.integers(0, 100_000), num_stages=st.integers(1, 3), num_ranks=st.integers(1, 3))
def test_random_plans(seed: int, num_stages: int, num_ranks: int) -> None:
    case = random_case(seed, num_ranks=num_ranks, layers_of_stage=LAYERS[num_stages])
    tokens = FewTargets(case, share=0.5)
    if any(mask[:-1].any() for mask in tokens.masks):
        found, gradients, _ = run_in_process(case, "float64", tokens=tokens)
        assert_same(found, gradients, want=expected(case, "float64", loss_sum=tokens.loss_sum), dtype="float64")


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_is_the_training_loss_of_the_batch(share: float, dtype: torch.dtype) -> None:
    """To the last bit, and the losses of tokens that are no targets are 0."""
    case = CASES[0]
    tokens, model = FewTargets(case, share=share), random_model(library_config("float32"), dtype="float32", seed=SEED)
    programs = lower(case.plan(), case.sequences)
    interpreter = Interpreter(transport=LoneTransport(), kernel=pick_kernel("cpu"), model=model.to(dtype))
    loss = BatchLoss(loss=CrossEntropy(), row_of=range(3), num_rows=3)
    trained = interpreter.enqueue(programs[0], tokens, loss=loss)
    scored = interpreter.score(programs.forward_part()[0], tokens, loss=loss)
    assert torch.equal(trained.row_sums, scored.row_sums) and float(trained.row_sums.sum()) > 0
    for each in scored.terms:
        masks = [tokens.read(piece.sequence, start=piece.start, stop=piece.stop)[1] != IGNORED for piece in each.pieces]
        assert each.terms.bool().tolist() == np.concatenate(masks).tolist()


@examples(100)
@given(counts=st.lists(st.booleans(), min_size=1, max_size=200))
def test_rows_are_gathered_if_that_leaves_out_enough(counts: list[bool]) -> None:
    words = np.where(counts, 5, IGNORED)
    rows = head_rows(words)
    num_targets = max(sum(counts), 1)
    if rows is None:
        assert len(counts) - num_targets < max(len(counts) / 32, 1)
    else:
        assert len(rows) == num_targets < len(counts) and set(np.flatnonzero(counts)) <= set(rows)
