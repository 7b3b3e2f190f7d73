"""The scripts of jobs/reproduce on tiny batches, and the page that shows their results."""

import importlib
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rayfcp.compare.settings import Setting
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.program import Encode, lower
from rayfcp.values import ClusterSpec, Images, Primitive, SequenceSpec
from rayfcp.verify import check_plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "jobs" / "reproduce"
SMALL = ("--global-batch", "16", "--batches", "1", "--max-seqlen", "16384")
ARGUMENTS = {
    "ring_figure3": ("--models", "llama3.2-1b", "--lengths", "dist:wikipedia", "--devices", "4", *SMALL),
    "ring_figure5": ("--model", "llama3.2-1b", "--devices", "2", "4", *SMALL),
    "ring_figures4_6": ("--models", "qwen3-vl-2b", "--lengths", "dist:openvid@1", "--devices", "4", "--check", *SMALL),
    "ring_table3": ("--models", "internvl3-2b", "--lengths", "dist:openvid@1", "--devices", "4", *SMALL),
    "ring_tables1_2": ("--devices", "2", "4", "--global-batches", "8", "16", "--repeats", "1", *SMALL),
    "ring_tables4_5": ("--model", "llama3.2-1b", "--devices", "4", "--draws", "1", *SMALL),
    "ring_table6": ("--model", "llama3.2-1b", "--lengths", "dist:github", "--devices", "4", *SMALL),
}
FULL = ("--tokens-per-rank", "4096")
"""Options of the scripts of FCP with blocks, which fill the ranks."""
ARGUMENTS |= {
    "block_ablation": ("--ranks", "10", "--lengths", "dist:lognormal", *FULL),
    "block_equal_lengths": ("--ranks", "4", "--tokens", "1000", "7000", *FULL),
    "block_imbalance": ("--ranks", "4", "--lengths", "dist:bimodal", *FULL),
    "block_scaling": ("--ranks", "3", "--lengths", "dist:long-tail", "--rank-tokens", "2000", "4096", *FULL),
    "block_sizes": ("--ranks", "4", "--lengths", "dist:long-tail", "--blocks", "512", "1024", *FULL),
}
STAGED = ("--model", "llama3.2-1b", "--lengths", "dist:github", "--devices", "4", "--stages", "2", *SMALL)
STAGED += ("--global-batch", "8", "--max-seqlen", "8192")
"""Options of the scripts of InfiniPipe."""
ARGUMENTS |= {
    "pipeline_figure8": ("--models", "llama3.2-1b", "--contexts", "16384", "--tensor-parallel", "1", "3", *STAGED[2:]),
    "pipeline_figure9": STAGED,
    "pipeline_figure10": ("--contexts", "8192", "16384", "--global-batches", "8", *STAGED),
    "pipeline_figure11": ("--global-batches", "8", *STAGED),
    "pipeline_table2": STAGED,
}
EXTREME = ("--ranks", "4", "--short", "7", "--seeds", "1", "--long", "16384", "--model", "llama3.2-1b")


def cost_of(cluster: ClusterSpec) -> CostModel:
    model, hardware = model_profile("llama3.2-1b"), hardware_profile("ascend-910c")
    return CostModel.from_profiles(
        model, hardware, num_ranks=cluster.num_ranks, bytes_per_element=hardware.dtype_bytes, reduce_every="step"
    )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script as Python does when it is run: its own folder first."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.parametrize("name", ARGUMENTS)
def test_scripts_run_and_write_what_they_print(
    name: str, load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    script: ModuleType = load(name)
    script.main([*ARGUMENTS[name], "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    shown = capsys.readouterr().out
    heads = next(line for line in shown.splitlines() if line.startswith(script.COLUMNS[0][0]))
    assert all(head in heads for head, _, _ in script.COLUMNS)
    assert rows and all({key for _, key, _ in script.COLUMNS} <= set(row) for row in rows)
    numbers = [value for row in rows for key, value in row.items() if key.endswith(("_s", "_ms", "_k", "speedup"))]
    assert all(value is None or value > 0 for value in numbers)


def test_extreme_batch_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["extreme.py", *EXTREME, "--json", str(out)])
    runpy.run_path(str(FOLDER / "extreme.py"), run_name="__main__")
    (row,) = json.loads(out.read_text())["rows"]
    assert row["bound_s"] <= row["flex_s"] <= row["static_s"] * (1 + 1e-9)


def test_wrong_input_is_one_line(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script, tables = load("ring_figure5"), load("tables")
    assert tables.exit_code(lambda: script.main(["--lengths", "nowhere.txt", "--devices", "2"])) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("--lengths 'nowhere.txt' does not exist")


def test_letter_packs_by_memory_alone(load: Any) -> None:
    """Costs change the degrees, never the members of a group; the plan holds."""
    sequences = [
        SequenceSpec(id=at, num_tokens=tokens, num_targets=tokens - 1)
        for at, tokens in enumerate([9_000, 4_000, 2_500, 2_000, 1_200, 800, 700, 300, 150, 60])
    ]
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=2_500)
    cost = cost_of(cluster)
    other = cost.with_coefficients(attention_s_per_pair=50 * cost.attention_s_per_pair)
    literal_plan = load("literal").literal_plan
    plans = [literal_plan(sequences, cluster=cluster, cost=each) for each in (cost, other)]
    for plan in plans:
        check_plan(plan, sequences, cluster=cluster)
    one, two = ({group.sequences for microbatch in plan.microbatches for group in microbatch.groups} for plan in plans)
    assert one == two


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_that_encode_all_of_their_group_do_so_degree_times(load: Any, degree: int) -> None:
    run = Images(start=4, num_tokens=16, num_patches=64, count=5, stride=18)
    sequences = tuple(
        SequenceSpec(id=at, num_tokens=100 + at, num_targets=9, images=(run,) if at % 3 else ()) for at in range(8)
    )
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=4_000)
    model, hardware = model_profile("qwen3-vl-2b"), hardware_profile("ascend-910c")
    cost = CostModel.from_profiles(
        model, hardware, num_ranks=4, recomputed_layers=0, bytes_per_element=2, reduce_every="step"
    )
    everywhere = load("everywhere")
    found = everywhere.with_images(everywhere._of_degree(degree, Primitive.RING), spread=False)(
        sequences, cluster=cluster, cost=cost, options=PlanConfig()
    )
    setting = Setting(
        model=model, hardware=hardware, recomputed_layers=0, reduce_every="step", cluster=cluster, cost=cost
    )
    plan = everywhere._plan("static-cp", found.microbatches, setting=setting)
    programs = everywhere.encoded_everywhere(lower(plan, sequences), plan)
    counts = [
        sum(each.count for item in program.instructions if isinstance(item, Encode) for each in item.images)
        for program in programs
    ]
    assert sum(counts) == degree * sum(each.count for sequence in sequences for each in sequence.images)
    assert all(len(set(counts[first : first + degree])) == 1 for first in range(0, 4, degree))


def test_groups_are_told_as_in_the_paper(load: Any) -> None:
    sequences = [SequenceSpec(id=at, num_tokens=100, num_targets=99) for at in range(4)]
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=100)
    plan = load("literal").literal_plan(sequences, cluster=cluster, cost=cost_of(cluster))
    assert load("ring_table6").groups_text(plan) == "2 of <1>x2"


def test_results_name_every_script() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    scripts = [path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    assert len(scripts) == len(ARGUMENTS) + 1
    assert not [name for name in scripts if f"jobs/reproduce/{name}" not in text]
