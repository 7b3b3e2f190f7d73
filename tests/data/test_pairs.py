"""Rows with two answers become pairs of samples with one prompt, whose labels are the answers, in every format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import Config, ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data import LengthIndex, prepare_local
from rayfcp.data.mixture import MixtureSampler
from rayfcp.data.pairs import PairEncoder
from rayfcp.data.prepare import cached_prepare, fingerprint_of, prepare
from rayfcp.data.rows import BadReason, BadRowError, TokenRow
from rayfcp.data.sampler import Sampler
from rayfcp.data.sources import discover
from tests.data.chat_templates import CHANGING, SHAPES, read, unmarked
from tests.data.makers import EOS, data_config, few_examples, stored_rows, write_rows
from tests.data.test_chat import TOOL, any_letters, conversations, folder_of, learned, text_of  # noqa: F401  a fixture

Messages = list[dict[str, Any]]
USER, GOOD, BAD = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "assistant", "content": "three"},
)


def encoder(tokenizer: str = "bytes", **keys: Any) -> PairEncoder:
    return PairEncoder(DataConfig(paths="unused", tokenizer=tokenizer, rows="pairs", **keys))


def both(record: dict[str, Any], *, encode: PairEncoder) -> tuple[TokenRow, TokenRow]:
    """The two samples of a row, which counts once."""
    chosen, rejected = encode(record)
    assert (chosen.num_rows, rejected.num_rows) == (1, 0)
    return chosen, rejected


def lists(*rows: TokenRow) -> list[list[list[int]]]:
    return [[(row.tokens if each is None else each).tolist() for each in (row.tokens, row.labels)] for row in rows]


words = st.text(any_letters, min_size=1, max_size=8)
PIECES = [f"{letter * 3} has {letter * 2}" for letter in "cdefghij"]
"""Texts of several words; none is a part of another."""


@few_examples
@given(prompt=words, answers=st.lists(words, min_size=2, max_size=2, unique=True))
def test_texts_have_the_loss_on_what_follows_the_prompt(prompt: str, answers: list[str]) -> None:
    encode, prompt = encoder(), f"user {prompt} ."
    stated = both({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}, encode=encode)
    for row, answer in zip(stated, answers, strict=True):
        own = [*answer.encode(), EOS]
        assert row.tokens.tolist() == [*prompt.encode(), *own]
        assert row.labels.tolist() == [-100] * len(prompt.encode()) + own
    whole = {name: prompt + own for name, own in zip(("chosen", "rejected"), answers, strict=True)}
    assert lists(*both({"prompt": prompt, **whole}, encode=encode)) == lists(*stated)
    shared = next(
        at for at, (own, other) in enumerate(zip(*(each.tokens for each in stated), strict=False)) if own != other
    )
    for row, one in zip(both(whole, encode=encode), stated, strict=True):
        assert row.tokens.tolist() == one.tokens.tolist()
        assert row.labels.tolist() == [-100] * shared + one.tokens.tolist()[shared:]


def talk(pieces: list[str], *, first: str) -> Messages:
    """Texts of the user and of the assistant in turns, beginning with the role `first`."""
    roles = ["user", "assistant"][:: 1 if first == "user" else -1]
    return [{"role": roles[number % 2], "content": piece} for number, piece in enumerate(pieces)]


@few_examples
@given(data=st.data())
def test_every_text_of_a_row_is_rendered_once_or_the_row_is_refused(
    folder_of: Callable[..., str],  # noqa: F811
    data: st.DataObject,
) -> None:
    """Answers may repeat any part of the prompt, as texts or as messages."""
    encode = encoder(folder_of(unmarked(read("chatml"))), loss_on="last_assistant")
    pieces = data.draw(st.permutations(PIECES))
    system = [{"role": "system", "content": pieces.pop()}] * data.draw(st.integers(0, 1))
    prompt = system + talk([pieces.pop() for _ in range(data.draw(st.sampled_from([1, 3])))], first="user")
    start = data.draw(st.integers(0, len(prompt)))
    stop = data.draw(st.integers(start, len(prompt)))
    repeated = prompt[start:stop]
    is_whole = repeated in ([], prompt)
    good, bad = (talk([pieces.pop()], first="assistant") for _ in range(2))
    values: dict[str, Any] = {"prompt": prompt, "chosen": repeated + good, "rejected": repeated + bad}
    form = data.draw(st.sampled_from(["messages", "texts", "prompt of text", "answer of text", "instruction"]))
    if form == "texts" and (is_whole or not start or stop == len(prompt)):
        values = {name: "\n".join(each["content"] for each in value) for name, value in values.items()}
    elif form == "prompt of text" and not system:
        values["prompt"] = prompt[-1]["content"]
        has_own = bool(repeated) and repeated[0]["role"] == "user"
        is_whole = has_own == (prompt[-1] in repeated)
        prompt = prompt[-1:] * (not has_own) + repeated
    elif form == "answer of text" and not repeated:
        values["rejected"] = bad[0]["content"]
    else:
        is_whole |= repeated == prompt[len(system) :]
        if form == "instruction" and not system and len(prompt) == 1:
            values = {"instruction": prompt[0]["content"], **values} | {"prompt": None}
    try:
        found = [text_of(row) for row in encode(values)]
    except BadRowError as error:
        assert error.reason == BadReason.PROMPT_MISMATCH and not is_whole
        return
    assert is_whole
    for text, answer, other in zip(found, (good, bad), (bad, good), strict=True):
        texts = [each["content"] for each in prompt + answer]
        assert [text.count(each) for each in texts] == [1] * len(texts)
        assert sorted(texts, key=text.index) == texts and other[0]["content"] not in text


@few_examples
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("change", [str, unmarked])
@given(messages=conversations(any_letters), rest=conversations(any_letters), data=st.data())
def test_messages_in_all_shapes_give_one_pair(
    folder_of: Callable[..., str],  # noqa: F811
    change: Callable[[str], str],
    name: str,
    messages: Messages,
    rest: Messages,
    data: st.DataObject,
) -> None:
    """The answers may have several turns; those of the prompt are not learned."""
    encode = encoder(folder_of(change(SHAPES[name].template)))
    prompt = messages[:-1]
    chosen, rejected = [messages[-1], *(each for each in rest if each["role"] != "system")], [{**GOOD, "content": "x"}]
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    found = both(record, encode=encode)
    shape = SHAPES[name]
    after = shape.after_unmarked if change is unmarked and shape.after_unmarked is not None else shape.after
    for row, answer in zip(found, (chosen, rejected), strict=True):
        own = [each["content"] for each in answer if each["role"] == "assistant"]
        assert learned(row) == "".join(shape.before + text + after for text in own)
    others = [
        {"chosen": prompt + chosen, "rejected": prompt + rejected},
        {"prompt": prompt, "chosen": prompt + chosen, "rejected": prompt + rejected},
        {"prompt": prompt[-1]["content"], "chosen": prompt + chosen, "rejected": prompt + rejected},
        {"prompt": prompt, "chosen": chosen, "rejected": rejected[0]},
        {"prompt": prompt, "chosen": chosen, "rejected": "x"},
    ]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    parts = {
        key: [{"from": names[each["role"]], "value": each["content"]} for each in value]
        for key, value in record.items()
    }
    others.append(parts)
    if prompt[0]["role"] == "system":
        others.append({**parts, "prompt": parts["prompt"][1:], "system": prompt[0]["content"]})
    if len(prompt) == 1:
        others.append({**record, "prompt": prompt[0]["content"]})
    others += [{key: json.dumps(value) for key, value in each.items()} for each in (record, others[0])]
    assert lists(*both(data.draw(st.sampled_from(others)), encode=encode)) == lists(*found)


def test_tools_are_those_of_conversations(folder_of: Callable[..., str]) -> None:  # noqa: F811
    encode = encoder(folder_of(read("chatml")))
    plain = {"prompt": "one", "chosen": [GOOD], "rejected": [BAD]}
    for row, bare in zip(encode({**plain, "tools": json.dumps([TOOL])}), encode(plain), strict=True):
        assert learned(row) == learned(bare)
        assert '"look"' in text_of(row) and '"look"' not in text_of(bare)


def test_everything_or_the_last_turn_may_enter_the_loss(folder_of: Callable[..., str]) -> None:  # noqa: F811
    turns = [USER, GOOD, USER]
    record = {"prompt": [USER], "chosen": [GOOD, USER, BAD], "rejected": [BAD]}
    template = folder_of(read("phi"))
    chosen, rejected = encoder(template, loss_on="last_assistant")(record)
    assert (learned(chosen), learned(rejected)) == ("three<|end|>\n",) * 2
    for texts in ({"prompt": "b ", "chosen": "c", "rejected": "d"}, {"chosen": "b c", "rejected": "b d"}):
        assert lists(*encoder(loss_on="all")(texts)) == [[[*text, EOS]] * 2 for text in (b"b c", b"b d")]
    chosen, _ = encoder(template, loss_on="all")({"chosen": [*turns, GOOD], "rejected": [*turns, BAD]})
    assert learned(chosen) == text_of(chosen)


OTHER = {**USER, "content": "else"}
SYSTEM, BRIEF = ({"role": "system", "content": text} for text in ("Be kind.", "Be brief."))
BROKEN: list[tuple[dict[str, Any], BadReason]] = [
    ({"chosen": "ab"}, BadReason.MISSING_COLUMN),
    ({"chosen": "ab", "rejected": None}, BadReason.MISSING_COLUMN),
    ({"chosen": "ab", "rejected": 3}, BadReason.WRONG_TYPE),
    ({"prompt": 3, "chosen": "ab", "rejected": "ac"}, BadReason.WRONG_TYPE),
    ({"prompt": "a", "chosen": "ab", "rejected": ""}, BadReason.EMPTY),
    ({"prompt": "a", "chosen": [], "rejected": [GOOD]}, BadReason.EMPTY),
    ({"chosen": "ab", "rejected": "ab"}, BadReason.EQUAL_ANSWERS),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, BadReason.EQUAL_ANSWERS),
    ({"prompt": "a b", "chosen": "a b c", "rejected": " d"}, BadReason.PROMPT_MISMATCH),
    ({"prompt": "a b ", "chosen": "d", "rejected": " a b c"}, BadReason.PROMPT_MISMATCH),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": GOOD}, BadReason.EQUAL_ANSWERS),
    ({"chosen": "ab", "rejected": "cb"}, BadReason.NO_PROMPT),
    ({"chosen": "Hello", "rejected": "Hi"}, BadReason.NO_PROMPT),
    ({"chosen": "abc d", "rejected": "abd"}, BadReason.NO_PROMPT),
    ({"chosen": "ab c", "rejected": "ab d", "question": "else"}, BadReason.UNUSED_COLUMN),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "context": "else"}, BadReason.UNUSED_COLUMN),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d", "e"]]}, BadReason.UNUSED_COLUMN),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "instruction": "else"}, BadReason.UNUSED_COLUMN),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}, BadReason.UNUSED_COLUMN),
    ({"chosen": [GOOD], "rejected": [BAD]}, BadReason.NO_PROMPT),
    ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, BadReason.NO_PROMPT),
    ({"chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, BadReason.NO_PROMPT),
    ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, OTHER, BAD]}, BadReason.NO_PROMPT),
    ({"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, BadReason.PROMPT_MISMATCH),
    (
        {"prompt": [SYSTEM, USER], "chosen": [BRIEF, USER, GOOD], "rejected": [BRIEF, USER, BAD]},
        BadReason.PROMPT_MISMATCH,
    ),
    ({"prompt": "be.\n\nUser: a", "chosen": "User: a b", "rejected": "User: a c"}, BadReason.PROMPT_MISMATCH),
    ({"prompt": "User: a", "chosen": "Be.\nUser: a b", "rejected": "Be.\nUser: a c"}, BadReason.PROMPT_MISMATCH),
    ({"prompt": "User: a\nb", "chosen": "User: a\nc", "rejected": "User: a\nd"}, BadReason.PROMPT_MISMATCH),
    ({"prompt": "any", "chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, BadReason.PROMPT_MISMATCH),
    ({"prompt": "any", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, BadReason.PROMPT_MISMATCH),
    ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [OTHER, BAD]}, BadReason.PROMPT_MISMATCH),
    ({"prompt": [OTHER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, BadReason.PROMPT_MISMATCH),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER, BAD]}, BadReason.PROMPT_MISMATCH),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "be"}, BadReason.UNUSED_COLUMN),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": "[]"}, BadReason.UNUSED_COLUMN),
    ({"chosen": "a\ud800", "rejected": "ab"}, BadReason.NOT_UTF8),
    ({"prompt": [USER], "chosen": ["two"], "rejected": [BAD]}, BadReason.BAD_MESSAGES),
    ({"prompt": [USER], "chosen": [{"content": "two"}], "rejected": [BAD]}, BadReason.BAD_MESSAGES),
    ({"chosen": [USER, GOOD], "rejected": [USER, {**BAD, "weight": 0.5}]}, BadReason.BAD_WEIGHT),
    ({"chosen": [USER, GOOD], "rejected": [USER, {**BAD, "weight": 0}]}, BadReason.NO_TARGETS),
    ({"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, GOOD]}, BadReason.NO_TARGETS),
]


def test_a_prompt_is_compared_as_it_is_rendered(folder_of: Callable[..., str]) -> None:  # noqa: F811
    """Nulls of tables, names of keys and white space do not count; the system message of either is kept."""
    encode = encoder(folder_of(read("chatml")))
    want = lists(*encode({"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}))
    other = {"from": "human", "value": " one\n", "name": None}
    for prompt, before in (
        ([SYSTEM, USER], [USER]),
        ([SYSTEM, other], [USER]),
        ([SYSTEM], [USER]),
        ([USER], [SYSTEM, USER]),
        (other, [SYSTEM, USER]),
        (" one ", [SYSTEM, {**USER, "tool_calls": None}]),
    ):
        row = {"prompt": prompt, "chosen": [*before, GOOD], "rejected": [*before, BAD]}
        assert lists(*encode(row)) == want


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "User: a b", "chosen": "c", "rejected": "d", "question": "a b", "margin": 0, "input": ""},
        {"chosen": "User: a b c", "rejected": "User: a b d", "query": " a b "},
        {"instruction": "a b", "input": "e", "chosen": "c", "rejected": "d", "question": "a b"},
    ],
)
def test_columns_that_repeat_the_prompt_are_counted(
    folder_of: Callable[..., str],  # noqa: F811
    tmp_path: Path,
    row: dict[str, Any],
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    data = data_config(tmp_path, tokenizer=folder_of(read("chatml")), rows="pairs")
    made = prepare_local(data, out_dir=str(tmp_path / ".out"))
    assert made.num_rows == 1 and made.account.ignored_columns == {list(row)[-1 if "margin" not in row else 3]: 1}


def test_an_empty_prompt_is_one_of_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "", "chosen": "b", "rejected": "c"}) + "\n")
    made = prepare_local(data_config(tmp_path, rows="pairs"), out_dir=str(tmp_path / ".out"))
    assert stored_rows(made) == [([*text, EOS], [*text, EOS]) for text in (b"b", b"c")]


@pytest.mark.parametrize(("record", "reason"), BROKEN)
def test_rows_that_give_no_pair_are_bad_as_a_whole(
    folder_of: Callable[..., str],  # noqa: F811
    tmp_path: Path,
    record: dict[str, Any],
    reason: BadReason,
) -> None:
    tokenizer = folder_of(unmarked(read("phi")))
    with pytest.raises(BadRowError) as raised:
        encoder(tokenizer)(record)
    assert raised.value.reason == reason
    good = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (good, record, good)))
    made = prepare_local(data_config(tmp_path, tokenizer=tokenizer, rows="pairs"), out_dir=str(tmp_path / ".out"))
    assert (made.num_rows, made.bad_rows, made.named_bad_rows[0].row) == (2, {reason.value: 1}, 1)
    assert stored_rows(made) == 2 * [tuple(each) for each in lists(*encoder(tokenizer)(good))]


def test_answers_whose_turns_change_have_no_single_text(folder_of: Callable[..., str]) -> None:  # noqa: F811
    thought = {**GOOD, "reasoning_content": "why"}
    record = {"prompt": [USER], "chosen": [thought, USER, BAD], "rejected": [BAD]}
    template = CHANGING["thinking"].template
    with pytest.raises(BadRowError, match=r"changes earlier turns of the answer; set data\.loss_on to last"):
        encoder(folder_of(unmarked(template)))(record)
    with pytest.raises(BadRowError, match=r"leaves out reasoning_content of message 1 \(assistant\)"):
        encoder(folder_of(template))(record)  # marks make one text, which has no thought to learn
    (last, _) = encoder(folder_of(unmarked(template)), loss_on="last_assistant")(record)
    assert "three" in learned(last) and "why" not in learned(last)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow", ".stream.arrow"])
def test_rows_of_every_format(folder_of: Callable[..., str], tmp_path: Path, ending: str) -> None:  # noqa: F811
    """Tables have messages or texts in a column, and nulls for what a row does not have."""
    tokenizer = folder_of(read("chatml"))
    talks = {
        "prompt": [[USER], None, [USER]],
        "chosen": [[GOOD], [USER, GOOD], [GOOD]],
        "rejected": [[BAD], [USER, BAD], [GOOD]],
        "tools": [json.dumps([TOOL]), None, None],
        "score": [1, 2, 3],
        "text": ["a", "b", "c"],
    }
    texts = {"prompt": ["a", None], "chosen": ["b", "a b"], "rejected": ["c", "a c"]}
    for number, (columns, count) in enumerate(((talks, 2), (texts, 2))):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_rows(folder / f"a{ending}", columns)
        made = prepare_local(data_config(folder, tokenizer=tokenizer, rows="pairs"), out_dir=str(folder / ".out"))
        rows = [{name: values[at] for name, values in columns.items()} for at in range(count)]
        assert stored_rows(made) == [tuple(each) for row in rows for each in lists(*encoder(tokenizer)(row))]
        assert made.bad_rows == ({"equal_answers": 1} if number == 0 else {})


def test_files_of_texts_have_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(ConfigError, match=r"bad \(missing_column 1\).*no chosen and no rejected"):
        prepare_local(data_config(tmp_path, rows="pairs", max_bad_fraction=0.5), out_dir=str(tmp_path / ".out"))


def pair_file(path: Path, *, pairs: int, first: str = "") -> str:
    """Pair i has a prompt of one letter, and answers of i + 1 letters, `a` chosen, and of twice as many, `b`."""
    rows = range(1, pairs + 1)
    columns = {"prompt": [first or "p"] * pairs, "chosen": ["a" * at for at in rows]}
    return write_rows(path, {**columns, "rejected": ["b" * (2 * at) for at in rows]})


@pytest.mark.parametrize("shard_tokens", [1, 7, 12, 1000])
def test_no_shard_ends_between_two_of_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_tokens: int
) -> None:
    monkeypatch.setattr("rayfcp.data.shards.SHARD_TOKENS", shard_tokens)
    monkeypatch.setattr("rayfcp.data.shards.BATCH_ROWS", 1)
    monkeypatch.setattr("rayfcp.data.sources.PIECE_BYTES", 100)
    pair_file(tmp_path / "a.jsonl", pairs=9)
    made = prepare_local(data_config(tmp_path, rows="pairs"), out_dir=str(tmp_path / ".out"))
    assert (made.num_rows, sum(shard.num_rows for shard in made.shards)) == (9, 18)
    assert len(made.shards) > 1 and all(shard.num_rows % 2 == 0 for shard in made.shards)
    assert [bytes(tokens[1:2]) for tokens, _ in stored_rows(made)] == [b"a", b"b"] * 9


def letters(sampler: Sampler, index: LengthIndex, *, steps: int) -> list[tuple[int, int]]:
    """Lengths of the samples of each drawn pair."""
    found = []
    for step in range(1, steps + 1):
        ids = [sample.id for sample in sampler.batch(step).samples]
        assert ids[::2] == [own - 1 for own in ids[1::2]] and all(own % 2 == 0 for own in ids[::2])
        found += [(int(index.lengths[own]), int(index.lengths[own + 1])) for own in ids[::2]]
    return found


def test_long_pairs_are_cut_or_dropped_as_pairs(tmp_path: Path) -> None:
    pair_file(tmp_path / "a.jsonl", pairs=8)
    folder = str(tmp_path / ".out")
    prepare_local(data_config(tmp_path, rows="pairs"), out_dir=folder)
    whole = [(2 + at, 2 + 2 * at) for at in range(1, 9)]
    for how, expected in (
        ("cut", [(min(9, own), min(9, other)) for own, other in whole]),
        ("drop", [pair for pair in whole if max(pair) <= 9]),
    ):
        index = LengthIndex.open(folder, max_seqlen=9, long_sequences=how)
        assert index.num_draws == len(expected)
        assert sorted(letters(Sampler(index, seed=1, global_batch=2), index, steps=len(expected))) == sorted(expected)
    base = {"data": {"paths": "a"}, "loss": {"type": "dpo"}}
    for keys, key in (
        ({**base, "data": {"paths": "a", "long_sequences": "split"}}, "data.long_sequences"),
        (
            {**base, "eval": {"sets": {"val": {"paths": "b", "long_sequences": "split"}}}},
            "eval.sets.val.long_sequences",
        ),
    ):
        with pytest.raises(ValueError, match=f"'dpo', which does not run with {key}: split; leave it out"):
            Config.model_validate(keys)


def test_mixtures_draw_pairs(tmp_path: Path) -> None:
    for name, pairs in (("x", 3), ("y", 6)):
        (tmp_path / name).mkdir()
        pair_file(tmp_path / name / "a.jsonl", pairs=pairs, first=name)
    sources = {name: {"paths": str(tmp_path / name), "weight": 1} for name in "xy"}
    data = DataConfig(sources=sources, rows="pairs", global_batch_sequences=8)
    made = prepare(data, out_dir=str(tmp_path / ".out"))
    assert (made.rows, made.num_rows) == ("pairs", 9)
    index = LengthIndex.open(made.folder, max_seqlen=100)
    sampler = MixtureSampler(index, data, seed=3)
    letters(sampler, index, steps=4)
    stop = index.sources["x"][1]
    batches = [sampler.batch(step) for step in range(1, 5)]
    assert all(
        batch.source_of == tuple(int(sample.id >= stop) for sample in batch.samples) and len(batch.samples) == 8
        for batch in batches
    )
    counts = np.bincount([own for batch in batches for own in batch.source_of])
    assert abs(counts[0] - counts[1]) <= 4  # a pair more of one, and one less of the other


def test_prepared_folders_of_another_kind_are_refused(tmp_path: Path) -> None:
    pair_file(tmp_path / "a.jsonl", pairs=2)
    own = data_config(tmp_path / "a.jsonl", rows="pairs")
    assert fingerprint_of(own, files=discover(own).files) != fingerprint_of(
        own.model_copy(update={"rows": "sequences"}), files=discover(own).files
    )
    prepare_local(own, out_dir=str(tmp_path / "pairs"))
    write_rows(tmp_path / "b.jsonl", {"text": ["one"]})
    prepare_local(data_config(tmp_path / "b.jsonl"), out_dir=str(tmp_path / "plain"))
    for rows, folder, kind in (("sequences", "pairs", "pairs"), ("pairs", "plain", "sequences")):
        for format_ in ("auto", "prepared"):
            data = data_config(tmp_path / folder, rows=rows, format=format_, tokenizer="bytes")
            with pytest.raises(ConfigError, match=f"has rows that are {kind}, must have {rows} for loss.type"):
                cached_prepare(data, cache_dir=str(tmp_path / ".cache"))
    data = data_config(tmp_path / "pairs", rows="pairs", format="prepared")
    assert cached_prepare(data, cache_dir=str(tmp_path / ".cache")).num_rows == 2
