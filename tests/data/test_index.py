"""Samples and their tokens: long rows cut, split or dropped; any cut of a read gives the targets of the whole."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.data import LengthIndex, TokenReader, prepare_local, shards
from rayfcp.values import Sample
from tests.data.makers import data_config, few_examples, whole, write_rows

IGNORED = -100
Rows = list[tuple[list[int], list[int] | None]]
modes = st.sampled_from(["cut", "split", "drop"])


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    """Rows of 1 to 12 tokens, some labelled."""
    rows: Rows = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
        label = st.sampled_from([IGNORED, *range(10)])
        labels = draw(st.none() | st.lists(label, min_size=len(tokens), max_size=len(tokens)))
        rows.append((tokens, labels))
    return rows


def prepared(folder: Path, rows: Rows) -> str:
    columns: dict[str, list[Any]] = {"input_ids": [row[0] for row in rows], "labels": [row[1] for row in rows]}
    write_rows(folder / "a.jsonl", columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", 10)
        patch.setattr(shards, "SHARD_TOKENS", 25)
        return prepare_local(data_config(folder / "a.jsonl"), out_dir=str(folder / "out")).folder


def expected_samples(rows: Rows, *, max_seqlen: int, mode: str) -> list[tuple[list[int], list[int]]]:
    """Tokens and targets, row by row, the slow way."""
    samples = []
    for tokens, labels in rows:
        pieces = range(0, len(tokens), max_seqlen)
        if len(tokens) > max_seqlen and mode != "split":
            pieces = range(0) if mode == "drop" else range(1)
        for start in pieces:
            stop = min(start + max_seqlen, len(tokens))
            if stop - start > 1 or len(tokens) == 1:
                samples.append((tokens[start:stop], [*(labels or tokens)[start + 1 : stop], IGNORED]))
            elif mode == "cut":
                samples.append((tokens[start:stop], [IGNORED]))
    return samples


@few_examples
@given(rows=some_rows(), max_seqlen=st.integers(1, 13), mode=modes)
def test_samples_are_the_rows(tmp_path_factory: pytest.TempPathFactory, rows: Rows, max_seqlen: int, mode: Any) -> None:
    folder = prepared(tmp_path_factory.mktemp("rows"), rows)
    expected = expected_samples(rows, max_seqlen=max_seqlen, mode=mode)
    if not expected:
        with pytest.raises(ConfigError, match="must leave at least one"):
            LengthIndex.open(folder, max_seqlen=max_seqlen, long_sequences=mode)
        return
    index, reader = LengthIndex.open(folder, max_seqlen=max_seqlen, long_sequences=mode), TokenReader.open(folder)
    samples = index.samples(range(len(index)))
    assert [whole(reader, sample) for sample in samples] == expected
    counted = sum(min(sum(each != IGNORED for each in targets) + 1, len(targets)) for _, targets in expected)
    assert index.head_fraction == counted / sum(len(tokens) for tokens, _ in expected)
    assert [sample.num_targets for sample in samples] == [
        sum(target != IGNORED for target in targets) for _, targets in expected
    ]
    assert [sample.id for sample in samples] == list(range(len(expected)))
    assert index.lengths.tolist() == [len(tokens) for tokens, _ in expected]
    assert index.num_tokens == sum(len(tokens) for tokens, _ in expected)
    num_long = sum(len(tokens) > max_seqlen for tokens, _ in rows)
    assert index.balance.num_long == (0 if mode == "drop" else num_long)
    assert index.balance.skipped.get("dropped", 0) == (num_long if mode == "drop" else 0)


@few_examples
@given(rows=some_rows(), max_seqlen=st.integers(1, 13), data=st.data())
def test_any_cut_of_a_sample_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, max_seqlen: int, data: st.DataObject
) -> None:
    folder = prepared(tmp_path_factory.mktemp("cuts"), rows)
    index, reader = LengthIndex.open(folder, max_seqlen=max_seqlen), TokenReader.open(folder)
    sample = index.sample(data.draw(st.integers(0, len(index) - 1)))
    inner = data.draw(st.lists(st.integers(0, sample.num_tokens), max_size=4))
    cuts = [0, *sorted(inner), sample.num_tokens]
    parts = [reader.read(sample, start=start, stop=stop) for start, stop in pairwise(cuts)]
    tokens = [token for part, _ in parts for token in part.tolist()]
    targets = [target for _, part in parts for target in part.tolist()]
    assert (tokens, targets) == whole(reader, sample)


def test_remote_shards_read_alike_and_only_in_part(tmp_path: Path) -> None:
    rows = {"input_ids": [[number, number + 1, number + 2] for number in range(40)]}
    url = write_rows(tmp_path / "a.jsonl", rows)
    local = prepare_local(data_config(url), out_dir=str(tmp_path / "out")).folder
    remote = prepare_local(data_config(url), out_dir=f"memory://{tmp_path.name}-index").folder
    here, there = LengthIndex.open(local, max_seqlen=2), LengthIndex.open(remote, max_seqlen=2)
    assert here.fingerprint == there.fingerprint
    readers = TokenReader.open(local), TokenReader.open(remote)
    for sample in here.samples(range(len(here))):
        assert whole(readers[0], sample) == whole(readers[1], sample)


def test_lengths_are_read_without_the_tokens(tmp_path: Path) -> None:
    from rayfcp.data.shards import ShardReader

    write_rows(tmp_path / "a.parquet", {"input_ids": [[1] * 1000] * 300})
    url = f"memory://{tmp_path.name}-small"
    made = prepare_local(data_config(tmp_path / "a.parquet"), out_dir=url)
    reader = ShardReader(made, 0)
    read: list[int] = []

    class Counting:
        """A file that counts what is read of it."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def read(self, *size: int) -> bytes:
            data: bytes = self._file.read(*size)
            read.append(len(data))
            return data

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    open_file = reader.fs.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader.fs, "open", lambda *args, **keys: Counting(open_file(*args, **keys)))
        assert reader.small_columns()["length"].tolist() == [1000] * 300
    assert sum(read) < made.shards[0].num_bytes / 50


def test_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    rows: Rows = [([1, 2], None), ([1, 9], None), ([8, 1], None), ([1, 2], [1, 9])]
    folder = prepared(tmp_path, rows)
    index = LengthIndex.open(folder, max_seqlen=8, vocab_size=9)
    assert index.balance.skipped == {"token_out_of_range": 2}
    assert [sample.row for sample in index.samples(range(len(index)))] == [0, 2]
    assert [(row.row, row.reason) for row in index.named_bad_rows] == [
        (1, "token_out_of_range"),
        (0, "token_out_of_range"),
    ]
    with pytest.raises(ConfigError, match=r"2 of 4 rows \(50.00%\) are bad .*data.max_bad_fraction allows 0.4;"):
        LengthIndex.open(folder, max_seqlen=8, vocab_size=9, max_bad_fraction=0.4)
    assert len(LengthIndex.open(folder, max_seqlen=8, vocab_size=9, max_bad_fraction=0.5)) == 2


def test_fingerprint_tells_how_rows_become_samples(tmp_path: Path) -> None:
    folder = prepared(tmp_path, [([1, 2, 3, 4], None), ([5], None)])
    ways = [{"max_seqlen": 2}, {"max_seqlen": 3}, {"max_seqlen": 2, "long_sequences": "split"}]
    prints = {LengthIndex.open(folder, **way).fingerprint for way in ways}
    assert len(prints) == 3
    assert LengthIndex.open(folder, max_seqlen=2).fingerprint in prints


def test_positions_outside_are_refused(tmp_path: Path) -> None:
    reader = TokenReader.open(prepared(tmp_path, [([1, 2, 3], None)]))
    sample = Sample(id=0, shard=0, row=0, start=0, stop=3, num_targets=2)
    for start, stop in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match=r"must lie in \[0, 3\)"):
            reader.read(sample, start=start, stop=stop)


def test_threads_share_a_reader(tmp_path: Path) -> None:
    rows: Rows = [([number % 10] * (1 + number % 7), None) for number in range(200)]
    folder = prepared(tmp_path, rows)
    index, reader = LengthIndex.open(folder, max_seqlen=100), TokenReader.open(folder)
    samples = index.samples(range(len(index)))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda sample: whole(reader, sample)[0], samples * 3))
    assert read == [tokens for tokens, _ in rows] * 3
