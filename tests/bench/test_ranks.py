"""All ranks of real plans on one device against attention written out densely."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from rayfcp.bench import attention as tensors
from rayfcp.bench.attention import AttentionBatch, AttentionResult, dense, random_batch, run_ranks
from rayfcp.bench.request import STRATEGIES, BenchRequest, attention_only, planned
from rayfcp.bench.results import TOLERANCE
from rayfcp.bench.serial import SerialTransport, Stopwatch, run_serially
from rayfcp.execute.kernels import pick_kernel
from rayfcp.plan import model_profile
from rayfcp.values import InfeasiblePlanError, LayerKind
from tests.examples import examples

CPU = torch.device("cpu")
MODEL = """\
name: small
num_layers: 2
hidden_size: 32
num_heads: 4
num_kv_heads: 2
head_dim: 8
ffn_size: 48
vocab_size: 60
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("models") / "small.yaml"
    path.write_text(MODEL)
    return str(path)


def request(model: str, *, num_ranks: int, num_tokens: int) -> BenchRequest:
    return BenchRequest(
        device="cpu",
        num_ranks=num_ranks,
        tokens_per_rank=-(-num_tokens // num_ranks),
        model=model,
        hardware="cpu",
        dtype="float64",
        rounds=1,
        context_tokens=16,
        block_lengths=(8,),
        strategies=("ring",),
        block_tokens=5,
    )


def batch_of(lengths: tuple[int, ...], model: str) -> AttentionBatch:
    shape = attention_only(model_profile(model))
    return random_batch(lengths, model=shape, device=CPU, dtype=torch.float64, seed=len(lengths))


def written_out(batch: AttentionBatch) -> AttentionResult:
    """Softmax of masked scores over the whole batch at once, differentiated by autograd."""
    q, k, v = (each.clone().requires_grad_() for each in (batch.query, batch.key, batch.value))
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    at = torch.arange(len(owner))
    seen = (owner[:, None] == owner[None, :]) & (at[:, None] >= at[None, :])
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = (each.repeat_interleave(share, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) * batch.scale
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), wide_v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), batch.gradient)
    return AttentionResult(out=out.detach(), dq=dq, dk=dk, dv=dv)


@examples(20)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
    num_ranks=st.integers(1, 5),
    strategy=st.sampled_from(STRATEGIES),
)
def test_ranks_together_are_dense_attention(
    model: str, lengths: tuple[int, ...], num_ranks: int, strategy: str
) -> None:
    batch = batch_of(lengths, model)
    try:
        parts, _ = planned(strategy, lengths, request=request(model, num_ranks=num_ranks, num_tokens=sum(lengths)))
    except InfeasiblePlanError:
        assert strategy == "ulysses", "others need no heads that divide"
        reject()
    outcome, seconds = run_ranks(parts, batch, kernel=pick_kernel("cpu"))
    assert outcome.error(written_out(batch)) <= TOLERANCE["float64"]
    grids = (seconds.forward_s, seconds.backward_s)
    assert {(len(grid), len(row)) for grid in grids for row in grid} == {(len(parts), num_ranks)}
    assert all(each > 0 for grid in grids for row in grid for each in row)


@examples(10)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple))
def test_the_single_kernel_is_dense_attention(model: str, lengths: tuple[int, ...]) -> None:
    batch = batch_of(lengths, model)
    found, forward_s, backward_s = dense(batch, pick_kernel("cpu"), watch=Stopwatch(CPU))
    assert found.error(written_out(batch)) <= TOLERANCE["float64"]
    assert forward_s > 0 and backward_s > 0


@examples(20)
@given(tokens=st.integers(1, 30), rows=st.integers(1, 40), at=st.integers(0, 29), off=st.floats(0.5, 9.0))
def test_errors_are_found_wherever_they_are(model: str, tokens: int, rows: int, at: int, off: float) -> None:
    batch = batch_of((tokens,), model)
    truth = AttentionResult(out=batch.query, dq=batch.gradient, dk=batch.key, dv=batch.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "ROWS", rows)
        assert truth.error(truth) == 0.0
        for name, wrong, least in (("out", off, 0.05), ("dk", off, 0.05), ("dv", float("nan"), float("inf"))):
            moved = getattr(truth, name).clone()
            moved[at % tokens, 0, 3] += wrong
            assert replace(truth, **{name: moved}).error(truth) >= least


def test_windows_and_experts_do_not_count() -> None:
    """The bench asks what attention over all keys takes."""
    plain = model_profile("qwen3-8b")
    other = replace(plain, kind_of_layer=(LayerKind(window=64),) * plain.num_layers, num_experts=8, experts_per_token=2)
    assert attention_only(other) == attention_only(plain)


def test_a_wrong_plan_is_seen(model: str) -> None:
    """Tokens that nobody loads, and tokens of another rank, are no small error."""
    lengths = (30, 8)
    batch, kernel = batch_of(lengths, model), pick_kernel("cpu")
    truth = written_out(batch)
    ((row,), _) = planned("ring", lengths, request=request(model, num_ranks=2, num_tokens=38))
    nobody = (replace(row[0], pieces=row[1].pieces), row[1])
    assert run_ranks((nobody,), batch, kernel=kernel)[0].error(truth) == float("inf")
    one, *others = row[1].pieces
    moved = replace(one, start=one.start - 1, stop=one.stop - 1)
    shifted = (row[0], replace(row[1], pieces=(moved, *others)))
    assert run_ranks((shifted,), batch, kernel=kernel)[0].error(truth) > 1e-3


def test_one_rank_computes_at_a_time() -> None:
    """A ring of messages: whoever waits lets others compute, and nobody else."""
    busy, most, lock = 0, 0, threading.Lock()

    def count(change: int) -> None:
        nonlocal busy, most
        with lock:
            busy += change
            most = max(most, busy)

    def work(transport: SerialTransport, watch: Stopwatch) -> list[float]:
        watch.start()
        seen, token = [], torch.full((3,), float(transport.rank))
        for _ in range(4):
            arriving = torch.empty(3)
            pending = transport.post([((transport.rank + 1) % 3, token)], [((transport.rank - 1) % 3, arriving)])
            count(1)
            token.clone().exp_()
            count(-1)
            pending.wait()
            assert pending.done()
            token = arriving
            seen.append(float(token[0]))
        watch.stop()
        assert watch.seconds() > 0
        return seen

    found = run_serially(3, work, device=CPU)
    assert found == [[float((rank - hop) % 3) for hop in range(1, 5)] for rank in range(3)]
    assert most == 1


def test_a_rank_that_fails_ends_all() -> None:
    def work(transport: SerialTransport, watch: Stopwatch) -> None:
        watch.start()
        if transport.rank == 1:
            raise ArithmeticError("rank 1 cannot")
        arriving = torch.empty(1)
        transport.post([], [(1, arriving)]).wait()

    with pytest.raises(ArithmeticError, match="rank 1 cannot"):
        run_serially(3, work, device=CPU)
