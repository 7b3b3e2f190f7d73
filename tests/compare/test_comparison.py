"""The comparison: its JSON contract, sane figures, the same results again, and what is infeasible."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rayfcp.compare import comparison as comparison_module
from rayfcp.compare.advice import Advisor
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import Comparison, compare
from rayfcp.compare.layouts import LayoutSearch, ParallelLayout
from rayfcp.compare.lengths import batches_of, draw_batches, lengths_of
from rayfcp.compare.results import BatchFigures, averaged
from rayfcp.config import ConfigError
from rayfcp.plan import model_profile, strategy_names
from rayfcp.plan.strategies.registry import get
from rayfcp.simulate import Breakdown
from rayfcp.values import Imbalance
from tests.compare.cases import LENGTHS, small

NUMBER = (int, float)
FIELDS: dict[str, Any] = {
    "iteration_s": NUMBER,
    "lower_bound_s": NUMBER,
    "gap": NUMBER,
    "tokens_per_s_per_rank": NUMBER,
    "mfu": NUMBER,
    "attention_mfu": NUMBER,
    "imbalance": dict,
    "bubble": NUMBER,
    "peak_memory_gib": NUMBER,
    "plan_s": NUMBER,
    "prepare_s": NUMBER,
    "num_microbatches": NUMBER,
    "degrees": dict,
    "speedup_over_best_baseline": NUMBER,
}
RATIOS = ("mfu", "attention_mfu", "bubble")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compare")
    names = tuple(name for name in strategy_names() if name != "flexsp")
    return compare(small(folder, strategies=(*names, "dapple")))


def results(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Through JSON and back, as a reader of the file gets them."""
    return {each["strategy"]: each for each in json.loads(json.dumps(comparison.as_json()))["results"]}


def test_entries_have_the_contract_s_fields(everything: Comparison) -> None:
    for name, entry in results(everything).items():
        assert isinstance(entry["reason"], str) and entry["reason"]
        for field, kind in FIELDS.items():
            if entry["feasible"]:
                assert isinstance(entry[field], kind) and not isinstance(entry[field], bool), (name, field)
            else:
                assert entry[field] is None, (name, field)
    inputs = everything.as_json()["inputs"]
    assert inputs["devices"] == 4 and inputs["seed"] == 0 and inputs["max_tokens_per_rank"] == 6_000


def test_figures_make_sense(everything: Comparison) -> None:
    tokens = sum(min(length, 8192) for length in LENGTHS)
    for name, entry in results(everything).items():
        if not entry["feasible"]:
            continue
        assert entry["gap"] >= 1 - 1e-6, name
        assert all(0 <= entry[ratio] < 1 for ratio in RATIOS), name
        assert entry["attention_mfu"] < entry["mfu"]
        assert sorted(entry["imbalance"]) == ["attention", "communication", "compute", "memory"]
        assert all(0 <= value < 1 for value in entry["imbalance"].values())
        assert all(1 <= int(degree) <= 4 and count > 0 for degree, count in entry["degrees"].items())
        assert (
            entry["peak_memory_gib"] > 0 and entry["prepare_s"] > entry["plan_s"] > 0 and entry["num_microbatches"] >= 1
        )
        per_batch = entry["per_batch"]
        assert entry["iteration_s"] == pytest.approx(sum(each["iteration_s"] for each in per_batch) / 2)
        whole_s = sum(each["iteration_s"] for each in per_batch)
        assert entry["gap"] == pytest.approx(whole_s / sum(each["lower_bound_s"] for each in per_batch))
        assert entry["tokens_per_s_per_rank"] == pytest.approx(tokens / whole_s / 4)
    fastest = min(entry["iteration_s"] for entry in results(everything).values() if entry["feasible"])
    assert results(everything)["flex-ring"]["iteration_s"] <= 1.05 * fastest
    assert results(everything)["auto"]["iteration_s"] <= 1.01 * fastest


def test_auto_chooses_among_both_numbers_of_stages(tmp_path: Path) -> None:
    names = ("auto", "flex-ring", "elastic-pipeline")
    found = results(compare(small(tmp_path, strategies=names, stages=2, batches=1)))
    auto, *others = (found[name] for name in names)
    assert auto["feasible"] and auto["reason"].startswith("Auto took ")
    assert auto["iteration_s"] <= 1.01 * min(each["iteration_s"] for each in others if each["feasible"])


def test_speedups_are_over_the_best_baseline(everything: Comparison) -> None:
    feasible = [entry for entry in results(everything).values() if entry["feasible"]]
    best_s = min(entry["iteration_s"] for entry in feasible if get(entry["strategy"]).is_baseline)
    for entry in feasible:
        assert entry["speedup_over_best_baseline"] == pytest.approx(best_s / entry["iteration_s"])


def test_without_baselines_there_is_no_speedup(tmp_path: Path) -> None:
    entry = results(compare(small(tmp_path, strategies=("flex-ring",), batches=1)))["flex-ring"]
    assert entry["feasible"] and entry["speedup_over_best_baseline"] is None


def test_the_same_inputs_give_the_same_results(tmp_path: Path) -> None:
    def figures(seed: int) -> list[dict[str, Any]]:
        entries = results(compare(small(tmp_path, seed=seed))).values()
        for entry in entries:
            for each in (entry, *entry["per_batch"]):
                del each["plan_s"], each["prepare_s"]
        return list(entries)

    assert figures(0) == figures(0) != figures(1)


def test_batches_are_those_of_the_file(everything: Comparison) -> None:
    lengths = sorted(lengths_of(everything.case.batches))
    assert lengths == sorted(min(length, 8192) for length in LENGTHS)
    given = everything.inputs
    again = draw_batches(given.lengths, num_batches=2, global_batch=8, max_seqlen=8192, seed=given.seed)
    assert again == everything.case.batches


def test_all_names_every_strategy_and_says_why_some_cannot(tmp_path: Path) -> None:
    names = tuple(name for name in strategy_names() if get(name).needs_stages)
    comparison = compare(small(tmp_path, strategies=names))
    for name, entry in results(comparison).items():
        assert not entry["feasible"] and name in entry["reason"]
        assert "--stages is 1" in entry["reason"], name


def test_unknown_strategies_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--strategies is 'flex-rnig', .*did you mean 'flex-ring'"):
        compare(small(tmp_path, strategies=("ring", "flex-rnig")))
    with pytest.raises(ConfigError, match="names none"):
        compare(small(tmp_path, strategies=()))


def test_a_sequence_that_fits_nowhere_is_infeasible(tmp_path: Path) -> None:
    entry = results(compare(small(tmp_path, max_tokens_per_rank=2_000)))["flex-ring"]
    assert not entry["feasible"] and "8192 tokens, 4 ranks hold at most 8000 (2000 each)" in entry["reason"]


def test_what_takes_too_much_memory_to_simulate_is_refused(tmp_path: Path) -> None:
    """One ring over 2,048 ranks has 4 million transfers; nothing is lowered."""
    entry = results(compare(small(tmp_path, devices=2048, batches=1, strategies=("ring",))))["ring"]
    assert not entry["feasible"] and "compare has 4; use fewer --devices" in entry["reason"]


def free(folder: Path, **changes: Any) -> Inputs:
    return small(folder, max_tokens_per_rank=None, **({"batches": 1, "strategies": ("flex-ring",)} | changes))


def test_a_model_that_does_not_fit_is_infeasible(tmp_path: Path) -> None:
    entry = results(compare(free(tmp_path, memory_gib=2.0)))["flex-ring"]
    assert not entry["feasible"] and "2 GiB" in entry["reason"] and entry["iteration_s"] is None


def test_memory_decides_on_recomputation(tmp_path: Path) -> None:
    """Plenty of memory recomputes nothing; little of it gives less time to none of the fixed settings."""
    assert results(compare(free(tmp_path, memory_gib=64.0)))["flex-ring"]["recomputed_layers"] == 0
    little = free(tmp_path, memory_gib=13.0)
    chosen = results(compare(little))["flex-ring"]
    assert chosen["peak_memory_gib"] <= 13.0
    for layers in (0, 8, 16):
        fixed = results(compare(free(tmp_path, memory_gib=13.0, recompute_layers=layers)))["flex-ring"]
        assert not fixed["feasible"] or chosen["iteration_s"] <= 1.02 * fixed["iteration_s"]
    kept, repeated = (
        results(compare(free(tmp_path, recompute_layers=16, keep_attention=keep)))["flex-ring"]
        for keep in (True, False)
    )
    assert kept["keeps_attention"] and not repeated["keeps_attention"]
    assert kept["iteration_s"] < repeated["iteration_s"] and kept["peak_memory_gib"] > repeated["peak_memory_gib"]
    fixed = results(compare(free(tmp_path, reduce_every="step", recompute_layers=4)))["flex-ring"]
    assert (fixed["recomputed_layers"], fixed["reduce_every"]) == (4, "step")
    with pytest.raises(ConfigError, match="--recompute-layers is 17, must be at most the model's 16"):
        compare(free(tmp_path, recompute_layers=17))


@pytest.mark.parametrize("memory_gib", [10.0, 13.0])
def test_auto_takes_the_setting_that_suits_the_best_strategy(tmp_path: Path, memory_gib: float) -> None:
    names = ("auto", "static-cp", "ulysses", "flex-ring")
    found = results(compare(free(tmp_path, memory_gib=memory_gib, strategies=names)))
    others = [found[name]["iteration_s"] for name in names[1:] if found[name]["feasible"]]
    assert found["auto"]["iteration_s"] <= 1.01 * min(others)


def test_tensor_parallelism_makes_fewer_and_larger_ranks(tmp_path: Path) -> None:
    one, two = (compare(free(tmp_path, tensor_parallel=size)) for size in (1, 2))
    assert one.case.num_ranks == 4 and two.case.num_ranks == 2
    assert [each.entries[0].num_ranks for each in (one, two)] == [4, 2]
    assert results(two)["flex-ring"]["feasible"] and results(two)["flex-ring"]["mfu"] < 1
    with pytest.raises(ConfigError, match="3 tensor-parallel devices do not divide the 32 heads"):
        compare(free(tmp_path, tensor_parallel=3))
    with pytest.raises(ConfigError, match="5 stages x 1 devices need more than the 4 available"):
        compare(free(tmp_path, stages=5))


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-vl-2b", "nemotron-h-8b"])
def test_what_tensor_parallel_devices_cannot_share_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"2 .*devices cannot share the model's"):
        compare(free(tmp_path, model=model, tensor_parallel=2))


def test_given_sizes_are_those_of_the_search(tmp_path: Path) -> None:
    """One model of a layout: a given number of tensor-parallel devices has the figures that a search finds for it, of
    ours and of a system that shares out the vocabulary."""
    names = ("flex-ring", "static-cp")
    given = compare(free(tmp_path, tensor_parallel=2, strategies=names))
    advisor = Advisor(free(tmp_path, searched=("tensor_parallel",), strategies=names))
    layout = ParallelLayout(num_stages=1, tensor_parallel=2)
    for entry in given.entries:
        candidate = advisor.candidate(entry.strategy, layout)
        (trial,) = LayoutSearch(entry.strategy, [candidate], log=lambda _: None).run()
        assert trial.entry is not None
        assert (trial.entry.iteration_s, trial.entry.peak_memory_gib) == (entry.iteration_s, entry.peak_memory_gib)
        assert candidate.split_vocabulary == (entry.strategy == "static-cp")


def test_the_order_of_batches_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence among short ones needs recomputation; whichever batch holds it, the verdict is the same."""
    lengths = tmp_path / "uneven.json"
    lengths.write_text(json.dumps([600 + 11 * each for each in range(31)] + [30_000]))
    inputs = free(
        tmp_path,
        lengths=str(lengths),
        batches=4,
        global_batch=8,
        max_seqlen=40_000,
        memory_gib=13.0,
        strategies=("flex-ring", "static-cp", "ulysses"),
    )
    drawn = batches_of(inputs, model=model_profile(inputs.model))
    verdicts = []
    for first in range(len(drawn)):
        turned = drawn[first:] + drawn[:first]
        monkeypatch.setattr(comparison_module, "batches_of", lambda *_, turned=turned, **__: turned)
        found = results(compare(inputs, check=False))
        keys = ("feasible", "iteration_s", "gap", "mfu", "bubble", "imbalance", "tokens_per_s_per_rank")
        keys += ("recomputed_layers", "reduce_every", "speedup_over_best_baseline")
        verdicts.append({name: {key: entry[key] for key in keys} for name, entry in found.items()})
    assert any(entry["feasible"] for entry in verdicts[0].values())
    assert all(each == verdicts[0] for each in verdicts)


def test_ratios_are_sums_over_sums() -> None:
    """Of a short batch that is done well and a long one that is not, the long one decides."""
    rng = random.Random(0)
    figures = [
        BatchFigures(
            num_tokens=tokens,
            num_ranks=2,
            iteration_s=seconds,
            lower_bound_s=seconds * rng.random(),
            mfu=rng.random(),
            attention_mfu=rng.random(),
            imbalance=Imbalance(compute=ratio, attention=0.0, memory=0.0, communication=0.0),
            maxima={"compute": seconds, "attention": 0.0, "memory": 0.0, "communication": 0.0},
            bubble=rng.random(),
            peak_memory_gib=1.0,
            breakdown=Breakdown(compute=seconds, sharding=0, all_to_all=0, ring=0, hop=0, bubble=0),
            plan_s=1.0,
            prepare_s=2.0,
            degrees={1: 2},
            num_microbatches=1,
        )
        for tokens, seconds, ratio in ((1000, 1.0, 0.1), (3000, 9.0, 0.5))
    ]
    found = averaged(figures)
    short, long = figures
    assert found["tokens_per_s_per_rank"] == pytest.approx(4000 / 10 / 2)
    assert found["gap"] == pytest.approx(10 / (short.lower_bound_s + long.lower_bound_s))
    assert found["imbalance"].compute == pytest.approx((0.1 * 1 + 0.5 * 9) / 10)
    for name in ("mfu", "attention_mfu", "bubble"):
        assert found[name] == pytest.approx((getattr(short, name) + 9 * getattr(long, name)) / 10)
    assert averaged(figures[::-1]) == found | {"per_batch": tuple(figures[::-1])}
