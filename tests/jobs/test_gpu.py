"""`jobs/bench/gpu.py` at sizes for a CPU: all of it works with the packages of a machine without Ray, says what it left
out and where it failed, and keeps what it had."""

import argparse
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayfcp.execute.kernels import pick_kernel
from rayfcp.plan import hardware_profile, model_profile
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "jobs" / "bench" / "gpu.py"
CPU = torch.device("cpu")
PACKAGES = (
    *("torch", "transformers", "triton", "numba", "scipy", "pyarrow", "safetensors", "prometheus-client", "rich"),
    *("PyYAML", "fsspec", "packaging", "pydantic"),
)
"""Of a machine with a GPU and no network; the last is carried there."""
HOOK = """\
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ALLOWED = {allowed!r}


class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        hidden = top not in sys.stdlib_module_names and top not in ALLOWED and not top.startswith(("_", "gpu"))
        return None if hidden else super().find_spec(name, path, target)


sys.meta_path = [Installed if each is PathFinder else each for each in sys.meta_path]
Path(__file__).with_name("hidden").touch()
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Modules beside the script, imported as it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        names = ("gpu", "gpu_sizes", "gpu_sections", "gpu_training", "gpu_plain", "gpu_devices", "gpu_tables")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def bench(scripts: Any) -> Any:
    return scripts.gpu_sizes.Bench(device=CPU, sizes=scripts.gpu_sizes.LITTLE, log=lambda _: None)


def modules_of(packages: tuple[str, ...]) -> set[str]:
    """Top-level modules of installed packages, and of those that they require."""
    found: set[str] = set()
    todo = [*packages]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            required = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        todo += [re.match(r"[\w.-]+", each).group() for each in required if "extra ==" not in each]  # type: ignore[union-attr]
    owners = metadata.packages_distributions()
    return {top for top, of in owners.items() if {re.sub(r"[-_.]+", "-", each).lower() for each in of} & found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a run of all sections, where other packages cannot be imported."""
    folder = tmp_path_factory.mktemp("whole")
    allowed = sorted({*modules_of(PACKAGES), "rayfcp"})
    (folder / "sitecustomize.py").write_text(HOOK.format(allowed=allowed))
    out = folder / "found.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "hidden").exists() and "all sections ran" in done.stderr
    return json.loads(out.read_text())


def test_all_sections_run_without_other_packages(scripts: Any, whole: Any) -> None:
    assert "ray" not in modules_of(PACKAGES) and "highspy" not in modules_of(PACKAGES)
    assert list(whole["sections"]) == [name for name in scripts.gpu.NAMES if name != "devices"]
    assert not whole["left_out"]
    for each in whole["sections"].values():
        assert not each["ray_imported"] and each["machine"]["kernel"] == pick_kernel("cpu").name and each["wall_s"] > 0
    found = whole["sections"]["conformance"]
    assert all(case["holds"] for case in found["cases"])
    assert [(row["num_parts"], row["num_cuts"]) for row in found["merges"]] == [(3, 5), (5, 1)]
    assert not any(row["fused"] for row in found["merges"])
    assert all(0 < row["found"] == row["by_operators"] < 1e-6 for row in found["merges"])
    assert [row["seconds"]["fused"] for row in found["merge_seconds"]] == [None]


def test_sections_are_those_of_the_script(scripts: Any) -> None:
    assert tuple(scripts.gpu_sections.SECTIONS) == scripts.gpu.NAMES == tuple(scripts.gpu_tables.TABLES)
    assert all(f"\n{name} " in scripts.gpu.__doc__ for name in scripts.gpu.NAMES)


def test_attention_of_plans_and_one_rank(bench: Any, whole: Any) -> None:
    found = whole["sections"]["attention"]
    assert [row["strategy"] for row in found["runs"][0]["results"]] == list(bench.sizes.strategies)
    assert all(row["error"] < 1e-4 for row in found["runs"][0]["results"])
    assert list(found["targets"]) == ["dist:wikipedia: efficiency of flex-block"]
    (alone,) = whole["sections"]["one_rank"]["runs"].values()
    assert alone["kernel_s"] > 0 and alone["num_sequences"] > 1 and not alone["waits"]
    assert alone["overhead"] == pytest.approx(alone["program_s"] / alone["kernel_s"] - 1)


def test_training_is_the_librarys_own(whole: Any) -> None:
    """The same loss before and after an update, on packed documents; other attention and other logits change
    nothing but rounding."""
    (row,) = whole["sections"]["training"]["rows"]
    assert row["num_documents"] > 1 and row["ours"]["num_tokens"] == row["num_tokens"] == 48
    plain = row["plain"]
    assert plain["sdpa, weights in float32, loss in library"]["losses"] == pytest.approx(
        row["ours"]["losses"], rel=1e-5
    )
    assert all(each["tokens_per_s"] > 0 for each in (row["ours"], *plain.values()))
    assert len(plain) == 3


def test_memory_profile_and_copies(whole: Any) -> None:
    rows = whole["sections"]["memory"]["rows"]
    assert [row["recomputed"] for row in rows] == [0, 1, 2] and all(row["predicted_bytes"] > 0 for row in rows)
    assert not any("error" in row or row["peak_bytes"] for row in rows)  # a CPU does not tell
    (profile,) = whole["sections"]["profile"]["models"].values()
    assert profile["hardware_yaml"].startswith("name: tiny-cpu\n") and profile["held_out"]
    copies = whole["sections"]["copies"]["rows"]
    assert [(row["work"], row["num_units"], row["num_spared"]) for row in copies] == [
        (work, count, spared) for count in (1, 2) for spared in (0, count) for work in ("attention", "matrix product")
    ]
    assert all(row["copied_bytes_per_s"] > 0 and row["beside_s"] > 0 for row in copies)


def test_tables_and_profiles_of_the_file(
    scripts: Any, whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    rest = {"started": "later", "command": ["gpu.py"], "sections": {"copies": {"error": "no", "wall_s": 1.0}}}
    (tmp_path / "second.json").write_text(json.dumps({**rest, "left_out": {"devices": "estimated 120 s"}}))
    words = ["gpu_tables", str(tmp_path / "whole.json"), str(tmp_path / "second.json"), "--profiles", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert scripts.gpu_tables.main() == 0
    text = capsys.readouterr().out
    assert re.findall(r"(?m)^## (\w+)$", text) == list(scripts.gpu.NAMES)
    assert "| qwen3 | 48 | rayfcp | 0 |" in text and "| ring |" in text and "| missed |" in text
    assert "**error**: no" in text and "Left out: estimated 120 s." in text
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) > 8 and all(len({row.count("|") for row in block}) == 1 for block in blocks)
    profile = hardware_profile(str(tmp_path / "tiny-cpu.yaml"))
    assert f"tiny-cpu:\n  peak_flops: {profile.peak_flops}\n" in text


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_plain_training_is_one_whatever_computes_it(scripts: Any, bench: Any, recomputed: int) -> None:
    from rayfcp.bench.alone import random_rows
    from rayfcp.models.describe import model_config

    plain = scripts.gpu_plain
    config = bench.config("")
    library, rows = model_config(config.model, vocab_size=40), random_rows([9, 1, 7], vocab_size=40, seed=2)

    def losses(attention: str, loss: str, layers: int) -> tuple[float, ...]:
        trainer = plain.PlainTrainer(config, library, device=CPU)
        return trainer.run(rows, attention=attention, loss=loss, recomputed_layers=layers, steps=2).losses

    wanted = losses("eager", "library", 0)
    assert wanted[0] > wanted[1] > wanted[2]
    assert losses(plain.KERNEL, "chunks", recomputed) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("gib", [79.1, 139.8])
def test_sizes_fit_by_the_memory_model(scripts: Any, gib: float) -> None:
    """Nothing that an H100 or H200 cannot hold is tried."""
    plain, full, memory = scripts.gpu_plain, scripts.gpu_sizes.FULL, int(gib * 2**30)
    for name in full.models:
        model = model_profile(name)
        for tokens in full.tokens:
            layers = plain.fewest_recomputed(model, num_tokens=tokens, memory_bytes=memory, dtype=full.dtype)
            found = plain.predicted_bytes(model, num_tokens=tokens, recomputed_layers=layers, dtype=full.dtype)
            assert found <= 0.9 * memory
        for layers in (0, model.num_layers):
            keys = {"recomputed_layers": layers, "dtype": full.dtype}
            most = plain.fitting_tokens(model, memory_bytes=memory, **keys)
            assert plain.predicted_bytes(model, num_tokens=most, **keys) <= 0.9 * memory
            assert plain.predicted_bytes(model, num_tokens=most + 1, **keys) > 0.9 * memory


def test_a_failed_attempt_leaves_the_next_alone(scripts: Any) -> None:
    """Out of memory is told in one line; the next attempt gets a thing that the failed one has not seen, made when that
    is gone."""
    made: list[Any] = []

    class Thing:
        seen = 0

    @contextmanager
    def make() -> Iterator[Thing]:
        assert not [each for each in made if each()]
        thing = Thing()
        made.append(weakref.ref(thing))
        yield thing

    def fine(thing: Thing) -> Any:
        thing.seen += 1
        return {"seen": thing.seen}

    def too_much(thing: Thing) -> Any:
        thing.seen += 1
        return {"sum": float(torch.ones(1 << 60).sum())}

    first, failed, *others = scripts.gpu_sizes.attempts(make, [fine, too_much, fine, fine], device=CPU)
    assert [first, *others] == [{"seen": 1}, {"seen": 1}, {"seen": 2}] and len(made) == 2
    assert list(failed) == ["error"] and failed["error"].startswith("RuntimeError: ") and "\n" not in failed["error"]
    assert scripts.gpu_sections._failures([{"fine": 1}]) == {}
    assert scripts.gpu_sections._failures([{"fine": 1}, failed, failed]) == failed


def test_training_goes_on_after_running_out_of_memory(
    scripts: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward pass, after which an engine runs no step: the next size has another, with first weights."""
    training = scripts.gpu_training
    original = training.train_steps
    sizes = dataclasses.replace(bench.sizes, tokens=(40, 48))
    monkeypatch.setattr(training, "baselines_of", lambda _: ())

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def failing(output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(fail)
        return output

    def once(rank: Any, rows: Any, **keys: Any) -> Any:
        if len(rows) < 3:
            rank.engine.generation.module.layers[1].register_forward_hook(lambda _, __, output: failing(output))
        return original(rank, rows, **keys)

    monkeypatch.setattr(training, "train_steps", once)
    first, second = training.compared(dataclasses.replace(bench, sizes=sizes), "", keep=lambda _: None)
    assert [row["num_documents"] for row in (first, second)] == [2, 3]
    assert first["ours"] == {"error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"}
    assert second["ours"]["losses"][0] > second["ours"]["losses"][1] > 0


def test_a_failed_section_keeps_what_it_had(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(bench: Any) -> Any:
        bench.keep({"rows": [1]})
        raise ArithmeticError("too far")

    monkeypatch.setitem(scripts.gpu_sections.SECTIONS, "copies", failing)
    given = argparse.Namespace(folder=str(tmp_path), device="cpu", tiny=True, models=None, stop_s=1e18, devices=0)
    found = scripts.gpu._section("copies", given)
    assert found["rows"] == [1] and found["error"] == "ArithmeticError: too far" and "Traceback" in found["traceback"]


def test_sections_that_do_not_fit_are_left_out(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = scripts.gpu
    monkeypatch.setattr(gpu, "_section", lambda name, _: {"wall_s": 1.0})
    monkeypatch.setattr("rayfcp.cluster.workers.environment.set_environment", lambda granted: None)
    names = {"sections": "profile,copies", "folder": str(tmp_path)}
    assert gpu._estimate("training", argparse.Namespace(models="a,b,c", tiny=False)) == 1.5 * gpu.SECONDS["training"]
    gpu._here(argparse.Namespace(**names, stop_s=time.time() + 99.5, tiny=False, models=None))
    profile, copies = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("profile", "copies"))
    assert re.match(r"estimated 220 s, [6-9]\d s are left", profile["left_out"]) and copies == {"wall_s": 1.0}


STUB = """\
import json, os, sys, time
from pathlib import Path

words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(words["--folder"])


def write(name, found):
    (folder / "writing").write_text(json.dumps(found))
    (folder / "writing").rename(folder / name)


for name in words["--sections"].split(","):
    with (folder.parent / "begun").open("a") as file:
        file.write(name + " ")
    if name in {crashing!r}:
        write(f"{{name}}.part", {{"rows": [7], "wall_s": 1.0}})
        os._exit(3)
    if name in {hanging!r}:
        write(f"{{name}}.part", {{"rows": [8], "wall_s": 1.0}})
        (folder.parent / "hanging").write_text(str(os.getpid()))
        time.sleep(600)
    write(f"{{name}}.json", {{"wall_s": 0.1, "process": os.getpid()}})
"""


def stubbed(folder: Path, *words: str, crashing: tuple[str, ...] = (), hanging: tuple[str, ...] = ()) -> list[str]:
    """The script's command, with sections that do nothing, crash their process, or hang, at which time runs out."""
    (folder / "stub.py").write_text(STUB.format(crashing=crashing, hanging=hanging))
    code = f"""\
        import sys
        from pathlib import Path
        sys.path[:0] = [{str(SCRIPT.parent)!r}]
        sys.argv[1:] = {[*words, "--out", str(folder / "found.json")]!r}
        import gpu
        gpu.HERE = Path({str(folder / "stub.py")!r})
        gpu.tempfile.tempdir = {str(folder)!r}
        hanging, now = Path({str(folder / "hanging")!r}), gpu.time.time
        gpu.time.time = lambda: now() + (1000 if hanging.exists() else 0)
        sys.exit(gpu.main())
        """
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_a_crash_and_a_limit_leave_the_other_sections(tmp_path: Path) -> None:
    words = stubbed(tmp_path, "--limit-s", "1000", crashing=("one_rank",), hanging=("memory",))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 1 and "failed: one_rank" in done.stderr
    assert (tmp_path / "begun").read_text() == "conformance one_rank training attention memory "
    assert list(found["sections"]) == ["conformance", "one_rank", "training", "attention", "memory"]
    processes = [found["sections"][name].get("process") for name in ("conformance", "training", "attention")]
    assert processes[0] != processes[1] == processes[2]
    assert found["sections"]["one_rank"] == {"rows": [7], "wall_s": 1.0, "error": "ended with code 3"}
    cut = found["sections"]["memory"]
    assert cut["rows"] == [8] and "time was up" in cut["cut_off"] and "error" not in cut
    assert list(found["left_out"]) == ["profile", "copies"] and "left out copies: no time is left" in done.stderr


def test_ctrl_c_leaves_what_was_measured(tmp_path: Path) -> None:
    process = subprocess.Popen(stubbed(tmp_path, hanging=("training",)), stderr=subprocess.DEVNULL)
    until((tmp_path / "hanging").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["stopped"] and list(found["sections"]) == ["conformance", "one_rank", "training"]
    assert found["sections"]["training"]["rows"] == [8]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "hanging").read_text()), 0)


def test_two_devices_and_a_killed_process(scripts: Any, bench: Any) -> None:
    import tests.execute.gloo  # noqa: F401  whose server forks the processes

    kept: list[Any] = []
    keep = lambda found: kept.append(dict(found))  # noqa: E731
    two = dataclasses.replace(bench, num_devices=2, start_method="forkserver", keep=keep)
    found = json.loads(json.dumps(scripts.gpu_sections.SECTIONS["devices"](two)))
    assert found["num_tokens"] == 96 and found["tokens_per_s"] > 0 and "recovery" not in kept[0]
    assert found["targets"]["loss on one rank fewer"]["found"] < 1e-4
    assert "CollectiveFailedError" in found["recovery"]["errors"][0] and found["recovery"]["total_s"] > 0
    text = "\n".join(scripts.gpu_tables.tables({"devices": {**found, "wall_s": 1.0, "from": "here"}}))
    assert "| qwen3 | 2 | 96 |" in text and "exchanges ended" in text
    with pytest.raises(ValueError, match="--devices is 1, must be 2 or more"):
        scripts.gpu_sections.SECTIONS["devices"](bench)


def test_processes_see_a_device_each(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(device: str, number: int) -> str | None:
        with scripts.gpu_devices.seeing(device, number):
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (seen("cuda", 1), seen("cpu", 1)) == ("1", None) and "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert seen("cuda", 1) == "6" and os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_targets_are_met_or_missed(scripts: Any) -> None:
    targets = {"a": {"found": 0.96, "at_least": 0.95}, "b": {"found": 0.04, "at_most": 0.03}, "c": {"found": 0.0}}
    found = scripts.gpu._targets({"x": {"targets": targets}, "y": {"error": "no"}})
    assert {name: each["met"] for name, each in found.items()} == {"x: a": True, "x: b": False, "x: c": True}
