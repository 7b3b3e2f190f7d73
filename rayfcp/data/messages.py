"""Conversations of rows in one form: OpenAI's `messages`, ShareGPT's `conversations`, prompt and completion, Alpaca's
instruction and output."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.values.counted import counted

Message = dict[str, Any]

BESIDE = ("tools", "functions", "system")
"""Columns that are read beside every form of conversation; `functions` is OpenAI's old name of tools."""
Forms = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""Required columns of each form, with the optional ones that it reads. A row is read in the first form that it fits."""
CHAT_FORMS: Forms = (
    (("messages",), BESIDE),
    (("conversations",), BESIDE),
    (("prompt", "completion"), BESIDE),
    (("instruction", "output"), ("input", "history", *BESIDE)),
)
"""Columns that make a row a conversation."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thoughts, which templates name differently."""
KNOWN_KEYS = frozenset(("role", "content", "tool_calls", "name", "tools", *REASONING_KEYS))
"""Keys of messages that a template must render; others may be left out."""
_LOSS_KEYS = ("weight", "train", "loss", "loss_scale")
"""Keys whose value 0 or false keeps a message of the assistant out of the loss."""
_UNREAD_LOSS_KEYS = ("train_detail", "training_detail")
"""Keys that say which characters of a message are trained."""


_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "function_response": "tool",
    "tool_response": "tool",
    "function": "tool",
}
"""Other names of roles, by those of chat templates."""
_CALLING_ROLES = ("function_call", "tool_call")
"""Roles whose content is a call as JSON text, or a list of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages as chat templates take them, and the functions that the assistant may call. `trained`: the numbers of
    the assistant's messages that may enter the loss, ascending. `left_out`: names of keys that were removed from all
    messages. `pictures`: images and videos of
    each message; empty until they are read.

    A content is a text, or, with images, a list of parts of type `text`, `image` and `video`. If a message names an
    image, its part has the key `reference` until the image is read.
    """

    messages: tuple[Message, ...]
    trained: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    left_out: tuple[str, ...] = ()
    pictures: tuple[tuple[Any, ...], ...] = ()

    @property
    def turns(self) -> tuple[int, ...]:
        """The numbers of all messages of the assistant."""
        return tuple(number for number, message in enumerate(self.messages) if message["role"] == "assistant")


def read_chat(record: Mapping[str, Any]) -> Chat:
    """Return the conversation of a row in one of `CHAT_FORMS`.

    Of `prompt` and `completion`, which are lists of messages here, only the completion's messages are trained. A
    message with `weight: 0`, `train: false` or `loss: false` is not. `system` becomes the first message.

    Raises:
        BadRowError: Messages, their weights or the tools have other types or values.
    """
    prompt, rest = _parts(record)
    prompt, rest = _with_system(record.get("system"), prompt=prompt, rest=rest)
    given = [*prompt, *rest]
    messages = tuple(map(_message, given))
    if not messages:
        raise BadRowError(BadReason.EMPTY)
    trained = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= len(prompt) and _is_trained(given[number], number)
    ]
    left_out = {f"messages.content.{key}" for each in given for key in _keys_of_parts(each)}
    left_out |= {
        f"messages.{key} of {message['role']}"
        for each, message in zip(given, messages, strict=True)
        for key in _LOSS_KEYS
        if message["role"] != "assistant" and each.get(key)
    }
    return Chat(messages=messages, trained=tuple(trained), tools=_tools_of(record), left_out=tuple(sorted(left_out)))


def with_calls_as_text(chat: Chat) -> Chat:
    """Return the conversation with arguments of calls as JSON text, which some templates (DeepSeek's) need."""

    def written(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    messages = (
        {**each, "tool_calls": list(map(written, each["tool_calls"]))} if "tool_calls" in each else each
        for each in chat.messages
    )
    return replace(chat, messages=tuple(messages))


def messages_in(value: Any) -> Any:
    """Return the messages that a text holds as JSON, which tables need if keys of messages differ; any other value
    as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            messages = found if isinstance(found, list) else [found]
            if messages and all(map(role_of, messages)):
                return messages
    return value


def role_of(given: Any) -> str | None:
    """The role of a message as chat templates name it; None if it has none."""
    role = (given.get("role") or given.get("from")) if isinstance(given, Mapping) else None
    if not isinstance(role, str):
        return None
    # ShareGPT's name of results; with the key `role` it is one that some templates render themselves.
    return "tool" if role == "observation" and "role" not in given else _ROLES.get(role, role)


def instructed(record: Mapping[str, Any]) -> list[Any]:
    """Return the messages before the answer of an Alpaca row: its history, then instruction and input, a line each.

    Raises:
        BadRowError: They are not texts.
    """
    history: list[Any] = []
    for pair in _listed(record.get("history") or [], name="history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _bad("history must be a list of pairs of texts, a question and its answer")
        history += [_said(role, text, name="history") for role, text in zip(("user", "assistant"), pair, strict=True)]
    texts = [record[name] for name in ("instruction", "input") if record.get(name)]
    if not all(isinstance(text, str) for text in texts):
        raise _bad("instruction and input must be text")
    return [*history, _said("user", "\n".join(texts), name="instruction")]


def _parts(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages that are not trained, and the others."""
    for name in ("messages", "conversations"):
        value = record.get(name)
        if value is not None:
            return [], _listed(_parsed(value, name=name) if isinstance(value, str) else value, name=name)
    if record.get("instruction") is not None:
        answer = _said("assistant", record.get("output"), name="output")
        return [], [*instructed(record), answer]
    prompt, completion = (_listed(messages_in(record.get(name)), name=name) for name in ("prompt", "completion"))
    return prompt, completion


def _said(role: str, text: Any, *, name: str) -> Message:
    if not isinstance(text, str):
        raise _bad(f"{name} must be text, is {type(text).__name__}")
    return {"role": role, "content": text}


def _with_system(system: Any, *, prompt: list[Any], rest: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages after one for the column `system`, which the first message may repeat."""
    if not system:
        return prompt, rest
    message = _message(_said("system", system, name="system"))
    first = next(iter([*prompt, *rest]), None)
    if role_of(first) == "system":
        if _joined(_message(first)) != _joined(message):
            raise _bad("the column system and the first message are two system messages; leave one out")
        return prompt, rest
    return ([message, *prompt], rest) if prompt else (prompt, [message, *rest])


def _joined(message: Message) -> str:
    return "".join(texts_of(message["content"])).strip()


def _listed(value: Any, *, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _bad(f"{name} must be a list, is {type(value).__name__}")
    return list(value)


def _bad(detail: str) -> BadRowError:
    return BadRowError(BadReason.BAD_MESSAGES, detail)


def _is_trained(message: Mapping[str, Any], number: int) -> bool:
    is_trained = True
    for name in _LOSS_KEYS:
        value = message.get(name)
        if value is not None and value not in (0, 1):
            raise BadRowError(BadReason.BAD_WEIGHT, f"{name} of message {number} is {value!r}, must be 0 or 1")
        is_trained &= value is None or bool(value)
    if unread := next((name for name in _UNREAD_LOSS_KEYS if message.get(name)), None):
        raise BadRowError(BadReason.BAD_WEIGHT, f"{unread} of message {number} is not read: give weight 0 or 1")
    return is_trained


def _message(given: Any) -> Message:
    """Return the message with role and content, from OpenAI's or ShareGPT's keys, without keys that have no value."""
    if not isinstance(given, Mapping):
        raise _bad("messages must be objects with role and content, or with from and value")
    message = {
        name: value
        for name, value in given.items()
        if name not in _LOSS_KEYS and value is not None and not (isinstance(value, list | dict) and not value)
    }
    if "role" not in given and "from" in given:
        message = _of_sharegpt(given, message)
    role = role_of(given)
    if not role:
        raise _bad("a message has no role")
    if (given.get("role") or given.get("from")) in _CALLING_ROLES:
        calls = _parsed(
            str(_content(message.pop("content", ""))), name=f"a message of {given.get('role') or given['from']}"
        )
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
    if role != "assistant" and "content" not in message and (others := sorted(message.keys() - _WITHOUT_TEXT)):
        raise _bad(f"a message of {role} has no content, but {', '.join(others[:4])}")
    for key in message.keys() & _TEXT_KEYS:
        if not isinstance(message[key], str):
            raise _bad(f"{key} of a message must be text, is {type(message[key]).__name__}")
    message["role"] = role
    message["content"] = _content(message.get("content"))
    if calls := _calls(message):
        message["tool_calls"] = calls
    if (
        role == "assistant"
        and not calls
        and isinstance(message["content"], str)
        and not any(message.get(key, "").strip() for key in ("content", *REASONING_KEYS))
    ):
        raise _bad("a message of the assistant is empty")
    return message


_TEXT_KEYS = frozenset(("name", *REASONING_KEYS))
_WITHOUT_TEXT = frozenset(("role", "name", "tool_call_id", "tools"))
"""Keys that are never a message's text under another name."""


def _calls(message: Message) -> list[Message]:
    """Return the calls of a message. OpenAI's old form of a call is removed from the message."""
    calls = _listed(message.pop("tool_calls", []), name="tool_calls")
    if call := message.pop("function_call", None):
        calls = [*calls, call]
    return [_call(call) for call in calls]


def _of_sharegpt(given: Mapping[str, Any], message: Message) -> Message:
    role, value = message.pop("from", None), message.pop("value", "")
    if not isinstance(role, str) or not isinstance(given.get("value"), str):
        raise _bad("from and value of a message must be text")
    return {**message, "content": value}


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _content(value: Any) -> str | list[Message]:
    """Return the text of a content, which may come in parts; the parts if one is an image."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list | tuple):
        raise _bad(f"a content must be text or a list of parts, is {type(value).__name__}")
    parts = list(map(_part, value))
    return parts if any(part["type"] != "text" for part in parts) else "".join(texts_of(parts))


PICTURE_MARK = re.compile(r"<(image|video)>")
"""Marks of images in texts."""
PICTURE_TYPES = {"image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video"}
"""Kinds of parts, keyed by type, which may also be the key of the reference."""
_REFERENCE_KEYS = frozenset((*PICTURE_TYPES, "url", "path", "bytes", "base64"))
_SIZE_KEYS = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
_TIME_KEYS = ("nframes", "num_frames", "min_frames", "max_frames", "fps", "sample_fps", "video_start", "video_end")
_UNREAD_KEYS = frozenset(("text", *_SIZE_KEYS, *_TIME_KEYS))
"""Keys of an image's part that are refused, since they would change its tokens."""


def check_marks(num_marks: int, num_images: int, *, kind: str) -> None:
    """
    Raises:
        BadRowError: The numbers differ.
    """
    if num_marks != num_images:
        detail = f"{counted(num_marks, 'mark')} of {kind}s for {counted(num_images, kind)}"
        raise BadRowError(BadReason.MARKERS_MISMATCH, detail)


def _part(part: Any) -> Message:
    """Return a part with its type, and its text or the reference to its image."""
    given = _given(part)
    kind = given.get("type") or next((name for name in ("text", *PICTURE_TYPES) if name in given), None)
    if kind not in PICTURE_TYPES:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise _bad("parts of a content must be of type text, image or video")
        if pictures := sorted(given.keys() & PICTURE_TYPES.keys()):
            raise _bad(f"a part of type text has {pictures[0]}; make it a part of its own")
        return {"type": "text", "text": part["text"]}
    own = {name: given[name] for name in given.keys() & _REFERENCE_KEYS}
    others = given.keys() - own.keys() - {"type", "index"}
    if unread := sorted(others & _UNREAD_KEYS if own else others):
        raise _bad(f"a part of type {kind} has {unread[0]}, which is not read")
    if len(own) > 1 and own.keys() != {"bytes", "path"}:
        raise _bad(f"a part of type {kind} has {' and '.join(sorted(own))}; leave one of them")
    reference = own if len(own) > 1 else next(iter(own.values()), None)
    if "base64" in own:
        reference = f"data:;base64,{reference}"
    return {"type": PICTURE_TYPES[kind], "reference": reference, "index": given.get("index")}


def _given(part: Any) -> Message:
    """Return the keys of a part that have a value, with the keys inside of OpenAI's `image_url` beside them."""
    if not isinstance(part, Mapping):
        return {}
    given = dict(part)
    for name in ("image_url", "video_url"):
        if isinstance(given.get(name), Mapping):
            given |= given.pop(name)
    return {name: value for name, value in given.items() if value or isinstance(value, int | float)}


def _keys_of_parts(given: Mapping[str, Any]) -> set[str]:
    """Return the keys of a content's parts that have a value and are not read."""
    content = given.get("content")
    parts = map(_given, content) if isinstance(content, list | tuple) else ()
    return {
        str(key)
        for part in parts
        for key in part.keys() - {"type", "text"}
        if part.get("type", key) not in PICTURE_TYPES or key not in {*_REFERENCE_KEYS, "index"}
    }


def _call(given: Any) -> Message:
    """The call of a function as templates take it: with arguments as an object, which OpenAI writes as JSON text."""
    if not isinstance(given, Mapping):
        raise _bad("tool_calls must be objects")
    call = dict(given) if isinstance(given.get("function"), Mapping) else {"type": "function", "function": given}
    function = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise _bad("a tool call has no function name")
    arguments = function.get("arguments")
    if arguments is None and (
        others := sorted(name for name in function.keys() - _WITHOUT_ARGUMENTS if function[name])
    ):
        raise _bad(f"a tool call has no arguments, but {', '.join(others[:4])}")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parsed(arguments, name="arguments of a tool call")
    function["arguments"] = arguments or {}
    return {**call, "function": function}


_WITHOUT_ARGUMENTS = frozenset(("name", "arguments", "id", "type"))
"""Keys of a call that do not hold its arguments under another name."""


def _tools_of(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    tools, functions = _tools(record.get("tools")), _tools(record.get("functions"))
    if tools and functions:
        raise _bad("tools and functions are two lists of tools; leave one out")
    return tools or (functions and tuple({"type": "function", "function": each} for each in functions))


def _tools(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    """The tools; JSON text stands for the list, as tables have no other way to hold schemas that differ."""
    if value is None or value == "":
        return None
    tools = _parsed(value, name="tools") if isinstance(value, str) else value
    tools = [_parsed(tool, name="a tool") if isinstance(tool, str) else tool for tool in _listed(tools, name="tools")]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise _bad("tools must be objects")
    return tuple(tools) or None


def _parsed(text: str, *, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"{name} must be JSON: {error}") from error


def keys_beside(messages: Sequence[Message]) -> set[str]:
    """Return the keys of messages and of their calls that templates may leave out."""
    found = {f"messages.{key}" for message in messages for key in message.keys() - KNOWN_KEYS}
    for message in messages:
        for call in message.get("tool_calls", ()):
            found |= {f"messages.tool_calls.{key}" for key in call.keys() - _CALL_KEYS}
            found |= {f"messages.tool_calls.function.{key}" for key in call["function"].keys() - _FUNCTION_KEYS}
    return found


_CALL_KEYS, _FUNCTION_KEYS = frozenset(("type", "function")), frozenset(("name", "arguments"))


def without_keys(messages: Sequence[Message], names: set[str]) -> list[Message]:
    """Return the messages without the keys of these names, as `keys_beside` gives them."""

    def kept(values: Mapping[str, Any], path: str) -> Message:
        return {key: value for key, value in values.items() if f"{path}.{key}" not in names}

    found = []
    for message in messages:
        own = kept(message, "messages")
        if "tool_calls" in own:
            calls = [kept(call, "messages.tool_calls") for call in own["tool_calls"]]
            path = "messages.tool_calls.function"
            own["tool_calls"] = [{**call, "function": kept(call["function"], path)} for call in calls]
        found.append(own)
    return found
