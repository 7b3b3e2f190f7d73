"""Names that users write and read, a line each: `python -m tests.golden.names` writes names.txt again.

Names of Python with their signatures, adapters, commands with their options, exit codes, configuration keys with types
and defaults, strategies, metrics, and keys of JSON output. A line that goes or changes breaks somebody's script.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import rayfcp
from rayfcp import adapters, commands
from rayfcp.cli import _parser
from rayfcp.cluster.jobs.evaluate import Evaluated
from rayfcp.cluster.tools.doctor.facts import Finding
from rayfcp.commands.evaluate import _as_json
from rayfcp.compare.comparison import compare
from rayfcp.config import Config
from rayfcp.plan import strategy_names
from rayfcp.simulate import simulate_plan
from rayfcp.telemetry.names import METRICS, PREFIX
from rayfcp.telemetry.steps import to_line
from rayfcp.values import EvalResult, SourceReport
from tests.compare.cases import small
from tests.telemetry.samples import PAIRS, report

FILE = Path(__file__).with_name("names.txt")


def names() -> list[str]:
    """Return all lines, sorted."""
    found = [
        *_python_names(),
        *_command_names(_parser(), "command rayfcp"),
        *(f"exit code {name} {code}" for name, code in vars(commands).items() if type(code) is int),
        *_config_names(Config.model_json_schema()),
        *(f"strategy {name}" for name in strategy_names()),
        *(
            f"metric {PREFIX}{each.name} {each.kind} {json.dumps(['run', *each.labels, *each.known])}"
            for each in METRICS
        ),
        *_json_names(),
    ]
    return sorted(set(found))


def _python_names() -> Iterator[str]:
    for name in rayfcp.__all__:
        value = getattr(rayfcp, name)
        yield from _signatures(f"python rayfcp.{name}", simulate_plan if value is rayfcp.simulate else value)
    for info in pkgutil.iter_modules(adapters.__path__, f"{adapters.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", None) in _own(module):
                yield from _signatures(f"python {info.name}.{name}", value)


def _own(module: ModuleType) -> set[str]:
    """Return the names of a module and, of a package, of those in it."""
    inner = pkgutil.iter_modules(getattr(module, "__path__", []), f"{module.__name__}.")
    return {module.__name__, *(each.name for each in inner)}


def _signatures(name: str, value: Any) -> Iterator[str]:
    """Yield the parameters of a function, or of a class and its public methods, as far as the package defines them."""
    if isinstance(value, type):
        for inner, member in inspect.getmembers(value):
            method = member.fget if isinstance(member, property) else member
            if inspect.isroutine(method) and not inner.startswith("_") and _is_ours(method):
                yield f"{name}.{inner}" + ("" if isinstance(member, property) else _parameters(method))
    takes = value.__init__ if isinstance(value, type) else value
    yield name + (_parameters(value) if inspect.isroutine(takes) and _is_ours(takes) else "")


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("rayfcp")


def _shown(default: Any) -> Any:
    return type(default) if isinstance(default, BaseModel) else default


def _parameters(function: Any) -> str:
    """Print a signature without types; functions, classes and sections among the defaults by name."""
    signature = inspect.signature(function)
    plain = [
        each.replace(annotation=each.empty, default=_shown(each.default)) for each in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r"<(?:function|class) '?(?:\w+\.)*(\w+)[^>]*>", r"\1", text)


def _command_names(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield f"{name} {word}"
                yield from _command_names(inner, f"{name} {word}")
        elif not isinstance(action, argparse._HelpAction):
            words = "/".join(action.option_strings) or action.dest
            shown = {
                "nargs": action.nargs,
                "choices": action.choices and list(action.choices),
                "default": action.default,
            }
            yield f"{name} {words} {json.dumps({key: each for key, each in shown.items() if each is not None})}"


def _config_names(schema: dict[str, Any]) -> Iterator[str]:
    """Yield keys with type and default, from the schema of the configuration; `*` stands for a name or a position."""
    sections = schema["$defs"]

    def keys(section: dict[str, Any], prefix: str) -> Iterator[str]:
        for key, given in section["properties"].items():
            kind = {name: each for name, each in given.items() if name not in ("title", "description")}
            if section_of := re.fullmatch(r"#/\$defs/(\w+)", given.get("$ref", "")):
                yield from keys(sections[section_of[1]], f"{prefix}{key}.")
                continue
            default = "required" if key in section.get("required", ()) else json.dumps(kind.pop("default", None))
            yield f"config {prefix}{key} = {default} {json.dumps(kind, sort_keys=True)}"
            for inner in re.findall(r"#/\$defs/(\w+)", json.dumps(kind)):
                yield from keys(sections[inner], f"{prefix}{key}.*.")

    return keys(schema, "")


def _json_names() -> Iterator[str]:
    with TemporaryDirectory() as folder:
        found = compare(small(Path(folder), strategies=("ring", "static-cp"), batches=1))
        yield from _keys("json compare", found.as_json())
    result = EvalResult(loss=1.0, tokens=8, pairs=PAIRS, broken_rows=1)
    source = SourceReport(num_sequences=1, num_tokens=1, num_targets=1, loss=1.0)
    line = to_line(report(eval={"set": result}, sources={"source": source}, pairs=PAIRS, num_targets=1))
    yield from _keys("json steps.jsonl", json.loads(line))
    results = {"pairs": result, "tokens": EvalResult(loss=1.0, tokens=8)}
    evaluated = Evaluated(step=1, seconds=1.0, results=results, sums={}, terms={})
    yield from _keys("json evaluate", _as_json("", evaluated))
    yield from (f"json doctor[].{name}" for name in Finding.__slots__)


def _keys(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _keys(f"{name}.{'*' if key.isdigit() else key}", inner)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _keys(f"{name}[]", inner)
    else:
        yield name


def main() -> None:
    FILE.write_text("".join(f"{line}\n" for line in names()), encoding="utf-8")


if __name__ == "__main__":
    main()
