"""`jobs/teach.py`: the teacher's own logits in any family, its vocabulary, and teachers that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer

from rayfcp.config import ConfigError
from rayfcp.models.families import CAUSAL_FAMILIES, check_family
from rayfcp.models.library import make_library_model
from tests.data.chat_templates import tokenizer_folder
from tests.models.folders import SHAPE, saved
from tests.models.self_taught import BOUND, script, self_taught, with_curve

VOCAB = 300
"""Vocabulary size, at least that of `tokenizer_folder`."""
PLAIN = ("qwen3", "qwen3_moe", "phi3", "minicpm3", "nemotron", "glm4_moe", "gpt2", "modernbert-decoder", "qwen3_next")
"""Families that neither scale nor cap logits, of several kinds of heads, experts and layers."""


def test_a_model_that_is_its_own_teacher_has_no_loss() -> None:
    """The loss of a model that teaches itself with all words is 0, and its log-probabilities are the library's, in
    every family that scales or caps logits and in some others. `tests/models/self_taught.py` tries all that train."""
    taught = set()
    for family in CAUSAL_FAMILIES:
        try:
            config, keys = with_curve(family)
        except Exception:  # families without a default configuration
            continue
        if not keys and family not in PLAIN:
            continue
        try:
            loss, difference = self_taught(config)
        except Exception:  # whatever a family's own code raises
            with pytest.raises(ConfigError):
                check_family(family)
            continue
        assert abs(loss) < BOUND and difference < 1e-4, family
        taught.add(family)
    assert taught >= {*PLAIN, "granite", "hyperclovax", "cohere", "falcon_h1", "gemma2", "gemma4", "nanochat"}


def logits_of(model: Any, ids: np.ndarray) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.from_numpy(ids)[None].long()).logits[0].float()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["qwen3", "qwen3_vl", "internvl", "gemma3"])
def test_the_logits_are_those_of_the_library_in_the_dtype_of_the_files(
    what: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """For a model with images, the logits are those of text alone."""
    saved(tmp_path, what, dtype=dtype)
    job = script()
    model = job["open_teacher"](str(tmp_path), device="cpu", max_seqlen=23)
    assert model.dtype is dtype
    ids = np.random.default_rng(0).integers(0, 50, 23).astype(np.int32)
    words, logits = (torch.from_numpy(each) for each in job["likeliest"](model, ids, words=5))
    auto: Any = AutoModelForMultimodalLM if what in ("qwen3_vl", "internvl") else AutoModelForCausalLM
    want = logits_of(auto.from_pretrained(tmp_path, dtype="auto").eval(), ids).log_softmax(-1)
    bound = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(logits, want.gather(1, words.long()), rtol=bound, atol=bound)
    assert torch.equal(words[:, 0].long(), want.argmax(-1)) or dtype is torch.bfloat16


def without_weights(folder: Path) -> None:
    saved(folder, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "layer_types": None}))


def with_adapter(folder: Path) -> None:
    saved(folder, "qwen3")
    (folder / "adapter_config.json").write_text("{}")


def of_family(family: str, **keys: Any) -> Any:
    def write(folder: Path) -> None:
        names = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
        config = AutoConfig.for_model(family, **{**{name: SHAPE[name] for name in names}, **keys})
        (AutoModel if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config).save_pretrained(folder)

    return write


def classifier(folder: Path) -> None:
    config = AutoConfig.for_model("qwen3", **{**SHAPE, "num_labels": 1})
    make_library_model(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (without_weights, "its files lack model.layers.3."),
        (with_adapter, "which holds an adapter (adapter_config.json)"),
        (classifier, "a qwen3 with the head of a classifier, must be a decoder"),
        (of_family("bert"), "a bert whose logits change by"),
        (of_family("t5", d_model=32, d_kv=8, d_ff=48, num_layers=2), "a t5 with an encoder, must be a decoder"),
        (lambda folder: saved(folder, "llama"), "data.max_seqlen is 1000000, TEACHER"),
        (lambda folder: folder.mkdir(), "no Hugging Face model is there"),
    ],
)
def test_teachers_that_are_refused(write: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    write(folder)
    with pytest.raises(ConfigError) as caught:
        script()["open_teacher"](str(folder), device="cpu", max_seqlen=10**6 if "max_seqlen" in message else 8)
    text = str(caught.value)
    assert "TEACHER is" in text or "TEACHER '" in text
    assert message in text and "model.path" not in text and "\n" not in text


def teach(folder: Path, *words: str, tokenizer: str, out: str = "taught.parquet") -> int:
    """Run the script on a run with that tokenizer and its teacher in `folder / "teacher"`."""
    (folder / "texts.jsonl").write_text('{"text": "a b c a b d"}\n{"text": "d c b"}\n')
    given = [f"data.paths=[{folder}/texts.jsonl]", f"data.tokenizer={tokenizer}", "data.max_seqlen=32", "run.name=t"]
    (folder / "run.yaml").write_text("data: {global_batch_sequences: 2}\ntrain: {steps: 1}\n")
    model = ["model.architecture.num_layers=1", "model.architecture.hidden_size=32", "model.architecture.num_heads=2"]
    model.append(f"model.architecture.vocab_size={VOCAB}")
    places = [str(folder / "run.yaml"), str(folder / "teacher"), str(folder / out), f"run.dir={folder}/runs/t"]
    found: int = script()["main"]([*places, *given, *model, "--device", "cpu", *words])
    return found


@pytest.mark.parametrize("of_teacher", [VOCAB - 20, VOCAB, VOCAB + 20])
def test_a_vocabulary_that_is_padded_otherwise(of_teacher: int, tmp_path: Path, capsys: Any) -> None:
    """Words that teacher and model both have are stored, with the teacher's probabilities; more are refused."""
    rows, words = tokenizer_folder(tmp_path / "rows", None), min(of_teacher, VOCAB)
    of_family("gemma2", vocab_size=of_teacher, head_dim=8, final_logit_softcapping=0.5)(tmp_path / "teacher")
    assert teach(tmp_path, "--words", str(words), tokenizer=rows) == 0
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").eval()
    table = pq.read_table(tmp_path / "taught.parquet").to_pylist()
    assert len(table) == 2
    for row in table:
        want = logits_of(teacher, np.array(row["input_ids"])).log_softmax(-1)
        found = want.gather(1, torch.tensor(row["teacher_words"]))
        torch.testing.assert_close(torch.tensor(row["teacher_logits"]), found)
        assert all(sorted(each) == list(range(words)) for each in row["teacher_words"])
    assert teach(tmp_path, "--words", str(words + 1), tokenizer=rows) == 2
    message = (
        f"--words is {words + 1}, must be at most {words}, the words that teacher ({of_teacher}) and model ({VOCAB})"
    )
    assert message in capsys.readouterr().err


def test_rows_that_the_teacher_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_family("granite", vocab_size=80)(tmp_path / "teacher")
    assert teach(tmp_path, "--words", "8", tokenizer=tokenizer_folder(tmp_path / "rows", None)) == 2
    assert "with 80 words, a row has token " in capsys.readouterr().err


def test_the_teacher_has_the_vocabulary_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, teacher = tokenizer_folder(tmp_path / "rows", None), tmp_path / "teacher"
    of_family("granite", vocab_size=VOCAB, logits_scaling=8.0)(teacher)
    assert teach(tmp_path, "--words", "8", tokenizer=rows) == 0
    _, error = capsys.readouterr()
    assert f"{teacher} has no tokenizer that loads: the vocabularies of teacher and rows are not compared" in error
    AutoTokenizer.from_pretrained(rows).save_pretrained(teacher)
    assert teach(tmp_path, "--words", "8", tokenizer=rows, out="same.parquet") == 0
    assert "not compared" not in capsys.readouterr().err
    first, second = (pq.read_table(tmp_path / name) for name in ("taught.parquet", "same.parquet"))
    assert first.equals(second)
    assert teach(tmp_path, "--words", "8", tokenizer="bytes") == 2
    assert "which has a tokenizer of its own, data.tokenizer is 'bytes'" in capsys.readouterr().err
    file = teacher / "tokenizer.json"
    known = json.loads(file.read_text())
    vocab = known["model"]["vocab"]
    one, other = [word for word in vocab if word.strip("<>") == word][:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(known))
    assert teach(tmp_path, "--words", "8", tokenizer=rows) == 2
    _, error = capsys.readouterr()
    assert f"whose tokenizer differs from {rows!r} in 2 tokens: " in error and len(error.splitlines()) == 1
