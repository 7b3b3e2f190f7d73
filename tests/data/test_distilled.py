"""Rows with a teacher's words: what goes in comes out, of any file, in any piece; and what is wrong is counted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import Config, ConfigError
from rayfcp.data import LengthIndex, TokenReader, cached_prepare, prepare_local, shards
from rayfcp.data.rows import IGNORED
from tests.data.makers import data_config, few_examples, stored_rows, write_rows

ENDINGS = (".jsonl", ".parquet", ".arrow", ".stream.arrow")
Row = tuple[list[int], list[list[int]], list[list[float]]]


@st.composite
def taught_rows(draw: st.DrawFn) -> list[Row]:
    """Rows of one to nine tokens, each with one to three words a position."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 6))):
        size, width = draw(st.integers(1, 9)), draw(st.integers(1, 3))
        ids = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
        word_lists = st.lists(st.integers(0, 199), min_size=width, max_size=width, unique=True)
        words = draw(st.lists(word_lists, min_size=size, max_size=size))
        logits = draw(st.lists(st.floats(-50, 50, width=32), min_size=size * width, max_size=size * width))
        places = range(0, size * width, width)
        rows.append((ids, words, [logits[at : at + width] for at in places]))
    return rows


def columns(rows: list[Row]) -> dict[str, list[Any]]:
    ids, words, logits = zip(*rows, strict=True)
    return {"input_ids": list(ids), "teacher_words": list(words), "teacher_logits": list(logits)}


@few_examples
@given(
    rows=taught_rows(),
    ending=st.sampled_from(ENDINGS),
    batch_tokens=st.integers(1, 9),
    shard_tokens=st.integers(1, 60),
    max_seqlen=st.integers(2, 10),
    long_sequences=st.sampled_from(["cut", "split", "drop"]),
    cut=st.integers(0, 9),
)
def test_what_a_teacher_said_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Row],
    ending: str,
    batch_tokens: int,
    shard_tokens: int,
    max_seqlen: int,
    long_sequences: Any,
    cut: int,
) -> None:
    """In any piece of a sample, beside the targets that it is about."""
    folder = tmp_path_factory.mktemp("round")
    write_rows(folder / f"a{ending}", columns(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", batch_tokens)
        patch.setattr(shards, "SHARD_TOKENS", shard_tokens)
        made = prepare_local(data_config(folder / f"a{ending}", rows="distilled"), out_dir=str(folder / "out"))
    assert stored_rows(made) == [(ids, ids) for ids, _, _ in rows]
    assert made.rows == "distilled" and all(shard.has_teacher for shard in made.shards)
    assert made.max_token_id == max(each for ids, words, _ in rows for some in (ids, *words) for each in some)
    if long_sequences == "drop" and all(len(ids) > max_seqlen for ids, _, _ in rows):
        return
    index = LengthIndex.open(made.folder, max_seqlen=max_seqlen, long_sequences=long_sequences)
    reader = TokenReader.open(made.folder)
    firsts = np.cumsum([0, *(shard.num_rows for shard in made.shards)])
    for sample in index.samples(range(len(index))):
        ids, words, logits = rows[firsts[sample.shard] + sample.row]
        for start, stop in ((0, min(cut, sample.num_tokens)), (min(cut, sample.num_tokens), sample.num_tokens)):
            found = reader.teacher(sample, start=start, stop=stop)
            assert found[0].tolist() == words[sample.start + start : sample.start + stop]
            assert found[1].tolist() == logits[sample.start + start : sample.start + stop]
            _, targets = reader.read(sample, start=start, stop=stop)
            following = [*ids[: sample.stop], IGNORED][sample.start + start + 1 : sample.start + stop + 1]
            assert targets.tolist() == following


SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int64()),
        "labels": pa.list_(pa.int64()),
        "teacher_words": pa.list_(pa.list_(pa.int32())),
        "teacher_logits": pa.list_(pa.list_(pa.float64())),
        "text": pa.string(),
    }
)
GOOD = {"input_ids": [1, 2], "teacher_words": [[3, 4], [5, 6]], "teacher_logits": [[0.5, 1], [2, -1]]}

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"teacher_words": None}, "missing_column", "has columns input_ids, teacher_logits, no teacher_words"),
    ({"input_ids": None}, "missing_column", "no input_ids"),
    ({"input_ids": []}, "empty", ""),
    ({"labels": [1]}, "labels_mismatch", "1 labels for 2 tokens"),
    ({"teacher_words": [[3, 4], [5]]}, "teacher_mismatch", "must have a list for each token, all of one length"),
    ({"teacher_words": [3, 4]}, "teacher_mismatch", "must have a list for each token"),
    ({"teacher_words": [[], []]}, "teacher_mismatch", "from 1 on"),
    (
        {"teacher_words": [[3, 4]]},
        "teacher_mismatch",
        "teacher_words of 1 x 2 and teacher_logits of 2 x 2 for 2 tokens",
    ),
    ({"teacher_logits": [[1.0], [2.0]]}, "teacher_mismatch", "teacher_logits of 2 x 1"),
    ({"teacher_words": [[3, -1], [5, 6]]}, "token_out_of_range", "teacher_words has -1"),
    ({"teacher_words": [[3, 4], [6, 6]]}, "repeated_word", "teacher_words has 6 twice at position 1, must have a word"),
    (
        {"teacher_words": [[4, 3, 4], [1, 2, 3]], "teacher_logits": [[0.5, 1, 2], [2, -1, 3]]},
        "repeated_word",
        "teacher_words has 4 twice at position 0",
    ),
    ({"teacher_words": [[3.0, 4.0], [5.0, 6.0]]}, "wrong_type", "teacher_words must hold integers only"),
    ({"teacher_words": [["a", "b"], ["c", "d"]]}, "wrong_type", "teacher_words must hold numbers only"),
    ({"teacher_logits": [[True, False], [True, True]]}, "wrong_type", "teacher_logits must hold numbers only"),
    ({"teacher_logits": [[0.5, None], [2, -1]]}, "wrong_type", "teacher_logits must hold numbers only"),
    ({"teacher_logits": [[0.5, float("-inf")], [2, -1]]}, "not_finite", "leave words without probability out"),
    ({"teacher_logits": [[0.5, float("nan")], [2, -1]]}, "not_finite", ""),
    ({"teacher_logits": [[0.5, 1e39], [2, -1]]}, "not_finite", "teacher_logits must be finite"),
    ({"input_ids": None, "teacher_words": None, "teacher_logits": None, "text": "a"}, "missing_column", ""),
]


@pytest.mark.parametrize(("change", "reason", "detail"), WRONG)
def test_wrong_rows_are_named(tmp_path: Path, change: dict[str, Any], reason: str, detail: str) -> None:
    """In lines, and in tables as far as their types hold it; rows around come through."""
    lines = [GOOD, {**GOOD, **change}, GOOD]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["a.jsonl"]
    if change != {"teacher_words": [3, 4]} and reason != "wrong_type":
        pq.write_table(pa.Table.from_pylist(lines, schema=SCHEMA), tmp_path / "a.parquet")
        files.append("a.parquet")
    for name in files:
        data = data_config(tmp_path / name, rows="distilled")
        made = prepare_local(data, out_dir=str(tmp_path / f"out-{name}"))
        assert made.bad_rows == {reason: 1}, name
        assert made.named_bad_rows[0].row == 1 and detail in made.named_bad_rows[0].detail
        assert [ids for ids, _ in stored_rows(made)] == [[1, 2], [1, 2]]


def test_texts_are_no_rows_of_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    write_rows(tmp_path / "b.jsonl", {name: [values] for name, values in GOOD.items()})
    made = prepare_local(data_config(tmp_path / "*.*", rows="distilled"), out_dir=str(tmp_path / "out"))
    assert made.bad_rows == {"missing_column": 1} and made.num_rows == 1


def test_words_beyond_the_vocabulary_are_skipped(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {name: [values, values] for name, values in GOOD.items()})
    made = prepare_local(data_config(tmp_path / "a.jsonl", rows="distilled"), out_dir=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="must leave at least one sample"):
        LengthIndex.open(made.folder, max_seqlen=8, vocab_size=6)
    assert len(LengthIndex.open(made.folder, max_seqlen=8, vocab_size=7)) == 2


def test_half_precision_and_fixed_sizes(tmp_path: Path) -> None:
    """As tables of `datasets` have them."""
    logits = np.array([[0.5, 1.0], [2.0, -1.0]], dtype=np.float16)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(logits.ravel()), 2)
    words = pa.FixedSizeListArray.from_arrays(pa.array([3, 4, 5, 6], pa.uint16()), 2)
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2]], pa.list_(pa.int64())),
            "teacher_words": pa.LargeListArray.from_arrays(pa.array([0, 2]), words),
            "teacher_logits": pa.FixedSizeListArray.from_arrays(inner, 2),
        }
    )
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    made = prepare_local(data_config(tmp_path / "a.arrow", rows="distilled"), out_dir=str(tmp_path / "out"))
    (sample,) = LengthIndex.open(made.folder, max_seqlen=8).samples([0])
    found = TokenReader.open(made.folder).teacher(sample, start=0, stop=2)
    assert found[0].tolist() == GOOD["teacher_words"] and found[1].tolist() == GOOD["teacher_logits"]


def test_prepared_rows_are_for_their_loss(tmp_path: Path) -> None:
    """Those of a teacher are sequences, too: of an evaluation set, or of a run without."""
    write_rows(tmp_path / "a.jsonl", {name: [values, values] for name, values in GOOD.items()})
    taught = data_config(tmp_path / "a.jsonl", rows="distilled")
    plain = data_config(tmp_path / "a.jsonl", rows="sequences")
    cached = {cached_prepare(data, cache_dir=str(tmp_path / "cache")).folder for data in (taught, plain)}
    assert len(cached) == 2
    other = {name: [values, values] for name, values in GOOD.items()}
    other["teacher_logits"] = [GOOD["teacher_logits"], [[0.5, 1], [2, -2]]]
    write_rows(tmp_path / "b.jsonl", other)
    contents = {
        prepare_local(
            taught.model_copy(update={"paths": (str(tmp_path / name),)}), out_dir=str(tmp_path / name[0])
        ).content
        for name in ("a.jsonl", "b.jsonl")
    }
    assert len(contents) == 2
    folder = str(tmp_path / "a")
    again = data_config(folder)
    assert cached_prepare(again.model_copy(update={"rows": "sequences"}), cache_dir="none").folder == folder
    write_rows(tmp_path / "c.jsonl", {"text": ["a"]})
    prepare_local(data_config(tmp_path / "c.jsonl"), out_dir=str(tmp_path / "c"))
    with pytest.raises(
        ConfigError, match=r"data\.paths has rows that are sequences, must have distilled for loss\.type"
    ):
        cached_prepare(data_config(tmp_path / "c", rows="distilled"), cache_dir="none")
    config = Config(
        data={"paths": folder},
        loss={"type": "distillation"},
        eval={"sets": {"val": {"paths": str(tmp_path / "a.jsonl")}}},
    )
    assert config.data.rows == "distilled" and config.eval.sets["val"].source(config.data).rows == "sequences"
