"""The error of a configuration that cannot be used.

YAML as a run's configuration uses it: plain data only, no key twice, `1e-3` is a number, a date is text.

What pydantic found wrong, said in one line: the dotted field, the value, the bound, the remedy.

From a YAML file and the command line to a checked Config, and back.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rayfcp.config.models import STDLIB_PLACEHOLDER, Config


class ConfigError(ValueError):
    """One clear line: the field, the value given, the bound, the remedy."""


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


def _without(resolvers: dict[Any, list[tuple[str, Any]]], *tags: str) -> dict[Any, list[tuple[str, Any]]]:
    return {first: [(tag, rule) for tag, rule in rules if tag not in tags] for first, rules in resolvers.items()}


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = _without(
        yaml.SafeLoader.yaml_implicit_resolvers, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float"
    )
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_yaml(text: str, *, source: str) -> Any:
    """Plain data of one YAML document.

    Raises:
        ConfigError: The text is not YAML; names `source`, the line and the column, both from 1.
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
}
_BOUNDS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_BOUND_WORDS = {
    "gt": ("greater than", "raise it"),
    "ge": ("at least", "raise it"),
    "lt": ("less than", "lower it"),
    "le": ("at most", "lower it"),
}


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all sections and keys.

    >>> "train.steps" in set(known_keys())
    True
    """
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")


def nearest_key(unknown: str) -> str:
    """The known key closest in spelling; one of the same section, or of the same name elsewhere, comes first.

    >>> nearest_key("train.stpes"), nearest_key("model.strategy"), nearest_key("trian")
    ('train.steps', 'plan.strategy', 'train')
    """
    section, _, name = unknown.rpartition(".")

    def likeness(candidate: str) -> float:
        its_section, _, its_name = candidate.rpartition(".")
        return SequenceMatcher(None, name, its_name).ratio() + (0.25 if section == its_section else 0.0)

    return max(known_keys(), key=likeness)


def unknown_key(dotted: str) -> str:
    """The line for a key that no section declares."""
    shown = " ".join(dotted.split()) or repr(dotted)
    return f"{shown} is not a known key; did you mean {nearest_key(dotted)}?"


def describe(error: ValidationError) -> str:
    """One line for the first problem, and how many more there are."""
    problems = error.errors(include_url=False)
    # Unknown keys first: a misspelt key often is the reason why another one is missing.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return _line(first) + more


def _line(problem: ErrorDetails) -> str:
    dotted = ".".join(str(part) for part in problem["loc"])
    kind, value, context = problem["type"], shown(problem["input"]), problem.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown_key(dotted)
    if kind == "missing":
        return f"{dotted} is missing, must be given; add it to the file or as {dotted}=VALUE"
    if kind == "value_error":
        message = str(context["error"])
        if message.startswith("must "):
            return f"{dotted} is {value}, {message}"
        return f"{dotted}.{message}" if dotted else message
    return f"{dotted} is {value}, {_bound(problem, context)}"


def _bound(problem: ErrorDetails, context: Mapping[str, Any]) -> str:
    kind = problem["type"]
    if kind in _BOUNDS:
        words, remedy = _BOUND_WORDS[_BOUNDS[kind]]
        return f"must be {words} {context[_BOUNDS[kind]]:g}; {remedy}"
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


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, changed by `section.key=value` overrides, later ones last.

    A value is read as YAML: `train.learning_rate=1e-4`, `cluster.num_workers=[2, 4]`, `run.dir=null`.

    Raises:
        ConfigError: One line that names the file or the dotted key, the value, the bound and the remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"config file {str(path)!r} does not exist; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}; give a YAML text file") from error
    raw = read_yaml(text, source=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config file {str(path)!r} holds {shown(raw)}, must hold sections of keys; see jobs/quickstart.yaml"
        )
    for override in overrides:
        _override(raw, override)
    return parse_config(raw)


def config_of_keys(overrides: Sequence[str]) -> Config:
    """The configuration of `section.key=value` words alone, for what reads no data: `data.paths` may be missing.

    Raises:
        ConfigError: One line, as of `load_config`.

    >>> config_of_keys(["model.name=qwen3-1.7b", "train.steps=3"]).train.steps
    3
    """
    raw: dict[str, Any] = {"data": {"paths": [STDLIB_PLACEHOLDER]}}
    for override in overrides:
        _override(raw, override)
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> Config:
    """The checked configuration of plain data, e.g. of a YAML file. An empty section takes its defaults.

    Raises:
        ConfigError: One line for the first problem.
    """
    given = {section: {} if keys is None else keys for section, keys in raw.items()}
    # A misspelt `data` would otherwise only be told as a missing one; so would a file without it.
    try:
        return Config.model_validate({"data": {}, **given})
    except ValidationError as error:
        raise ConfigError(describe(error)) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML. `parse_config` of it gives an equal Config."""
    return write_yaml(config.model_dump(mode="json"))


def check_paths(config: Config) -> None:
    """Whether the local files and folders that the configuration names are there. URLs are left to their readers.

    Raises:
        ConfigError: One line for the first that is missing.
    """
    named = [("data.paths", path) for path in config.data.paths]
    if config.checkpoint.resume not in ("auto", "never"):
        named.append(("checkpoint.resume", config.checkpoint.resume))
    for field, path in named:
        is_pattern = field == "data.paths" and any(sign in path for sign in "*?[")
        if "://" not in path and not is_pattern and not Path(path).expanduser().exists():
            raise ConfigError(f"{field} has {path!r}, which does not exist; give a file or folder that does")


def _override(raw: dict[str, Any], text: str) -> None:
    """Sets one `section.key=value` in `raw`."""
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
