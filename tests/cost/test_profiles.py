"""Profiles: every figure has a source, published ratios hold, files of a user's own are read or refused in one line."""

import dataclasses
from pathlib import Path

import pytest

from rayfcp.config import ConfigError
from rayfcp.config.loading import write_yaml
from rayfcp.plan import HARDWARE, MODELS, hardware_profile, model_profile
from rayfcp.values import HardwareProfile, ModelProfile, VisionProfile
from rayfcp.values.devices import device_of_hardware
from tests.masks import kinds

NAMED_MODELS = [
    *("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3-70b"),
    *("gpt-7b", "gpt-13b", "gpt-30b", "internvl3-2b", "internvl3-8b", "internvl2.5-4b"),
    *("qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b", "gpt-oss-20b", "gpt-oss-120b"),
    *(UNEQUAL := ("deepseek-v3", "qwen3-next-80b-a3b", "nemotron-h-8b", "kimi-linear-48b-a3b")),
]
NAMED_HARDWARE = ["ascend-910c", "a800", "a100", "h100", "h200", "b200", "gb200", "l40s", "gpu-x", "gpu-y", "cpu"]


SEEING = [name for name in NAMED_MODELS if name.startswith("internvl") or "-vl-" in name]


def figures(kind: type[ModelProfile] | type[HardwareProfile] | type[VisionProfile]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} - {
        "name",
        "source",
        "vision",
        "frozen",
        "keeps_attention",
        "compiled",
        "adapter",
        "num_outputs",
        "head_fraction",
        "fp32_residual",
    }


def test_all_profiles_are_there() -> None:
    assert sorted(MODELS) == sorted(NAMED_MODELS) and sorted(HARDWARE) == sorted(NAMED_HARDWARE)
    assert all(MODELS[name].name == name for name in MODELS)


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_each_figure_of_a_model_has_a_source(name: str) -> None:
    sources = MODELS.sources(name)
    of_experts = {"num_experts", "experts_per_token", "shared_ffn_size"}
    unnamed = {"kind_of_layer", "layers"} | (of_experts if not MODELS[name].has_experts else set())
    of_vision = {f"vision.{field}" for field in figures(VisionProfile)} if name in SEEING else set()
    windows = {"layer_windows"} if MODELS[name].layer_kinds else set()
    expected = (figures(ModelProfile) - unnamed) | of_vision | windows
    if name in UNEQUAL:
        expected = {"hidden_size", "vocab_size", "tied_embeddings", "layers"}
    assert set(sources) == expected, "no layer has a window where none is named"
    assert (MODELS[name].vision is not None) == (name in SEEING)
    assert all(len(text) > len("assumed, so") for text in sources.values())


@pytest.mark.parametrize("name", NAMED_HARDWARE)
def test_each_figure_of_a_device_has_a_source(name: str) -> None:
    sources = HARDWARE.sources(name)
    absent = {field for field in ("host_layer_s", "host_round_s") if getattr(HARDWARE[name], field) == 0}
    assert set(sources) == figures(HardwareProfile) - absent
    for field, text in sources.items():
        assert f"{field}: {text}" in HARDWARE[name].source
        assert not text.startswith("assumed") or len(text) > 25, f"{field}: say why"


def test_published_ratios() -> None:
    """Table 1 of FCP with blocks, and its MFU of 25 % with blocks of 512 tokens where long ones reach 65 %."""
    for name, ratio in (("gpu-x", 5920), ("gpu-y", 2500)):
        assert hardware_profile(name).peak_flops / hardware_profile(name).inter_node_bandwidth == pytest.approx(ratio)
    half = hardware_profile("h100").attention_half_tokens
    assert 0.65 * 512 / (512 + half) == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize(("name", "billions"), [("gpt-7b", 6.65), ("gpt-13b", 12.84), ("gpt-30b", 32.2)])
def test_gated_stand_ins_have_a_plain_mlp_s_parameters(name: str, billions: float) -> None:
    model = model_profile(name)
    assert 3 * model.ffn_size == pytest.approx(8 * model.hidden_size, rel=1e-3)
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-70b", 70.6), ("internvl3-8b", 7.62), ("internvl3-2b", 1.78), ("qwen3-30b-a3b", 30.5)],
)
def test_published_sizes(name: str, billions: float) -> None:
    assert model_profile(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def vision_parameters(model: ModelProfile) -> tuple[int, int]:
    """Those of matrices, counted one by one: of patches and layers, and of mergers."""
    vision = model.vision
    assert vision is not None
    wide = vision.merged_patches * vision.hidden_size
    layer = 4 * vision.hidden_size**2 + (3 if vision.gated else 2) * vision.hidden_size * vision.ffn_size
    merger = wide * vision.merger_size + vision.merger_size * model.hidden_size
    return vision.num_layers * layer + vision.patch_values * vision.hidden_size, vision.num_mergers * merger


@pytest.mark.parametrize(
    ("name", "tower", "whole"),
    [
        ("internvl3-2b", 0.30, 2.09),
        ("internvl2.5-4b", 0.30, 3.71),
        ("internvl3-8b", 0.30, 7.94),
        ("qwen3-vl-2b", 0.30, 2.13),
        ("qwen3-vl-4b", 0.30, 4.44),
        ("qwen3-vl-8b", 0.41, 8.77),
    ],
)
def test_models_that_see_have_the_published_sizes(name: str, tower: float, whole: float) -> None:
    """Billions: InternViT-300M, or SigLIP 2's large and 400M shapes, and the whole model with its mergers."""
    model = model_profile(name)
    of_tower, of_mergers = vision_parameters(model)
    assert of_tower / 1e9 == pytest.approx(tower, rel=0.02)
    assert (model.num_parameters + of_tower + of_mergers) / 1e9 == pytest.approx(whole, rel=0.01)


def test_a_token_s_work_counts_the_experts_that_it_passes() -> None:
    """3.3 billion parameters are active, as published; without the embedding, of which a token reads one row, 3.0."""
    model = model_profile("qwen3-30b-a3b")
    embedding = model.vocab_size * model.hidden_size
    assert (model.linear_flops_per_token / 2 + embedding) / 1e9 == pytest.approx(3.35, rel=0.01)
    alike = dataclasses.replace(model, num_experts=1, experts_per_token=1, ffn_size=8 * 768 + 128 // 3)
    assert model.layer_matmul_parameters == pytest.approx(alike.layer_parameters, rel=1e-3)
    assert alike.layer_parameters == alike.layer_matmul_parameters


def test_a_vision_encoder_in_a_file_of_a_user_s_own(tmp_path: Path) -> None:
    model = MODELS["qwen3-vl-8b"]
    assert model_profile(written(tmp_path, model)) == model
    (tmp_path / "blind.yaml").write_text(Path(written(tmp_path, MODELS["qwen3-8b"])).read_text() + "vision: null\n")
    assert model_profile(str(tmp_path / "blind.yaml")).vision is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_layer": 3}, "vision: num_layer is no field; did you mean num_layers?"),
        ({"ffn_size": None}, "vision: ffn_size is missing; give all of ffn_size"),
        ({"hidden_size": 0}, "vision: hidden_size is 0, must be above 0"),
        ({"merged_patches": 2.5}, "vision: merged_patches is 2.5, must be a whole number"),
        ({"gated": 1}, "vision: gated is 1, must be true or false"),
        ({"num_heads": 5}, "vision: hidden_size is 1024, must be a multiple of num_heads (5)"),
        ({"sources": {"hiden_size": "x"}}, "vision: sources has hiden_size, no field; did you mean hidden_size?"),
    ],
)
def test_wrong_vision_encoders_are_told_in_one_line(tmp_path: Path, changes: dict[str, object], line: str) -> None:
    model = MODELS["internvl3-2b"]
    assert model.vision is not None
    fields = dataclasses.asdict(model.vision) | changes
    path = written(tmp_path, model, vision={name: value for name, value in fields.items() if value is not None})
    with pytest.raises(ConfigError) as error:
        model_profile(path)
    assert line in str(error.value) and "\n" not in str(error.value) and "mine.yaml" in str(error.value)


def test_a_vision_encoder_is_a_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vision is 24, must hold fields of its own"):
        model_profile(written(tmp_path, MODELS["internvl3-2b"], vision=24))


def written(folder: Path, profile: ModelProfile | HardwareProfile, **changes: object) -> str:
    path = folder / "mine.yaml"
    fields = dataclasses.asdict(profile) | changes
    fields.pop("layers", None)
    if kind_of_layer := fields.pop("kind_of_layer", ()):
        fields["layer_windows"] = [kind["window"] for kind in kind_of_layer]
    path.write_text(write_yaml({key: value for key, value in fields.items() if value is not None}))
    return str(path)


def test_a_file_of_a_user_s_own(tmp_path: Path) -> None:
    assert model_profile(written(tmp_path, MODELS["gpt-7b"])) == MODELS["gpt-7b"]
    assert hardware_profile(written(tmp_path, HARDWARE["a800"])) == HARDWARE["a800"]
    assert hardware_profile(written(tmp_path, HARDWARE["a800"], name=None)).name == "mine"
    assert hardware_profile(written(tmp_path, HARDWARE["a800"], source=None)).source == ""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"peak_flop": 1e12}, "peak_flop is no field; did you mean peak_flops?"),
        ({"peak_flops": None}, "peak_flops is missing"),
        ({"peak_flops": "fast"}, "peak_flops is 'fast', must be a number"),
        ({"peak_flops": 0}, "peak_flops is 0, must be above 0"),
        ({"latency_s": -1e-6}, "latency_s is -1e-06, must be at least 0"),
        ({"devices_per_node": 2.5}, "devices_per_node is 2.5, must be a whole number"),
        ({"overlap": 1.5}, "overlap is 1.5, must be at most 1"),
        ({"sources": {"peak_flps": "x"}}, "sources has peak_flps, no field; did you mean peak_flops?"),
        ({"sources": "data sheet"}, "sources must map names of fields to texts"),
    ],
)
def test_wrong_fields_are_told_in_one_line(tmp_path: Path, changes: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        hardware_profile(written(tmp_path, HARDWARE["h100"], **changes))
    assert line in str(error.value) and "\n" not in str(error.value) and "mine.yaml" in str(error.value)


def test_other_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_heads is 5, must be a multiple of num_kv_heads"):
        model_profile(written(tmp_path, MODELS["qwen3-8b"], num_heads=5))
    with pytest.raises(ConfigError, match="tied_embeddings is 'no way', must be true or false"):
        model_profile(written(tmp_path, MODELS["qwen3-8b"], tied_embeddings="no way"))
    with pytest.raises(ConfigError, match="does not exist; check the path"):
        model_profile(str(tmp_path / "absent.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold fields of a profile"):
        model_profile(str(tmp_path / "list.yaml"))
    (tmp_path / "broken.yaml").write_text("name: [\n")
    with pytest.raises(ConfigError, match="bad YAML at line"):
        hardware_profile(str(tmp_path / "broken.yaml"))


def test_windows_of_layers_are_read(tmp_path: Path) -> None:
    model = dataclasses.replace(MODELS["qwen3-1.7b"], name="mine", kind_of_layer=kinds(0, *[4096] * 27))
    assert model_profile(written(tmp_path, model, layer_windows=[0, *[4096] * 27])) == model


@pytest.mark.parametrize(
    ("windows", "line"),
    [
        (4096, "layer_windows is 4096, must be a list"),
        ([0, 8], "must have num_layers (28)"),
        ([-1], "at least 0"),
    ],
)
def test_wrong_windows_of_layers_are_told_in_one_line(tmp_path: Path, windows: object, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_profile(written(tmp_path, MODELS["qwen3-1.7b"], layer_windows=windows))
    assert line in str(error.value) and "\n" not in str(error.value) and "mine.yaml" in str(error.value)


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "gb200", "l40s"])
def test_cards_are_known_in_any_case_with_their_peak(name: str) -> None:
    """The profile's peak is the one by which a run computes MFU on a card of that name."""
    profile = hardware_profile(name.upper())
    assert profile == hardware_profile(name) and profile.name == name
    device = device_of_hardware(profile.name)
    assert device is not None and device.name == "cuda"
    peak = device.peak_flops_of(f"NVIDIA {name.upper()}")
    assert peak is not None and peak == pytest.approx(profile.peak_flops, rel=1e-3)


def test_wrong_names_in_any_case_are_told() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        hardware_profile("H10O")
