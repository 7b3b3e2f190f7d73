"""Find what a chat template leaves out of a conversation: texts, thoughts, calls and tools must appear in the rendered
text.

Two checks complement each other. A probe renders a conversation of the same shape whose texts are unique words, once
for each shape: it finds what a template never renders, however short the text. Then each text of a row is searched in
its rendering: that finds what a template drops because of its content, e.g. thoughts between tags.
"""

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rayfcp.data.messages import REASONING_KEYS, Chat, Message, keys_beside, texts_of, without_keys
from rayfcp.data.rows import BadReason, BadRowError

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str]
"""Return the text of messages and tools; raises BadRowError."""

_THOUGHT = re.compile(r"</?think(?:ing)?>")
_MAX_SHAPES = 1 << 12
_WORD = "zq{}qz"
"""A word of a probe: no template has it, trims it, escapes it, or changes its case."""


class Sample(NamedTuple):
    """Text rendered from the first `stop` messages; it trains their `turns`."""

    text: str
    stop: int
    turns: tuple[int, ...]


class RenderedCheck:
    """Finds what the template `label` leaves out of conversations; remembers the shapes it has probed."""

    def __init__(self, *, label: str) -> None:
        self._label = label
        self._missing: dict[Any, str | None] = {}
        self._unused: dict[Any, tuple[str, ...]] = {}

    def check(self, chat: Chat, sample: Sample, *, template: str, render: Render) -> None:
        """Compare a rendered text with its messages. Thoughts of turns that the text does not train may be left out.

        Raises:
            BadRowError: Anything else is left out; names the template and what is missing.
        """
        messages = chat.messages[: sample.stop]
        key = (template, _shape(messages, chat.tools), sample.turns)
        if key not in self._missing:
            if len(self._missing) >= _MAX_SHAPES:
                self._missing.clear()
            self._missing[key] = _probed(messages, tools=chat.tools, turns=sample.turns, render=render)
        missing = self._missing[key] or _left_out(messages, tools=chat.tools, sample=sample)
        if missing is not None:
            raise BadRowError(
                BadReason.NOT_RENDERED,
                f"the chat template {self._label} leaves out {missing}; give one that renders it with "
                "data.chat_template, or leave it out of the row",
            )

    def unused_keys(self, chat: Chat, *, template: str, render: Render) -> tuple[str, ...]:
        """Return the keys of messages that do not change the rendered text.

        A key whose name does not stand in the template is tried once, in the first row that has it.
        """
        names = keys_beside(chat.messages)
        if not names:
            return chat.left_out
        is_named = any(re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", template) for name in names)
        key = (template, frozenset(names))
        unused = None if is_named else self._unused.get(key)
        if unused is None:
            unused = _unused(chat, names, render=render)
            if not is_named and len(self._unused) < _MAX_SHAPES:
                self._unused[key] = unused
        return (*unused, *chat.left_out)


def _unused(chat: Chat, names: set[str], *, render: Render) -> tuple[str, ...]:
    whole = render(chat.messages, chat.tools)

    def is_same(left_out: set[str]) -> bool:
        try:
            return render(without_keys(chat.messages, left_out), chat.tools) == whole
        except BadRowError:  # the template asks for the key
            return False

    return tuple(sorted(names if is_same(names) else (name for name in names if is_same({name}))))


def _shape(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> tuple[Any, ...]:
    """Return the structure of a conversation: everything but its texts."""
    return (
        tuple(
            (each["role"], *_shape_of(each["content"]), len(each.get("tool_calls", ())), *sorted(each))
            for each in messages
        ),
        None if not tools else "function" in tools[0],
    )


def _shape_of(content: Any) -> list[Any]:
    return [bool(content)] if isinstance(content, str) else [part["type"] for part in content]


def _probed(
    messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, turns: Sequence[int], render: Render
) -> str | None:
    """Return what the template leaves out of a conversation of this shape; None if nothing, or if it refuses the
    words."""
    words: dict[str, str] = {}

    def word(what: str) -> str:
        words[_WORD.format(len(words))] = what
        return list(words)[-1]

    def probe(number: int, message: Message) -> Message:
        own = dict(message)
        content, what = own["content"], _of(message, number, part="content")
        if not isinstance(content, str):
            own["content"] = [{**part, "text": word(what)} if part["type"] == "text" else part for part in content]
        elif content:
            own["content"] = word(what)
        if thoughts := [name for name in REASONING_KEYS if own.get(name)]:
            is_needed = _is_whole(message, is_trained=number in turns)
            own |= dict.fromkeys(thoughts, word(_of(message, number, part=thoughts[0])) if is_needed else "zq")
        if "tool_calls" in own:
            what = _of(message, number, part="tool_calls")
            own["tool_calls"] = [_probe_call(call, word=partial(word, what)) for call in own["tool_calls"]]
        return own

    probes = [probe(*each) for each in enumerate(messages)]
    try:
        text = render(probes, [_probe_tool(tools[0], word=word)] if tools else None)
    except BadRowError:
        return None
    return next((what for own, what in words.items() if own not in text), None)


def _probe_call(call: Mapping[str, Any], *, word: Callable[[], str]) -> Mapping[str, Any]:
    own = call["function"]
    arguments = {word(): word()}
    written = json.dumps(arguments) if isinstance(own["arguments"], str) else arguments
    return {**call, "function": {**own, "name": word(), "arguments": written}}


def _is_whole(message: Message, *, is_trained: bool) -> bool:
    return is_trained or message["role"] != "assistant"


def _probe_tool(tool: Mapping[str, Any], *, word: Callable[[str], str]) -> Mapping[str, Any]:
    own = tool.get("function", tool)
    if not isinstance(own, Mapping) or not own.get("name"):
        return tool
    name = word("tools")
    parameters = {"type": "object", "properties": {word("tools"): {"type": "string"}}}
    function = {**own, "name": name, "parameters": parameters}
    return {**tool, "function": function} if "function" in tool else function


def _of(message: Message, number: int, *, part: str) -> str:
    return f"{part} of message {number} ({message['role']})"


def _left_out(messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, sample: Sample) -> str | None:
    """Return the first text of a conversation that was not rendered, in the order of its messages."""
    text, place = sample.text, 0
    for number, message in enumerate(messages):
        is_whole = _is_whole(message, is_trained=number in sample.turns)
        for piece in _pieces(message["content"], is_whole=is_whole):
            start = 0 if message["role"] == "system" else place
            found = _find(piece, text, start=start)
            if found is None:
                return _of(message, number, part="content")
            place = max(place, found) if message["role"] != "system" else place
        for part, value in _values(message, is_whole=is_whole):
            if not _stands(value, text):
                return _of(message, number, part=part)
    for tool in tools or ():
        if missing := next((value for value in _tool_texts(tool) if not _stands(value, text)), None):
            return f"tools ({' '.join(missing.split())[:40]!r})"
    return None


def _pieces(content: Any, *, is_whole: bool) -> list[str]:
    """Return the texts of a content between tags of thoughts; only the text after the last tag unless `is_whole`."""
    found: list[str] = []
    for text in texts_of(content):
        own = [piece.strip() for piece in _THOUGHT.split(text)]
        found = own[-1:] if len(own) > 1 and not is_whole else [*found, *own]
    return found


def _values(message: Message, *, is_whole: bool) -> Iterator[tuple[str, str]]:
    """Texts of a message beside its content, without thoughts unless `is_whole`."""
    for name in (*REASONING_KEYS, "name") if is_whole else ("name",):
        if name in message:
            yield name, message[name]
    if message.get("tools"):
        yield from (("tools", text) for text in _texts(message["tools"]))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield from (("tool_calls", text) for text in (function["name"], *_texts(function.get("arguments"))))


def _texts(value: Any) -> Iterator[str]:
    """All keys and texts of JSON values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _tool_texts(tool: Mapping[str, Any]) -> Iterator[str]:
    """Names and descriptions of a tool and of its parameters."""
    own = tool.get("function", tool)
    if not isinstance(own, Mapping):
        return
    yield from (own[name] for name in ("name", "description") if isinstance(own.get(name), str))
    parameters = own.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name, each in properties.items() if isinstance(properties, Mapping) else ():
        yield name
        if isinstance(each, Mapping) and isinstance(each.get("description"), str):
            yield each["description"]


def _find(piece: str, text: str, *, start: int) -> int | None:
    """Return where a text, as it is or escaped for JSON, ends after `start` in the rendering; None if it is missing."""
    for written in _writings(piece):
        place = text.find(written, start)
        if place >= 0:
            return place + len(written)
    return start if _is_similar(piece, text[start:]) else None


def _stands(value: str, text: str) -> bool:
    return _find(value.strip(), text, start=0) is not None


def _writings(piece: str) -> Iterator[str]:
    yield piece
    yield json.dumps(piece, ensure_ascii=False)[1:-1]
    yield json.dumps(piece)[1:-1]
    yield repr(piece)[1:-1]
    yield html.escape(piece, quote=False)
    yield html.escape(piece).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")  # as Jinja writes quotes


def _is_similar(piece: str, text: str) -> bool:
    """True if the text has the piece with other white space, e.g. indented or wrapped."""
    return "".join(piece.split()) in "".join(text.split())
