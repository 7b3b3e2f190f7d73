"""Every command of the documentation: all are of a known form and checked by it; all but those of a table are run."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayfcp.cli import main
from rayfcp.config.loading import read_yaml
from tests.docs.forms import check, words_of
from tests.docs.pages import BLOCKS, COMMANDS, LANGUAGES, ROOT, SAVED, Command

# What is not run: pattern of page and command, and why. `make quickstart` is run as the `rayfcp train` at its end.
NOT_RUN = {
    r"README.md:\d+ make (test|explore)": "these tests are part of it",
    r"\S+ source ": "of the reader's shell",
    r"\S+ export ": "of the reader's shell",
    r"\S+ ssh ": "needs a second machine",
    r"\S+ rayfcp watch ": "follows a run that lives: tests/telemetry does; here the run has ended",
    r"docs/own_loop.md:\d+ (torchrun|python (ray_loop|plan_ahead))": "tests/execute/test_own_loop.py runs these files",
    r"\S+ (torchrun|python) .*jobs/hf_trainer": "tests/adapters/test_transformers.py runs it",
    r"\S+ rayfcp (train|doctor) .*address.auto": "joins a cluster: tests/cluster/jobs starts one",
    r"\S+ rayfcp submit ": "needs a cluster: tests/cluster/jobs starts one, submits, follows and stops",
    r"\S+ ray (start|job) ": "needs a cluster: tests/cluster/jobs starts one",
    r"\S+ rayfcp profile ": "tests/cluster/test_profiling.py times workers",
    r"\S+ docker ": "needs Docker; jobs/docker/check.sh builds the image for CPUs and trains in it",
    r"\S+ kubectl ": "needs Kubernetes; tests/jobs/test_kuberay.py holds manifests against schemas",
    r"\S+ sbatch ": "needs Slurm",
    r"\S+ (python jobs/pictures|rayfcp train jobs/qwen3-vl-tiny)": "tests/cluster/test_decoding.py does less of it",
    r"\S+ python -m rayfcp.models.families": "tests/models/test_family_count.py runs it on fewer families",
    r"docs/results.md:.*": "takes minutes to hours; tests/jobs and tests/compare run the same code on less",
    r"dashboards/README.md:\d+ python -m dashboards.install --beside-ray": "needs Ray's Grafana: tests/dashboards",
}
RUN: dict[str, Command] = {}  # once where several pages have it
for each in COMMANDS:
    if not any(re.match(pattern, str(each)) for pattern in NOT_RUN):
        RUN.setdefault(each.text.split("  #")[0].strip(), each)

NARROW = ["model.architecture.num_layers=2", "model.architecture.hidden_size=64"]
# What makes a run small enough for a test, behind the words of the page.
SMALL = [
    *("train.steps=2", "train.warmup_steps=0", "cluster.num_workers=2", 'data.paths=["{stdlib}/json"]'),
    *("data.max_seqlen=512", "data.long_sequences=split", "data.max_bad_fraction=0.5"),
    *(*NARROW, "data.global_batch_sequences=4"),
]
PEAK = "metrics.peak_flops=1e11"  # so that it need not be measured, as the first command does
SMALL_COMPARISON = [
    "--strategies",
    "flex-ring,static-cp",
    "--global-batch",
    "8",
    "--max-seqlen",
    "8192",
    "--devices",
    "4",
]


def small(words: list[str]) -> list[str]:
    """The same command, doing less."""
    if words[:2] == ["train", "jobs/quickstart.yaml"]:
        return [*words, *SMALL, *(["train.steps=3", PEAK] if len(words) > 2 else [])]
    if words[0] == "train":  # on CPUs: the Ray that tests share speaks of an NPU, which `auto` would take
        text = SAVED.get(words[1]) or Path(words[1]).read_text(encoding="utf-8")
        narrow = [] if (read_yaml(text, source=words[1]).get("model") or {}).get("path") else NARROW
        return [*words, "cluster.device=cpu", "train.steps=2", "eval.batches=1", PEAK, *narrow]
    if words[0] == "plan":
        return [*words, "plan.search_moves=2000", *([] if "--lengths" in words else SMALL)]
    if words[0] == "compare":
        return [*words, *SMALL_COMPARISON]
    if words[0] == "bench":
        return [*words, "--device", "cpu", "--tokens-per-rank", "32", "--strategies", "flex-ring,ring"]
    return [*words, "--baseline-steps", "1"] if words[0] == "report" else words


def test_the_table_has_nothing_that_is_no_longer_documented() -> None:
    assert not [pattern for pattern in NOT_RUN if not any(re.match(pattern, str(each)) for each in COMMANDS)]


def test_blocks_say_what_they_hold() -> None:
    assert not [f"{block.page}:{block.line} {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES]


@pytest.mark.filterwarnings("ignore:.*Pydantic")  # of Ray's own command line
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command_is_of_a_known_form(command: Command) -> None:
    check(words_of(command.text))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a reader has: the repository's jobs, files that pages log to save, a few texts."""
    folder = tmp_path_factory.mktemp("desk")
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    for name, text in SAVED.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "my-texts").mkdir()
    for number in range(24):
        (folder / "my-texts" / f"{number}.txt").write_text("a long tail of words " * (2 + 100 * (number % 5 == 0)))
    return folder


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("command", RUN.values(), ids=str)
def test_command_runs(
    command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    words = words_of(command.text)
    if words == ["make", "quickstart"]:
        words = ["rayfcp", "train", "jobs/quickstart.yaml"]
    if words[:3] == ["python", "-m", "dashboards.install"]:
        from dashboards.install import main as install

        assert install(words[3:]) == 0
        return
    if words[:2] == ["python", "jobs/chat.py"]:
        runpy.run_path(words[1])["write"](Path(words[2]), vocab_size=512)
        return
    if words[:2] == ["python", "jobs/teach.py"]:
        overrides = [*SMALL, "train.steps=3"] if words[2] == "jobs/quickstart.yaml" else []
        assert runpy.run_path(words[1])["main"]([*words[2:], *overrides]) == 0
        return
    assert words[0] == "rayfcp", "say in this test how it is run, or in NOT_RUN why it is not"
    code = main(small(words[1:]))
    said = capsys.readouterr()
    assert code in ((0, 1) if words[1] == "doctor" else (0,)), said.err  # 1: this machine lacks something
    assert "Traceback" not in said.err
    if words[1] == "doctor":
        assert all(re.match(r"(ok  |warn|fail)  ", line) for line in said.out.splitlines())
    made = [
        word for word in ("exported", "exported-tuned", "shards", "compare.html", "advised.yaml") if words[-1] == word
    ]
    assert all((desk / name).exists() for name in made)


@pytest.mark.usefixtures("ray_cluster")
def test_runs_left_what_the_first_guide_names(desk: Path) -> None:
    run = desk / "runs" / "quickstart"
    if not run.exists():
        pytest.skip("the commands before it were not asked for")
    text = (ROOT / "docs" / "guides" / "first_run.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w.]+/?)`", "\n".join(re.findall(r"(?m)^\| (`.*?) \|", text)))
    assert {"steps.jsonl", "report.html"} <= set(named)
    assert not [name for name in named if not (run / name).exists()]
    steps = [json.loads(line)["step"] for line in (run / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_recipes_left_models_that_open(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the example of their page, and as a whole model."""
    if not (desk / "build" / "tuned").exists():
        pytest.skip("the commands before it were not asked for")
    monkeypatch.chdir(desk)
    (code,) = (block.text for block in BLOCKS if block.page == "docs/guides/recipes.md" and block.language == "python")
    exec(compile(code, "recipes.md", "exec"), {})
    assert "What is the function dump for?" in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained("build/tuned")
    assert AutoTokenizer.from_pretrained("build/tuned").chat_template and not hasattr(whole, "peft_config")
    *_, last = Path("runs/sft-lora-tiny/steps.jsonl").read_text().splitlines()
    assert json.loads(last)["eval"]["held-out"]["loss"] > 0
