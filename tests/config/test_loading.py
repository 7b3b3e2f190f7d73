"""Configurations: what is accepted comes back equal, what is not gives one line that helps."""

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import Config, ConfigError, check_paths, dump_config, load_config, parse_config
from rayfcp.config.data import DataConfig, MixedSourceConfig
from rayfcp.config.loading import REMOVED, known_keys, nearest_key, read_recorded, read_yaml
from rayfcp.config.models import PipelineOptions
from tests.examples import examples

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
TEXT = st.text(max_size=12)
POSITIVE = st.floats(min_value=1e-12, max_value=1e12)


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, dict[str, object]]:
    steps, low = draw(st.integers(1, 10**9)), draw(st.integers(1, 64))
    return {
        "run": {"name": draw(NAMES), "dir": draw(st.none() | TEXT), "seed": draw(st.integers(0, 2**40))},
        "data": {
            "paths": draw(st.lists(TEXT, min_size=1, max_size=3)),
            "include": draw(st.lists(TEXT, max_size=2)),
            "max_seqlen": draw(st.integers(1, 8192)),
            "long_sequences": draw(st.sampled_from(["cut", "split", "drop"])),
            "max_bad_fraction": draw(st.floats(0, 1)),
        },
        "cluster": {"num_workers": draw(st.sampled_from([low, [low, low], [low, low + 3]]))},
        "train": {
            "steps": steps,
            "warmup_steps": draw(st.integers(0, steps)),
            "learning_rate": draw(POSITIVE),
            "beta2": draw(st.floats(0, 1, exclude_max=True)),
        },
        "checkpoint": {"resume": draw(st.sampled_from(["auto", "never"]) | TEXT)},
    }


@examples(25)
@given(raw_configs())
def test_dump_loads_back_equal(raw: dict[str, dict[str, object]]) -> None:
    config = parse_config(raw)
    again = parse_config(read_yaml(dump_config(config), source="dump"))
    assert again == config
    assert config.data.max_seqlen == raw["data"]["max_seqlen"] and config.run.name == raw["run"]["name"]


@examples(100)
@given(st.sampled_from(sorted(known_keys())), st.data())
def test_a_slip_of_the_finger_names_the_key(key: str, data: st.DataObject) -> None:
    section, _, name = key.rpartition(".")
    at = data.draw(st.integers(0, len(name) - 1))
    slip = name[:at] + data.draw(st.sampled_from("qxz")) + name[at:]
    assert nearest_key(f"{section}.{slip}" if section else slip) == key


@examples(200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
        max_leaves=6,
    ),
    st.sampled_from(sorted(known_keys())),
)
def test_any_value_is_taken_or_refused_in_one_line(value: object, key: str) -> None:
    raw: dict[str, object] = {"data": {"paths": ["x"]}}
    *sections, name = key.split(".")
    inner = raw
    for section in sections:
        inner = inner.setdefault(section, {})  # type: ignore[assignment]
    inner[name] = value
    try:
        parse_config(raw)
    except ConfigError as error:
        assert "\n" not in str(error) and key.split(".", maxsplit=1)[0] in str(error)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {"paths": ["x"]}} | read_yaml(text, source="test"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {steps: -3}", "train.steps is -3, must be at least 1; raise it"),
        ("plan: {blocks: {num_buffers: 1}}", "plan.blocks.num_buffers is 1, must be at least 2; raise it"),
        ("plan: {blocks: {block_tokens: 0}}", "plan.blocks.block_tokens is 0, must be at least 1; raise it"),
        ("plan: {blocks: {alpha: -1}}", "plan.blocks.alpha is -1, must be at least 0; raise it"),
        (
            "plan: {blocks: {buffers: 1}}",
            "plan.blocks.buffers is not a known key; did you mean plan.blocks.num_buffers?",
        ),
        ("train: {steps: 0}", "train.steps is 0, must be at least 1; raise it"),
        (
            "train: {compile: maybe}",
            "train.compile is 'maybe', must be one of 'auto', True or False; write one of them",
        ),
        ("train: {steps: 2.5}", "train.steps is 2.5, must be a whole number; write digits only"),
        ("train: {learning_rate: 0}", "train.learning_rate is 0, must be greater than 0; raise it"),
        ("train: {learning_rate: .inf}", "must be a finite number"),
        ("train: {beta2: 1}", "train.beta2 is 1, must be less than 1; lower it"),
        (
            "train: {compile: true}\ncluster: {num_workers: 2, tensor_parallel: 2}",
            "train.compile is true, must be false",
        ),
        ("train: {steps: 3, warmup_steps: 4}", "train.warmup_steps is 4, must be at most train.steps (3)"),
        ("train: {recompute_layers: 9}", "must be at most model.architecture.num_layers (4)"),
        (
            "plan: {pipeline: {milp_nodes: 100}}",
            "plan.pipeline.milp_nodes is not a known key; it had no effect in earlier releases; delete it",
        ),
        (
            "plan: {blocks: {search_moves: 2000}}",
            "plan.blocks.search_moves is not a known key; it had no effect in earlier releases; delete it",
        ),
        ("train: {stpes: 9}", "train.stpes is not a known key; did you mean train.steps?"),
        ("trian: {steps: 9}", "trian is not a known key; did you mean train?"),
        ("train: {save_steps: 9}", "train.save_steps is not a known key; it is called checkpoint.every_steps here"),
        ("model: {qlora: {r: 8}}", "model.qlora is not a known key; for adapters set model.lora.rank"),
        ("eval: {evry_steps: 3}", "eval.evry_steps is not a known key; did you mean eval.every_steps?"),
        (
            "eval: {sets: {val: {pahts: x}}}",
            "eval.sets.val.pahts is not a known key; did you mean eval.sets.val.paths?",
        ),
        (
            "eval: {sets: {val: {qwerty: x}}}",
            "eval.sets.val.qwerty is not a known key; eval.sets.val has paths, format",
        ),
        ("eval: {sets: {val: {format: text}}}", "eval.sets.val.paths is missing, must be given"),
        ("eval: {sets: {val: 3}}", "eval.sets.val is 3, must be a section of keys"),
        ("eval: {sets: 3}", "eval.sets is 3, must be a section of keys"),
        (
            "eval: {sets: {'a b': {paths: x}}}",
            "a name in eval.sets is 'a b', must start with a letter or digit and hold only",
        ),
        ("eval: {every_steps: 0}", "eval.every_steps is 0, must be at least 1; raise it"),
        (
            "eval: {sets: {val: {paths: x, max_seqlen: 9000}}}",
            "eval.sets.val.max_seqlen is 9000, must be at most data.max_seqlen (8192)",
        ),
        ("train: {eval_steps: 9}", "train.eval_steps is not a known key; it is called eval.every_steps here"),
        ("optimizer: {name: x}", "optimizer is not a known key; the optimizer is AdamW"),
        ("run: {qwerty: 1}", "run.qwerty is not a known key; run has name, dir, seed"),
        ("qwerty: 1", "qwerty is not a known key; a configuration has run, model, data, loss, eval, cluster"),
        ("train: 7", "train is 7, must be a section of keys"),
        ("3: 7", "3 is not a known key"),
        ("data: {paths: []}", "data.paths is missing, must be given"),
        ("data:", "data.paths is missing"),
        (
            "data: {paths: x, max_seqlen: 9000}",
            "data.max_seqlen is 9000, must be at most model.architecture.max_positions",
        ),
        ("data: {paths: x, format: xlsx}", "data.format is 'xlsx', must be one of 'auto', 'text'"),
        ("cluster: {num_workers: 0}", "cluster.num_workers is 0, must be at least 1; raise it"),
        ("cluster: {num_workers: [0, 4]}", "cluster.num_workers is [0, 4], must be at least 1; raise it"),
        ("cluster: {num_workers: [4, 2]}", "min no greater than max; swap them"),
        ("cluster: {num_workers: [4]}", "must be a whole number or [min, max]"),
        ("cluster: {num_workers: yes}", "must be a whole number or [min, max]"),
        (
            "cluster: {num_workers: 3, pipeline_stages: 2, tensor_parallel: 2}",
            "pipeline_stages x tensor_parallel (2 x 2 = 4)",
        ),
        (
            "model: {architecture: {num_heads: 3}}",
            "model.architecture.num_heads is 3, must be a multiple of num_kv_heads (2)",
        ),
        ("model: {architecture: {head_dim: 3}}", "model.architecture.head_dim is 3, must be even"),
        ("model: {init: pretrained}", "model.init is 'pretrained', must be 'random' without model.path"),
        (
            "model: {path: m, architecture: {num_layers: 4}}",
            "model.architecture.num_layers is 4, must be absent beside model.path ('m'), which has sizes of its own; "
            "leave one of the two out, e.g. by model.architecture=null",
        ),
        ("model: {path: m, architecture: {vision: null}}", "model.architecture.vision is None, must be absent beside"),
        ("model: {name: qwen3-8b, architecture: {ffn_size: 8}}", "must be absent beside model.name ('qwen3-8b')"),
        ("model: {path: m, name: qwen3-8b}", "model.name is 'qwen3-8b', must be absent beside model.path ('m')"),
        ("run: {name: ../up}", "run.name is '../up', must start with a letter or digit"),
        ("metrics: {port: 70000}", "metrics.port is 70000, must be at most 65535; lower it"),
    ],
)
def test_wrong_configs_say_what_is_wrong(text: str, line: str) -> None:
    assert line in refused(text)


def test_a_folder_model_brings_its_own_limits() -> None:
    raw = {"data": {"paths": ["x"], "max_seqlen": 100_000}, "model": {"path": "m"}, "train": {"recompute_layers": 99}}
    assert parse_config(raw).data.max_seqlen == 100_000


def test_an_empty_architecture_goes_with_a_path() -> None:
    """Also when it is written out: a run's own file has all keys."""
    given = {"data": {"paths": ["x"]}, "model": {"path": "m", "architecture": None}}
    config = parse_config(given)
    assert parse_config(read_yaml(dump_config(config), source="dump")) == config


@pytest.mark.parametrize(
    ("files", "init"),
    [
        (["config.json"], "random"),
        (["config.json", "model.safetensors"], "pretrained"),
        (["model-00001-of-00002.safetensors"], "pretrained"),
        (["pytorch_model.bin"], "pretrained"),  # which is refused when it is loaded, and never passed over
        (["consolidated.00.pth"], "pretrained"),
        ([], "random"),
    ],
)
def test_weights_are_taken_where_they_are(files: list[str], init: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    config = Config(data={"paths": ["x"]}, model={"path": str(tmp_path)})
    assert config.model.init == init and init in config.model.weights
    assert config.changed(train={"steps": 3}).model.init == init
    assert parse_config(read_yaml(dump_config(config), source="dump")).model.init == init
    for told in ("random", "pretrained"):
        assert Config(data={"paths": ["x"]}, model={"path": str(tmp_path), "init": told}).model.init == told


def test_models_that_are_not_here_have_weights_and_shapes_have_none() -> None:
    inits = {"path": "pretrained", "name": "random"}
    for key, init in inits.items():
        assert Config(data={"paths": ["x"]}, model={key: "org/model"}).model.init == init
    assert Config(data={"paths": ["x"]}).model.init == "random"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("data: {paths: ['{stdlib}']}\ntrain:\nrun: {name: 2026-01-01}\n")
    return path


def test_file_and_overrides(config_file: Path) -> None:
    changes = [
        "train.steps=7",
        "train.learning_rate=1e-4",
        "cluster.num_workers=[2, 4]",
        "model.architecture.num_layers=8",
    ]
    config = load_config(config_file, overrides=[*changes, "train.steps=9", "data.include=a.py"])
    assert (config.train.steps, config.train.learning_rate, config.cluster.num_workers) == (9, 1e-4, (2, 4))
    assert config.model.architecture.num_layers == 8 and config.data.include == ("a.py",)
    assert config.data.paths == (sysconfig.get_paths()["stdlib"],)
    assert config.run_dir == "runs/2026-01-01"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps", "must have the form section.key=value"),
        ("=3", "must have the form section.key=value"),
        ("train..steps=3", "must have the form section.key=value"),
        ("train.stpes=3", "did you mean train.steps?"),
        ("run.name.first=3", "run.name.first is not a known key"),
        ("data.include=[*.py]", "override 'data.include=[*.py]': bad YAML at line 1"),
        ("data=3", "data is 3, must be a section of keys"),
    ],
)
def test_wrong_overrides(config_file: Path, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, overrides=[override])
    assert line in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for content, line in [
        (None, f"config file {str(path)!r} does not exist"),
        ("train:\n  steps: [1\n", "bad YAML at line 3, column 1"),
        ("train:\n  steps: 1\n  steps: 2\n", "bad YAML at line 3, column 3: key 'steps' stands twice"),
        ("a: !!python/object:os.system x", "bad YAML at line 1, column 4"),
        ("", "holds None, must hold sections of keys"),
    ]:
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert line in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_a_recorded_configuration_loses_removed_keys_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "data: {paths: [x]}\n"
        "plan: {search_moves: 7, blocks: {search_moves: 2000, alpha: 3}, pipeline: {milp_nodes: 100}}"
    )
    plan = load_config(read_recorded(tmp_path)).plan
    assert (plan.search_moves, plan.blocks.alpha, plan.pipeline) == (7, 3, PipelineOptions())
    assert not set(REMOVED) & set(known_keys())
    (tmp_path / "config.yaml").write_text("data: {paths: [x]}\nplan: 7")
    with pytest.raises(ConfigError, match="plan is 7, must be a section of keys"):
        load_config(read_recorded(tmp_path))


def test_a_dict_is_a_configuration_too() -> None:
    sections: dict[str, object] = {"data": {"paths": ["x"]}, "train": {"steps": 3}}
    assert load_config(sections, overrides=["train.steps=5"]).train.steps == 5
    assert load_config(sections).train.steps == 3
    with pytest.raises(ConfigError, match=r"train.stpes is not a known key; did you mean train.steps\?"):
        load_config({"data": {"paths": ["x"]}, "train": {"stpes": 3}})


def test_errors_of_the_constructor_are_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(data={"paths": ["x"]}, train={"steps": -3})
    assert str(caught.value) == "train.steps is -3, must be at least 1; raise it"


def test_the_tokenizer_is_the_models_unless_another_is_named() -> None:
    data = {"paths": ["x"]}
    pretrained = {"path": "some/model", "init": "pretrained"}
    assert Config(data=data, model=pretrained).data.tokenizer == "some/model"
    assert Config(data=data | {"tokenizer": "bytes"}, model=pretrained).data.tokenizer == "bytes"
    assert Config(data=data | {"processor": "some/model"}, model=pretrained).data.tokenizer is None
    assert Config(data=data).data.tokenizer is None
    config = Config(data=data, model=pretrained)
    assert parse_config(read_yaml(dump_config(config), source="dump")) == config


def test_paths_must_be_there(tmp_path: Path) -> None:
    check_paths(Config.model_validate({"data": {"paths": [str(tmp_path), "s3://somewhere/else"]}}))
    with pytest.raises(ConfigError, match=r"data.paths has '/not/here', which does not exist"):
        check_paths(Config.model_validate({"data": {"paths": [str(tmp_path), "/not/here"]}}))
    with pytest.raises(ConfigError, match=r"checkpoint.resume has '/not/here'"):
        check_paths(Config.model_validate({"data": {"paths": [str(tmp_path)]}, "checkpoint": {"resume": "/not/here"}}))


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1.", 1.0), ("08", "08"), ("12", 12), ("1_0", 10), (".5", 0.5)]
)
def test_numbers_of_yaml(text: str, value: object) -> None:
    assert read_yaml(text, source="test") == value


def test_the_quickstart_keeps_its_contract() -> None:
    path = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"
    config = load_config(path)
    check_paths(config)
    shape = config.model.architecture
    assert shape.num_layers >= 4 and shape.num_heads >= 4 and shape.num_kv_heads == 2 and shape.max_positions >= 8192
    assert config.train.learning_rate <= 1e-3
    assert load_config(path, overrides=["data.max_seqlen=8192"]).data.max_seqlen == 8192
    assert (config.run.name, config.plan.strategy, config.cluster.num_workers) == ("quickstart", "flex-ring", 4)


def test_a_source_takes_the_place_of_the_sections_own_keys() -> None:
    sources = {"a": {"paths": "x", "format": "jsonl", "loss_on": "all", "weight": 2}}
    data = DataConfig(sources=sources, tokenizer="t", schedule=[{"from_step": 2, "weights": {"a": 1}}])
    assert data.of(data.sources["a"]) == DataConfig(paths="x", format="jsonl", loss_on="all", tokenizer="t")
    streaming = DataConfig(paths="x", streaming=True)
    assert not streaming.of(MixedSourceConfig(paths="y")).streaming
