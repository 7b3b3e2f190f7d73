"""The account balances: whatever the rows and settings, files, rows and tokens that were read add up."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data import LengthIndex, PreparedManifest, cached_prepare, prepare_local, shards, sources
from rayfcp.data.balance import CUT, DROPPED, NOT_TARGETS, SINGLE_TOKENS, TRAINED, Balance
from tests.data.makers import data_config, few_examples, stored_rows, write_rows

IGNORED = -100
Row = dict[str, Any]
modes = st.sampled_from(["cut", "split", "drop"])
texts = st.text("ab", min_size=1, max_size=8)


@st.composite
def token_rows(draw: st.DrawFn) -> Row:
    tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    if draw(st.booleans()):
        return {"input_ids": tokens}
    label = st.sampled_from([IGNORED, IGNORED, 3, 9])
    return {"input_ids": tokens, "labels": draw(st.lists(label, min_size=len(tokens), max_size=len(tokens)))}


ROWS = {
    "sequences": st.one_of(
        token_rows(),
        st.fixed_dictionaries({"text": texts}),
        st.fixed_dictionaries({"prompt": texts, "completion": texts}),
        st.sampled_from([{"text": ""}, {"text": 3}, {"other": 1}, {"input_ids": [1], "labels": [1, 2]}]),
    ),
    "pairs": st.one_of(
        st.fixed_dictionaries({"prompt": texts, "chosen": texts, "rejected": texts}),
        st.fixed_dictionaries({name: texts.map(lambda text: "ab " + text[1:]) for name in ("chosen", "rejected")}),
        st.just({"prompt": "a", "chosen": "b"}),
    ),
}
files_of_rows = st.sampled_from(["sequences", "pairs"]).flatmap(
    lambda kind: st.tuples(
        st.just(kind), st.lists(st.lists(ROWS[kind], min_size=1, max_size=5), min_size=1, max_size=3)
    )
)


def write(folder: Path, files: list[list[Row]]) -> None:
    for number, rows in enumerate(files):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepared(folder: Path, files: list[list[Row]], **keys: Any) -> PreparedManifest:
    write(folder, files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", 10)
        patch.setattr(shards, "SHARD_TOKENS", 25)
        patch.setattr(sources, "PIECE_BYTES", 60)
        return prepare_local(data_config(folder, **keys), out_dir=str(folder / ".out"))


def count(samples: list[tuple[list[int], list[int]]], *, max_seqlen: int, mode: str, limit: int) -> Counter[str]:
    """Count the tokens of a row, or of the two of a pair, one by one."""
    whole = sum(len(tokens) for tokens, _ in samples)
    values = [value for both in samples for each in both for value in each]
    if max(values) >= limit:
        return Counter({"token_out_of_range": whole})
    if mode == "drop" and any(len(tokens) > max_seqlen for tokens, _ in samples):
        return Counter({DROPPED: whole})
    if len(samples) == 2 and not all(any(label >= 0 for label in labels[1:max_seqlen]) for _, labels in samples):
        return Counter({"no_targets": whole})
    if len(samples) == 2 and samples[0][0][:max_seqlen] == samples[1][0][:max_seqlen]:
        return Counter({"equal_answers": whole})
    found: Counter[str] = Counter()
    for tokens, labels in samples:
        for place, label in enumerate(labels):
            start = place // max_seqlen * max_seqlen
            piece = min(max_seqlen, len(tokens) - start)
            if mode == "cut" and place >= max_seqlen:
                found[CUT] += 1
            elif mode == "split" and piece == 1 < len(tokens):
                found[SINGLE_TOKENS] += 1
            else:
                found[TRAINED if place > start and label != IGNORED else NOT_TARGETS] += 1
    return +found


@few_examples
@given(kind_and_files=files_of_rows, max_seqlen=st.integers(1, 13), mode=modes, limit=st.sampled_from([6, 9, 98, 300]))
def test_what_was_read_is_what_became_of_it(
    tmp_path_factory: pytest.TempPathFactory,
    kind_and_files: tuple[str, list[list[Row]]],
    max_seqlen: int,
    mode: Any,
    limit: int,
) -> None:
    kind, files = kind_and_files
    if kind == "pairs":
        mode = "drop" if mode == "drop" else "cut"
    try:
        made = prepared(tmp_path_factory.mktemp("rows"), files, rows=kind)
    except ConfigError as error:
        assert "hold no usable row" in str(error)
        return
    index = LengthIndex(made, max_seqlen=max_seqlen, long_sequences=mode, vocab_size=limit)
    balance, stored = index.balance, stored_rows(made)
    size = made.samples_per_row
    expected: Counter[str] = Counter()
    for start in range(0, len(stored), size):
        expected += count(stored[start : start + size], max_seqlen=max_seqlen, mode=mode, limit=limit)
    assert balance.tokens == expected
    assert balance.num_tokens == made.num_tokens == sum(len(tokens) for tokens, _ in stored)
    assert (balance.num_files, balance.num_rows) == (len(files), sum(map(len, files)))
    assert balance.num_rows + balance.num_further == balance.num_used + sum(balance.skipped.values())
    assert balance.tokens.get(TRAINED, 0) == sum(index.num_targets)
    assert balance.num_sequences == len(index)
    assert balance.num_idle == sum(index.num_targets == 0)
    assert balance.num_used == len(set(zip(index.shards, index.rows, strict=True))) // size
    counts: Counter[str] = Counter()
    index.count_skipped(lambda reason, number: counts.update({reason: number}))
    assert counts == balance.skipped
    assert str(balance).count("(") == str(balance).count(")")


def test_the_line_says_what_was_lost_and_the_remedy(tmp_path: Path) -> None:
    rows: list[Row] = [{"input_ids": [1] * 2}, {"input_ids": [2] * 4, "labels": [IGNORED] * 4}, {"input_ids": [3] * 14}]
    made = prepared(tmp_path, [rows, [{"text": ""}]])
    told = {
        mode: str(LengthIndex(made, max_seqlen=4, long_sequences=mode, vocab_size=None).balance)
        for mode in ("cut", "split", "drop")
    }
    read = "2 files, 4 rows (1 skipped: empty 1), {} sequences (1 without targets); 20 tokens = "
    assert told == {
        "cut": read.format(3)
        + "4 trained (20.0 %) + 6 not targets (30.0 %) + 10 cut by data.max_seqlen=4 from 1 row (50.0 %); raise "
        "data.max_seqlen, or use data.long_sequences: split",
        "split": read.format(6) + "11 trained (55.0 %) + 9 not targets (45.0 %)",
        "drop": read.replace("1 skipped: empty 1", "2 skipped: empty 1, dropped 1").format(2)
        + "1 trained (5.0 %) + 5 not targets (25.0 %) + 14 dropped in rows longer than data.max_seqlen=4 (70.0 %); use "
        "data.long_sequences: split or cut",
    }


def test_shares_are_never_rounded_to_nothing_or_all() -> None:
    told = str(
        Balance(
            max_seqlen=8,
            long_sequences="cut",
            samples_per_row=1,
            tokens={TRAINED: 999_999, "padding": 1},
            num_rows=1200,
        )
    )
    assert told == (
        "files not counted, 1,200 rows, 0 sequences; 1,000,000 tokens = 999,999 trained (over 99.9 %) + 1 padding "
        "removed (under 0.1 %)"
    )


def test_sources_add_up_to_the_mixture(tmp_path: Path) -> None:
    for name, rows in (("x", [{"text": "abc"}, {"text": ""}]), ("y", [{"text": "a" * 20}])):
        (tmp_path / name).mkdir()
        write(tmp_path / name, [rows])
    data = DataConfig(sources={name: {"paths": str(tmp_path / name)} for name in "xy"}, max_bad_fraction=1)
    made = cached_prepare(data, cache_dir=str(tmp_path / "cache"))
    index = LengthIndex.open(made.folder, max_seqlen=8)
    assert Balance.total([index.balance_of("x"), index.balance_of("y")]) == index.balance
    whole, first, second, skipped = index.lines()
    assert whole.startswith("account: 2 files, 3 rows (1 skipped: empty 1), 2 sequences; 25 tokens")
    assert first.startswith("account of source x: 1 file, 2 rows (1 skipped: empty 1), 1 sequence; 4 tokens")
    assert second.startswith("account of source y: 1 file, 1 row, 1 sequence; 21 tokens") and "cut by" in second
    assert skipped.startswith("skipped: ") and skipped.count("row ") == 1


def test_a_folder_of_an_earlier_version_claims_nothing_that_it_does_not_say(tmp_path: Path) -> None:
    made = prepared(tmp_path, [[{"text": "abc"}, {"text": ""}]])
    file = Path(made.folder, "manifest.json")
    values = json.loads(file.read_text())
    for name in ("account", "num_files", "num_ignored_files", "file_lines", "num_read_rows"):
        del values[name]
    file.write_text(json.dumps(values))
    assert LengthIndex.open(made.folder, max_seqlen=8).lines()[0] == (
        "account: files not counted, 2 rows (1 skipped: empty 1), 1 sequence; 4 tokens = 3 trained (75.0 %) + 1 not "
        "targets (25.0 %)"
    )


def test_what_reading_leaves_out_is_told_once(tmp_path: Path) -> None:
    rows = {"text": ["abc", "de"], "id": [1, 2], "note": ["x", "y"], "": [0, 1]}
    write_rows(tmp_path / "a.parquet", rows)
    made = prepare_local(data_config(tmp_path), out_dir=str(tmp_path / ".out"))
    assert LengthIndex.open(made.folder, max_seqlen=8).lines()[1:] == ["ignored columns: id, note, one without a name"]


def pairs_of(tmp_path: Path) -> LengthIndex:
    """Pairs that differ at once, in their fifth, and in their length beyond it."""
    rows = [{"prompt": "ab", "chosen": f"c{end}", "rejected": f"c{other}"} for end, other in ("de", "gh")]
    rows += [{"prompt": "ab", "chosen": "cdx", "rejected": "cdy"}, {"prompt": "ab", "chosen": "cd", "rejected": "cdef"}]
    made = prepared(tmp_path, [rows], rows="pairs")
    return LengthIndex(made, max_seqlen=4, long_sequences="cut", vocab_size=None)


def test_pairs_that_the_cut_makes_equal_are_not_trained(tmp_path: Path) -> None:
    index = pairs_of(tmp_path)
    assert index.balance.skipped == {"equal_answers": 2}
    assert index.balance.tokens == {NOT_TARGETS: 8, TRAINED: 8, CUT: 4, "equal_answers": 24}
    assert "in pairs that are equal within data.max_seqlen=4" in str(index.balance)
    assert [row.detail for row in index.named_bad_rows] == [
        "chosen and rejected are the same within data.max_seqlen=4"
    ] * 2
    with pytest.raises(ConfigError, match=r"2 of 4 rows \(50.00%\) are bad \(equal_answers 2\)"):
        LengthIndex.open(index.manifest.folder, max_seqlen=4, max_bad_fraction=0.4)


def test_pairs_without_an_answer_within_the_cut_are_not_trained(tmp_path: Path) -> None:
    """A pair that lacks either answer is left out as a whole, so that losses are means over pairs with both."""
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "d"}, {"prompt": "abcd", "chosen": "e", "rejected": "f"}]
    made = prepared(tmp_path, [rows], rows="pairs")
    index = LengthIndex(made, max_seqlen=4, long_sequences="cut", vocab_size=None)
    assert (len(index), index.balance.skipped) == (2, {"no_targets": 1})
    assert index.balance.tokens == {NOT_TARGETS: 4, TRAINED: 4, "no_targets": 12}
    assert "12 in pairs with an answer beyond data.max_seqlen=4 (60.0 %)" in str(index.balance)
    assert [row.detail for row in index.named_bad_rows] == ["an answer lies beyond data.max_seqlen=4"]


@pytest.mark.parametrize(
    ("labels", "max_seqlen", "cause"),
    [
        ([IGNORED] * 4, 8, "2 have a single token, or only labels of -100; give rows that have labels or answers"),
        ([IGNORED, IGNORED, IGNORED, 4], 3, "2 have their targets beyond data.max_seqlen=3; raise it"),
        ([1, 2, 3, 4], 1, "2 have their targets beyond data.max_seqlen=1; raise it"),
        ([1, IGNORED, IGNORED, IGNORED], 8, "2 have a single token, or only labels of -100"),
    ],
)
def test_data_without_any_target_are_refused(tmp_path: Path, labels: list[int], max_seqlen: int, cause: str) -> None:
    made = prepared(tmp_path, [[{"input_ids": [1, 2, 3, 4], "labels": labels}] * 2])
    index = LengthIndex(made, max_seqlen=max_seqlen, long_sequences="cut", vocab_size=None)
    with pytest.raises(ConfigError, match="data.paths: 2 sequences without a single target, must have one: " + cause):
        index.check_targets("data.paths")


def test_a_source_without_targets_is_refused(tmp_path: Path) -> None:
    for name, text in (("x", "abc"), ("y", "d")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, [[{"text": text}]])
    (tmp_path / "y" / "0.jsonl").write_text('{"input_ids": [5]}\n')
    data = DataConfig(sources={name: {"paths": str(tmp_path / name)} for name in "xy"})
    index = LengthIndex.open(cached_prepare(data, cache_dir=str(tmp_path / "cache")).folder, max_seqlen=8)
    with pytest.raises(ConfigError, match=r"^data.sources.y: 1 sequence without a single target.*single token"):
        index.check_targets("data.paths")


@pytest.mark.parametrize(("idle", "warns"), [(1, False), (2, True)])
def test_many_sequences_without_targets_draw_a_warning(tmp_path: Path, idle: int, warns: bool) -> None:
    masked: Row = {"input_ids": [1, 2], "labels": [IGNORED] * 2}
    made = prepared(tmp_path, [[masked] * idle + [{"input_ids": [1, 2]}] * (10 - idle)])
    lines = LengthIndex.open(made.folder, max_seqlen=8).lines()
    assert lines[1:] == (
        [
            "account: 2 of 10 sequences (20.0 %) have no target and train nothing: 2 have a single token, or only "
            "labels of -100; give rows that have labels or answers"
        ]
        if warns
        else []
    )
