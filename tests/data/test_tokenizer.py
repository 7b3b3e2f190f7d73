"""The built-in tokenizer and those of Hugging Face."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data import ByteTokenizer, load_tokenizer, prepare_local
from rayfcp.data.hub import locate
from tests.data.makers import data_config, few_examples, stored_rows


@few_examples
@given(st.text())
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
    with pytest.raises(ConfigError, match=r"data.tokenizer is '.*', must be 'bytes' or"):
        load_tokenizer(str(tmp_path))


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
    assert [locate("org/model-asked-once", key="model.path") for _ in range(3)] == [("org/model-asked-once", True)] * 3
    assert len(calls) == 1
    assert locate(str(tmp_path), key="model.path") == (str(tmp_path), True)
