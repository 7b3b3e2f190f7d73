"""Extended positions: logits and gradients are the library's with the same configuration, on any ranks; no token
depends on the call that it is in; exports open with the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import ModelConfig
from rayfcp.models.build import empty_model, random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import check_limits, model_config
from rayfcp.models.export import export_checkpoint
from rayfcp.models.selfcheck import check_supported
from tests.execute.cases import VOCAB, Case
from tests.models.families import assert_same, by_library, in_process
from tests.models.folders import SHAPE

POSITIONS, MAX_SEQLEN = 16, 61
TABLES = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 3.0, 5.0]}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"theta": 5e5},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "theta": 5e4},
    "llama3": {"factor": 4.0, **BANDS},
    "longrope": {"factor": 4.0, **TABLES},
}
CASES = (
    Case(num_ranks=1, lengths=(61, 1, 20), microbatches=((((0,), (0, 1, 2)),),)),
    Case(
        num_ranks=3,
        lengths=(61, 17, 1, 25, 7),
        microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (1, 3)), ((0,), (4,)))),
        recomputed=1,
    ),
)


def folder_of(folder: Path, family: str = "qwen3", **keys: Any) -> str:
    """A folder with the configuration of a family that has few positions."""
    shape = {**SHAPE, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, **keys}
    AutoConfig.for_model(family, **shape).save_pretrained(folder)
    return str(folder)


def extended(path: str, rope: str | None, *, max_seqlen: int = MAX_SEQLEN, **more: Any) -> PreTrainedConfig:
    keys = {"type": rope, **ROPES.get(rope or "", {}), **more}
    run = ModelConfig.model_validate({"path": path, "rope": keys})
    return model_config(run, vocab_size=VOCAB, max_seqlen=max_seqlen)


def in_long_runs(rope: str, **keys: Any) -> dict[str, Any]:
    """The same for runs with long sequences, whose short ones have longrope's long table too."""
    found = in_library(rope, **keys)
    return found | ({"short_factor": found["long_factor"]} if rope == "longrope" else {})


def in_library(rope: str, **keys: Any) -> dict[str, Any]:
    """The library's parameters for a rope of `ROPES`, written by hand."""
    found = {"rope_type": rope, "rope_theta": 10_000.0, **ROPES[rope], **keys}
    if "theta" in found:
        found["rope_theta"] = found.pop("theta")
    if rope in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = POSITIONS
    return found


@pytest.mark.parametrize("rope", ROPES)
def test_packed_batches_as_the_library_computes_them(rope: str, tmp_path: Path) -> None:
    config = extended(folder_of(tmp_path), rope)
    shape = {**SHAPE, "vocab_size": VOCAB, "max_position_embeddings": 4 * POSITIONS}
    theirs = AutoConfig.for_model("qwen3", **shape, rope_parameters=in_long_runs(rope))
    for case in CASES:
        assert_same(in_process(config, case), by_library(theirs, case), what=(rope, case.num_ranks))


@pytest.mark.parametrize("rope", ROPES)
def test_by_layer_type_layers_with_full_attention_are_extended(rope: str, tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    path = folder_of(tmp_path, "gemma3_text", layer_types=types, sliding_window=9)
    config: Any = extended(path, rope, theta=2e5)
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    due = in_long_runs(rope, theta=2e5)
    assert config.rope_parameters == {"full_attention": due, "sliding_attention": local}
    check_supported(config)


@pytest.mark.parametrize(("max_seqlen", "table"), [(POSITIONS, "short_factor"), (POSITIONS + 1, "long_factor")])
def test_the_longest_sequence_of_the_run_chooses_the_table(max_seqlen: int, table: str, tmp_path: Path) -> None:
    """Also for the model's own longrope, which the library would change from call to call."""
    folder = folder_of(tmp_path / "own", rope_parameters=in_library("longrope"))
    for config in (
        extended(folder, None, max_seqlen=max_seqlen),
        extended(folder_of(tmp_path / "given"), "longrope", max_seqlen=max_seqlen),
    ):
        assert [config.rope_parameters[name] for name in TABLES] == [TABLES[table]] * 2


@settings(deadline=None, max_examples=20)
@given(
    rope=st.sampled_from(sorted(ROPES)),
    cuts=st.lists(st.integers(1, MAX_SEQLEN - 1), unique=True).map(sorted),
    short=st.integers(1, MAX_SEQLEN),
)
def test_pieces_get_what_the_whole_gets(rope: str, cuts: list[int], short: int) -> None:
    keys = {"type": rope, **ROPES[rope]}
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 8}
    run = ModelConfig.model_validate({"architecture": {**shape, "max_positions": POSITIONS}, "rope": keys})
    config = model_config(run, vocab_size=VOCAB, max_seqlen=MAX_SEQLEN)
    model: Any = random_model(config, dtype="float32", seed=0)
    rotary, state = model.decoder.rotary_emb, torch.zeros(1, 1, 16)

    def table(positions: Tensor) -> Tensor:
        return torch.cat(rotary(state, positions[None]))[:, : len(positions)]

    places = torch.arange(MAX_SEQLEN)
    whole = table(places).clone()
    parts = places.tensor_split(cuts)
    assert torch.equal(torch.cat([table(part) for part in parts], dim=1), whole)
    assert torch.equal(table(places[:short]), whole[:, :short])


def config_with(folder: str, rope: str, **model: Any) -> Config:
    model = {"path": folder, "rope": {"type": rope, **ROPES[rope]}, **model}
    data = {"paths": ["."], "tokenizer": "bytes", "max_seqlen": MAX_SEQLEN}
    return Config.model_validate({"data": data, "model": model})


@pytest.mark.parametrize("rope", ROPES)
def test_an_export_opens_with_equal_logits(rope: str, tmp_path: Path) -> None:
    """Of short rows too, for which the library would take longrope's other table."""
    config = config_with(folder_of(tmp_path / "first"), rope)
    library: Any = model_config(config.model, vocab_size=VOCAB, max_seqlen=MAX_SEQLEN)
    held = random_model(library, dtype="float32", seed=5)
    dcp.save({"model": held.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    export_checkpoint(config, tmp_path / "checkpoint", out_dir=tmp_path / "out", vocab_size=VOCAB)
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reach = 4 * POSITIONS if "factor" in ROPES[rope] else MAX_SEQLEN
    assert opened.config.max_position_embeddings == library.max_position_embeddings == reach
    assert opened.config.rope_parameters == library.rope_parameters
    held.model.set_attn_implementation("sdpa")
    rows = [torch.arange(length)[None] % VOCAB for length in (MAX_SEQLEN, POSITIONS // 2)]
    with torch.no_grad():
        for row in rows:
            assert torch.equal(opened(input_ids=row).logits, held.model(input_ids=row).logits)
    # The next run takes its positions as they are.
    again = model_config(ModelConfig(path=str(tmp_path / "out")), vocab_size=VOCAB, max_seqlen=MAX_SEQLEN)
    assert again.rope_parameters == library.rope_parameters


def test_without_positions_the_key_is_named(tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    config = Config(data={"paths": ["."], "max_seqlen": MAX_SEQLEN}, model={"path": path})
    library = model_config(config.model, vocab_size=VOCAB)
    with pytest.raises(
        ConfigError, match=r"or extend them, e\.g\. by model\.rope\.type=yarn and model\.rope\.factor=4$"
    ):
        check_limits(library, config)
    short = config.changed(model={"path": path, "rope": {"type": "yarn", "factor": 3}})
    with pytest.raises(ConfigError, match=r"the model has 48 positions; lower it, or set model\.rope\.factor=4$"):
        check_limits(extended(path, "yarn", factor=3), short)
    check_limits(extended(path, "yarn"), short)


@pytest.mark.parametrize(
    ("family", "keys", "rope", "message"),
    [
        ("phi3", {}, {"type": "yarn", "factor": 2.0}, "model.rope.type is 'yarn', phi3 does not run with it"),
        ("qwen3", {}, {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "must have one for each of"),
        ("gpt2", {"n_embd": 32}, {"type": "linear", "factor": 2.0}, "gpt2 has no rotary positions"),
        ("gemma3_text", {}, {"type": "yarn", "factor": 2.0, "truncate": False}, "gemma3_text ignores it; leave it out"),
    ],
)
def test_what_a_family_cannot_do_is_one_line(
    family: str, keys: dict[str, Any], rope: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = folder_of(tmp_path, family, **keys)
    run = ModelConfig.model_validate({"path": path, "rope": rope})
    with pytest.raises(ConfigError) as caught:
        model_config(run, vocab_size=VOCAB, max_seqlen=MAX_SEQLEN)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_family_with_its_own_field_for_original_positions(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "phi3", original_max_position_embeddings=POSITIONS)
    config: Any = extended(path, "longrope", original_max_position_embeddings=8)
    assert config.original_max_position_embeddings == 8 == config.rope_parameters["original_max_position_embeddings"]
    check_supported(config)
    model: CausalLM = empty_model(config, dtype="float32")
    assert model.model.config.rope_parameters["partial_rotary_factor"] == 1.0
