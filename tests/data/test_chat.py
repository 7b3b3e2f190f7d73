"""Conversations become tokens whose labels are what the assistant wrote, whatever template, columns and format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data import LengthIndex, prepare_local
from rayfcp.data.chat import ChatEncoder
from rayfcp.data.prepare import fingerprint_of
from rayfcp.data.rows import BadReason, BadRowError, TokenRow
from rayfcp.data.sources import discover
from tests.data.chat_templates import CHANGING, SHAPES, Shape, library_tokenizer, read, tokenizer_folder, unmarked
from tests.data.makers import data_config, few_examples, stored_rows, write_rows

Messages = list[dict[str, Any]]
ALL = SHAPES | CHANGING
DATE = "2024-07-26"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folders of tokenizers with a template, each written once."""
    made: dict[Any, str] = {}

    def folder(template: str | None, **keys: Any) -> str:
        key = (template, *keys.items())
        if key not in made:
            made[key] = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), template, **keys)
        return made[key]

    return folder


def encoder(tokenizer: str, **keys: Any) -> ChatEncoder:
    return ChatEncoder(DataConfig(paths="unused", tokenizer=tokenizer, **keys))


def learned(row: TokenRow, decode: Callable[[list[int]], str] | None = None) -> str:
    """The text of the tokens that enter the loss."""
    decode = decode or library_tokenizer(None).decode
    marks = row.tokens if row.labels is None else row.labels
    return decode([token for token in marks.tolist() if token >= 0])


def text_of(row: TokenRow) -> str:
    text: str = library_tokenizer(None).decode(row.tokens.tolist())
    return text


def conversations(letters: st.SearchStrategy[str]) -> st.SearchStrategy[Messages]:
    """With or without a system message, then user and assistant by turns."""
    words = st.text(letters, min_size=1, max_size=12).map(lambda text: f"a{text}.")
    turns = st.lists(st.tuples(words, words), min_size=1, max_size=4)

    def made(system: str | None, pairs: list[tuple[str, str]]) -> Messages:
        first = [] if system is None else [{"role": "system", "content": system}]
        names = ("user", "assistant")
        return first + [
            {"role": role, "content": text} for pair in pairs for role, text in zip(names, pair, strict=True)
        ]

    return st.builds(made, st.none() | words, turns)


ascii_letters = st.characters(max_codepoint=126, min_codepoint=9, exclude_characters="<[|")
any_letters = st.characters(exclude_categories=("Cs",), exclude_characters="<[|\ufdd0\ufdd1")


def answers(messages: Messages, shape: Shape, *, after: str | None = None) -> list[str]:
    after = shape.after if after is None else after
    return [shape.before + each["content"] + after for each in messages if each["role"] == "assistant"]


@few_examples
@pytest.mark.parametrize("name", ALL)
@given(messages=conversations(ascii_letters))
def test_marked_templates_give_the_librarys_mask(folder_of: Callable[..., str], name: str, messages: Messages) -> None:
    template = ALL[name].template
    (row,) = encoder(folder_of(template))({"messages": messages})
    fixed = template.replace("strftime_now('%Y-%m-%d')", repr(DATE))
    expected = library_tokenizer(template).apply_chat_template(
        messages, chat_template=fixed, return_assistant_tokens_mask=True
    )
    assert row.tokens.tolist() == expected["input_ids"]
    assert row.labels is not None
    assert (row.labels >= 0).tolist() == [bool(each) for each in expected["assistant_masks"]]


@few_examples
@pytest.mark.parametrize("name", SHAPES)
@given(messages=conversations(any_letters))
def test_labels_are_the_answers_with_and_without_marks(
    folder_of: Callable[..., str], name: str, messages: Messages
) -> None:
    shape = SHAPES[name]
    (row,) = encoder(folder_of(shape.template))({"messages": messages})
    assert learned(row) == "".join(answers(messages, shape))
    (plain,) = encoder(folder_of(unmarked(shape.template)))({"messages": messages})
    assert learned(plain) == "".join(answers(messages, shape, after=shape.after_unmarked))
    assert plain.tokens.tolist() == row.tokens.tolist()


@few_examples
@pytest.mark.parametrize("name", CHANGING)
@given(messages=conversations(any_letters), data=st.data())
def test_turns_that_change_are_learned_once_as_they_were_written(
    folder_of: Callable[..., str], name: str, messages: Messages, data: st.DataObject
) -> None:
    """As a model would be asked: the conversation up to the generation prompt, then the turn."""
    turns = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
    for turn in turns:
        if data.draw(st.booleans()):
            messages[turn] = {**messages[turn], "reasoning_content": f"thought {turn}"}
    template = unmarked(CHANGING[name].template)
    rows = encoder(folder_of(template))({"messages": messages})
    assert [row.num_rows for row in rows] == [1] + [0] * (len(rows) - 1)
    fixed = template.replace("strftime_now('%Y-%m-%d')", repr(DATE))
    render = library_tokenizer(template).apply_chat_template
    keys = {"chat_template": fixed, "tokenize": False}
    seen = []
    for row in rows:
        inside = [turn for turn in turns if text_of(row).startswith(render(messages[: turn + 1], **keys))]
        inside = [turn for turn in inside if turn not in seen]
        prompts = [render(messages[:turn], add_generation_prompt=True, **keys) for turn in inside]
        wanted = [
            render(messages[: turn + 1], **keys)[len(before) :] for turn, before in zip(inside, prompts, strict=True)
        ]
        assert learned(row) == "".join(wanted)
        seen += inside
    assert seen == turns


def test_answers_inside_of_set_blocks(folder_of: Callable[..., str]) -> None:
    """The library counts what it has rendered before the mark, and marks other characters here."""
    template = read("phi").replace("{{- '<|' + message.role", "{% set block %}{{- '<|' + message.role")
    template = template.replace("{%- endfor %}", "{% endset %}{{ block }}{%- endfor %}")
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}] * 2
    (row,) = encoder(folder_of(template))({"messages": messages})
    assert learned(row) == "two<|end|>\n" * 2
    library = library_tokenizer(template)
    marked = library.apply_chat_template(messages, return_assistant_tokens_mask=True)
    pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    assert library.decode([token for token, mark in pairs if mark]) != "two<|end|>\n" * 2


def words_folder(folder: Path, template: str) -> str:
    """A tokenizer that drops white space, and whose first token is 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["A", "U", "hi", "yes", "more", "no", "[UNK]"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", chat_template=template)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_spans_that_begin_with_dropped_spaces(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A{% generation %} {{ m.content }} {% endgeneration %}"
        "{% else %}U {{ m.content }} {% endif %}{% endfor %}"
    )
    encode = encoder(words_folder(tmp_path, template))
    texts = (("user", "hi"), ("assistant", "yes"), ("user", "more"), ("assistant", "no"))
    (row,) = encode({"messages": [{"role": role, "content": text} for role, text in texts]})
    assert row.labels.tolist() == [-100, -100, -100, 3, -100, -100, -100, 5]


def test_a_span_that_ends_in_token_0(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %} hi "
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    encode = encoder(words_folder(tmp_path, template))
    turns = (("assistant", "A"), ("user", "U"), ("assistant", "A"))
    (row,) = encode({"messages": [{"role": role, "content": text} for role, text in turns]})
    assert row.labels.tolist() == [0, -100, -100, 0, -100]


def test_a_token_of_prompt_and_answer_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE({**alphabet, "=4": len(alphabet)}, [("=", "4")]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path)
    encode = encoder(str(tmp_path))
    with pytest.raises(BadRowError, match="the token '=4' is partly in the loss") as raised:
        encode({"prompt": "2+2=", "completion": "4"})
    assert raised.value.reason == BadReason.TOKEN_ACROSS_BORDER
    (row,) = encode({"prompt": "2+2=", "completion": " 4"})
    assert row.num_targets == 2


TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def with_keys(turn: int, **keys: Any) -> Messages:
    return [{**message, **(keys if number == turn else {})} for number, message in enumerate(TALK)]


@pytest.mark.parametrize("change", [str, unmarked])
@pytest.mark.parametrize(
    ("messages", "keys", "expected"),
    [
        (TALK, {}, "two. four."),
        (with_keys(1, weight=0), {}, "four."),
        (with_keys(3, weight=0.0), {}, "two."),
        (with_keys(1, train=False), {}, "four."),
        (with_keys(1, loss=False), {}, "four."),
        (with_keys(3, loss=0), {}, "two."),
        (with_keys(1, loss_scale=0.0), {}, "four."),
        (with_keys(1, weight=1, train=True), {}, "two. four."),
        (TALK, {"loss_on": "last_assistant"}, "four."),
        ([*TALK, {"role": "user", "content": "five"}], {"loss_on": "last_assistant"}, "four."),
    ],
)
def test_turns_that_enter_the_loss(
    folder_of: Callable[..., str], change: Callable[[str], str], messages: Messages, keys: dict[str, Any], expected: str
) -> None:
    (row,) = encoder(folder_of(change(read("phi"))), **keys)({"messages": messages})
    assert learned(row) == expected.replace(". ", "<|end|>\n").replace(".", "<|end|>\n")


def test_everything_enters_the_loss(folder_of: Callable[..., str]) -> None:
    (row,) = encoder(folder_of(unmarked(read("thinking"))), loss_on="all")({"messages": TALK})
    assert row.labels is None
    assert learned(row) == text_of(row)


SHAREGPT = [
    {"from": "system", "value": "be"},
    {"from": "human", "value": "one"},
    {"from": "gpt", "value": "two"},
    {"from": "function_call", "value": '{"name": "look", "arguments": {"at": 1}}'},
    {"from": "observation", "value": "seen"},
    {"from": "gpt", "value": "done"},
]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
CALL_AS_TEXT = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
OPENAI = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {"role": "assistant", "content": "two"},
    {"role": "assistant", "content": None, "tool_calls": [CALL_AS_TEXT]},
    {"role": "tool", "content": "seen"},
    {"role": "assistant", "content": "done"},
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_shapes_of_conversations_are_the_same(folder_of: Callable[..., str]) -> None:
    encode = encoder(folder_of(read("chatml")))
    (row,) = encode({"messages": OPENAI, "tools": [TOOL]})
    others = [
        {"conversations": SHAREGPT, "tools": json.dumps([TOOL])},
        {"conversations": SHAREGPT[1:], "system": "be", "tools": [json.dumps(TOOL)]},
    ]
    for other in others:
        assert encode(other)[0].tokens.tolist() == row.tokens.tolist()
    call = '<tool_call>\nlook {"at": 1}\n</tool_call>'
    assert learned(row) == "".join(f"{text}<|im_end|>" for text in ("two", call, "done"))
    called = [
        {**OPENAI[3], "content": "", "tool_calls": [CALL]} if number == 3 else each
        for number, each in enumerate(OPENAI)
    ]
    expected = library_tokenizer(read("chatml")).apply_chat_template(
        [called[0], {"role": "user", "content": "one"}, *called[2:]], tools=[TOOL]
    )
    assert row.tokens.tolist() == expected["input_ids"]


def test_columns_beside_messages_work_in_every_form(folder_of: Callable[..., str]) -> None:
    encode = encoder(folder_of(read("chatml")))
    asked, answered = OPENAI[1:5], OPENAI[5:]
    (row,) = encode({"messages": OPENAI, "tools": [TOOL]})
    beside = {"system": "be", "tools": json.dumps([TOOL])}
    for other in ({"messages": OPENAI[1:]}, {"messages": OPENAI}, {"prompt": asked, "completion": answered}):
        assert encode({**other, **beside})[0].tokens.tolist() == row.tokens.tolist()
    old = [
        {**OPENAI[3], "tool_calls": None, "function_call": {"name": "look", "arguments": '{"at": 1}'}},
        {"role": "function", "name": "look", "content": "seen"},
    ]
    (called,) = encode({"messages": [*OPENAI[:3], *old, *answered], "tools": [TOOL]})
    assert called.tokens.tolist() == row.tokens.tolist()
    (old_tools,) = encode({"messages": [*OPENAI[:3], *old, *answered], "functions": [TOOL["function"]]})
    assert old_tools.tokens.tolist() == row.tokens.tolist()


def test_alpaca_rows_are_conversations(folder_of: Callable[..., str]) -> None:
    encode = encoder(folder_of(read("phi")))
    history = [["one", "two"]]
    cases = [
        ({"instruction": "one", "output": "two"}, TALK[:2]),
        ({"instruction": "one", "input": "", "output": "two"}, TALK[:2]),
        ({"instruction": "a", "input": "b", "output": "two"}, [{**USER, "content": "a\nb"}, ANSWER]),
        ({"instruction": "three", "output": "four", "history": history}, TALK),
        ({"instruction": "one", "output": "two", "system": "be"}, [{"role": "system", "content": "be"}, *TALK[:2]]),
    ]
    for record, messages in cases:
        (row,), (same,) = encode(record), encode({"messages": messages})
        assert (row.tokens.tolist(), row.labels.tolist()) == (same.tokens.tolist(), same.labels.tolist())


def test_prompt_and_completion_as_messages(folder_of: Callable[..., str]) -> None:
    for change in (str, unmarked):
        encode, record = encoder(folder_of(change(read("phi")))), {"prompt": TALK[:3], "completion": TALK[3:]}
        (row,), (other,) = encode(record), encode({key: json.dumps(value) for key, value in record.items()})
        assert text_of(row) == text_of(other) and learned(row) == learned(other)
        assert (learned(row), text_of(row).count("<|end|>")) == ("four<|end|>\n", 4)


def test_prompt_and_completion_as_text(folder_of: Callable[..., str]) -> None:
    bytes_row, other_row = (
        encoder(name)({"prompt": "aé", "completion": " éb"})[0] for name in ("bytes", folder_of(None, adds_bos=True))
    )
    ids = " éb".encode()
    assert bytes_row.labels.tolist() == [-100] * 3 + [*ids, 257]
    library = library_tokenizer(None, adds_bos=True)
    assert other_row.tokens.tolist() == [*library("aé éb")["input_ids"], library.eos_token_id]
    assert learned(other_row) == " éb</s>"
    (everything,) = encoder("bytes", loss_on="all")({"prompt": "a", "completion": "b"})
    assert (everything.tokens.tolist(), everything.labels) == ([97, 98, 257], None)


def test_no_token_that_begins_or_ends_a_text_stands_twice(folder_of: Callable[..., str]) -> None:
    (row,) = encoder(folder_of(read("mistral"), adds_bos=True))({"messages": TALK})
    assert text_of(row) == "<s>[INST] one [/INST] two</s>[INST] three [/INST] four</s>"


USER, ANSWER = TALK[:2]
EACH = "{% for m in messages %}{{ m.content }}{% endfor %}"
BAD: list[tuple[dict[str, Any], BadReason]] = [
    ({"messages": []}, BadReason.EMPTY),
    ({"messages": "hi"}, BadReason.BAD_MESSAGES),
    ({"messages": ["hi"]}, BadReason.BAD_MESSAGES),
    ({"messages": [{"content": "hi"}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {"role": "assistant", "content": 3}]}, BadReason.BAD_MESSAGES),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, BadReason.BAD_MESSAGES),
    ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, BadReason.NOT_UTF8),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, ANSWER], "tools": "{"}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, ANSWER], "tools": [3]}, BadReason.BAD_MESSAGES),
    ({"conversations": [{"from": "human"}]}, BadReason.BAD_MESSAGES),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, BadReason.BAD_WEIGHT),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, BadReason.NO_TARGETS),
    ({"messages": [USER]}, BadReason.NO_TARGETS),
    ({"messages": [ANSWER]}, BadReason.PROMPT_MISMATCH),
    ({"prompt": [USER], "completion": "two"}, BadReason.BAD_MESSAGES),
    ({"prompt": "one", "completion": " two", "system": "be"}, BadReason.UNUSED_COLUMN),
    ({"prompt": "one", "completion": " two", "tools": [TOOL]}, BadReason.UNUSED_COLUMN),
    ({"messages": [USER, {**ANSWER, "content": "", "id": "x", "timestamp": "2024"}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {**ANSWER, "content": "", "tool_calls": []}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {**ANSWER, "content": " \n", "name": "x"}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {**ANSWER, "content": None, "function_call": None}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {**ANSWER, "content": None, "function_call": {}}]}, BadReason.BAD_MESSAGES),
    ({"messages": [{"role": "user", "text": "one"}, ANSWER]}, BadReason.BAD_MESSAGES),
    ({"messages": [{"role": "user", "value": "one"}, ANSWER]}, BadReason.BAD_MESSAGES),
    ({"messages": [{"role": "system", "content": "be"}, *TALK], "system": "else"}, BadReason.BAD_MESSAGES),
    ({"messages": TALK, "system": 3}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {**ANSWER, "loss": 0.5}]}, BadReason.BAD_WEIGHT),
    ({"messages": [USER, {**ANSWER, "loss": False}]}, BadReason.NO_TARGETS),
    ({"instruction": "one", "output": ""}, BadReason.BAD_MESSAGES),
    ({"instruction": "one", "output": "two", "history": ["a"]}, BadReason.BAD_MESSAGES),
    # The template renders roles and contents alone.
    ({"messages": TALK, "tools": [TOOL]}, BadReason.NOT_RENDERED),
    ({"messages": [USER, {**ANSWER, "content": None, "tool_calls": [CALL]}]}, BadReason.NOT_RENDERED),
    ({"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]}, BadReason.NOT_RENDERED),
    ({"messages": [USER, {**ANSWER, "content": None, "function_call": CALL["function"]}]}, BadReason.NOT_RENDERED),
    ({"messages": [USER, {**ANSWER, "reasoning_content": "why"}]}, BadReason.NOT_RENDERED),
    ({"messages": [USER, {**ANSWER, "thinking": "why"}]}, BadReason.NOT_RENDERED),
    ({"messages": [{**USER, "name": "alice"}, ANSWER]}, BadReason.NOT_RENDERED),
    ({"messages": [{"role": "system", "content": "be", "tools": "[lookup]"}, *TALK]}, BadReason.NOT_RENDERED),
    ({"prompt": "one", "completion": ""}, BadReason.EMPTY),
    ({"messages": [{**USER, "reasoning_content": "why"}, ANSWER]}, BadReason.NOT_RENDERED),
    ({"messages": [USER, {**ANSWER, "reasoning_content": {"a": "why"}}]}, BadReason.BAD_MESSAGES),
    ({"messages": [{**USER, "name": 3}, ANSWER]}, BadReason.BAD_MESSAGES),
    ({"messages": TALK, "tools": [TOOL], "functions": [TOOL["function"]]}, BadReason.BAD_MESSAGES),
    ({"messages": TALK, "functions": [TOOL["function"]]}, BadReason.NOT_RENDERED),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "parameters": {"a": 1}}]}]}, BadReason.BAD_MESSAGES),
    ({"messages": [USER, {**ANSWER, "loss_scale": 0.5}]}, BadReason.BAD_WEIGHT),
    ({"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "train": False}]}]}, BadReason.BAD_WEIGHT),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_bad_rows_have_a_reason(folder_of: Callable[..., str], record: dict[str, Any], reason: BadReason) -> None:
    with pytest.raises(BadRowError) as raised:
        encoder(folder_of(unmarked(read("phi"))))(record)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("template", "reason", "words"),
    [
        (None, BadReason.NO_CHAT_TEMPLATE, "must be a Hugging Face tokenizer with a chat template"),
        ("{{ raise_exception('roles must alternate') }}", BadReason.TEMPLATE_ERROR, "roles must alternate"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ '?' if add_generation_prompt }}",
            "prompt_mismatch",
            "1",
        ),
        (EACH + 2 * "{% generation %}{% endgeneration %}", BadReason.NO_TARGETS, "no token of an answer"),
        (f"{EACH}{{% generation %}}a{{% endgeneration %}}", "marks_mismatch", "marks 1 places for 2 turns"),
        (
            f"{EACH}{{% set x %}}{{% generation %}}a{{% endgeneration %}}{{% endset %}}{{{{ x | length }}}}",
            "marks_mismatch",
            "changes",
        ),
    ],
)
def test_templates_that_do_not_fit(
    folder_of: Callable[..., str], template: str | None, reason: BadReason, words: str
) -> None:
    with pytest.raises(BadRowError, match=words) as raised:
        encoder(folder_of(template))({"messages": TALK})
    assert raised.value.reason == reason


def test_marks_that_are_not_one_a_turn_cannot_leave_a_turn_out(folder_of: Callable[..., str]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% generation %}!{% endgeneration %}{% endfor %}"
    encode = encoder(folder_of(template))
    assert learned(encode({"messages": TALK})[0]) == "!!!!"
    with pytest.raises(BadRowError, match="marks 4 places for 2 turns"):
        encode({"messages": with_keys(1, weight=0)})


def test_templates_with_variables_and_a_date(folder_of: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text(
        "{{ kind }} {{ strftime_now('%d %b %Y, %H') }} {{ messages[0].content }}"
        "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    )
    keys = {"chat_template": str(file), "chat_template_kwargs": {"kind": "short"}}
    (row,) = encoder(folder_of(read("phi")), **keys)({"messages": TALK[:2]})
    assert (text_of(row), learned(row)) == ("short 26 Jul 2024, 00 onetwo", "two")


def test_files_and_names_of_templates(folder_of: Callable[..., str], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}</s>{% endfor %}"
    (expected,) = encoder(folder_of(template), loss_on="all")({"messages": TALK})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "own.jinja").write_text(template)
    several = library_tokenizer(None)
    several.chat_template = {"default": "{{ messages[0].content }}", "plain": template}
    several.save_pretrained(tmp_path / "several")
    several.chat_template = None
    for name, tokenizer in (
        (str(tmp_path / "chat_template.json"), folder_of(None)),
        (str(tmp_path / "own.jinja"), folder_of(None)),
        ("plain", str(tmp_path / "several")),
    ):
        (row,) = encoder(tokenizer, chat_template=name, loss_on="all")({"messages": TALK})
        assert row.tokens.tolist() == expected.tokens.tolist()
    with pytest.raises(ConfigError, match=r"or one of the tokenizer's templates \(default, plain\)"):
        encoder(str(tmp_path / "several"), chat_template="other")({"messages": TALK})


@pytest.mark.parametrize(
    "content",
    [
        '{"template": "{{ messages }}"}',
        '{"chat_template": 3}',
        '["{{ messages }}"]',
        "<!DOCTYPE html><p>{{ messages }}",
        "\n<html>{{ a }}",
        "version https://git-lfs.github.com/spec/v1",
        "",
    ],
)
def test_files_that_hold_no_template(folder_of: Callable[..., str], tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    write_rows(tmp_path / "a.jsonl", {"messages": [TALK]})
    data = data_config(tmp_path / "a.jsonl", tokenizer=folder_of(None), chat_template=str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match=r"^data\.chat_template is .*, must hold a Jinja template, or JSON"):
        prepare_local(data, out_dir=str(tmp_path / ".out"))


def test_reasons_can_be_printed(folder_of: Callable[..., str], tmp_path: Path) -> None:
    """Templates repeat in their errors what no encoding writes."""
    template = "{{ raise_exception('role ' + messages[0].role + ' of ' + messages[0].content) }}"
    roles = ["us\ud800er", "é"]
    lines = [{"messages": [{"role": role, "content": "\udcff"}, ANSWER], "\ud801": 1} for role in roles]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "a", "\ud801": 1}]))
    made = prepare_local(data_config(tmp_path, tokenizer=folder_of(template)), out_dir=str(tmp_path / ".out"))
    assert [row.detail for row in made.named_bad_rows] == [
        r"TemplateError: role us\ud800er of \udcff",
        r"TemplateError: role é of \udcff",
    ]
    assert made.account.ignored_columns == {r"\ud801": 1}


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow", ".stream.arrow"])
@pytest.mark.parametrize("column", ["messages", "dialog"])
def test_rows_of_every_format(folder_of: Callable[..., str], tmp_path: Path, ending: str, column: str) -> None:
    """Tables fill what a message does not have with nulls."""
    calling = [OPENAI[0], USER, *OPENAI[2:]]  # a column of a table holds text or parts, not both
    rows = [calling, TALK, [USER], with_keys(1, weight=0)]
    write_rows(tmp_path / f"a{ending}", {column: rows, "tools": [json.dumps([TOOL]), None, None, None]})
    keys = {"tokenizer": folder_of(unmarked(read("chatml"))), "text_column": column}
    made = prepare_local(data_config(tmp_path, **keys), out_dir=str(tmp_path / ".out"))
    encode = encoder(keys["tokenizer"])
    expected = [
        encode({"messages": row, "tools": [TOOL] if row is calling else None})[0] for row in rows if row != [USER]
    ]
    assert stored_rows(made) == [(row.tokens.tolist(), row.labels.tolist()) for row in expected]
    assert made.bad_rows == {"no_targets": 1}
    (bad,) = made.named_bad_rows
    assert (bad.row, bad.detail) == (2, "no message of the assistant enters the loss")


def test_samples_of_a_row_do_not_shift_the_numbers_of_others(
    folder_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfcp.data.sources.PIECE_BYTES", 150)
    write_rows(tmp_path / "a.jsonl", {"messages": [TALK, TALK, [USER], TALK, [USER]]})
    data = data_config(tmp_path, tokenizer=folder_of(unmarked(read("thinking"))))
    made = prepare_local(data, out_dir=str(tmp_path / ".out"))
    assert (made.num_rows, [row.row for row in made.named_bad_rows]) == (6, [2, 4])


def test_text_goes_before_conversations_and_a_column_may_be_named(
    folder_of: Callable[..., str], tmp_path: Path
) -> None:
    for ending in (".jsonl", ".parquet"):
        folder = tmp_path / ending[1:]
        folder.mkdir()
        write_rows(folder / f"a{ending}", {"text": ["plain"], "messages": [TALK]})
        keys = {"tokenizer": folder_of(read("phi"))}
        for column, expected in (("text", ["plain</s>"]), ("messages", ["two<|end|>\nfour<|end|>\n"])):
            data = data_config(folder, text_column=column, **keys)
            made = prepare_local(data, out_dir=str(tmp_path / f".{ending[1:]}-{column}"))
            decode = library_tokenizer(None).decode
            assert [decode([mark for mark in labels if mark >= 0]) for _, labels in stored_rows(made)] == expected


def test_prepared_data_depend_on_the_template(folder_of: Callable[..., str], tmp_path: Path) -> None:
    def fingerprint(path: str, **keys: Any) -> str:
        data = data_config(path, **keys)
        return fingerprint_of(data, files=discover(data).files)

    rows = write_rows(tmp_path / "a.jsonl", {"text": ["a"]})
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    marked, plain = folder_of(read("phi")), folder_of(unmarked(read("phi")))
    kinds = [
        {"tokenizer": marked},
        {"tokenizer": plain},
        {"tokenizer": plain, "chat_template": str(tmp_path / "t.jinja")},
        {"tokenizer": plain, "loss_on": "all"},
        {"tokenizer": plain, "chat_template_kwargs": {"a": 1}},
    ]
    assert len({fingerprint(rows, **keys) for keys in kinds}) == len(kinds)
    assert len({fingerprint(str(tmp_path / "a.txt"), **keys) for keys in kinds}) == 1
    with pytest.raises(ConfigError, match=r"data.chat_template is '/absent', which cannot be read"):
        fingerprint(rows, tokenizer=plain, chat_template="/absent")


def test_samples_without_targets_are_told(folder_of: Callable[..., str], tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {"messages": [TALK, [{**USER, "content": 40 * "one"}, ANSWER]]})
    folder = str(tmp_path / ".out")
    prepare_local(data_config(tmp_path, tokenizer=folder_of(read("phi"))), out_dir=folder)
    told = LengthIndex.open(folder, max_seqlen=100).lines()
    assert "2 sequences (1 without targets)" in told[0] and "cut by data.max_seqlen=100 from 1 row" in told[0]
    assert told[1].endswith("1 have their targets beyond data.max_seqlen=100; raise it")
    assert not any(
        "target" in line.replace("not targets", "") for line in LengthIndex.open(folder, max_seqlen=999).lines()
    )
