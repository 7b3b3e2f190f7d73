"""Reading a checked Config from a YAML file, a dict and the command line, and writing it.

YAML is read as plain data: no key twice, `1e-3` is a number, a date is text. Every problem becomes one line that names
the dotted key, the value, the bound and the remedy.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rayfcp.config.data import SourceConfig
from rayfcp.config.models import Config


class ConfigError(ValueError):
    """One clear line: the field, the value given, the bound, the remedy."""


FILL_IN = "FILL_IN"
"""Value of a key that only the user can choose; a run refuses it."""

_FLOAT = re.compile(
    r"""^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$
       |^[-+]?[0-9]+[eE][-+]?[0-9]+$
       |^[-+]?\.(?:inf|Inf|INF)$
       |^\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """YAML 1.1's float needs a dot and a signed exponent; users write 1e-3. A name like 2026-01-01 stays text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what `_Loader` would not read back as the same text."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unicode's line breaks are folded to spaces unless they are escaped, which double quotes do.
        style = '"' if any(mark in data for mark in "\r\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if not tag.endswith((":timestamp", ":float"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_yaml(text: str, *, source: str) -> Any:
    """Plain data of one YAML document.

    Raises:
        ConfigError: the text is not YAML; names `source`, the line and the column, both from 1.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or "not YAML"
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise ConfigError(
            f"{source}: bad YAML at {where}: {problem}; quote text that has special characters"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: bad YAML: {' '.join(str(error).split())}") from error


def write_yaml(data: Any) -> str:
    """YAML that `read_yaml` reads back to equal data; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


_KINDS = {
    "int": ("a whole number", "write digits only"),
    "float": ("a number", "write digits such as 0.1 or 1e-3"),
    "finite": ("a finite number", "write digits such as 0.1 or 1e-3"),
    "bool": ("true or false", "write one of the two"),
    "string": ("text", "put it in quotes"),
    "tuple": ("a list", "write [a, b]"),
    "model": ("a section of keys", "indent its keys below it"),
    "dict": ("a section of keys", "indent its keys below it"),
}
_BOUNDS = {
    "greater_than": ("gt", "greater than", "raise it"),
    "greater_than_equal": ("ge", "at least", "raise it"),
    "less_than": ("lt", "less than", "lower it"),
    "less_than_equal": ("le", "at most", "lower it"),
}


NAMED = "eval.sets."
"""Prefix of sections that have names of the user's, for which `NAME` stands in known keys."""


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all sections and keys."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner: Any = field.annotation
        if f"{prefix}{name}." == NAMED:
            _, inner = get_args(inner)
            prefix_of_inner = f"{NAMED}NAME."
        else:
            prefix_of_inner = f"{prefix}{name}."
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from known_keys(inner, prefix_of_inner)


ALIASES = {
    "train.steps": "max_steps training_steps",
    "train.learning_rate": "lr",
    "train.lr_schedule": "lr_scheduler lr_scheduler_type",
    "train.warmup_steps": "warmup_ratio",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.grad_clip": "max_grad_norm max_norm",
    "train.recompute_layers": "gradient_checkpointing activation_checkpoint activation_checkpointing",
    "train.compile": "torch_compile",
    "eval.every_steps": "eval_steps eval_interval evaluation_steps eval_freq",
    "eval.batches": "eval_iters max_eval_batches limit_val_batches",
    "eval.sets": "eval_dataset validation_file valid_data validation",
    "checkpoint.every_steps": "save_steps save_interval interval",
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "checkpoint.resume": "resume_from_checkpoint load_step",
    "run.dir": "output_dir dump_folder",
    "run.name": "run_name",
    "model.path": "model_name_or_path hf_assets_path flavor",
    "model.lora.rank": "lora_r lora_rank r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules lora_target lora_target_modules",
    "model.lora.dora": "use_dora",
    "model.lora.quantize": "load_in_4bit bnb_4bit_quant_type",
    "model.rope.type": "rope_scaling rope_type",
    "loss.type": "loss_type rl objective",
    "loss.beta": "dpo_beta",
    "loss.reference": "ref_model ref_model_name_or_path reference_model",
    "loss.center": "center_rewards_coefficient",
    "model.dtype": "bf16 fp16 torch_dtype mixed_precision mixed_precision_param",
    "data.paths": "dataset dataset_name dataset_path train_file",
    "data.text_column": "dataset_text_field",
    "data.sources": "datasets interleave_probs mix_strategy probabilities",
    "data.chat_template": "chat_template_path",
    "data.loss_on": "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt mask_history",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path",
    "data.max_seqlen": "seq_len max_length max_seq_length block_size cutoff_len",
    "data.global_batch_sequences": "global_batch_size train_batch_size per_device_train_batch_size local_batch_size "
    "batch_size",
    "cluster.num_workers": "world_size num_gpus num_nodes nproc_per_node data_parallel_shard_degree "
    "data_parallel_replicate_degree",
    "cluster.tensor_parallel": "tensor_parallel_degree tensor_parallel_size tp",
    "cluster.pipeline_stages": "pipeline_parallel_degree pipeline_parallel_size pp",
    "metrics.loggers": "report_to enable_wandb enable_tensorboard",
}
"""Keys by what Hugging Face Trainer and torchtitan call them."""

UNSUPPORTED = {
    "lora lora_config peft peft_config adapter qlora": "for adapters set model.lora.rank",
    "load_in_8bit quantization quantization_config float8": "quantization is not supported, but beside adapters: set "
    "model.lora.quantize=nf4",
    "optim optimizer optimizers": "the optimizer is AdamW; set train.learning_rate, beta1, beta2 and weight_decay",
    "eval_strategy evaluation_strategy do_eval": "evaluation runs if eval.sets names data; set eval.every_steps",
    "per_device_eval_batch_size eval_batch_size": "evaluation batches have data.global_batch_sequences sequences",
    "num_train_epochs epochs num_epochs": "runs are counted in steps; set train.steps",
    "gradient_accumulation_steps micro_batch_size pipeline_parallel_microbatch_size": "microbatches are planned per "
    "batch; set data.global_batch_sequences",
    "context_parallel_degree context_parallel_size cp sequence_parallel_size": "degrees of context parallelism are "
    "planned per batch; set plan.strategy",
    "packing group_by_length": "sequences are always packed, by length",
    "fsdp fsdp_config deepspeed ddp": "parameters are always sharded with FSDP2",
    "expert_parallel_degree": "expert parallelism is not supported",
    "label_smoothing_factor neftune_noise_alpha dropout": "regularization beyond train.weight_decay is not supported",
}

REMOVED = ("plan.blocks.search_moves", "plan.pipeline.milp_nodes")
"""Keys without effect that earlier releases accepted and recorded in the `config.yaml` of every run."""

MIN_LIKENESS = 0.7
"""Ratio of matching characters from which on a key is suggested."""


def nearest_key(unknown: str) -> str | None:
    """The known key closest in spelling, one of the same section first; None if none is close.

    >>> nearest_key("train.stpes"), nearest_key("model.strategy"), nearest_key("trian"), nearest_key("model.qwerty")
    ('train.steps', 'plan.strategy', 'train', None)
    """
    section, _, name = unknown.rpartition(".")
    likeness = {key: SequenceMatcher(None, name, key.rpartition(".")[2]).ratio() for key in known_keys()}
    near = [key for key, ratio in likeness.items() if ratio >= MIN_LIKENESS]
    return max(near, key=lambda key: likeness[key] + 0.25 * (key.rpartition(".")[0] == section), default=None)


def unknown_key(dotted: str) -> str:
    """The line for a key that no section declares.

    >>> unknown_key("train.save_steps")
    'train.save_steps is not a known key; it is called checkpoint.every_steps here'
    """
    given = " ".join(dotted.split()) or repr(dotted)
    section, _, name = dotted.rpartition(".")
    if dotted.startswith(NAMED) and len(parts := dotted.removeprefix(NAMED).split(".")) == 2:
        of_any = unknown_key(f"{NAMED}NAME.{parts[1]}") if parts[0] != "NAME" else ""
        if of_any:
            return of_any.replace(f"{NAMED}NAME", f"{NAMED}{parts[0]}")
    if dotted in REMOVED:
        return f"{given} is not a known key; it had no effect in earlier releases; delete it"
    for key, names in {} if dotted.startswith(NAMED) else ALIASES.items():
        if name in names.split():
            return f"{given} is not a known key; it is called {key} here"
    for part in dotted.split("."):
        for names, reason in UNSUPPORTED.items():
            if part in names.split():
                return f"{given} is not a known key; {reason}"
    if near := nearest_key(dotted):
        return f"{given} is not a known key; did you mean {near}?"
    prefix = f"{section}." if any(key.startswith(f"{section}.") for key in known_keys()) else ""
    known = (key.removeprefix(prefix) for key in known_keys() if key.startswith(prefix))
    names = ", ".join(key for key in known if "." not in key)
    return f"{given} is not a known key; {section or 'a configuration'} has {names}"


def describe(error: ValidationError) -> str:
    """One line for the first problem, and the number of others."""
    problems = error.errors(include_url=False)
    # Unknown keys first: a misspelt key often is the reason why another one is missing.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    return _line(first) + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _line(problem: ErrorDetails) -> str:
    dotted = ".".join(str(part) for part in problem["loc"])
    kind, value, context = problem["type"], shown(problem["input"]), problem.get("ctx", {})
    if problem["input"] == FILL_IN:
        return (
            f"{dotted} is {value}, a placeholder, must be set before training; write its value or give {dotted}=VALUE"
        )
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown_key(dotted)
    if kind == "missing":
        return f"{dotted} is missing, must be given; add it to the file or as {dotted}=VALUE"
    if kind == "value_error":
        message = str(context["error"])
        if message.startswith("must "):
            return f"{dotted} is {value}, {message}"
        return f"{dotted}.{message}" if dotted else message
    if dotted.endswith(".[key]"):  # a name that the user chose
        dotted = f"a name in {'.'.join(map(str, problem['loc'][:-2]))}"
    return f"{dotted} is {value}, {_bound(problem, context)}"


def _bound(problem: ErrorDetails, context: Mapping[str, Any]) -> str:
    kind = problem["type"]
    if kind in _BOUNDS:
        name, words, remedy = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}; {remedy}"
    if kind == "literal_error":
        return f"must be one of {context['expected']}; write one of them"
    if kind == "too_short":
        return f"must have at least {context['min_length']} entry; add one"
    if kind == "string_pattern_mismatch":
        return "must start with a letter or digit and hold only letters, digits, '.', '_' and '-'; rename it"
    words, remedy = _KINDS.get(kind.split("_")[0], (problem["msg"].lower(), "see the documentation of this key"))
    return f"must be {words}; {remedy}"


def shown(value: Any) -> str:
    """The value as text of one line, at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_config(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    trains: bool = True,
    needs_data: bool = True,
) -> Config:
    """Return the configuration in a YAML file or a dict of sections, changed by `section.key=value` overrides in order.

    A value is read as YAML: `train.learning_rate=1e-4`, `cluster.num_workers=[2, 4]`, `run.dir=null`. Placeholders
    (`FILL_IN`) are errors, unless it never `trains`: then keys of `train` that have one are at their defaults. Without
    `needs_data`, `data.paths` may be missing.

    Raises:
        ConfigError: one line that names the file or the dotted key, the value, the bound and the remedy.
    """
    if isinstance(source, Mapping):
        raw = copy.deepcopy(dict(source))
    else:
        raw = read_mapping(source, what="config", content="sections of keys; see jobs/quickstart.yaml")
    for override in overrides:
        _override(raw, override)
    if not trains and isinstance(train := raw.get("train"), dict):
        raw["train"] = {key: value for key, value in train.items() if value != FILL_IN}
    return parse_config(raw, needs_data=needs_data)


def read_mapping(path: str | Path, *, what: str, content: str) -> dict[str, Any]:
    """The keys of the YAML file `path`; a ConfigError names `what` kind of file it is and its expected `content`."""
    where = f"{what} file {str(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{where} does not exist; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; give a YAML text file") from error
    raw = read_yaml(text, source=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} holds {shown(raw)}, must hold {content}")
    return raw


def read_recorded(run_dir: str | Path) -> dict[str, Any]:
    """Return the sections that a run recorded in its `config.yaml`, without the keys of `REMOVED`.

    Raises:
        ConfigError: the file does not exist or is no YAML mapping.
    """
    raw = read_mapping(Path(run_dir) / "config.yaml", what="config", content="sections of keys")
    for dotted in REMOVED:
        *sections, key = dotted.split(".")
        inner: Any = raw
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(key, None)
    return raw


def config_of_keys(overrides: Sequence[str]) -> Config:
    """Return the configuration of `section.key=value` words, for commands that read no data."""
    return load_config({}, overrides=overrides, needs_data=False)


def parse_config(raw: Mapping[str, Any], *, needs_data: bool = True) -> Config:
    """Return the checked configuration of plain data, e.g. of a YAML file. An empty section takes its defaults.

    Raises:
        ConfigError: one line for the first problem.
    """
    given = {str(section): {} if keys is None else keys for section, keys in raw.items()}
    # Without `data`, pydantic would report only that, and not a misspelt `data`.
    config = Config(**{"data": {}, **given})
    if needs_data and not config.data.paths and not config.data.sources:
        raise ConfigError(
            "data.paths is missing, must be given; add it to the file or as data.paths=VALUE, or give data.sources"
        )
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML. `parse_config` of it gives an equal Config."""
    return write_yaml(config.model_dump(mode="json"))


def check_paths(config: Config) -> None:
    """Check that the local files and folders that the configuration names exist. URLs are left to their readers.

    Raises:
        ConfigError: one line for the first that is missing.
    """
    data = config.data
    sources: dict[str, SourceConfig] = {
        f"eval.sets.{name}": each.source(data) for name, each in config.eval.sets.items()
    }
    sources |= {"data": data} | {f"data.sources.{name}": each for name, each in data.sources.items()}
    named = []
    for key, source in sources.items():
        named += [(f"{key}.paths", path) for path in source.paths]
        if source.chat_template is not None and not source.chat_template.isidentifier():  # a name is a tokenizer's
            named.append((f"{key}.chat_template", source.chat_template))
    if config.checkpoint.resume not in ("auto", "never"):
        named.append(("checkpoint.resume", config.checkpoint.resume))
    for field, path in named:
        is_pattern = field.endswith(".paths") and any(sign in path for sign in "*?[")
        if "://" not in path and not is_pattern and not Path(path).expanduser().exists():
            raise ConfigError(f"{field} has {path!r}, which does not exist; give a file or folder that does")


def _override(raw: dict[str, Any], text: str) -> None:
    """Set one `section.key=value` in `raw`."""
    dotted, equals, value = text.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r} must have the form section.key=value; e.g. train.steps=100")
    section = raw
    for part in parts[:-1]:
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(unknown_key(dotted))
    section[parts[-1]] = read_yaml(value, source=f"override {text!r}")
