"""`jobs/bench/predict.py`: batches with pictures, and models from profile to predicted steps."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.bench.alone import random_shards
from rayfcp.data.rows import IGNORED
from rayfcp.values import VisionProfile
from tests.execute.gloo import FORKS
from tests.program.images import VISION

SCRIPT = Path(__file__).resolve().parents[2] / "jobs" / "bench" / "predict.py"
FAMILIES = ("qwen3_vl", "internvl")
LITTLE = {  # but enough tokens that the fit sees what they take, by a clock that other processes do not touch
    "--clock": "cpu",
    "--batches": "1",
    "--sequences": "3",
    "--max-tokens-per-rank": "256",
    "--max-tokens": "256",
    "--rounds": "1",
    "--repeats": "1",
    "--strategies": "flex-ring",
}


Run = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def batches() -> Iterator[Any]:
    """The module beside the script, imported as it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield importlib.import_module("predict_batches")


@pytest.fixture
def run(batches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the script with these options; gives what it keeps and what it prints. Its ranks are forks of a process
    that has imported what they use."""
    script = importlib.import_module("predict")
    monkeypatch.setattr(script.multiprocessing, "get_context", lambda method: FORKS)

    def run(*options: str) -> tuple[dict[str, Any], str]:
        out = tmp_path / "found.json"
        script.main([*options, *(word for pair in LITTLE.items() for word in pair), "--json", str(out)])
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


@given(family=st.sampled_from(FAMILIES), small=st.booleans(), size=st.integers(3, 12), seed=st.integers(0, 99))
def test_batches_have_texts_images_and_videos(batches: Any, family: str, small: bool, size: int, seed: int) -> None:
    vision: VisionProfile = VISION
    _, rows = (batches.SMALL if small else batches.EYES)[family]
    drawn = rows.batch(size, vision=vision, seed=seed)
    assert drawn == rows.batch(size, vision=vision, seed=seed)
    assert [each.id for each in drawn] == list(range(size))
    assert any(not each.images for each in drawn) and sum(bool(each.images) for each in drawn) >= 2
    runs = [run for each in drawn for run in each.images]
    assert all(run.num_patches == run.num_tokens * vision.merged_patches for run in runs)
    tokens = batches.DrawnTokens(drawn, vocab_size=9, seed=seed)
    for each in drawn:
        ids, targets = tokens.read(each.id, start=0, stop=each.num_tokens)
        counted = np.flatnonzero(targets != IGNORED)
        assert len(counted) == each.num_targets >= 1
        assert (targets[counted] == ids[counted + 1]).all()
        assert not any(start <= at + 1 < stop for run in each.images for start, stop in run.ranges() for at in counted)


@pytest.mark.parametrize(("family", "freeze", "ranks"), [("qwen3_vl", False, "1"), ("internvl", True, "2")])
def test_a_model_that_sees_is_measured_and_predicted(family: str, freeze: bool, ranks: str, run: Run) -> None:
    found, shown = run("--sees", family, "--small", "--ranks", ranks, *["--freeze"] * freeze)
    (step,) = found["steps"]
    for who in ("measured", "cost", "simulated"):
        assert step[f"{who}_s"] > 0 and step[f"{who}_language_s"] > 0
    assert step["cost_encoder_s"] > 0 and found["cost"]["encoder"]["frozen"] == freeze
    assert all(f"{part} " in shown for part in ("language", "encoder", "cost model:", "simulator:"))


def test_a_model_that_reads_is_all_language(run: Run, tmp_path: Path) -> None:
    random_shards(tmp_path, [40, 9, 23, 64], vocab_size=99, seed=0)
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump({"data": {"paths": [str(tmp_path / "shards")]}, "model": {"architecture": {"vocab_size": 99}}})
    )
    found, shown = run("--config", str(config), "--max-seqlen", "64", "--ranks", "1")
    (step,) = found["steps"]
    for who in ("measured", "cost", "simulated"):
        assert step[f"{who}_s"] == step[f"{who}_language_s"] > 0 == step[f"{who}_encoder_s"]
    assert "encoder" not in shown and all(f"{who}: mean" in shown for who in ("cost model", "simulator"))
