"""Rows of every form that is read, drawn with what must become of each, by rules written down here again.

Texts are rendered by one template that says each thing once, so that the oracle is a concatenation of pieces: what each
message adds, and whether the assistant learns it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from rayfcp.data.rows import BadReason
from tests.data.chat_templates import library_tokenizer

TEMPLATE = (
    "{%- for tool in tools or [] %}{{- '<|im_start|>tools\n' + tool | tojson + '<|im_end|>' }}{% endfor %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}{%- generation %}"
    "{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{- m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- call.function.name + ' ' + call.function.arguments | tojson }}"
    "{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = "</s>"
Piece = tuple[str, bool]
Sample = tuple[list[int], list[int]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row: its values, the samples that it must give, or why it is bad, and names that must be counted as ignored."""

    values: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    reason: BadReason | None = None
    ignored: tuple[str, ...] = ()
    padding: int = 0


def sample_of(pieces: list[Piece]) -> Sample:
    """Tokens and labels of pieces of text, each learned or not."""
    tokens: list[int] = []
    labels: list[int] = []
    for text, is_learned in pieces:
        ids = library_tokenizer(None)(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        labels += ids if is_learned else [-100] * len(ids)
    return tokens, labels


letters = st.characters(exclude_categories=("Cs",), exclude_characters="<[|\ufdd0\ufdd1")
words = st.text(letters, min_size=1, max_size=6).map(lambda text: f"a{text}.")
CALL_NAMES = ("look", "mul")


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation: messages, tools, which messages are learned, and its names of keys that no template renders."""

    messages: list[dict[str, Any]]
    system: str | None
    tools: list[dict[str, Any]]
    ignored: tuple[str, ...]

    def pieces(self, *, first: int = 0) -> list[Piece]:
        """What the template writes; messages before `first` are not learned."""
        pieces: list[Piece] = [
            (f"<|im_start|>tools\n{json.dumps(tool, ensure_ascii=False)}<|im_end|>", False) for tool in self.tools
        ]
        if self.system is not None:
            pieces.append((f"<|im_start|>system\n{self.system}<|im_end|>", False))
        for number, message in enumerate(self.messages):
            role = {"function": "tool"}.get(message["role"], message["role"])
            is_learned = role == "assistant" and number >= first
            is_learned &= all(message.get(name, True) for name in ("weight", "train", "loss"))
            thought = message.get("reasoning_content")
            content = message.get("content") or ""
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            calls = [call["function"] for call in message.get("tool_calls", [])]
            calls += [message["function_call"]] if "function_call" in message else []
            body = (f"<think>{thought}</think>" if thought else "") + text
            for call in calls:
                given = call["arguments"]
                arguments = json.loads(given) if isinstance(given, str) else given
                body += f"{call['name']} {json.dumps(arguments, ensure_ascii=False)}"
            pieces += [(f"<|im_start|>{role}\n", False), (f"{body}<|im_end|>", is_learned)]
        return pieces


@st.composite
def answers(draw: st.DrawFn, *, plain: bool) -> dict[str, Any]:
    """A message of the assistant in one of its shapes."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(words)}
    if plain:
        return message
    shape = draw(st.sampled_from(["text", "text", "parts", "calls", "function_call", "thought"]))
    if shape == "parts":
        message["content"] = [{"type": "text", "text": text} for text in draw(st.lists(words, min_size=1, max_size=2))]
    arguments = {"at": draw(words), "n": draw(st.integers(0, 99))}
    if shape == "calls":
        given = draw(st.sampled_from([arguments, json.dumps(arguments)]))
        message |= {
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": given}}],
        }
    if shape == "function_call":
        message |= {"content": None, "function_call": {"name": "mul", "arguments": json.dumps(arguments)}}
    if shape == "thought":
        message["reasoning_content"] = draw(words)
    if draw(st.integers(0, 4)) == 0:
        message[draw(st.sampled_from(["weight", "train", "loss"]))] = draw(st.sampled_from([0, 1, False, True]))
    return message


@st.composite
def talks(draw: st.DrawFn, *, plain: bool = False) -> Talk:
    """User and assistant by turns, of which the last is learned; with tools where messages call them."""
    messages: list[dict[str, Any]] = []
    ignored = set()
    for _ in range(draw(st.integers(1, 3))):
        question = {"role": "user", "content": draw(words)}
        answer = draw(answers(plain=plain))
        messages += [question, answer]
        if "tool_calls" in answer or "function_call" in answer:
            role = "tool" if "tool_calls" in answer else "function"
            messages += [{"role": role, "content": draw(words)}, {"role": "assistant", "content": draw(words)}]
        if not plain and draw(st.integers(0, 2)) == 0:
            question["id"] = draw(st.sampled_from(["x1", "other"]))
            ignored.add("messages.id")
    for name in ("weight", "train", "loss"):
        messages[-1].pop(name, None)
    tools = [{"type": "function", "function": {"name": name, "description": draw(words)}} for name in CALL_NAMES]
    has_tools = not plain and draw(st.booleans())
    return Talk(
        messages=messages,
        system=draw(st.none() | words),
        tools=tools if has_tools else [],
        ignored=tuple(ignored),
    )


def _beside(draw: st.DrawFn, talk: Talk, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns beside messages, to whose front a system message may go instead."""
    beside: dict[str, Any] = {}
    if talk.system is not None:
        where = draw(st.sampled_from(["column", "message", "both"]))
        if where != "message":
            beside["system"] = talk.system
        if where != "column":
            messages.insert(0, {"role": "system", "content": talk.system})
    if talk.tools:
        beside["tools"] = draw(st.sampled_from([talk.tools, json.dumps(talk.tools)]))
    return beside


@st.composite
def chat_rows(draw: st.DrawFn) -> Row:
    talk = draw(talks())
    messages = [dict(each) for each in talk.messages]
    beside = _beside(draw, talk, messages)
    values = {"messages": messages, **beside}
    return Row(values=values, samples=[sample_of(talk.pieces())], ignored=talk.ignored)


@st.composite
def sharegpt_rows(draw: st.DrawFn) -> Row:
    talk = draw(talks(plain=True))
    messages = [dict(each) for each in talk.messages]
    beside = _beside(draw, talk, messages)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    said = [{"from": names[each["role"]], "value": each["content"]} for each in messages]
    ignored = ()
    if draw(st.booleans()):
        said[-1]["timestamp"], ignored = "2024", ("messages.timestamp",)
    return Row(values={"conversations": said, **beside}, samples=[sample_of(talk.pieces())], ignored=ignored)


@st.composite
def completion_rows(draw: st.DrawFn) -> Row:
    """Prompt and completion: texts, or messages of which the last is the completion."""
    if draw(st.booleans()):
        prompt, completion = draw(words), " " + draw(words)
        return Row(
            values={"prompt": prompt, "completion": completion},
            samples=[sample_of([(prompt, False), (completion + EOS, True)])],
        )
    talk = draw(talks(plain=True))
    prompt = [dict(each) for each in talk.messages[:-1]]
    beside = _beside(draw, talk, prompt)
    values = {"prompt": prompt, "completion": talk.messages[-1:], **beside}
    return Row(values=values, samples=[sample_of(talk.pieces(first=len(talk.messages) - 1))])


@st.composite
def alpaca_rows(draw: st.DrawFn) -> Row:
    instruction, given, output, past = draw(words), draw(st.sampled_from(["", "b"])), draw(words), draw(words)
    history = [[past, past]] if draw(st.booleans()) else []
    asked = instruction + (f"\n{given}" if given else "")
    texts = [*(text for pair in history for text in pair), asked, output]
    roles = ["user", "assistant"] * (len(texts) // 2)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    talk = Talk(messages=messages, system=draw(st.none() | words), tools=[], ignored=())
    values = {"instruction": instruction, "input": given, "output": output, "history": history, "system": talk.system}
    return Row(values=values, samples=[sample_of(talk.pieces())])


@st.composite
def text_rows(draw: st.DrawFn) -> Row:
    text = draw(words)
    return Row(values={"text": text}, samples=[sample_of([(text + EOS, True)])])


@st.composite
def token_rows(draw: st.DrawFn) -> Row:
    """Documents with padding around them, labels, and masks of the loss."""
    documents = draw(st.lists(st.lists(st.integers(1, 90), min_size=2, max_size=4), min_size=1, max_size=3))
    left, right = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    tokens = [0] * left + [each for own in documents for each in own] + [0] * right
    values: dict[str, Any] = {"input_ids": tokens}
    labels = list(tokens)
    kept = range(left, len(tokens) - right)
    if draw(st.booleans()):
        labels = [draw(st.sampled_from([-100, each])) if at in kept else -100 for at, each in enumerate(tokens)]
        values["labels"] = list(labels)
    for name in draw(st.sets(st.sampled_from(["loss_mask", "completion_mask", "assistant_masks"]))):
        values[name] = [draw(st.integers(0, 1)) for _ in tokens]
        labels = [each if bit else -100 for each, bit in zip(labels, values[name], strict=True)]
    if left or right or draw(st.booleans()):
        values["attention_mask"] = [int(at in kept) for at in range(len(tokens))]
    if len(documents) > 1:
        values["position_ids"] = [0] * left + [at for own in documents for at in range(len(own))] + [0] * right
    elif draw(st.booleans()):
        values["position_ids"] = list(range(len(tokens)))
    if draw(st.booleans()):
        values["token_type_ids"] = [0] * len(tokens)
    samples, start = [], left
    for own in documents:
        samples.append((own, labels[start : start + len(own)]))
        start += len(own)
    return Row(values=values, samples=samples, padding=left + right)


@st.composite
def bad_rows(draw: st.DrawFn) -> Row:
    """Rows that would lose something."""
    empty = {"role": "assistant", "content": draw(st.sampled_from(["", " \n"])), "id": "x", "tool_calls": []}
    question = {"role": "user", "content": "q"}
    values, reason = draw(
        st.sampled_from(
            [
                ({"messages": [question, empty]}, BadReason.BAD_MESSAGES),
                ({"system": "be", "prompt": "q", "completion": " a"}, BadReason.UNUSED_COLUMN),
                ({"system": "be", "text": "q"}, BadReason.UNUSED_COLUMN),
                ({"text": "q", "images": ["a.png"]}, BadReason.NO_PROCESSOR),
                ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, BadReason.MASK_MISMATCH),
                ({"input_ids": [1, 2, 3], "loss_mask": [1, 0]}, BadReason.MASK_MISMATCH),
                ({"input_ids": [1, 2, 3], "position_ids": [0, 2, 3]}, BadReason.BAD_POSITIONS),
                ({"input_ids": [1, 2, 3], "token_type_ids": [0, 1, 1]}, BadReason.MASK_MISMATCH),
                ({"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}, BadReason.UNUSED_COLUMN),
            ]
        )
    )
    return Row(values=values, reason=reason)


@st.composite
def pair_rows(draw: st.DrawFn) -> Row:
    prompt = draw(words)
    texts = draw(st.lists(words, min_size=2, max_size=2, unique=True))
    if draw(st.booleans()):
        samples = [sample_of([(prompt, False), (text + EOS, True)]) for text in texts]
        return Row(values={"prompt": prompt, "chosen": texts[0], "rejected": texts[1]}, samples=samples)
    system = draw(st.none() | words)
    question = {"role": "user", "content": prompt}
    replies = [{"role": "assistant", "content": text} for text in texts]
    samples = [
        sample_of(Talk(messages=[question, each], system=system, tools=[], ignored=()).pieces()) for each in replies
    ]
    asked: dict[str, Any] = draw(
        st.sampled_from([{"prompt": [question]}, {"prompt": prompt}, {"instruction": prompt}, {}])
    )
    first = [] if asked else [question]
    values = {"chosen": [*first, replies[0]], "rejected": [*first, replies[1]], "system": system, **asked}
    return Row(values=values, samples=samples)


@st.composite
def distilled_rows(draw: st.DrawFn) -> Row:
    row = draw(token_rows())
    count = len(row.values["input_ids"])
    table = [[at, at + 1] for at in range(count)]
    values = {**row.values, "teacher_words": table, "teacher_logits": [[0.5, 1.5]] * count}
    return Row(values=values, samples=row.samples, padding=row.padding)


FORMS = {
    "sequences": (
        text_rows, chat_rows, sharegpt_rows, completion_rows, alpaca_rows, token_rows, token_rows, chat_rows, bad_rows,
    ),
    "pairs": (pair_rows,),
    "distilled": (distilled_rows,),
}  # fmt: skip
BESIDE: dict[str, Any] = {
    "id": "x",
    "source": 3,
    "meta": ["a"],
    "score é": 0.5,
    "prompt_id": "y",
    "special_tokens_mask": [0, 1],
}
"""Columns that no form uses."""


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """Rows of one form in a file of a format, all with the same further columns."""

    ending: str
    rows: list[Row]
    beside: tuple[str, ...]


@st.composite
def row_files(draw: st.DrawFn) -> tuple[str, list[RowFile]]:
    """The kind of rows, and files of them."""
    kind = draw(st.sampled_from(["sequences", "sequences", "sequences", "pairs", "distilled"]))
    files = []
    for _ in range(draw(st.integers(1, 3))):
        form = draw(st.sampled_from(FORMS[kind]))
        rows = draw(st.lists(form(), min_size=1, max_size=2))
        beside = draw(st.sets(st.sampled_from(sorted(BESIDE))))
        ending = draw(st.sampled_from([".jsonl", ".parquet", ".arrow", ".stream.arrow", ".jsonl.gz"]))
        files.append(RowFile(ending=ending, rows=rows, beside=tuple(sorted(beside))))
    return kind, files
