"""Weights of a folder become parameters as in the library, part by part; what does not fit is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.models import pretrained
from rayfcp.models.build import empty_model
from rayfcp.models.library import config_at
from rayfcp.models.pretrained import LazyTensor, Source, check_weights, fill_pretrained, read
from rayfcp.values.state import Box
from tests.examples import examples
from tests.models.folders import ALL_FOLDERS, saved

INDEX = "model.safetensors.index.json"


def filled(folder: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Parameters of a whole model."""
    model = empty_model(config, dtype="float32")
    model.to_empty(device="cpu")
    model.tie()
    fill_pretrained(model.model, str(folder), config=config)
    return {name: each.detach() for name, each in model.model.named_parameters()}


@pytest.mark.parametrize("what", ALL_FOLDERS)
def test_parameters_are_those_that_were_saved(what: str, tmp_path: Path) -> None:
    """Every bit."""
    config, want = saved(tmp_path, what)
    assert (tmp_path / INDEX).exists()
    check_weights(str(tmp_path), config)
    found = filled(tmp_path, config)
    assert found.keys() == want.keys()
    for name, value in found.items():
        assert value.dtype is torch.float32 and torch.equal(value, want[name].float()), name


CONVERSIONS: dict[str, Callable[..., Tensor]] = {
    "fused experts": lambda *each: torch.cat([torch.stack(list(each[:2]), 0), torch.stack(list(each[2:]), 0)], dim=1),
    "experts last": lambda *each: torch.stack(list(each), -1),
    "rows": lambda *each: torch.cat(list(each)),
}
"""Conversions of four tensors of one shape that copy nothing."""


@examples(60)
@given(st.sampled_from(sorted(CONVERSIONS)), st.data())
def test_a_part_of_what_was_converted_reads_no_more_than_it_needs(how: str, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    tensors = [torch.arange(rows * columns).reshape(rows, columns) + 100.0 * at for at in range(4)]
    whole, source = CONVERSIONS[how](*tensors), CONVERSIONS[how](*(LazyTensor([tensor]) for tensor in tensors))
    assert isinstance(source, LazyTensor) and source.shape == whole.shape
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in whole.shape)
    sizes = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(whole.shape, starts, strict=True))
    box = Box(offsets=starts, sizes=sizes)
    sizes_read: list[int] = []

    def counted(source: Source, box: Box) -> Tensor:
        if isinstance(source, Tensor):
            sizes_read.append(box.num_elements)
        return read(source, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "read", counted)
        assert torch.equal(source.read(box), read(whole, box))
    assert sum(sizes_read) == box.num_elements


def test_what_lazy_tensors_do_not_know_is_done_with_whole_ones() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(torch.flip(LazyTensor([tensor]), [0]), torch.flip(tensor, [0]))  # type: ignore[arg-type]
    assert torch.equal(LazyTensor([tensor]).reshape(4, 3), tensor.reshape(4, 3))
    joined = torch.cat([LazyTensor([tensor]), LazyTensor([tensor])], 1)  # type: ignore[list-item]
    assert torch.equal(torch.chunk(joined, 4, dim=1)[3], tensor[:, 2:])
    with pytest.raises(ValueError, match="cannot be joined along dimension 0"):
        torch.cat([LazyTensor([tensor]), LazyTensor([tensor[:, :2]])])  # type: ignore[list-item]


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """All tensors of a folder in one file, changed."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(2)


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(31)


def quantise(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)


def repeat(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def untie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def lose_an_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.2.mlp.experts.3.down_proj.weight"]


BROKEN = {
    "missing": ("qwen3", drop, r"its files lack model\.layers\.1\.mlp\.up_proj\.weight; give weights"),
    "unexpected": (
        "qwen3",
        add,
        r"Qwen3ForCausalLM has no place for model\.layers\.1\.mlp\.extra\.weight of its",
    ),
    "of another shape": ("qwen3", narrow, r"model\.norm\.weight has shape \[31\] there, must be \[32\] by its config"),
    "quantised": ("qwen3", quantise, r"model\.norm\.weight holds I8, must be one of F64, F32, F16, BF16; give weights"),
    "an expert lost": ("qwen3_moe", lose_an_expert, r"experts\.down_proj has shape \[4, 32, 24\] there, must be \[5,"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_fit_is_named(what: str, tmp_path: Path) -> None:
    """Before anything is read, and again where it is read."""
    family, change, message = BROKEN[what]
    config, _ = saved(tmp_path, family)
    rewritten(tmp_path, change)
    for refuses in (lambda: check_weights(str(tmp_path), config), lambda: filled(tmp_path, config)):
        with pytest.raises(ConfigError, match=message) as caught:
            refuses()
        assert str(caught.value).startswith("model.path is ") and "\n" not in str(caught.value)


def test_ties_that_the_files_do_not_keep_are_refused(tmp_path: Path) -> None:
    config, want = saved(tmp_path, "qwen3, tied")
    rewritten(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    found = filled(tmp_path, config)
    assert torch.equal(found["model.embed_tokens.weight"], want["model.embed_tokens.weight"].float())
    rewritten(tmp_path, untie)
    with pytest.raises(ConfigError, match=r"differ, but its config\.json ties them; set tie_word_embeddings to false"):
        filled(tmp_path, config)


def test_tables_of_older_releases_are_passed_over(tmp_path: Path) -> None:
    config, _ = saved(tmp_path, "llama")
    rewritten(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    check_weights(str(tmp_path), config)


def test_files_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    config, _ = saved(tmp_path, "qwen3")
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    held = first.read_bytes()
    for content, message in ((held[: len(held) // 2], "is damaged"), (None, "is missing, which its index names")):
        first.unlink()
        if content is not None:
            first.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{first.name} {message}"):
            check_weights(str(tmp_path), config)
    index = json.loads((tmp_path / INDEX).read_text())
    second = sorted(tmp_path.glob("*.safetensors"))[0].name
    index["weight_map"] |= dict.fromkeys(load_names(tmp_path / INDEX, first.name), second)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"{second} lacks .*, which its index says it has"):
        check_weights(str(tmp_path), config)
    (tmp_path / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(ConfigError, match=f"broken {INDEX} "):
        check_weights(str(tmp_path), config)


def load_names(index: Path, file: str) -> list[str]:
    """Names of the tensors that a file holds by its index."""
    return [name for name, each in json.loads(index.read_text())["weight_map"].items() if each == file]


def said_to_be_quantized(folder: Path, settings: dict[str, str]) -> PreTrainedConfig:
    """The configuration of a folder whose `config.json` says so."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    return config_at(str(folder))


def test_plain_weights_are_not_quantized_whatever_their_configuration_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, and neither the model nor an export has the entry."""
    plain, want = saved(tmp_path, "qwen3")
    config = said_to_be_quantized(tmp_path, {"quant_method": "gptq", "bits": "4"})
    assert config.to_dict() == plain.to_dict()
    check_weights(str(tmp_path), config)
    assert [each.getMessage() for each in caplog.records] == [
        f"quantization_config of {tmp_path} ('gptq') is dropped: its weights are not quantized"
    ]
    found = filled(tmp_path, config)
    assert all(torch.equal(value, want[name].float()) for name, value in found.items())


def scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight_scale_inv"] = torch.ones(1)


@pytest.mark.parametrize("change", [quantise, scale, add, narrow, drop])
def test_quantized_weights_are_refused_by_the_name_of_their_method(
    change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    saved(tmp_path, "qwen3")
    rewritten(tmp_path, change)
    config = said_to_be_quantized(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"whose weights are quantized \(quantization_config 'fp8' .*: .*; give the"):
        check_weights(str(tmp_path), config)


def test_code_of_a_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked either. A family of the library needs none."""
    saved(tmp_path, "qwen3")
    file = tmp_path / "config.json"
    found = json.loads(file.read_text()) | {
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    }
    file.write_text(json.dumps(found))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    config = config_at(str(tmp_path))
    check_weights(str(tmp_path), config)
    assert empty_model(config, dtype="float32").model.config.model_type == "qwen3"
    file.write_text(json.dumps(found | {"model_type": "own"}))
    with pytest.raises(ConfigError, match=r"model\.path is .*needs code of its own \(auto_map\), which is never run"):
        config_at(str(tmp_path))


def test_a_single_file_precedes_an_index(tmp_path: Path) -> None:
    config, _ = saved(tmp_path, "qwen3")
    (tmp_path / "sharded.json").write_text((tmp_path / INDEX).read_text())
    rewritten(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(3))
    (tmp_path / "sharded.json").rename(tmp_path / INDEX)
    assert filled(tmp_path, config)["model.norm.weight"].eq(3).all()


def test_a_folder_without_safetensors_says_so(tmp_path: Path) -> None:
    config, _ = saved(tmp_path, "qwen3")
    for file in (*tmp_path.glob("*.safetensors"), tmp_path / INDEX):
        file.unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=f"neither .* nor {INDEX} is there, but pytorch_model.bin; save"):
        check_weights(str(tmp_path), config)
