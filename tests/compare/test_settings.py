"""Settings of a strategy: which are planned, dropped and simulated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayfcp.compare import planning
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import Case, compare
from rayfcp.compare.layouts import LayoutCandidate, LayoutSearch, ParallelLayout, Trial
from rayfcp.compare.lengths import Batch
from rayfcp.compare.planning import OPTIONS
from rayfcp.config.constraints import HostConstraints
from rayfcp.plan import hardware_profile, model_profile
from tests.compare.cases import small
from tests.masks import specs

MODEL, HARDWARE = model_profile("llama3.2-1b"), hardware_profile("h100")
ONE = ParallelLayout(num_stages=1, tensor_parallel=1)
FREE: dict[str, Any] = {"max_tokens_per_rank": None, "batches": 1, "strategies": ("flex-ring",)}
LENGTHS = [3000, 700, 1200, 90, 2200, 5000]


def candidate(inputs: Inputs, batches: Sequence[Batch], **constraints: Any) -> LayoutCandidate:
    options = OPTIONS.model_copy(update={"constraints": HostConstraints(**constraints)})
    case = Case(model=MODEL, hardware=HARDWARE, num_ranks=inputs.devices, batches=tuple(batches), options=options)
    return LayoutCandidate(ONE, inputs=inputs, case=case)


def searched(found: LayoutCandidate, strategy: str) -> Trial:
    (trial,) = LayoutSearch(strategy, [found], log=lambda _: None, check=False).run()
    return trial


def test_the_fastest_simulated_finalist_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The better of two settings is predicted to be a little slower than the other; simulation finds it."""
    inputs = small(tmp_path, **FREE | {"memory_gib": 14.0}, recompute_layers=0)
    found = candidate(inputs, [specs(LENGTHS * 6)])
    times_s = [
        found.simulated("flex-ring", each, log=lambda _: None, check=False).iteration_s for each in found.settings
    ]
    best = found.settings[times_s.index(min(times_s))]
    factor = 1.05 * max(times_s) / min(times_s)
    predicted = LayoutCandidate._predict

    def spoilt(self: LayoutCandidate, strategy: str, setting: Any, **given: Any) -> float:
        return predicted(self, strategy, setting, **given) * (factor if setting is best else 1.0)

    monkeypatch.setattr(LayoutCandidate, "_predict", spoilt)
    trial = searched(found, "flex-ring")
    assert min(times_s) < max(times_s)
    assert trial.setting is best and trial.iteration_s == min(times_s)


@pytest.mark.parametrize("strategy", ["flex-ring", "static-cp", "auto"])
def test_bounds_leave_out_no_finalist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """What is found without bounds is found with fewer plans of the same batches."""
    batches = [specs([each + shift for each in LENGTHS]) for shift in (0, 13, 100)]
    plans: list[str] = []
    plan_timed = planning.plan_timed

    def counted(*args: Any, **given: Any) -> Any:
        plans.append(given["strategy"])
        return plan_timed(*args, **given)

    monkeypatch.setattr(planning, "plan_timed", counted)
    inputs = small(tmp_path, **FREE)
    quick = searched(candidate(inputs, batches), strategy)
    num_quick = len(plans)
    monkeypatch.setattr(planning, "lower_bound", lambda *_, **__: 0.0)
    monkeypatch.setattr("rayfcp.compare.layouts.MARGIN", 1e9)
    whole = searched(candidate(inputs, batches), strategy)
    assert quick.setting == whole.setting and quick.iteration_s == whole.iteration_s
    assert num_quick < len(plans) - num_quick


def test_settings_without_a_permitted_group_are_dropped(tmp_path: Path) -> None:
    """Groups of at most 4 of 8 ranks hold the long sequence only where layers are recomputed."""
    inputs = small(tmp_path, **FREE | {"memory_gib": 14.0}, devices=8)
    trials = [
        searched(candidate(inputs, [specs([1000, length])], degrees=[1, 2, 4]), "flex-ring") for length in (900, 60_000)
    ]
    short, long = (trial.setting for trial in trials)
    assert short is not None and long is not None
    assert 4 * short.cluster.max_tokens_per_rank < 60_000 <= 4 * long.cluster.max_tokens_per_rank
    refused = searched(candidate(inputs, [specs([1000, 150_000])], degrees=[1]), "flex-ring")
    assert refused.status == "infeasible" and "150000" in refused.reason.replace(",", "")


@pytest.mark.parametrize(("size", "tokens", "feasible"), [(1, 2400, True), (4, 2500, True), (4, 2400, False)])
def test_tensor_parallel_devices_share_heads(tmp_path: Path, size: int, tokens: int, feasible: bool) -> None:
    """32 heads on 4 tensor-parallel devices leave 8 for a Ulysses group, which holds 8 x 2,500 tokens of 20,000."""
    given = FREE | {"strategies": ("ulysses",), "max_tokens_per_rank": tokens, "max_seqlen": 20_000, "global_batch": 16}
    (entry,) = compare(small(tmp_path, **given, devices=64, tensor_parallel=size)).entries
    assert entry.feasible == feasible, entry.reason
