"""The built-in tokenizer and those of Hugging Face."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from rayfcp.config import Config, ConfigError
from rayfcp.data import ByteTokenizer, load_tokenizer, prepare_local, run_tokenizer
from rayfcp.data.hub import locate
from tests.data.makers import data_config, few_examples, stored_rows


@few_examples
@drawn(st.text())
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    *tokens, last = tokenizer.encode(text).tolist()
    assert bytes(tokens).decode() == text
    assert last == tokenizer.eos_id
    assert [batch.tolist() for batch in tokenizer.encode_batch([text, ""])] == [[*tokens, last], [last]]


@pytest.fixture(scope="module")
def hugging_face_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "red": 2, "fox": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_hugging_face_by_path(hugging_face_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(hugging_face_folder))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 1)
    assert tokenizer.encode("red fox blue").tolist() == [2, 3, 0, 1]
    (tmp_path / "a.txt").write_text("fox fox")
    data = data_config(tmp_path, tokenizer=str(hugging_face_folder))
    made = prepare_local(data, out_dir=str(tmp_path / ".out"))
    assert [tokens for tokens, _ in stored_rows(made)] == [[3, 3, 1]]
    assert made.tokenizer_fingerprint == tokenizer.fingerprint != ByteTokenizer.fingerprint


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer is '.*', which has no tokenizer that loads \(.*\); set"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_neox", "gemma2", "t5"])
def test_a_folder_without_words_is_not_an_empty_tokenizer(tmp_path: Path, model_type: str) -> None:
    """The library makes one for some families, also if only the settings of a tokenizer are there."""
    tool = {"content": "<tool>", "special": False}
    settings = {"eos_token": "<end>", "added_tokens_decoder": {"1": tool}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"data.tokenizer is '.*', which has no tokenizer .*\(it has no words"):
            load_tokenizer(str(tmp_path))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))


def run_with(model: dict[str, Any], **data: Any) -> Config:
    return Config(data={"paths": ["rows"], **data}, model=model)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({"name": "qwen3-8b"}, {"tokenizer": "bytes"}),
        ({"name": "qwen3-8b"}, {"format": "prepared"}),
        ({"architecture": {"num_layers": 2}}, {}),
        ({"path": "."}, {"tokenizer": "bytes"}),
    ],
)
def test_bytes_where_they_are_asked_for(model: dict[str, Any], data: dict[str, Any]) -> None:
    assert isinstance(run_tokenizer(run_with(model, **data)), ByteTokenizer)


@pytest.mark.parametrize("data", [{}, {"paths": (), "sources": {"a": {"paths": ["x"]}, "b": {"paths": ["y"]}}}])
def test_a_named_model_is_not_trained_on_bytes_by_default(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer is missing, must be given with model\.name \('qwen3-8b'\)"):
        run_tokenizer(run_with({"name": "qwen3-8b"}, **data))


def test_errors_name_the_key_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "untold").mkdir()
    given = ((".", {"processor": "untold"}, "data.processor"), (".", {"tokenizer": "untold"}, "data.tokenizer"))
    for model, data, key in (("untold", {}, "model.path"), *given):
        with pytest.raises(ConfigError, match=f"^{key} is 'untold', which has no tokenizer .*; set data.tokenizer to"):
            run_tokenizer(run_with({"path": model}, **data))


def test_code_that_a_tokenizer_brings_is_not_run(
    hugging_face_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked whether it may run."""
    folder = tmp_path / "own"
    shutil.copytree(hugging_face_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    with pytest.raises(ConfigError, match=r"data\.tokenizer is .*code of its own \(auto_map\), which is never run"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("given", "nearest"), [("qwen3-tinny", "qwen3-tiny"), ("models/tinny", None), ("./modles/x", "models")]
)
def test_the_nearest_folder_is_named(
    given: str, nearest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3-tiny", "models/other"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", _unreachable)
    with pytest.raises(ConfigError, match=rf"^model\.path is '{given}', there is no such folder") as caught:
        locate(given, key="model.path")
    assert (f"(nearest: {nearest!r})" in str(caught.value)) == (nearest is not None)
    assert nearest is not None or "nearest" not in str(caught.value)


def _unreachable(*_: object, **__: object) -> None:
    raise OSError("no network")


@pytest.mark.parametrize("name", ["./absent", "/absent", "~/absent-folder", "a/b/c"])
def test_a_path_never_goes_to_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path is '.*', there is no such folder"):
        locate(name, key="model.path")


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def refuse(*args: object, **keys: object) -> None:
        calls.append(args)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no such folder, and the hub cannot be asked"):
        locate("org/model-asked-once", key="model.path")
    (tmp_path / "models--org--model-asked-once" / "snapshots" / "1").mkdir(parents=True)
    assert [locate("org/model-asked-once", key="model.path") for _ in range(3)] == [("org/model-asked-once", True)] * 3
    assert len(calls) == 1
    assert locate(str(tmp_path), key="model.path") == (str(tmp_path), True)
