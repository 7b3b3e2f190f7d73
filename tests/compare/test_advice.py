"""The advice: the fastest of all layouts, what is left out and why, and the configuration that is written."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cli import main
from rayfcp.cluster.facts.capacity import tokens_that_fit
from rayfcp.compare import layouts as layouts_module
from rayfcp.compare.advice import Advice, Advisor, format_layouts, layout_section, suits
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.layouts import Case, LayoutCandidate, ParallelLayout, layouts, misfit
from rayfcp.compare.page import render
from rayfcp.compare.run_config import DATA, run_config_text
from rayfcp.compare.table import SIMPLER_WITHIN
from rayfcp.config import ConfigError, load_config
from rayfcp.config.models import PlanConfig
from rayfcp.plan import HARDWARE, MODELS, hardware_profile, model_profile
from rayfcp.values import InfeasiblePlanError
from tests.compare.cases import arguments, small
from tests.compare.test_page import sound

SIZES = ("stages", "tensor_parallel")
NAMES = ("flex-ring", "static-cp", "elastic-pipeline")
QUICK: dict[str, Any] = {"batches": 1, "max_seqlen": 4096, "max_tokens_per_rank": None, "strategies": NAMES}
QUICK |= {"reduce_every": "microbatch", "gather_every": "microbatch"}
SEARCHED: dict[str, Any] = {"max-tokens-per-rank": None, "stages": "auto", "tensor-parallel": "auto", "batches": 1}


def request(folder: Path, **changes: Any) -> Inputs:
    return small(folder, **(QUICK | {"searched": SIZES} | changes))


@pytest.fixture(scope="module")
def advice(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    return Advisor(request(tmp_path_factory.mktemp("advice"))).advise()


def test_the_recommendation_is_the_best_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds leave out nothing that is faster: a search that simulates all else finds what simulating all finds."""
    inputs = request(tmp_path, hardware="a800", memory_gib=10.0)
    advisor = Advisor(inputs)
    all_s = {}
    for name, layout in ((name, layout) for layout in advisor.layouts for name in NAMES if suits(name, layout)):
        all_s[name, layout] = exhaustive(advisor, name, layout)
    found_s = {key: seconds for key, seconds in all_s.items() if seconds is not None}
    with monkeypatch.context() as thorough:
        thorough.setattr(layouts_module, "FINALISTS", 100)
        thorough.setattr(layouts_module, "MARGIN", float("inf"))
        best = advisor.advise().best
    assert best is not None
    assert best.iteration_s <= SIMPLER_WITHIN * min(found_s.values())
    assert best.iteration_s <= found_s[best.strategy, best.layout]
    quick = Advisor(inputs).advise()
    assert quick.best is not None and quick.best.iteration_s <= 1.01 * best.iteration_s
    left = [trial for trial in quick.trials if trial.strategy in NAMES]
    assert {(each.strategy, each.layout) for each in left} == set(all_s)
    for trial in left:
        seconds = all_s[trial.strategy, trial.layout]
        assert (trial.status == "infeasible") <= (seconds is None)
        if seconds is not None and trial.lower_bound_s is not None:
            assert trial.lower_bound_s <= seconds * (1 + 1e-9)
        if trial.status == "simulated":
            assert trial.iteration_s <= seconds  # of the fastest layout other settings are simulated too


def exhaustive(advisor: Advisor, name: str, layout: ParallelLayout) -> float | None:
    """Simulated seconds of the best setting by prediction; None without a plan."""
    candidate = advisor.candidate(name, layout)
    try:
        _, setting = candidate.predictions(name, limit_s=float("inf"))[0]
        return candidate.simulated(name, setting, log=lambda _: None, check=True).iteration_s
    except InfeasiblePlanError:
        return None


def test_layouts_are_all_that_leave_no_device_idle(tmp_path: Path) -> None:
    h100 = hardware_profile("h100")

    def sizes(**given: Any) -> set[tuple[int, int]]:
        return {(each.num_stages, each.tensor_parallel) for each in layouts(small(tmp_path, **given), hardware=h100)}

    found = sizes(devices=12, searched=SIZES)
    assert found == {
        (number, size)
        for size in range(1, 13)
        for number in range(1, 13)
        if 12 % (size * number) == 0 and h100.devices_per_node % size == 0
    }
    assert sizes(devices=7, stages=3, searched=SIZES[1:]) == {(3, 1)}
    assert {size for _, size in sizes(devices=9, tensor_parallel=2, searched=SIZES[:1])} == {2}


@pytest.mark.parametrize(
    ("model", "layout", "why"),
    [
        ("llama3.2-1b", (17, 1), "17 stages are more than the model's 16 layers"),
        ("llama3.2-1b", (1, 16), "do not divide the 8 key/value heads"),
        ("qwen3-30b-a3b", (1, 2), "cannot share the model's experts"),
        ("llama3.2-1b", (40, 1), "need more than the 32 available devices"),
    ],
)
def test_layouts_that_cannot_be_say_why(tmp_path: Path, model: str, layout: tuple[int, int], why: str) -> None:
    inputs = small(tmp_path, devices=32, max_tokens_per_rank=None)
    given = ParallelLayout(num_stages=layout[0], tensor_parallel=layout[1])
    assert why in misfit(given, inputs=inputs, model=MODELS[model], hardware=HARDWARE["ascend-910c"])


def test_a_device_of_a_layout_has_its_part(tmp_path: Path) -> None:
    """Heads and bytes are shared out, attention takes as long on T heads' devices as on one that is T times as fast;
    only what a baseline system shares out too is less of the vocabulary."""
    model, hardware = MODELS["qwen3-8b"], HARDWARE["h100"]
    inputs = small(tmp_path, devices=8, max_tokens_per_rank=None)
    layout = ParallelLayout(num_stages=2, tensor_parallel=2)
    case = Case(model=model, hardware=hardware, num_ranks=8, batches=(), options=PlanConfig())
    whole, split = (
        LayoutCandidate(layout, inputs=inputs, case=case, split_vocabulary=each).case for each in (False, True)
    )
    assert whole.num_ranks == 2
    assert whole.model.attention_flops_per_pair * 2 == model.attention_flops_per_pair
    assert whole.model.vocab_size == model.vocab_size == 2 * split.model.vocab_size
    assert whole.hardware.devices_per_node == 4 and whole.hardware.peak_flops == hardware.peak_flops

    def linear_s(view: Any) -> float:
        return view.model.linear_flops_per_token / view.hardware.linear_efficiency / hardware.peak_flops

    moved_s = 4 * 36 * 4096 * 2 * (1 / 2) / 450e9
    alone_s = split.model.linear_flops_per_token / hardware.linear_efficiency / hardware.peak_flops
    assert linear_s(split) == pytest.approx(alone_s + moved_s)
    assert linear_s(whole) > linear_s(split)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """Every layout without a plan stands below the table with its reason."""
    found = Advisor(request(tmp_path, memory_gib=10.0, strategies=("flex-ring",))).advise()
    infeasible = [trial for trial in found.trials if trial.status == "infeasible"]
    assert infeasible and all("GiB" in trial.reason or "tokens" in trial.reason for trial in infeasible)
    text = format_layouts(found)
    own = [trial for trial in infeasible if trial.strategy == "flex-ring"]
    assert len(own) >= 2 and all(f"  {trial.layout}: {trial.reason}" in text for trial in own)


@pytest.mark.parametrize(
    ("name", "stages", "why"),
    [
        ("seq1f1b", 1, "seq1f1b needs pipeline stages, --stages is 1"),
        ("ulysses", 2, "ulysses is compared without pipeline stages, --stages is 2"),
        ("flex-ring", 17, "17 stages need more than the 4 available devices"),
    ],
)
def test_a_strategy_without_a_layout_says_why(tmp_path: Path, name: str, stages: int, why: str) -> None:
    inputs = request(tmp_path, strategies=(name,), stages=stages, searched=())
    (entry,) = Advisor(inputs).advise().comparison.entries
    assert not entry.feasible and why in entry.reason.replace(" x 1 devices", "")


def test_baseline_systems_are_at_their_best(advice: Advice) -> None:
    assert advice.best is not None and set(advice.systems) == {"Megatron-LM", "DeepSpeed"}
    for name, strategies in {"Megatron-LM": {"static-cp", "dapple"}, "DeepSpeed": {"ulysses"}}.items():
        own = [each for each in advice.trials if each.strategy in strategies and each.status == "simulated"]
        best = advice.systems[name]
        assert best.strategy in strategies and best.iteration_s <= min(
            each.iteration_s for each in own if each.split_vocabulary or each.layout.tensor_parallel == 1
        )
        assert advice.gain(name) == pytest.approx(best.iteration_s / advice.best.iteration_s)


def test_json_has_the_comparison_s_keys_and_two_more(advice: Advice) -> None:
    found = json.loads(json.dumps(advice.as_json()))
    assert list(found) == ["inputs", "results", "layouts", "recommended"]
    assert found["inputs"]["stages"] == found["inputs"]["tensor_parallel"] == "auto"
    assert [each["strategy"] for each in found["results"]] == list(NAMES)
    assert advice.best is not None and found["recommended"]["strategy"] == advice.best.strategy
    least_s = min(each["iteration_s"] for each in found["results"])
    assert found["recommended"]["iteration_s"] <= SIMPLER_WITHIN * least_s
    assert set(found["recommended"]["rivals"]) == {"Megatron-LM", "DeepSpeed"}
    assert {each["status"] for each in found["layouts"]} <= {"simulated", "predicted", "bounded", "infeasible"}
    assert all(each["reason"] for each in found["layouts"] if each["status"] != "simulated")


def test_the_page_has_a_section_of_layouts(advice: Advice) -> None:
    page = sound(render(advice.comparison, more=layout_section(advice)))
    assert "<h2>Layout</h2>" in page and "pipeline stages and tensor-parallel devices searched" in page
    assert page.count("<tr><td>") >= len(advice.layouts) and "Recommended: " in page


@cache
def tiny(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    fields = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 128}
    path.write_text("\n".join(f"{name}: {value}" for name, value in fields.items()) + "\nvocab_size: 512\n")
    return path


def test_the_run_plans_with_what_was_advised(tmp_path: Path) -> None:
    """Every layout is usable: the run accepts the configuration, and has the same room for tokens and layers of
    stages."""
    from rayfcp.cluster.driver.preparing import check_runnable
    from rayfcp.cluster.facts.devices import layers_of_stage

    given: dict[str, Any] = {"model": str(tiny(tmp_path)), "hardware": "cpu", "max_seqlen": 512, "memory_gib": 0.05}
    given |= {"reduce_every": None, "strategies": NAMES[:1], "global_batch": 4}
    inputs = request(tmp_path, **given)
    seen = set()
    for layout in Advisor(inputs).layouts:
        sizes = {"stages": layout.num_stages, "tensor_parallel": layout.tensor_parallel}
        found = Advisor(replace(inputs, **sizes, searched=())).advise()
        if found.best is None:
            continue
        path = tmp_path / "config.yaml"
        path.write_text(run_config_text(found, data="data"))
        config = load_config(path, overrides=["train.steps=2", "train.learning_rate=1e-5"])
        check_runnable(config)
        entry, model = found.best.entry, model_profile(str(tiny(tmp_path)))
        assert entry is not None and entry.layers_of_stage == layers_of_stage(config, model)
        tokens = tokens_that_fit(config, model, num_ranks=entry.num_ranks, memory_bytes=int(0.05 * 2**30))
        assert entry.max_tokens_per_rank == tokens
        seen.add(layout)
    assert len(seen) >= 4 and {each.num_stages for each in seen} >= {1, 2} <= {each.tensor_parallel for each in seen}


@pytest.mark.parametrize("model", ["qwen3-1.7b", "gpt-7b"])
def test_named_models_are_written_so_that_a_run_knows_them(tmp_path: Path, model: str) -> None:
    """What only the user knows is refused by name before it is filled in; planning needs none of it."""
    from rayfcp.cluster.driver.preparing import check_runnable
    from rayfcp.cluster.tools.preview import model_of

    inputs = request(tmp_path, model=model, hardware="h100", devices=8, strategies=("flex-ring",))
    path = tmp_path / "config.yaml"
    path.write_text(run_config_text(Advisor(replace(inputs, searched=())).advise()))
    with pytest.raises(ConfigError, match=r"^train.steps is 'FILL_IN', a placeholder, must be set before training"):
        load_config(path)
    config = load_config(path, trains=False)
    found, want = model_of(config), model_profile(model)
    assert (found.num_layers, found.num_parameters) == (want.num_layers, want.num_parameters)
    text = path.read_text().replace("\n# ", " ")
    assert config.data.paths == (DATA,) and f"To fill in: data.paths; the placeholder is {DATA}." in text
    key = "data.tokenizer" if model == "gpt-7b" else "model.path"
    assert f"To fill in: {key}" in text and "To choose: train.steps and train.learning_rate" in text
    assert ("The weights are random" in text) == (key == "data.tokenizer") == (config.model.init == "random")
    with pytest.raises(ConfigError, match=rf"^{key} is 'PATH/OF/.*', there is no such folder"):
        check_runnable(config)


def test_the_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out, page = tmp_path / "config.yaml", tmp_path / "out.json", tmp_path / "out.html"
    given = {**SEARCHED, "json": out, "html": page, "write-config": config, "data": tmp_path, "max-seqlen": 2048}
    assert main(arguments(tmp_path, **given, strategies="flex-ring")) == 0
    captured = capsys.readouterr()
    assert "Recommended: flex-ring on " in captured.out and "Megatron-LM's best layout" in captured.out
    assert "flex-ring on 2 stages x 1 device: planning" in captured.err
    recommended = json.loads(out.read_text())["recommended"]
    written = load_config(config, trains=False)
    assert written.cluster.pipeline_stages == recommended["num_stages"]
    assert written.cluster.tensor_parallel == recommended["tensor_parallel"]
    assert written.data.paths == (str(tmp_path),) and written.plan.strategy == "flex-ring"
    assert "<h2>Layout</h2>" in page.read_text()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max-tokens-per-rank": 6000}, "--max-tokens-per-rank is 6000, must not be given where layouts are compared"),
        ({"write-config": "."}, "--write-config is '.', a folder"),
        ({"data": "somewhere"}, "give --write-config its path too"),
        ({"write-config": "absent.yaml", "memory-gib": 0.5}, "no layout is feasible, so there is nothing to write"),
    ],
)
def test_wrong_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], line: str) -> None:
    assert main(arguments(tmp_path, **{**SEARCHED, "strategies": "static-cp", **changes})) == 2
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments(tmp_path, stages="some"))
    assert "argument --stages: 'some' must be a whole number of at least 1" in capsys.readouterr().err


def test_nothing_can_be_written_of_nothing(tmp_path: Path) -> None:
    found = Advisor(request(tmp_path, memory_gib=0.5, strategies=("static-cp",))).advise()
    assert found.best is None and "No recommendation" in format_layouts(found)
    with pytest.raises(ConfigError, match="add devices or memory"):
        run_config_text(found)
