"""Streams: the same samples for a step whoever tokenised what when, each once an epoch, a bounded way ahead."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayfcp.config import ConfigError, load_config
from rayfcp.config.data import DataConfig
from rayfcp.data import TokenReader, sources
from rayfcp.data.stream import StreamSampler, find_stream, open_stream
from tests.data.makers import EOS, whole

NUM_FILES, ROWS = 10, 7


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of which each is a part of the stream; one holds nothing that can be used."""
    monkeypatch.setattr(sources, "SPLIT_BYTES", 1)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(NUM_FILES):
        rows = [json.dumps({"text": f"{number} {row} " + "x" * (row % 4)}) for row in range(ROWS)]
        (texts / f"{number}.jsonl").write_text("\n".join(rows))
    (texts / "bad.jsonl").write_text('{"other": 1}\n')
    return tmp_path


def config(folder: Path, **keys: Any) -> DataConfig:
    given = {"max_seqlen": 64, "global_batch_sequences": 4, "max_bad_fraction": 0.5, **keys}
    return DataConfig(paths=str(folder / "texts"), streaming=True, **given)


def sampler(folder: Path, *, cache: str = ".cache", request: Any = None, **keys: Any) -> StreamSampler:
    data = config(folder, **keys)
    stream = open_stream(data, cache_dir=str(folder / cache))
    ask = None if request is None else request(stream, data)
    return StreamSampler(stream, data, seed=5, vocab_size=258, request=ask)


def texts(drawn: StreamSampler, *, steps: range) -> list[str]:
    reader = TokenReader.open(drawn._stream.folder)
    samples = [sample for step in steps for sample in drawn.batch(step).samples]
    tokens = [whole(reader, sample)[0] for sample in samples]
    assert all(each[-1] == EOS for each in tokens)
    return [bytes(each[:-1]).decode() for each in tokens]


def test_every_epoch_takes_each_sample_once(folder: Path) -> None:
    found = texts(sampler(folder), steps=range(1, 4 * NUM_FILES * ROWS // 4 + 1))
    counts = Counter(found)  # 4 epochs of 11 parts are 11 windows of 4
    assert len(counts) == NUM_FILES * ROWS and set(counts.values()) == {4}
    assert found[:20] != sorted(found[:20])


@pytest.mark.parametrize("step", [1, 7, 30, 61])
def test_any_step_is_found_by_those_who_begin_there(folder: Path, step: int) -> None:
    """As after a resume on another machine, with another cache."""
    walked = sampler(folder)
    texts(walked, steps=range(1, step))
    jumped = sampler(folder, cache=".other")
    assert jumped.batch(step).samples == walked.batch(step).samples
    assert jumped.batch(step).samples_hash == walked.batch(step).samples_hash
    assert texts(jumped, steps=range(step, step + 1)) == texts(walked, steps=range(step, step + 1))
    jumped.check_state(json.loads(json.dumps(walked.state(step))))


def test_parts_that_are_lost_are_made_again(folder: Path) -> None:
    first = sampler(folder)
    want = texts(first, steps=range(1, 8))
    written = {path.name: path.read_bytes() for path in Path(first._stream.folder).glob("s*-*")}
    for number, name in enumerate(sorted(written)):
        if number % 2:
            (Path(first._stream.folder) / name).unlink()
    assert texts(sampler(folder), steps=range(1, 8)) == want
    assert {path.name: path.read_bytes() for path in Path(first._stream.folder).glob("s*-*")} == written


def test_parts_are_requested_a_window_ahead_and_no_more(folder: Path) -> None:
    asked: list[int] = []

    def request(stream: Any, data: DataConfig) -> Callable[[int], Callable[[], None]]:
        def begin(split: int) -> Callable[[], None]:
            asked.append(split)
            stream.prepare(split, data=data)
            return lambda: None

        return begin

    drawn = sampler(folder, request=request)
    drawn.batch(1)
    assert len(asked) == len(set(asked)) == 8, "two windows of four"
    for step in range(1, 6):
        drawn.batch(step)
    assert len(asked) == 8
    drawn.batch(12)
    assert len(asked) == NUM_FILES + 1


def test_a_part_that_a_lost_reader_left_is_made_here(folder: Path) -> None:
    lost = sampler(folder, request=lambda _stream, _data: lambda _split: lambda: None)
    assert texts(lost, steps=range(1, 9)) == texts(sampler(folder, cache=".other"), steps=range(1, 9))


def test_bad_rows_end_it(folder: Path) -> None:
    (folder / "texts" / "bad.jsonl").write_text('{"other": 1}\n' * 20)
    with pytest.raises(
        ConfigError, match=r"data.max_bad_fraction allows 0.1; first: .*bad.jsonl row 1: missing_column"
    ):
        texts(sampler(folder, max_bad_fraction=0.1), steps=range(1, 30))


def test_a_stream_of_nothing_is_told(folder: Path) -> None:
    for path in (folder / "texts").glob("[0-9]*"):
        path.unlink()
    with pytest.raises(ConfigError, match="hold no usable row"):
        sampler(folder, max_bad_fraction=1.0).batch(1)


def test_a_stream_without_any_target_ends_at_its_first_window(folder: Path) -> None:
    for path in (folder / "texts").glob("[0-9]*"):
        path.write_text('{"input_ids": [1, 2], "labels": [5, -100]}\n')
    with pytest.raises(ConfigError, match=r"data.paths: [34] sequences without a single target.*only labels of -100"):
        sampler(folder).batch(1)


def test_the_account_of_a_stream_is_that_of_the_parts_that_were_read(folder: Path) -> None:
    drawn, skipped = sampler(folder), Counter[str]()
    drawn.index.count_skipped(lambda reason, count: skipped.update({reason: count}))
    assert drawn.index.lines()[0].startswith("a stream of 0.0 MB in 11 parts")
    texts(drawn, steps=range(1, NUM_FILES * ROWS))  # epochs in which parts are read again
    balance, rows = drawn.index.balance, NUM_FILES * ROWS
    num_tokens = NUM_FILES * (5 * ROWS + 9)  # with the end tokens, and an x more in each of 4 rows
    assert (balance.num_rows, balance.num_used, balance.num_tokens) == (rows + 1, rows, num_tokens)
    assert balance.tokens == {"trained": num_tokens - rows, "not targets": rows}
    assert balance.skipped == skipped == {"missing_column": 1}
    account, bad = drawn.index.lines()
    assert account.startswith(f"account of 11 of 11 parts: 11 files, {rows + 1} rows (1 skipped: missing_column 1)")
    assert bad.startswith("skipped: ") and "bad.jsonl" in bad


def test_another_input_is_another_stream(folder: Path) -> None:
    state = sampler(folder).state(3)
    sampler(folder).check_state(state)
    with (folder / "texts" / "3.jsonl").open("a") as file:
        file.write('\n{"text": "more"}')
    with pytest.raises(ConfigError, match=r"data.paths \(their content\) is"):
        sampler(folder).check_state(state)


def test_only_a_stream_is_found(folder: Path) -> None:
    stream = open_stream(config(folder), cache_dir=str(folder / ".cache"))
    assert find_stream(stream.folder) == stream
    assert find_stream(str(folder)) is None
    with pytest.raises(ConfigError, match="must be a folder of prepared data"):
        TokenReader.open(str(folder))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"sources": {"a": {"paths": "x"}}}, "must be false with sources"),
        ({"paths": "x", "processor": "p"}, "must be false with processor"),
        ({"paths": "x", "format": "prepared"}, "must be false with format prepared"),
    ],
)
def test_what_does_not_stream(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"data.streaming is true, {words}"):
        load_config({"data": {**data, "streaming": True}})
