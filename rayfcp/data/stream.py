"""Streams: input that is tokenised while the run trains, a bounded way ahead, instead of all of it before.

The files are cut into splits as for `prepare`, and the splits are the numbered parts of the stream: which samples a
step has depends on them, the seed and the step alone, not on who tokenised what when. Splits come in an order of each
epoch's own; those of a window are shuffled together. Lost or deleted shards are made again, equal byte for byte.
"""

import hashlib
import json
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.account import ReadAccount
from rayfcp.data.balance import Balance, skipped_lines
from rayfcp.data.index import CountCall, LengthIndex, read_balances
from rayfcp.data.manifest import (
    MAX_NAMED_ROWS,
    VERSION,
    PreparedManifest,
    join,
    name_of,
    resolve,
    whole_file,
)
from rayfcp.data.prepare import SplitResult, fingerprint_of, prepare_split, to_json
from rayfcp.data.rows import BadRow, LongSequences
from rayfcp.data.sampler import Sampler, permute
from rayfcp.data.sources import InputSplit, discover, make_splits, would_be_read
from rayfcp.data.storage import check_unreadable
from rayfcp.data.tokenizer import tokenizer_of
from rayfcp.values import GlobalBatch, Sample
from rayfcp.values.counted import counted

logger = logging.getLogger(__name__)

STREAM_NAME, KIND = "stream.json", "rayfcp-stream"
MAX_SHARDS = 1 << 12
"""Shards of a split, 64 MiB of text: many more than there are."""
WINDOW_SPLITS = 4
"""Splits whose samples are shuffled together: up to 256 MiB of text."""
_KEPT_WINDOWS = 3

Waiter = Callable[[], None]
"""Returns when a split is prepared; raises ConfigError if its input cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The parts of a stream. `folder`: where their shards are written, not part of the file. `file_lines`: log lines
    about files that are not read."""

    folder: str
    fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    tokenizer_vocab_size: int
    splits: tuple[InputSplit, ...]
    num_ignored_files: int = 0
    file_lines: tuple[str, ...] = ()

    def prepare(self, split: int, *, data: DataConfig) -> None:
        """Tokenise a split, unless it is prepared."""
        if not self.is_prepared(split, data=data):
            work = partial(prepare_split, data=data, out_dir=self.folder, fingerprint=self.fingerprint)
            result = work(self.splits[split])
            fs, path = resolve(self._result_url(split))
            with whole_file(fs, path) as file:
                file.write(to_json(_RESULT, result))

    def is_prepared(self, split: int, *, data: DataConfig) -> bool:
        """True if the split is there as a whole; files that could not be read count if `data` allows any."""
        manifest = self.manifest(split)
        return manifest is not None and (data.max_unreadable_files > 0 or not manifest.account.unreadable_files)

    def manifest(self, split: int) -> PreparedManifest | None:
        """The split as prepared data of its own; None if it is not there as a whole."""
        fs, path = resolve(self._result_url(split))
        try:
            result = _RESULT.validate_python(json.loads(fs.cat_file(path)))
            sizes = {
                name: fs.size(join(resolve(self.folder)[1], name)) for each in result.shards for name in each.files
            }
        except (FileNotFoundError, ValueError):
            return None
        if any(sizes[name] != size for each in result.shards for name, size in each.files.items()):
            return None
        return PreparedManifest(
            folder=self.folder,
            fingerprint=self.fingerprint,
            tokenizer=self.tokenizer,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            tokenizer_vocab_size=self.tokenizer_vocab_size,
            max_token_id=result.max_token_id,
            shards=result.shards,
            bad_rows=result.bad_rows,
            named_bad_rows=result.named_bad_rows,
            account=result.account,
            num_read_rows=result.num_rows,
        )

    def shard(self, number: int) -> tuple[PreparedManifest, int]:
        """The manifest that has shard `number` of samples, and its number there.

        Raises:
            ConfigError: The shard is not there.
        """
        split, own = divmod(number, MAX_SHARDS)
        manifest = self.manifest(split)
        if manifest is None:
            raise ConfigError(f"{self.folder} has no part {split}; all nodes must reach data.cache_dir")
        return manifest, own

    def _result_url(self, split: int) -> str:
        return join(self.folder, f"split-{self.fingerprint}-{split:05d}.json")


_STREAM, _RESULT = TypeAdapter(Stream), TypeAdapter(SplitResult)


def open_stream(data: DataConfig, *, cache_dir: str) -> Stream:
    """The stream of `data`, which a file in a folder of `cache_dir` describes to all processes.

    Raises:
        ConfigError: There is nothing to read.
    """
    found = discover(data)
    fingerprint = fingerprint_of(data, files=found.files)
    folder = name_of(*resolve(join(cache_dir, f"stream-{fingerprint}")))
    if would_be_read(folder, data):
        raise ConfigError(f"{folder} lies in data.paths, must lie outside: its shards would be read as input next time")
    tokenizer = tokenizer_of(data)
    stream = Stream(
        folder=folder,
        fingerprint=fingerprint,
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_vocab_size=tokenizer.vocab_size,
        splits=make_splits(found.files),
        num_ignored_files=len(found.ignored),
        file_lines=found.lines,
    )
    fs, path = resolve(join(folder, STREAM_NAME))
    with whole_file(fs, path) as file:
        values = _STREAM.dump_python(stream, mode="json", exclude={"folder"})
        file.write(json.dumps({"kind": KIND, "version": VERSION, **values}).encode())
    return stream


def find_stream(folder: str) -> Stream | None:
    """The stream that `open_stream` described in `folder`, if it did."""
    fs, path = resolve(folder)
    try:
        values = json.loads(fs.cat_file(join(path, STREAM_NAME)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if (values.get("kind"), values.get("version")) != (KIND, VERSION):
        return None
    return _STREAM.validate_python({**values, "folder": name_of(fs, path)})


class StreamIndex:
    """Index of a stream: its samples as far as they are known before they are read, and the account of the parts read
    so far; see `LengthIndex`."""

    has_images = False
    num_draws = samples_per_draw = 1

    def __init__(self, stream: Stream, *, max_seqlen: int, long_sequences: LongSequences) -> None:
        self.max_seqlen, self.long_sequences = max_seqlen, long_sequences
        self.lengths = np.array([max_seqlen])
        self.fingerprint = hashlib.blake2b(
            repr((stream.fingerprint, max_seqlen, long_sequences)).encode(), digest_size=8
        ).hexdigest()
        self.named_bad_rows: tuple[BadRow, ...] = ()
        self.balance = Balance(max_seqlen=max_seqlen, long_sequences=long_sequences, samples_per_row=1)
        """Account of the parts that were read so far, files not counted."""
        self._stream, self.account = stream, ReadAccount()
        self._read: set[int] = set()
        self._count_skipped: CountCall = lambda _reason, _count: None

    def __len__(self) -> int:
        return 1

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hash of the tokenizer."""
        return self._stream.tokenizer_fingerprint

    @property
    def is_read(self) -> bool:
        """True if every part was read."""
        return len(self._read) == len(self._stream.splits)

    def lines(self, *, path: Path | None = None) -> list[str]:
        """Return a description of the stream, or the account of the parts that were read so far; see
        `LengthIndex.lines`."""
        splits = self._stream.splits
        if not self._read:
            num_bytes = sum(split.num_bytes for split in splits)
            size = f"{num_bytes / 1e6:,.1f} MB in {counted(len(splits), 'part')}"
            return [f"a stream of {size}, tokenized as it is needed", *self._stream.file_lines]
        files = {file.url for split in self._read for file in splits[split].files}
        num_unreadable = len(self.account.unreadable_files)
        balance = replace(
            self.balance,
            num_files=len(files) - num_unreadable,
            num_ignored_files=self._stream.num_ignored_files,
            num_unreadable_files=num_unreadable,
        )
        title = f"account of {len(self._read):,} of {len(splits):,} parts"
        skipped = skipped_lines(self.named_bad_rows, path=path)
        return [*balance.lines(title), *skipped, *self.account.lines()]

    def add(self, split: int, balance: Balance, *, account: ReadAccount, named: tuple[BadRow, ...]) -> None:
        """Add a part that was read, unless it was before."""
        if split in self._read:
            return
        self._read.add(split)
        self.balance = Balance.total([self.balance, balance])
        self.account = ReadAccount.total([self.account, account])
        self.named_bad_rows = (*self.named_bad_rows, *named)[:MAX_NAMED_ROWS]
        for reason, count in balance.skipped.items():
            self._count_skipped(reason, count)

    def count_skipped(self, call: CountCall) -> None:
        """Report the rows that were skipped so far to `call`, and those of each further part when it is read."""
        self._count_skipped = call
        for reason, count in self.balance.skipped.items():
            call(reason, count)


def _size(index: LengthIndex | None) -> int:
    return 0 if index is None else len(index)


class StreamSampler(Sampler):
    """Global batches of a stream. Every epoch takes each sample once. `request` begins to prepare a split and returns
    what waits for it; one window is requested ahead of the one that is drawn from."""

    def __init__(
        self,
        stream: Stream,
        data: DataConfig,
        *,
        seed: int,
        vocab_size: int,
        request: Callable[[int], Waiter] | None = None,
    ) -> None:
        index = StreamIndex(stream, max_seqlen=data.max_seqlen, long_sequences=_long_sequences(data))
        super().__init__(index, seed=seed, global_batch=data.global_batch_sequences)  # type: ignore[arg-type]
        self._stream, self._data, self._vocab_size = stream, data, vocab_size
        self._request = request or (lambda split: partial(stream.prepare, split, data=data))
        self._waiters: dict[int, Waiter] = {}
        self._asked: set[int] = set()
        self._window_splits = min(WINDOW_SPLITS, len(stream.splits))
        self._firsts = [0]
        """First sample of each window that is known, and of the one after it."""
        self._opened: OrderedDict[int, list[LengthIndex | None]] = OrderedDict()

    @property
    def index(self) -> StreamIndex:
        return self._index  # type: ignore[return-value]

    def _batch(self, step: int, *, first: int) -> GlobalBatch:
        stop = first + self._global_batch
        while self._firsts[-1] < stop:
            self._open(len(self._firsts) - 1)
        samples: list[Sample] = []
        window = bisect_right(self._firsts, first) - 1
        while len(samples) < self._global_batch:
            start = first + len(samples)
            last = min(stop, self._firsts[window + 1])
            samples += self._samples(window, np.arange(start, last) - self._firsts[window]) if last > start else []
            window += 1
        self._ask(window)
        return GlobalBatch(step=step, epoch=self._epoch(first), samples=tuple(samples))

    def _epoch(self, first: int) -> int:
        """Epoch of a sample, as far as windows are known."""
        window = bisect_right(self._firsts, first) - 1
        return window * self._window_splits // len(self._stream.splits)

    def state(self, step: int) -> dict[str, Any]:
        return {**super().state(step), "epoch": self._epoch(step * self._global_batch)}

    def _splits(self, window: int) -> list[int]:
        """The splits of a window, in order."""
        size = len(self._stream.splits)
        places = range(window * self._window_splits, (window + 1) * self._window_splits)
        shuffle = partial(permute, size=size, seed=self._seed)
        return [int(shuffle(np.array([place % size]), epoch=place // size)[0]) for place in places]

    def _ask(self, window: int) -> None:
        if window in self._asked:
            return
        self._asked.add(window)
        for split in self._splits(window):
            if split not in self._waiters and not self._stream.is_prepared(split, data=self._data):
                self._waiters[split] = self._request(split)

    def _open(self, window: int) -> list[LengthIndex | None]:
        """Lengths of a window's splits, which are prepared unless they are there; None for one without good rows."""
        if window in self._opened:
            self._opened.move_to_end(window)
            return self._opened[window]
        self._ask(window)
        indices = [self._length_index(split) for split in self._splits(window)]
        balance = self.index.balance
        balance.check_bad_rows(named=self.index.named_bad_rows, max_bad_fraction=self._data.max_bad_fraction)
        unreadable = self.index.account.unreadable_files
        check_unreadable(unreadable, max_unreadable_files=self._data.max_unreadable_files)
        if balance.num_sequences:
            balance.check_targets("data.paths")
        self._opened[window] = indices
        if len(self._opened) > _KEPT_WINDOWS:
            self._opened.popitem(last=False)
        if window == len(self._firsts) - 1:
            self._firsts.append(self._firsts[-1] + sum(map(_size, indices)))
            if self.index.is_read and self._firsts[-1] == 0:
                raise ConfigError(
                    f"data.paths {', '.join(map(repr, self._data.paths))} hold no usable row; give files that do"
                )
        return indices

    def _length_index(self, split: int) -> LengthIndex | None:
        if waiter := self._waiters.pop(split, None):
            waiter()
        manifest = self._stream.manifest(split)
        if manifest is None:  # whoever prepared it has another disk, or it was deleted meanwhile
            self._stream.prepare(split, data=self._data)
            manifest = self._stream.manifest(split)
            assert manifest is not None
        logger.info("part %d: %s", split, manifest)
        settings: dict[str, Any] = {"max_seqlen": self._data.max_seqlen, "long_sequences": _long_sequences(self._data)}
        if not manifest.shards:
            (nothing,) = read_balances(manifest, **settings)
            self.index.add(split, nothing, account=manifest.account, named=manifest.named_bad_rows)
            return None
        index = LengthIndex(manifest, vocab_size=self._vocab_size, **settings)
        self.index.add(split, index.balance, account=manifest.account, named=index.named_bad_rows)
        return index

    def _samples(self, window: int, numbers: Any) -> list[Sample]:
        """Samples of a window by their numbers in it, of which ids and shards say the split."""
        indices, splits = self._open(window), self._splits(window)
        stops = np.cumsum([_size(index) for index in indices])
        places = permute(numbers, size=int(stops[-1]), seed=self._seed, epoch=window)
        found = []
        for place in places.tolist():
            at = int(np.searchsorted(stops, place, side="right"))
            index = indices[at]
            assert index is not None  # it has samples
            sample = index.sample(place - int(stops[at]) + len(index))
            found.append(
                replace(sample, id=(splits[at] << 32) + sample.id, shard=splits[at] * MAX_SHARDS + sample.shard)
            )
        return found


def _long_sequences(data: DataConfig) -> LongSequences:
    return "cut" if data.long_sequences == "auto" else data.long_sequences  # streams have no images
