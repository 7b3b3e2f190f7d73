"""Comparisons of models that see: images cost what they must, a frozen encoder less, and plans are proven."""

import json
from pathlib import Path
from typing import Any

import pytest

from rayfcp.cli import main
from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import compare
from rayfcp.compare.results import Entry
from rayfcp.config import ConfigError
from tests.compare.cases import arguments, small

RUN: dict[str, Any] = {"start": 8, "tokens": 64, "patches": 256, "stride": 70}
SEEING = ("flex-ring", "static-cp", "ulysses")


def seeing(folder: Path, **changes: Any) -> Inputs:
    """Rows of 3 to 24 images, and of text alone."""
    rows: list[Any] = [{"tokens": 70 * count + 40, "pictures": [RUN | {"count": count}]} for count in (3, 24, 9, 5)]
    path = folder / "rows.json"
    path.write_text(json.dumps([*rows, 900, 250]))
    given = {"lengths": str(path), "model": "qwen3-vl-2b", "global_batch": 6, "batches": 1, "strategies": SEEING}
    return small(folder, **(given | {"max_tokens_per_rank": 4_000} | changes))


def entries(inputs: Inputs) -> dict[str, Entry]:
    return {entry.strategy: entry for entry in compare(inputs).entries}


def test_images_take_time_and_a_frozen_encoder_less(tmp_path: Path) -> None:
    """The proof of `compare` is behind every plan here."""
    text = tmp_path / "text.json"
    text.write_text(json.dumps([250, 1720, 670, 390, 900, 250]))
    trained, frozen = entries(seeing(tmp_path)), entries(seeing(tmp_path, frozen_vision=True))
    blind = entries(seeing(tmp_path, lengths=str(text)))
    for name in SEEING:
        seconds = [each[name].iteration_s or 0.0 for each in (blind, frozen, trained)]
        assert 0 < seconds[0] < seconds[1] < seconds[2], name
        assert all((each[name].gap or 0.0) >= 1 - 1e-6 for each in (trained, frozen))


def test_images_of_all_ranks_are_balanced_by_the_planner_that_knows_of_them(tmp_path: Path) -> None:
    found = compare(seeing(tmp_path, strategies=("flex-ring", "static-cp")))
    of = {scene.plan.strategy: scene.plan for scene in found.scenes}
    assert all(microbatch.encoding for plan in of.values() for microbatch in plan.microbatches)
    encoder_s = {name: sum(each.encoder_s for each in plan.microbatches) for name, plan in of.items()}
    assert encoder_s["flex-ring"] <= encoder_s["static-cp"] * (1 + 1e-9)


def test_freezing_needs_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--freeze-vision: model .* has no vision encoder; drop it"):
        compare(small(tmp_path, frozen_vision=True))
    given = arguments(tmp_path, lengths=seeing(tmp_path).lengths, model="internvl3-2b", **{"global-batch": 6})
    assert main([*given, "--batches", "1", "--freeze-vision", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["inputs"]["frozen_vision"] is True
    assert "flex-ring" in capsys.readouterr().out
