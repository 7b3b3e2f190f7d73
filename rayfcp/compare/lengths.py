"""Lengths of sequences from files or distributions, and the global batches drawn from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.plan.distributions import distribution
from rayfcp.values import SequenceSpec, Windows

Lengths = npt.NDArray[np.int64]
Batch = tuple[SequenceSpec, ...]

DISTRIBUTION = "dist:"
COLUMN = "length"


def draw_batches(
    source: str, *, num_batches: int, global_batch: int, max_seqlen: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Lengths of each batch: drawn without replacement with `seed`, cut to `max_seqlen`.

    Raises:
        ConfigError: the file cannot be used, or holds fewer lengths than the batches need.
    """
    needed = num_batches * global_batch
    if source.startswith(DISTRIBUTION):
        try:
            drawn = distribution(source.removeprefix(DISTRIBUTION)).sample(needed, seed=seed)
        except ValueError as error:
            raise ConfigError(f"--lengths: {error}") from None
    else:
        lengths = read_lengths(source)
        if len(lengths) < needed:
            raise ConfigError(
                f"--lengths {source!r} has {len(lengths)} lengths, must have at least --batches x --global-batch "
                f"({num_batches} x {global_batch} = {needed}), as none is drawn twice; lower one of them"
            )
        drawn = np.random.default_rng(seed).permutation(lengths)[:needed]
    cut = np.minimum(drawn, max_seqlen).reshape(num_batches, global_batch)
    return tuple(tuple(batch) for batch in cut.tolist())


def sequences_of(lengths: tuple[int, ...], *, windows: Windows = ()) -> Batch:
    """Causal sequences whose ids are their positions, for a model with these kinds of layers."""
    return tuple(
        SequenceSpec(id=index, num_tokens=length, num_targets=length - 1, windows=windows)
        for index, length in enumerate(lengths)
    )


def read_lengths(path: str) -> Lengths:
    """All lengths of a file: .json list, .npy, .parquet with a column `length`, else one integer per line.

    Raises:
        ConfigError: no such file, a wrong format, or a length that is no whole number of at least 1 (with its line
            or position, from 1).
    """
    readers: dict[str, Callable[[Path], Lengths]] = {".json": _json, ".npy": _npy, ".parquet": _parquet}
    suffix = Path(path).suffix.lower()
    try:
        lengths = readers.get(suffix, _lines)(Path(path))
    except FileNotFoundError as error:
        raise ConfigError(f"--lengths {path!r} does not exist; check the path, or name one as dist:github") from error
    except _WrongLengthsError as error:
        raise ConfigError(f"--lengths {path!r}: {error}") from error
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"--lengths {path!r} cannot be read as {suffix or 'text'}: {why}") from error
    if lengths.size == 0:
        raise ConfigError(f"--lengths {path!r} holds no lengths; give one whole number a line")
    return lengths


class _WrongLengthsError(ValueError):
    """What is wrong with the content of a file of lengths."""


def _lines(path: Path) -> Lengths:
    texts = path.read_text(encoding="utf-8").splitlines()
    try:
        numbers = np.array([int(text) for text in texts if text.strip()], np.int64)
    except (ValueError, OverflowError):
        numbers = np.zeros(1, np.int64)
    if numbers.size and numbers.min() < 1:
        for number, text in enumerate(texts, start=1):
            word = text.strip()
            if word and not (word.isascii() and word.isdigit() and 0 < int(word) < 1 << 62):
                raise _WrongLengthsError(f"line {number} is {word[:40]!r}, must be a whole number of at least 1")
    return numbers


def _json(path: Path) -> Lengths:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, list):
        raise _WrongLengthsError(f"holds a {type(data).__name__}, must be a list of whole numbers")
    return _whole(data)


def _npy(path: Path) -> Lengths:
    data = np.load(path, allow_pickle=False)
    if not isinstance(data, np.ndarray) or data.ndim != 1:
        raise _WrongLengthsError(f"has shape {np.shape(data)}, must have one dimension")
    return _whole(data)


def _parquet(path: Path) -> Lengths:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    if COLUMN not in file.schema_arrow.names:
        raise _WrongLengthsError(f"has columns {', '.join(file.schema_arrow.names)}, must have one named {COLUMN!r}")
    return _whole(file.read(columns=[COLUMN]).column(COLUMN).to_pylist())


def _whole(values: Any) -> Lengths:
    """The values if all are whole numbers of at least 1."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and (array.size == 0 or array.min() >= 1):
        return array.astype(np.int64)
    for position, value in enumerate(values, start=1):
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < 1:
            raise _WrongLengthsError(f"entry {position} is {value!r}, must be a whole number of at least 1")
    if array.size:
        raise _WrongLengthsError("holds numbers that are too large for a length")
    return np.zeros(0, np.int64)
