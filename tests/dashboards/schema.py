"""Grafana's schema of boards, as its own library has it in types for one series of Grafana.

A board is read into these types and written again: what comes out other than it went in was unknown to the schema, or
lacks what the schema demands. Then each value is held against the declared type of its field, enumerations included.
"""

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import UnknownDataquery, panelcfg_config
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

LIBRARY = "grafana_foundation_sdk"
NUMBERS = {int: int, float: int | float}


def problems(board: dict[str, Any]) -> list[str]:
    """Errors in it, each with its place."""
    register_default_plugins()
    try:
        read = Dashboard.from_json(board)
        written = json.loads(json.dumps(read, cls=JSONEncoder))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"cannot be read: {error!r}"]
    return [*_differences(board, written, "board"), *_misfits(read, Dashboard, "board")]


def _differences(given: Any, written: Any, place: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(written, dict):
        yield from (f"{place}.{key} is not known" for key in sorted(given.keys() - written.keys()))
        yield from (f"{place}.{key} is missing" for key in sorted(written.keys() - given.keys()))
        for key in sorted(given.keys() & written.keys()):
            yield from _differences(given[key], written[key], f"{place}.{key}")
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for index, (one, other) in enumerate(zip(given, written, strict=True)):
            yield from _differences(one, other, f"{place}[{index}]")
    elif given != written:
        yield f"{place} is {given!r}, is read as {written!r}"


def _misfits(value: Any, hint: Any, place: str) -> Iterator[str]:
    """Where `value` is not of the type `hint`. What is declared as any object is of the type that it was read into."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        yield from min((list(_misfits(value, part, place)) for part in parts), key=len)
    elif origin is list and isinstance(value, list):
        for index, each in enumerate(value):
            yield from _misfits(each, parts[0], f"{place}[{index}]")
    elif origin is dict and isinstance(value, dict):
        for key, each in value.items():
            yield from _misfits(each, parts[1], f"{place}.{key}")
    elif type(value).__module__.startswith(LIBRARY) and not isinstance(value, enum.Enum):
        yield from _misfits_of_fields(value, hint, place)
    elif (choices := _choices(hint)) is not None:
        if value not in choices:
            yield f"{place} is {value!r}, must be one of {choices}"
    elif hint not in (object, typing.Any) and not _is_plain(value, hint):
        yield f"{place} is {value!r}, must be {hint}"


def _choices(hint: Any) -> list[Any] | None:
    """All values of an enumeration; None for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [each.value for each in hint]
    return None


def _misfits_of_fields(value: Any, hint: Any, place: str) -> Iterator[str]:
    kind = type(value)
    if isinstance(value, UnknownDataquery):
        yield f"{place} is a query of an unknown kind"
    if isinstance(hint, type) and hint is not object and not issubclass(kind, hint):
        yield f"{place} is {kind.__name__}, must be {hint.__name__}"
    if isinstance(value, Panel) and panelcfg_config(value.type_val) is None:
        yield f"{place} is a panel of the unknown kind {value.type_val!r}"
    for name, declared in typing.get_type_hints(kind).items():
        yield from _misfits(getattr(value, name), declared, f"{place}.{name}")


def _is_plain(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(hint, type) and isinstance(value, NUMBERS.get(hint, hint))
