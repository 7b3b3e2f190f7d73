"""A folder with an adapter, alone or beside a model, is refused by name wherever a model is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rayfcp.cluster.driver.preparing import check_runnable
from rayfcp.cluster.driver.references import check_reference
from rayfcp.cluster.evaluation import Subject
from rayfcp.config import Config, ConfigError
from tests.models.folders import saved
from tests.models.helpers import VOCAB
from tests.models.self_taught import script


def trained(folder: str, base: str) -> None:
    del base
    check_runnable(Config.model_validate({"data": {"paths": ["."], "tokenizer": "bytes"}, "model": {"path": folder}}))


def evaluated(folder: str, base: str) -> None:
    del base
    Subject.of(folder, given={}, overrides=(), step=None, log=print, has_sets=False)


def referred(folder: str, base: str) -> None:
    given = {"data": {"paths": ["."], "tokenizer": "bytes"}, "model": {"path": base}}
    config = Config.model_validate(given | {"loss": {"type": "dpo", "reference": folder}})
    check_reference(config, vocab_size=VOCAB)


def teaching(folder: str, base: str) -> None:
    del base
    script()["open_teacher"](folder, device="cpu", max_seqlen=8)


PLACES = {
    trained: "model.path",
    evaluated: "RUN_OR_MODEL",
    referred: "loss.reference",
    teaching: "TEACHER",
}


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("use", PLACES)
def test_an_adapter_is_merged_first(use: Callable[[str, str], None], is_beside: bool, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    for each in (base, folder) if is_beside else (base,):
        saved(each, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(folder)
    with pytest.raises(ConfigError) as caught:
        use(str(folder), str(base))
    text = str(caught.value)
    assert text.startswith(f"{PLACES[use]} is {str(folder)!r}, which holds an adapter (adapter_config.json): ")
    assert "rayfcp export RUN OUT --merge" in text and "\n" not in text
