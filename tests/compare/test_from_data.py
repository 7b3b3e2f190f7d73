"""From a user's data and model to an answer: a configuration, rows of text and a Hugging Face folder, prepared rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rayfcp.cli import main
from rayfcp.compare.arguments import DEFAULT_STRATEGIES, STAGED_STRATEGIES, Inputs
from rayfcp.compare.comparison import model_of
from rayfcp.compare.lengths import batches_of
from rayfcp.config import load_config
from rayfcp.data import prepare_local
from tests.compare.cases import ROOT
from tests.data.chat_templates import library_tokenizer, tokenizer_folder

TEXTS = ["a word" * (1 + number % 7 + 40 * (number % 9 == 0)) for number in range(40)]
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 2048}
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 64}
ON = ["--hardware", "H100", "--devices", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: configuration, weights, tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    ids = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    vocab_size = len(library_tokenizer(None))
    shape = AutoConfig.for_model("qwen3", vocab_size=vocab_size, tie_word_embeddings=True, **SIZES, **ids)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer_folder(folder, None)
    return folder


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with rows of text and a configuration of their run."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    Path("mine.yaml").write_text(
        json.dumps(
            {
                "model": {"architecture": SHAPE},
                "data": {"paths": ["rows.jsonl"], "max_seqlen": 200, "global_batch_sequences": 6},
                "cluster": {"device": "cpu", "num_workers": 2, "memory_gib_per_device": 1.5},
                "train": {"recompute_layers": 1, "reduce_every": "microbatch"},
                "plan": {"constraints": "megatron", "strategy": "ring"},
                "run": {"seed": 3},
            }
        )
    )
    return tmp_path


def inputs(monkeypatch: pytest.MonkeyPatch, *words: str) -> Inputs:
    """Inputs of the comparison that a command line asks for, without the comparison."""
    asked: list[Inputs] = []
    with monkeypatch.context() as patched:
        patched.setattr("rayfcp.compare.command.run", lambda given, _: asked.append(given))
        assert main(["compare", *words]) == 0
    (found,) = asked
    return found


@pytest.mark.usefixtures("desk")
def test_from_rows_and_a_folder_to_a_configuration(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands: the first answers and writes what the second, a run, takes once steps are chosen."""
    words = ["--lengths", "rows.jsonl", "--model", str(model), "--global-batch", "6", *ON]
    assert main(["compare", *words, "--strategies", "flex-ring,static-cp", "--write-config", "advised.yaml"]) == 0
    said = capsys.readouterr()
    assert "Recommended: " in said.out and "static-cp: " in said.err
    assert main(["train", "advised.yaml"]) == 2
    assert "train.steps is 'FILL_IN', a placeholder" in capsys.readouterr().err
    on_cpu = ["train.steps=2", "train.learning_rate=1e-5", "cluster.device=cpu", "cluster.num_workers=2"]
    config = load_config("advised.yaml", overrides=[*on_cpu, "cluster.memory_gib_per_device=null"])
    from rayfcp.cluster.driver.preparing import check_runnable

    check_runnable(config)
    assert (config.data.paths, config.data.tokenizer, config.model.init) == (("rows.jsonl",), str(model), "pretrained")
    assert main(["plan", "advised.yaml", "--lengths", "rows.jsonl.txt"]) == 2
    assert "does not exist" in capsys.readouterr().err, "placeholders are no obstacle to planning"


@pytest.mark.usefixtures("desk")
def test_rows_are_counted_by_the_model_s_tokenizer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--lengths", "rows.jsonl", "--model", str(model), "--global-batch", "20", *ON]
    found = inputs(monkeypatch, *words)
    tokenizer = library_tokenizer(None)
    counts = sorted(len(tokenizer(text)["input_ids"]) + 1 for text in TEXTS)  # and an end token
    drawn = [each for batch in batches_of(found, model=model_of(found)) for each in batch]
    assert sorted(each.num_tokens for each in drawn) == counts and found.max_seqlen == counts[-1]
    assert all(each.num_targets == each.num_tokens - 1 for each in drawn)
    assert model_of(found).num_layers == 2 and found.batches == 2
    cut = inputs(monkeypatch, *words, "--max-seqlen", "100", "--batches", "1", "--seed", "4")
    assert cut.rows is not None and max(each.num_tokens for each in cut.rows) == 100 and len(cut.rows) == 20
    Path("rows.jsonl").write_text(json.dumps({"text": "long" * 1000}))
    whole = inputs(monkeypatch, *words)
    assert whole.max_seqlen == 2048, "the model has no more positions"
    assert {each.num_tokens for batch in batches_of(whole, model=model_of(whole)) for each in batch} == {2048}


@pytest.mark.usefixtures("desk")
def test_a_configuration_says_all_but_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are those that the run trains on, its choices are kept, options and overrides go before it."""
    from rayfcp.cluster.dataset import open_dataset
    from rayfcp.cluster.driver.preparing import prepared_data

    found = inputs(monkeypatch, "mine.yaml")
    assert (found.hardware, found.devices, found.memory_gib) == ("cpu", 2, 1.5)
    assert (found.global_batch, found.max_seqlen, found.seed) == (6, 200, 3)
    assert (found.recompute_layers, found.reduce_every, found.gather_every) == (1, "microbatch", None)
    assert found.constraints.placement == "aligned" and found.strategies == (*DEFAULT_STRATEGIES, "ring")
    config = load_config("mine.yaml")
    sampler = open_dataset(config, data_dir=prepared_data(config, log=lambda _: None)).sampler
    own = [(sample.num_tokens, sample.num_targets) for step in (1, 2) for sample in sampler.batch(step).samples]
    batches = batches_of(found, model=model_of(found))
    assert [(each.num_tokens, each.num_targets) for batch in batches for each in batch] == own
    options = ["--global-batch", "5", "--batches", "3", "--recompute-layers", "auto", "--stages", "2", "--seed", "9"]
    other = inputs(monkeypatch, "mine.yaml", *ON, *options, "data.max_seqlen=150", "plan.strategy=flex-ring")
    assert (other.hardware, other.devices, other.memory_gib) == ("H100", 4, None), "memory is of other devices"
    assert (other.global_batch, other.batches, other.recompute_layers, other.seed) == (5, 3, None, 9)
    assert other.strategies == DEFAULT_STRATEGIES + STAGED_STRATEGIES and other.max_seqlen == 150
    assert other.rows is not None and len(other.rows) == 15


@pytest.mark.usefixtures("desk")
def test_other_lengths_or_another_model_for_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inputs(monkeypatch, "mine.yaml", "--lengths", "dist:github", *ON)
    assert found.rows is None and found.profile is not None and found.profile.hidden_size == 32
    other = inputs(monkeypatch, "mine.yaml", "--model", "qwen3-8b", *ON)
    assert other.profile is None and model_of(other).num_layers == 36 and other.rows is not None


def test_prepared_rows_keep_targets_and_load_no_library(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_local(load_config("mine.yaml").data, out_dir="prepared")
    words = ["--lengths", "prepared", "--model", "llama3.2-1b", "--global-batch", "8", *ON]
    found = inputs(monkeypatch, *words)
    assert found.rows is not None and len(found.rows) == 16 and found.lengths == "prepared"
    bytes_of = [len(text) + 1 for text in TEXTS]
    assert all(each.num_tokens in bytes_of and each.num_targets == each.num_tokens - 1 for each in found.rows)
    again = inputs(monkeypatch, *words, "--seed", "0")
    assert again.rows == found.rows != inputs(monkeypatch, *words, "--seed", "1").rows
    check = (
        "import sys\nfrom rayfcp.cli import main\n"
        f"done = main({['compare', *words, '--strategies', 'flex-ring']!r})\n"
        "loaded = sorted({'torch', 'ray', 'transformers'} & set(sys.modules))\n"
        "sys.exit(f'loaded: {loaded}' if loaded else done)"
    )
    run: dict[str, Any] = {"capture_output": True, "text": True, "env": {"PYTHONPATH": str(ROOT), "PATH": ""}}
    done = subprocess.run([sys.executable, "-c", check], cwd=desk, check=False, timeout=300, **run)
    assert done.returncode == 0, done.stderr


WRONG = {
    "text and a name": (["--lengths", "rows.jsonl", "--model", "qwen3-8b"], "line 1 has text, must have one of length"),
    "a folder": (["--lengths", ".", "--model", "qwen3-8b"], "--lengths '.' is a folder, must be a file"),
    "no CONFIG": (["data.max_seqlen=5", "--model", "qwen3-8b"], "CONFIG is missing before 'data.max_seqlen=5'"),
    "too few rows": (["--lengths", "prepared", "--model", "qwen3-8b", "--batches", "9"], "'prepared' has 40 lengths"),
    "videos": (["--lengths", "dist:msrvtt", "--model", "qwen3-vl-2b"], "--max-seqlen is missing, must be given"),
    "nothing": ([], "--lengths is missing, must be given; give a file, a prepared folder or dist:NAME, or CONFIG"),
}


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize("what", WRONG)
def test_wrong_words_get_one_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, line = WRONG[what]
    if "prepared" in words:
        prepare_local(load_config("mine.yaml").data, out_dir="prepared")
    assert main(["compare", *words, "--global-batch", "8", *ON]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and line in captured.err.splitlines()[-1]
