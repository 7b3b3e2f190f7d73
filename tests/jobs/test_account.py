"""`jobs/bench/account.py`: what it counts on tensors without memory is what the model's shape and the plan say."""

import importlib
import sys
from collections.abc import Iterator
from itertools import product
from types import ModuleType

import pytest

from rayfcp.cost.analytic import ATTENTION_BACKWARD
from rayfcp.plan import model_profile
from tests.jobs.test_ablation import BENCH

RANKS, DOCUMENT = 2, 4096


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCH)
    yield importlib.import_module("account")
    for name in ("account", "account_tally"):
        sys.modules.pop(name)


def test_account(account: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"hardware": "h100", "ranks": RANKS, "primitives": ("ring",)}
    made = account.Accountant("qwen3-1.7b", document=DOCUMENT, tokens_per_rank=DOCUMENT // RANKS, **keys)
    assert {
        len(group.ranks) for plan in made.plans.values() for each in plan.microbatches for group in each.groups
    } == {2}
    model, tokens = model_profile("qwen3-1.7b"), DOCUMENT // RANKS
    layer, head = 2 * tokens * model.layer_parameters, 2 * tokens * model.vocab_size * model.hidden_size
    repeated = layer - 2 * tokens * model.ffn_size * model.hidden_size  # all that backward needs: not the last product
    attention = DOCUMENT * (DOCUMENT + 1) / 2 / RANKS * model.attention_flops_per_pair / model.num_layers
    for keeps, in_triton in product((True, False), repeat=2):
        repeats, runs = not made.plans[not keeps].keeps_attention, made.runs[not keeps][in_triton]
        assert repeats or keeps
        for layers, again, (found, _) in zip((1, 2, 1), (0, 0, 1), runs, strict=True):
            assert found["products"] == 3 * layers * layer + again * repeated + 3 * head
            times = layers * (1 + ATTENTION_BACKWARD) + again * repeats
            assert found["attention"] == pytest.approx(times * attention, rel=1e-3)
        assert len(runs[2][1]) == len(runs[0][1]) + repeats, "messages of the repeated attention"
    accounts = [made.account(setup) for setup in account.SETUPS]
    steps = [each.step_s for each in accounts]
    assert sorted(steps, reverse=True) == steps and all(0 < each.mfu < 1 for each in accounts)
    *_, torchs, fused, last = accounts
    assert last.end_s < fused.end_s
    assert fused.merge_gb < torchs.merge_gb and fused.launches < torchs.launches
    assert fused.product_s == torchs.product_s and fused.attention_s == torchs.attention_s


def test_ranks_that_need_no_other_merge_nothing(account: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-1.7b", "--documents", "1024", "--tokens-per-rank", "2048", "--ranks", "2"]
    account.main([*words, "--published", "1000"])
    out = capsys.readouterr().out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(account.SETUPS), "one table: no ring is needed"
    names, *_, torchs, fused, _ = rows
    assert [each[names.index("merge GB")] for each in (torchs, fused)] == ["0.0"] * 2
    assert "published 1,000 tok/s/GPU: MFU" in out
