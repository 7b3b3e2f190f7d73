"""The processor of a vision-language model's folder reads the images of rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from rayfcp.config import Config


def config_of(folder: Path, **sections: Any) -> Config:
    given = {"data": {"paths": ["x"]}, **sections}
    return Config(**{**given, "model": {"path": str(folder), "init": "random"}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    return tmp_path


def test_the_processor_is_that_of_the_model(folder: Path) -> None:
    config = config_of(folder)
    assert (config.data.processor, config.data.tokenizer) == (str(folder), None)
    assert config.pictures == "images are read by the processor of model.path"
    assert config.changed(train={"steps": 3}).data == config.data


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"paths": ["x"], "tokenizer": "bytes"}},
        {"data": {"paths": ["x"], "streaming": True}},
        {"loss": {"type": "dpo"}},
    ],
)
def test_runs_that_read_no_pictures_say_so(folder: Path, sections: dict[str, Any]) -> None:
    config = config_of(folder, **sections)
    assert config.data.processor is None
    assert (config.pictures or "").startswith("images are not read, rows that have some are refused")


def test_other_models_have_a_tokenizer_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "preprocessor_config.json").unlink()
    assert config_of(folder).data.processor is None
    (folder / "processor_config.json").write_text("{}")
    assert config_of(folder).data.processor == str(folder)
    monkeypatch.setattr("rayfcp.config.models.find_spec", lambda _: None)  # without Pillow
    assert config_of(folder).data.processor is None
    monkeypatch.undo()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    text = config_of(folder)
    assert (text.data.processor, text.data.tokenizer, text.pictures) == (None, str(folder), None)
    given = config_of(folder, data={"paths": ["x"], "processor": "other"})
    assert (given.data.processor, given.pictures) == ("other", "images are read by the processor of other")
