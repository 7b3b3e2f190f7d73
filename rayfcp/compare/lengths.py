"""Lengths of sequences from files or distributions, and the global batches drawn from them.

In a .json list, a row of plain text is its length; one with images is an object:

    {"tokens": 9000, "targets": 30,
     "pictures": [{"start": 24, "tokens": 256, "patches": 1024, "count": 30, "stride": 262}]}

Each entry of `pictures` is a run of `count` equal images (default: 1), the first of `tokens` tokens from token
`start`, the next `stride` tokens on (default: `tokens`), each of `patches` patches to the vision encoder. `targets`:
tokens that enter the loss (default: those that are in no image, but for the first).
"""

import dataclasses
import json
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.distributions import DISTRIBUTIONS
from rayfcp.compare.videos import IMAGES_PER_SECOND, VIDEOS, frames_of
from rayfcp.config import ConfigError
from rayfcp.cost.profiles import pick
from rayfcp.values import Images, LayerKinds, ModelProfile, SequenceSpec

Lengths = npt.NDArray[np.int64]
Batch = tuple[SequenceSpec, ...]
Row = int | SequenceSpec
"""A drawn sequence: plain text as its length, or a sequence with its images."""

DISTRIBUTION = "dist:"
RATE = "@"
COLUMNS = ("length", "num_tokens", "input_ids")
"""Columns from which the tokens of a row are known, the first that it has: two of numbers, one of token ids."""
JSONL = ".jsonl"

R = TypeVar("R", bound=Sized)


class WrongRowsError(ValueError):
    """Wrong content of a file of lengths."""


def batches_of(inputs: Inputs, *, model: ModelProfile) -> tuple[Batch, ...]:
    """Return the batches of a comparison: of its rows, or as `draw_batches`."""
    if inputs.rows is not None:
        return _batches(inputs.rows, size=inputs.global_batch, max_seqlen=inputs.max_seqlen, model=model)
    return draw_batches(
        inputs.lengths,
        num_batches=inputs.batches,
        global_batch=inputs.global_batch,
        max_seqlen=inputs.max_seqlen,
        seed=inputs.seed,
        model=model,
    )


def draw_batches(
    source: str,
    *,
    num_batches: int,
    global_batch: int,
    max_seqlen: int,
    seed: int,
    model: ModelProfile | None = None,
) -> tuple[Batch, ...]:
    """Return the sequences of each batch with the model's kinds of layers, ids their positions: drawn without
    replacement with `seed`, cut to `max_seqlen`, images whole. Without `model`, plain text.

    Raises:
        ConfigError: The file cannot be used, holds fewer rows than the batches need, or has images without a model that
            encodes them.
    """
    needed = num_batches * global_batch
    if source.startswith(DISTRIBUTION):
        rows = _drawn(source.removeprefix(DISTRIBUTION), needed, max_seqlen=max_seqlen, seed=seed, model=model)
    else:
        rows = draw(read_rows(source), source=source, num_batches=num_batches, global_batch=global_batch, seed=seed)
        check_encoded(rows, source=source, model=model)
    return _batches(rows, size=global_batch, max_seqlen=max_seqlen, model=model)


def draw(rows: Sequence[Row], *, source: str, num_batches: int, global_batch: int, seed: int) -> list[Row]:
    """Return the rows of all batches, drawn without replacement.

    Raises:
        ConfigError: There are fewer.
    """
    needed = num_batches * global_batch
    if len(rows) < needed:
        raise ConfigError(
            f"--lengths {source!r} has {len(rows)} lengths, must have at least --batches x --global-batch "
            f"({num_batches} x {global_batch} = {needed}), as none is drawn twice; lower one of them"
        )
    return [rows[at] for at in np.random.default_rng(seed).permutation(len(rows))[:needed].tolist()]


def _batches(rows: Sequence[Row], *, size: int, max_seqlen: int, model: ModelProfile | None) -> tuple[Batch, ...]:
    kinds = model.layer_kinds if model else ()
    return tuple(
        sequences_of_rows([cut(row, max_seqlen) for row in rows[first : first + size]], layer_kinds=kinds)
        for first in range(0, len(rows), size)
    )


def tokens_of(row: Row) -> int:
    """Return the tokens of a row."""
    return row if isinstance(row, int) else row.num_tokens


def longest_of(name: str) -> int:
    """Return the longest sequence of a named distribution of text.

    Raises:
        ConfigError: An unknown name, or videos, whose tokens depend on the model.
    """
    word, rate, _ = name.removeprefix(DISTRIBUTION).partition(RATE)
    if rate or word in VIDEOS:
        raise ConfigError("--max-seqlen is missing, must be given with videos; e.g. --max-seqlen 131072")
    try:
        return DISTRIBUTIONS[pick(word, (*DISTRIBUTIONS, *VIDEOS), what="distribution")].longest
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None


def lengths_of(batches: Sequence[Batch]) -> list[int]:
    """Return the tokens of all sequences of all batches."""
    return [sequence.num_tokens for batch in batches for sequence in batch]


def sequences_of_rows(rows: Sequence[Row], *, layer_kinds: LayerKinds = ()) -> Batch:
    """Causal sequences whose ids are their positions, for a model with these kinds of layers."""
    return tuple(
        SequenceSpec(id=index, num_tokens=row, num_targets=row - 1, layer_kinds=layer_kinds)
        if isinstance(row, int)
        else dataclasses.replace(row, id=index, layer_kinds=layer_kinds)
        for index, row in enumerate(rows)
    )


def _drawn(name: str, count: int, *, max_seqlen: int, seed: int, model: ModelProfile | None) -> Sequence[Row]:
    """Draw `count` rows of a named distribution, or of a set of videos with, after an @, its images per second."""
    word, _, rate = name.partition(RATE)
    try:
        pick(word, (*DISTRIBUTIONS, *VIDEOS), what="distribution")
        if word in VIDEOS:
            if model is None:
                raise ValueError(
                    f"{word} is a set of videos, which need a vision-language model; name text, as dist:github"
                )
            frames = frames_of(model, per_second=_rate(rate) if rate else IMAGES_PER_SECOND)
            return VIDEOS[word].sample(count, frames=frames, max_seqlen=max_seqlen, seed=seed)
        if rate:
            raise ValueError(f"distribution {word} is of text, which has no images; drop {RATE}{rate}")
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None
    lengths: list[int] = DISTRIBUTIONS[word].sample(count, seed=seed).tolist()
    return lengths


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"images a second are {text!r}, must be a number above 0; e.g. dist:msrvtt@2")
    return rate


def read_rows(path: str) -> Sequence[Row]:
    """Return all rows of a file: lengths as in `read_lengths`, and in a .json list also objects with images.

    Raises:
        ConfigError: As `read_lengths`, or an object that is not a row.
    """

    def rows(values: Any) -> Sequence[Row]:
        if isinstance(values, list) and any(isinstance(value, dict) for value in values):
            return [_row(value, entry=entry) for entry, value in enumerate(values, start=1)]
        lengths: list[int] = _whole(values).tolist()
        return lengths

    return _read(path, rows)


def read_lengths(path: str) -> Lengths:
    """Return all lengths of a file: .json list, .npy, .parquet or .jsonl with one of `COLUMNS`, else one integer per
    line.

    Raises:
        ConfigError: A missing file, a wrong format, or a length that is not a whole number of at least 1 (with its line
            or position, from 1).
    """
    return _read(path, _whole)


def _read(path: str, convert: Callable[[Any], R]) -> R:
    """Convert the values of a file; all errors are one line."""
    suffix = Path(path).suffix.lower()
    if Path(path).is_dir():
        raise ConfigError(
            f"--lengths {path!r} is a folder, must be a file or a folder that rayfcp prepare wrote; give raw data as "
            "data.paths of CONFIG"
        )
    try:
        rows = convert(READERS.get(suffix, _lines)(Path(path)))
    except FileNotFoundError as error:
        raise ConfigError(f"--lengths {path!r} does not exist; check the path, or name one as dist:github") from error
    except WrongRowsError as error:
        raise ConfigError(f"--lengths {path!r}: {error}") from error
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"--lengths {path!r} cannot be read as {suffix or 'text'}: {why}") from error
    if len(rows) == 0:
        raise ConfigError(f"--lengths {path!r} holds no lengths; give one whole number a line")
    return rows


def _lines(path: Path) -> list[int]:
    words = [text.strip() for text in path.read_text(encoding="utf-8").splitlines()]
    for number, word in enumerate(words, start=1):
        if word and not (word.isascii() and word.isdigit() and 0 < int(word) < 1 << 62):
            raise WrongRowsError(f"line {number} is {word[:40]!r}, must be a whole number of at least 1")
    return [int(word) for word in words if word]


def _jsonl(path: Path) -> list[Any]:
    """Return numbers, and rows with images as they are."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                raise WrongRowsError(f"line {number} is {line.strip()[:40]!r}, must be JSON; correct it") from None
            rows.append(value if _has_images(value) else _length(value, where=f"line {number}"))
    return rows


def _has_images(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("tokens"), int)


def _length(value: object, *, where: str) -> int:
    """Return the tokens of a number or of a row with one of `COLUMNS`."""
    if not isinstance(value, dict):
        return _number(value, where=where, least=1)
    name = next((name for name in COLUMNS if value.get(name) is not None), None)
    if name is None:
        raise WrongRowsError(
            f"{where} has {', '.join(map(str, value)) or 'no columns'}, must have one of {', '.join(COLUMNS)}; rows of "
            "text are counted by the tokenizer of a Hugging Face folder in --model, or by that of CONFIG"
        )
    return _number(_counted(value[name]), where=f"{where}: {name}", least=1)


def _counted(value: object) -> object:
    return len(value) if isinstance(value, list) else value


def holds_text(path: str) -> bool:
    """Return whether the first row of a .jsonl file has columns, but none that tells its tokens."""
    if Path(path).suffix.lower() != JSONL:
        return False
    try:
        with Path(path).open(encoding="utf-8") as lines:
            row = json.loads(next(line for line in lines if line.strip()))
    except (OSError, ValueError, StopIteration):
        return False  # reading it says why
    return isinstance(row, dict) and not _has_images(row) and not any(row.get(name) is not None for name in COLUMNS)


def _json(path: Path) -> list[Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, list):
        raise WrongRowsError(f"holds a {type(data).__name__}, must be a list of whole numbers")
    return data


def _npy(path: Path) -> Any:
    data = np.load(path, allow_pickle=False)
    if not isinstance(data, np.ndarray) or data.ndim != 1:
        raise WrongRowsError(f"has shape {np.shape(data)}, must have one dimension")
    return data


def _parquet(path: Path) -> Any:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    name = next((name for name in COLUMNS if name in file.schema_arrow.names), None)
    if name is None:
        raise WrongRowsError(
            f"has columns {', '.join(file.schema_arrow.names)}, must have one named {' or '.join(map(repr, COLUMNS))}"
        )
    return [_counted(value) for value in file.read(columns=[name]).column(name).to_pylist()]


READERS: dict[str, Callable[[Path], Any]] = {".json": _json, JSONL: _jsonl, ".npy": _npy, ".parquet": _parquet}


def _whole(values: Any, *, first: int = 1) -> Lengths:
    """Return the values if all are whole numbers of at least 1; errors count entries from `first`."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and (array.size == 0 or array.min() >= 1):
        return array.astype(np.int64)
    for position, value in enumerate(values, start=first):
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < 1:
            raise WrongRowsError(f"entry {position} is {value!r}, must be a whole number of at least 1")
    if array.size:
        raise WrongRowsError("holds numbers that are too large for a length")
    return np.zeros(0, np.int64)


_ROW = ("tokens", "targets", "pictures")
_RUN = ("start", "tokens", "patches", "count", "stride")


def _row(value: Any, *, entry: int) -> Row:
    """Return entry `entry`, from 1, of a list in which some rows have images.

    Raises:
        WrongRowsError: It is not a row; the message has the entry, the field, the value and the bound.
    """
    where = f"entry {entry}"
    if not isinstance(value, dict) or ("tokens" not in value and any(name in value for name in COLUMNS)):
        return _length(value, where=where)
    _check_names(value, _ROW, needed=("tokens",), where=where)
    tokens = _number(value["tokens"], where=f"{where}: tokens", least=1)
    given = value.get("pictures", [])
    if not isinstance(given, list):
        raise WrongRowsError(f"{where}: pictures is {given!r}, must be a list of runs; put it in brackets")
    runs = tuple(_run(each, where=f"{where}: run {number}") for number, each in enumerate(given, start=1))
    text = tokens - sum(run.count * run.num_tokens for run in runs)
    targets = _number(value.get("targets", max(text - 1, 0)), where=f"{where}: targets", least=0)
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
    _check_names(value, _RUN, needed=_RUN[:3], where=where)
    numbers = {"count": 1, "stride": value["tokens"], **value}
    whole = {name: _number(numbers[name], where=f"{where}: {name}", least=name != "start") for name in _RUN}
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


def _number(value: object, *, where: str, least: int) -> int:
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
        raise ConfigError(
            f"--lengths {source!r} has images, model {name} has no vision encoder; name a vision-language model"
        )
    for run in runs:
        if run.num_patches != vision.merged_patches * run.num_tokens:
            raise ConfigError(
                f"--lengths {source!r} has an image of {run.num_patches} patches and {run.num_tokens} tokens, must "
                f"have {vision.merged_patches} patches a token as model {model.name if model else ''}; correct it"
            )
