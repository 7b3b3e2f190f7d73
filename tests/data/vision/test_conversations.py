"""Conversations and texts with images give the tokens, labels, reasons and ignored columns of the same rows with a
character in place of each image."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayfcp.config.data import DataConfig
from rayfcp.config.evaluation import EvalSetConfig
from rayfcp.data import LengthIndex, PreparedManifest, TokenReader, prepare_local
from rayfcp.data.rows import BadReason
from rayfcp.data.vision.decoding import read_part, sample_items
from rayfcp.data.vision.processors import ImageTokenizer, load_processor
from tests.data.chat_templates import unmarked
from tests.data.makers import data_config, stored_rows
from tests.data.rows_of_every_form import TEMPLATE, alpaca_rows, chat_rows, completion_rows, sharegpt_rows, text_rows
from tests.data.vision.makers import image, saved
from tests.examples import examples

SHOW = (
    "{%- macro show(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for p in content %}"
    "{%- if p.type == 'text' %}{{- p.text }}{%- else %}{{- {'image': 'IMAGE', 'video': 'VIDEO'}[p.type] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{%- endmacro %}"
)
SHOWN = SHOW + TEMPLATE.replace("m.content", "show(m.content)")
LAST_THOUGHT = unmarked(SHOWN).replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")
TEMPLATES = {"marked": SHOWN, "unmarked": unmarked(SHOWN), "last thought": LAST_THOUGHT}
STAND_INS = {"\ue000": "image", "\ue001": "video"}
"""Characters in place of images."""
SIZES = ((40, 40), (40, 70), (64, 33), (30, 90))
FAMILIES = ("qwen", "intern")


class Processors(NamedTuple):
    """Folders of processors, keyed by family and template."""

    folders: dict[tuple[str, str], str]

    def __call__(self, family: str, template: str = "marked") -> ImageTokenizer:
        return load_processor(self.folders[family, template])


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory, qwen: ImageTokenizer, intern: ImageTokenizer) -> Processors:
    folder, found = tmp_path_factory.mktemp("with-templates"), {}
    for own, family in ((qwen, "qwen"), (intern, "intern")):
        for name, template in TEMPLATES.items():
            copied = shutil.copytree(own.name, folder / family / name)
            text = template.replace("IMAGE", own.family.image_marker).replace("VIDEO", own.family.video_marker)
            (copied / "chat_template.jinja").write_text(text)
            found[family, name] = str(copied)
    return Processors(found)


CONTENTS = ("history", "text", "instruction", "input", "output", "messages", "conversations", "prompt", "completion")
"""Columns with contents, in reading order."""
Change = Callable[..., Any]


def changed(values: dict[str, Any], change: Change) -> dict[str, Any]:
    """The row with `change` of each of its contents, in order. `parts`: a list of parts may stand there."""

    def message(given: dict[str, Any]) -> dict[str, Any]:
        key = "value" if "value" in given else "content"
        content = given[key]
        if given.get("role") == "system" or given.get("from") == "system":
            return given
        if isinstance(content, list):
            content = [{**part, "text": change(part["text"], parts=False)} for part in content]
        elif content is not None:
            content = change(content, parts=key == "content")
        return {**given, key: content}

    new = dict(values)
    for name in (name for name in CONTENTS if values.get(name)):
        column = values[name]
        if isinstance(column, str):
            new[name] = change(column, parts=False)
        elif name == "history":
            new[name] = [[change(text, parts=False) for text in pair] for pair in column]
        else:
            new[name] = list(map(message, column))
    return new


class Given(NamedTuple):
    """A row with stand-ins, and the row with its images, each a list of files."""

    plain: dict[str, Any]
    shown: dict[str, Any]
    pictures: list[list[str]]


@st.composite
def picture_rows(draw: st.DrawFn) -> Given:
    form = draw(st.sampled_from([chat_rows, chat_rows, sharegpt_rows, completion_rows, alpaca_rows, text_rows]))
    values = draw(form()).values
    assume(not set(STAND_INS) & set(json.dumps(values, ensure_ascii=False)))

    def with_stand_ins(text: str, parts: bool) -> str:
        for stand_in in draw(st.lists(st.sampled_from(sorted(STAND_INS)), max_size=2)):
            at = draw(st.integers(0, len(text)))
            text = text[:at] + stand_in + text[at:]
        return text

    pictures: list[list[str]] = []
    columns: dict[str, list[Any]] = {"image": [], "video": []}

    def mark(kind: str, *, may_name: bool) -> tuple[str, Any]:
        count = 1 if kind == "image" else draw(st.integers(2, 4))
        size = draw(st.integers(0, len(SIZES) - 1))
        files = [f"{size}-{draw(st.integers(0, 1))}.png" for _ in range(count)]
        pictures.append(files)
        reference = files[0] if kind == "image" else files
        if may_name and draw(st.booleans()):
            return kind, {"type": kind, kind: reference}
        columns[kind].append(reference)
        return kind, {"type": kind}

    def with_pictures(text: str, parts: bool) -> Any:
        use_parts = parts and draw(st.booleans())
        found = [(sign, mark(STAND_INS[sign], may_name=use_parts) if sign in STAND_INS else None) for sign in text]
        if not use_parts:
            return "".join(f"<{own[0]}>" if own else sign for sign, own in found)
        return [own[1] if own else {"type": "text", "text": sign} for sign, own in found]

    plain = changed(values, with_stand_ins)
    shown = changed(plain, with_pictures)
    return Given(plain, {**shown, "images": columns["image"], "videos": columns["video"]}, pictures)


def prepared(folder: Path, row: dict[str, Any], **keys: Any) -> PreparedManifest:
    """The row beside a text, so that not all are bad."""
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(SIZES):
        for seed in (0, 1):
            (folder / f"{number}-{seed}.png").write_bytes(saved(image(*size, seed=seed)))
    lines = [json.dumps(each) + "\n" for each in ({"text": "good"}, row)]
    (folder / "rows.jsonl").write_text("".join(lines))
    return prepare_local(data_config(folder / "rows.jsonl", **keys), out_dir=str(folder / "out"))


def stored_files(made: PreparedManifest) -> list[list[bytes]]:
    """The files of each sample, in the order of their places."""
    reader, index = TokenReader(made), LengthIndex.open(made.folder, max_seqlen=1 << 20)
    return [
        [
            read_part(reader, sample, first=int(first), num_bytes=int(size))
            for _, places in sample_items(reader, sample)
            for first, size in places
        ]
        for sample in index.samples(range(len(index)))
    ]


def with_images(
    tokens: list[int],
    labels: list[int],
    *,
    tokenizer: ImageTokenizer,
    pictures: list[list[str]],
    hidden: frozenset[int],
) -> tuple[list[int], list[int]]:
    """The sample with the library's expansion in place of each stand-in: its tokens are labels if the stand-in is one,
    without the `hidden`."""
    family, left = tokenizer.family, iter(pictures)
    codes = {tuple(tokenizer.encode(sign)[:-1].tolist()): kind for sign, kind in STAND_INS.items()}
    new_tokens, new_labels, at = list[int](), list[int](), 0
    while at < len(tokens):
        kind = codes.get(tuple(tokens[at : at + 3]))
        if kind is None:
            new_tokens.append(tokens[at])
            new_labels.append(labels[at])
            at += 1
            continue
        files = next(left)
        size = SIZES[int(files[0][0])]
        grid = family.image_grid(size) if kind == "image" else family.video_grid(size, len(files))
        marker = family.image_marker if kind == "image" else family.video_marker
        own = tokenizer.library(family.expanded(marker, [grid], fps=None).text, add_special_tokens=False)["input_ids"]
        new_tokens += own
        is_label = labels[at] != -100
        new_labels += [token if is_label and token not in hidden else -100 for token in own]
        at += 3
    return new_tokens, new_labels


@pytest.mark.parametrize("family", FAMILIES)
@examples(60)
@given(
    row=picture_rows(),
    template=st.sampled_from(sorted(TEMPLATES)),
    loss_on=st.sampled_from(["assistant", "last_assistant", "all"]),
    has_targets=st.sampled_from([False, False, True]),
)
def test_rows_are_those_of_the_text_path(
    processors: Processors, family: str, row: Given, template: str, loss_on: str, has_targets: bool
) -> None:
    tokenizer = processors(family, template)
    hidden = frozenset() if has_targets else tokenizer.family.marks
    name = tokenizer.name
    with tempfile.TemporaryDirectory() as folder:
        plain = prepared(Path(folder, "plain"), row.plain, tokenizer=name, loss_on=loss_on)
        keys: dict[str, Any] = {"processor": name, "loss_on": loss_on, "picture_targets": has_targets}
        shown = prepared(Path(folder, "shown"), row.shown, **keys)
        assert (shown.bad_rows, shown.account) == (plain.bad_rows, plain.account)
        expected = [
            with_images(*each, tokenizer=tokenizer, pictures=row.pictures, hidden=hidden) for each in stored_rows(plain)
        ]
        assert stored_rows(shown) == expected
        signs = [sum(tokens.count(token) for token in tokenizer.picture_marks) for tokens, _ in expected]
        files = [Path(folder, "shown", name).read_bytes() for own in row.pictures for name in own]
        for count, own in zip(signs, stored_files(shown), strict=True):
            assert own == files[: len(own)]
            assert bool(own) == bool(count)


@pytest.mark.parametrize("family", FAMILIES)
@examples(30)
@given(row=picture_rows(), kind=st.sampled_from(["images", "videos"]), is_more=st.booleans())
def test_marks_and_pictures_must_match(
    processors: Processors, family: str, row: Given, kind: str, is_more: bool
) -> None:
    column = row.shown[kind]
    assume(is_more or column)
    assume("text" not in row.shown or any(row.pictures))  # a text without marks is a caption, whatever has pictures
    other = [*column, "0-0.png" if kind == "images" else ["0-0.png"] * 2] if is_more else column[:-1]
    with tempfile.TemporaryDirectory() as folder:
        values = {**row.shown, kind: other}
        made = prepared(Path(folder, "in"), values, processor=processors(family).name, loss_on="all")
        assert made.bad_rows == {BadReason.MARKERS_MISMATCH: 1}


USER, ANSWER = {"role": "user", "content": "<image>Q?"}, {"role": "assistant", "content": "A cat."}
END = "<|im_end|>"
TALK = [USER, ANSWER]
AGAIN = [*TALK, {"role": "user", "content": "And <video>?"}, {"role": "assistant", "content": "B"}]
CALL = {"type": "function", "function": {"name": "zoom", "arguments": '{"x": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ONE, BOTH = {"images": ["0-0.png"]}, {"images": ["0-0.png"], "videos": [["1-0.png", "1-1.png"]]}


def of_parts(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Q?"}]}, ANSWER]}


USED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "answers": ({"messages": AGAIN, **BOTH}, {}, f"A cat.{END}B{END}"),
    "last answer": ({"messages": AGAIN, **BOTH}, {"loss_on": "last_assistant"}, f"B{END}"),
    "weight": ({"messages": [USER, {**ANSWER, "weight": 0}, *AGAIN[2:]], **BOTH}, {}, f"B{END}"),
    "train": ({"messages": [*AGAIN[:3], {**AGAIN[3], "train": False}], **BOTH}, {}, f"A cat.{END}"),
    "system": ({"messages": TALK, "system": "be", **ONE}, {}, f"A cat.{END}"),
    "calls": (
        {"messages": [USER, CALLS, {"role": "tool", "content": "k"}, ANSWER], "tools": [CALL], **ONE},
        {},
        f'zoom {{"x": 1}}{END}A cat.{END}',
    ),
    "picture of a tool": (
        {"messages": [USER, CALLS, {"role": "tool", "content": [{"type": "video"}]}, ANSWER], **BOTH},
        {},
        f'zoom {{"x": 1}}{END}A cat.{END}',
    ),
    "thoughts": ({"messages": [USER, {**ANSWER, "reasoning_content": "t"}], **ONE}, {}, f"<think>t</think>A cat.{END}"),
    "column": ({"chat": TALK, **ONE}, {"text_column": "chat"}, f"A cat.{END}"),
    "JSON text": ({"messages": json.dumps(TALK), **ONE}, {}, f"A cat.{END}"),
    "conversations": (
        {"conversations": [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "A"}], **ONE},
        {},
        f"A{END}",
    ),
    "completion": ({"prompt": "<image>Q", "completion": " A", **ONE}, {}, f" A{END}"),
    "completion of messages": ({"prompt": [USER], "completion": [ANSWER], **ONE}, {}, f"A cat.{END}"),
    "instruction": ({"instruction": "<image>Q", "output": "A", **ONE}, {}, f"A{END}"),
    "typed part": ({**of_parts({"type": "image", "text": None}), **ONE}, {}, f"A cat.{END}"),
    "numbered part": ({**of_parts({"type": "image", "index": 0}), **ONE}, {}, f"A cat.{END}"),
    "part with a key of its type": (of_parts({"type": "image", "image": "0-0.png"}), {}, f"A cat.{END}"),
    "part without a type": (of_parts({"image": "0-0.png"}), {}, f"A cat.{END}"),
    "part with a URL": (of_parts({"type": "image_url", "image_url": {"url": "0-0.png"}}), {}, f"A cat.{END}"),
    "part with a path": (of_parts({"type": "image", "path": "0-0.png"}), {}, f"A cat.{END}"),
    "part of a response": (of_parts({"type": "input_image", "image_url": "0-0.png"}), {}, f"A cat.{END}"),
    "part with frames": (of_parts({"type": "video", "video": ["0-0.png"] * 3}), {}, f"A cat.{END}"),
    "mark in a part": ({**of_parts({"type": "text", "text": "<image>"}), **ONE}, {}, f"A cat.{END}"),
    "own picture and column": (
        {**of_parts({"type": "image", "image": "1-0.png"}, {"type": "image"}), **ONE},
        {},
        f"A cat.{END}",
    ),
    "no pictures": ({"messages": [{"role": "user", "content": "Q"}, ANSWER], "images": []}, {}, f"A cat.{END}"),
}
REFUSED: dict[str, tuple[dict[str, Any], BadReason, str]] = {
    "all out of the loss": ({"messages": [USER, {**ANSWER, "train": False}], **ONE}, BadReason.NO_TARGETS, "no mess"),
    "mark alone": ({"messages": TALK}, BadReason.MARKERS_MISMATCH, "1 mark of images for 0 images"),
    "picture alone": ({"messages": AGAIN[2:], **BOTH}, BadReason.MARKERS_MISMATCH, "0 marks of images for 1 image"),
    "mark in a text": ({"text": "a <image>"}, BadReason.MARKERS_MISMATCH, "1 mark of images for 0 images"),
    "mark of a video in a text": ({"text": "<video>"}, BadReason.MARKERS_MISMATCH, "1 mark of videos for 0 videos"),
    "mark in thoughts": (
        {"messages": [{"role": "user", "content": "Q"}, {**ANSWER, "reasoning_content": "<image>"}]},
        BadReason.MARKERS_MISMATCH,
        "<image> stands where no image can be",
    ),
    "mark and part": (
        {**of_parts({"type": "image"}, {"type": "text", "text": "<image>"}), **ONE},
        BadReason.MARKERS_MISMATCH,
        "2 marks of images for 1 image",
    ),
    "named twice": (
        {**of_parts({"type": "image", "image": "0-0.png"}), **ONE},
        BadReason.MARKERS_MISMATCH,
        "1 mark of images for 2 images",
    ),
    "other number": (
        {**of_parts({"type": "image", "index": 1}), **ONE},
        BadReason.MARKERS_MISMATCH,
        "index 1 in a part of type image, which stands for number 0",
    ),
    "rules of its own": (
        of_parts({"type": "image", "image": "0-0.png", "max_pixels": 9}), BadReason.BAD_MESSAGES, "has max_pixels"
    ),
    "unknown form": (of_parts({"type": "image", "source": {"data": "x"}}), BadReason.BAD_MESSAGES, "has source"),
    "two references": (
        of_parts({"type": "image", "image": "0-0.png", "url": "1-0.png"}), BadReason.BAD_MESSAGES, "has image and url"
    ),
    "text and picture": (
        of_parts({"type": "text", "text": "a", "image": "0-0.png"}), BadReason.BAD_MESSAGES, "type text has image"
    ),
    "sound": (of_parts({"type": "audio", "audio": "a.wav"}), BadReason.BAD_MESSAGES, "must be of type text, image or"),
    "tools beside a text": (
        {"text": "<image>", "tools": [CALL], **ONE}, BadReason.UNUSED_COLUMN, "tools beside text has no place"
    ),
    "system beside a completion": (
        {"prompt": "<image>", "completion": "a", "system": "be", **ONE}, BadReason.UNUSED_COLUMN, "system beside prompt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", USED)
def test_forms_that_are_used(processors: Processors, tmp_path: Path, family: str, form: str) -> None:
    row, keys, trained = USED[form]
    tokenizer = processors(family)
    made = prepared(tmp_path / "in", row, processor=tokenizer.name, **keys)
    labels = [token for token in stored_rows(made)[-1][1] if token != -100]
    assert labels == tokenizer.library(trained, add_special_tokens=False)["input_ids"], made.named_bad_rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", REFUSED)
def test_forms_that_are_refused(processors: Processors, tmp_path: Path, family: str, form: str) -> None:
    row, reason, detail = REFUSED[form]
    made = prepared(tmp_path / "in", row, processor=processors(family).name)
    (bad,) = made.named_bad_rows
    assert (bad.reason, detail in bad.detail) == (reason, True), bad


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_pictures_without_pictures_are_refused(processors: Processors, tmp_path: Path, family: str) -> None:
    tokenizer = processors(family)
    for number, (token, kind) in enumerate(tokenizer.picture_marks.items()):
        text = str(tokenizer.library.convert_ids_to_tokens(token))
        for form, row in enumerate(
            ({"text": f"a{text}b"}, {"input_ids": [5, token, 6]}, {"input_ids": [5, 6], "labels": [5, token]})
        ):
            made = prepared(tmp_path / f"{number}-{form}", row, processor=tokenizer.name)
            (bad,) = made.named_bad_rows
            assert bad.reason == BadReason.MARKERS_MISMATCH
            assert bad.detail.startswith(f"1 mark of {kind}s") and bad.detail.endswith(f"for 0 {kind}s")


def test_unread_keys_are_counted(processors: Processors, tmp_path: Path) -> None:
    url = {"url": "0-0.png", "detail": "low"}
    row = {**of_parts({"type": "image_url", "image_url": url, "id": "x"}), "source": "web"}
    row["messages"][1] = {**ANSWER, "score": 3}
    made = prepared(tmp_path / "in", row, processor=processors("qwen").name)
    names = ("source", "messages.content.detail", "messages.content.id", "messages.score")
    assert made.account.ignored_columns == dict.fromkeys(names, 1)


def test_sources_and_evaluation_sets_have_rules_of_their_own(processors: Processors, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(Path(processors("qwen").name, "chat_template.jinja").read_text() + "{{ mood }}")
    own = {"loss_on": "all", "chat_template": str(tmp_path / "t.jinja"), "chat_template_kwargs": {"mood": "sad"}}
    row = {"messages": TALK, **ONE}
    made = prepared(tmp_path / "in", row, processor=processors("qwen").name)
    data = DataConfig.model_validate(
        {"sources": {"a": {"paths": ["a"], **own}}, "processor": processors("qwen").name, "max_bad_fraction": 1.0}
    )
    paths = (str(tmp_path / "in" / "rows.jsonl"),)
    of_set = EvalSetConfig.model_validate({"paths": paths, **own}).source(data)
    of_source = data.of(data.sources["a"].model_copy(update={"paths": paths}))
    first, second = (
        stored_rows(prepare_local(each, out_dir=str(tmp_path / name)))[-1]
        for name, each in (("source", of_source), ("set", of_set))
    )
    tokens, labels = stored_rows(made)[-1]
    assert first == second
    assert first[0] == [*tokens, *processors("qwen").encode("sad")[:-1].tolist()]
    assert labels.count(-100) > first[1].count(-100) == 1


def test_templates_that_take_lists_alone(processors: Processors, tmp_path: Path) -> None:
    """Templates of some processors take lists alone; a template that takes texts alone has no place for images."""
    whole = SHOWN.replace("content is string", "false").replace("IMAGE", processors("qwen").family.image_marker)
    row = {"messages": [{"role": "system", "content": "be"}, *TALK], **ONE}
    (tmp_path / "lists.jinja").write_text(whole)
    (tmp_path / "texts.jinja").write_text(TEMPLATE)
    found = {
        name: prepared(
            tmp_path / name, row, processor=processors("qwen").name, chat_template=str(tmp_path / f"{name}.jinja")
        )
        for name in ("lists", "texts")
    }
    made = prepared(tmp_path / "own", row, processor=processors("qwen").name)
    assert stored_rows(found["lists"]) == stored_rows(made)
    assert found["texts"].bad_rows == {BadReason.TEMPLATE_ERROR: 1}
