"""Rows of a file of lengths that have images.

In a .json list, a row of plain text is its length; one with images is an object:

    {"tokens": 9000, "targets": 30,
     "pictures": [{"start": 24, "tokens": 256, "patches": 1024, "count": 30, "stride": 262}]}

Each entry of `pictures` is a run of `count` equal images (default: 1), the first of `tokens` tokens from token
`start`, the next `stride` tokens on (default: `tokens`), each of `patches` patches to the vision encoder. `targets`:
tokens that enter the loss (default: those that are in no image, but for the first).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rayfcp.config import ConfigError
from rayfcp.cost.profiles import pick
from rayfcp.values import Images, ModelProfile, SequenceSpec

Row = int | SequenceSpec
"""A drawn sequence: plain text as its length, or a sequence with its images."""

ROW = ("tokens", "targets", "pictures")
RUN = ("start", "tokens", "patches", "count", "stride")


class WrongRowsError(ValueError):
    """Wrong content of a file of lengths."""


def row_of(value: Any, *, entry: int) -> Row:
    """Return entry `entry`, from 1, of a list in which some rows have images.

    Raises:
        WrongRowsError: It is not a row; the message has the entry, the field, the value and the bound.
    """
    where = f"entry {entry}"
    if not isinstance(value, dict):
        return _whole(value, where=where, least=1)
    _check_names(value, ROW, needed=("tokens",), where=where)
    tokens = _whole(value["tokens"], where=f"{where}: tokens", least=1)
    given = value.get("pictures", [])
    if not isinstance(given, list):
        raise WrongRowsError(f"{where}: pictures is {given!r}, must be a list of runs; put it in brackets")
    runs = tuple(_run(each, where=f"{where}: run {number}") for number, each in enumerate(given, start=1))
    text = tokens - sum(run.count * run.num_tokens for run in runs)
    targets = _whole(value.get("targets", max(text - 1, 0)), where=f"{where}: targets", least=0)
    if targets > tokens:
        raise WrongRowsError(f"{where}: targets is {targets}, must be at most tokens ({tokens}); lower it")
    try:
        return SequenceSpec(id=entry, num_tokens=tokens, num_targets=targets, images=runs)
    except ValueError as error:
        raise WrongRowsError(f"{where}: {str(error).partition(': ')[2]}") from None


def _run(value: object, *, where: str) -> Images:
    if not isinstance(value, dict):
        raise WrongRowsError(f"{where} is {value!r}, must be an object; e.g. start, tokens, patches")
    if "mutual" in value:
        raise WrongRowsError(f"{where}: mutual is not supported, the language model is causal in images; leave it out")
    _check_names(value, RUN, needed=RUN[:3], where=where)
    numbers = {"count": 1, "stride": value["tokens"], **value}
    whole = {name: _whole(numbers[name], where=f"{where}: {name}", least=name != "start") for name in RUN}
    names = {"tokens": "num_tokens", "patches": "num_patches"}
    try:
        return Images(**{names.get(name, name): value for name, value in whole.items()})
    except ValueError as error:
        raise WrongRowsError(f"{where}: {error}") from None


def _check_names(value: dict[str, Any], known: Sequence[str], *, needed: Sequence[str], where: str) -> None:
    for name in value:
        try:
            pick(name, known, what="field")
        except ValueError as error:
            raise WrongRowsError(f"{where}: {error}") from None
    for name in needed:
        if name not in value:
            raise WrongRowsError(f"{where}: {name} is missing; give {', '.join(needed)}")


def _whole(value: object, *, where: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise WrongRowsError(f"{where} is {value!r}, must be a whole number of at least {int(least)}")
    return value


def cut(row: Row, max_seqlen: int) -> Row:
    """Return the row's first `max_seqlen` tokens, or those before an image that would be cut.

    Raises:
        ConfigError: Nothing is before it.
    """
    if isinstance(row, int):
        return min(row, max_seqlen)
    if row.num_tokens <= max_seqlen:
        return row
    runs, tokens = [], max_seqlen
    for run in row.images:
        whole = sum(stop <= max_seqlen for _, stop in run.ranges())
        if whole:
            runs.append(dataclasses.replace(run, count=whole))
        if whole < run.count:
            tokens = min(tokens, run.start + whole * run.stride)
            break
    if tokens == 0:
        raise ConfigError(
            f"--max-seqlen is {max_seqlen}, must be at least {row.images[0].num_tokens}, the tokens of an image "
            "that a row starts with; raise it"
        )
    return dataclasses.replace(row, num_tokens=tokens, num_targets=min(row.num_targets, tokens - 1), images=tuple(runs))


def check_encoded(rows: Sequence[Row], *, source: str, model: ModelProfile | None) -> None:
    """Check that the model encodes the rows' images into as many tokens as the rows state.

    Raises:
        ConfigError: It does not.
    """
    runs = [run for row in rows if not isinstance(row, int) for run in row.images]
    if not runs:
        return
    vision = model.vision if model else None
    if vision is None:
        name = model.name if model else "of none"
        raise ConfigError(f"--lengths {source!r} has images, model {name} has no vision encoder; name one that sees")
    for run in runs:
        if run.num_patches != vision.merged_patches * run.num_tokens:
            raise ConfigError(
                f"--lengths {source!r} has an image of {run.num_patches} patches and {run.num_tokens} tokens, must "
                f"have {vision.merged_patches} patches a token as model {model.name if model else ''}; correct it"
            )
