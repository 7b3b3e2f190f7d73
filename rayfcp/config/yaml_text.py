"""YAML as a run's configuration uses it: plain data only, no key twice, `1e-3` is a number, a date is text."""

import re
from typing import Any

import yaml

from rayfcp.config.errors import ConfigError

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
