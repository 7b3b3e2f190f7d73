"""`rayfcp.log_probs`: those of the library's model on each sequence alone, on any number of devices, and its errors."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rayfcp
from rayfcp.config import ConfigError
from tests.cluster.runs import run_config

VOCABULARY, POSITIONS = 300, 512
LENGTHS = (1, 2, 7, 400, 3, 60, 1, 9, 180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, and no tokenizer."""
    folder = tmp_path_factory.mktemp("scored")
    shape = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"head_dim": 12, "intermediate_size": 96, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **shape, **sizes, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def sequences() -> list[Any]:
    rng = random.Random(0)
    rows: list[Any] = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return [np.array(row, dtype=np.uint16) if number % 2 else row for number, row in enumerate(rows)]


def alone(folder: Path, sequences: list[Any], dtype: torch.dtype) -> list[npt.NDArray[np.float64]]:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    found = []
    for each in sequences:
        ids = torch.tensor(np.asarray(each, dtype=np.int64))
        with torch.no_grad():
            known = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        found.append(known[:-1].gather(1, ids[1:, None])[:, 0].numpy())
    return found


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("workers", "dtype", "bound"), [(3, "float64", 1e-9), (2, "float32", 1e-5)])
def test_equal_those_of_the_library(folder: Path, sequences: list[Any], workers: int, dtype: str, bound: float) -> None:
    """Sequences are cut over all devices; results are in order, and of each the first token has none."""
    config = {"cluster": {"device": "cpu", "num_workers": workers}, "plan": {"strategy": "ring"}}
    told: list[tuple[int, int]] = []
    found = rayfcp.log_probs(
        folder / "model",
        sequences,
        config=config | {"metrics": {"peak_flops": 1e11}, "data": {"global_batch_sequences": 3}},
        overrides=[f"model.dtype={dtype}"],
        progress=lambda done, total: told.append((done, total)),
    )
    want = alone(folder, sequences, getattr(torch, dtype))
    assert [each.shape for each in found] == [(length - 1,) for length in LENGTHS]
    assert {each.dtype for each in found} == {np.dtype(dtype)}
    for mine, own in zip(found, want, strict=True):
        assert mine == pytest.approx(own, rel=bound, abs=bound)
    assert told[-1] == (len(LENGTHS), len(LENGTHS)) and [done for done, _ in told] == sorted(done for done, _ in told)
    assert [each.name for each in folder.iterdir()] == ["model"]


def test_wrong_input_is_one_line(folder: Path) -> None:
    """Before anything is started."""
    model = str(folder / "model")
    reward = run_config(folder, name="reward", loss={"type": "reward"})
    for target, rows, more, told in (
        (str(folder / "nowhere"), [[1, 2]], {}, "must be a run directory with config.yaml or a Hugging Face folder"),
        (model, [[1, 2], []], {}, r"sequence 1 has float64 of shape \[0\], must be integers of shape \[tokens\]"),
        (model, [[1.5, 2]], {}, "sequence 0 has float64"),
        (model, [[[1, 2], [3, 4]]], {}, r"sequence 0 has int64 of shape \[2, 2\]"),
        (model, [[1, 2], [3, [4]]], {}, "sequence 1 has"),
        (model, [[4, -1]], {}, "sequence 0: input_ids has -1, must be in"),
        (model, [[1], [4, VOCABULARY]], {}, "sequence 1 has token 300, must be less than 300, the model's vocabulary"),
        (model, [[1] * (POSITIONS + 1)], {}, "sequences of up to 513 tokens: data.max_seqlen is 513, the model has"),
        (model, [[1, 2]], {"overrides": ["cluster.workers=2"]}, "did you mean cluster.num_workers"),
        (model, [[1, 2]], {"config": {"loss": dict(reward.loss)}}, "a run of which has a model without log-prob"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            rayfcp.log_probs(target, rows, **more)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    sees = AutoConfig.for_model("qwen3_vl", image_token_id=258, text_config={"vocab_size": 300})
    sees.save_pretrained(folder / "sees")
    with pytest.raises(ConfigError, match="sequence 1 has token 258, which stands for an image, must have text alone"):
        rayfcp.log_probs(str(folder / "sees"), [[1, 2], [1, 258, 2]], overrides=["model.init=random"])
    assert [each.size for each in rayfcp.log_probs(model, [[1], [2]])] == [0, 0], "no cluster is needed"
    assert rayfcp.log_probs(model, []) == []
