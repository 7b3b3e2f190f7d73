"""What pydantic found wrong, said in one line: the dotted field, the value, the bound, the remedy."""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rayfcp.config.models import Config

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
