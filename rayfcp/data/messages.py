"""Conversations of rows in one form: OpenAI's `messages`, ShareGPT's `conversations`, prompt and completion."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayfcp.data.rows import BadReason, BadRowError

Message = dict[str, Any]

CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "system")
"""Columns of rows with conversations, read where a row has neither tokens nor a text."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of roles, by that of chat templates; others are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages as chat templates take them, and the functions that the assistant may call. `trained`: the numbers of
    the assistant's messages that may enter the loss, ascending."""

    messages: tuple[Message, ...]
    trained: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def turns(self) -> tuple[int, ...]:
        """The numbers of all messages of the assistant."""
        return tuple(number for number, message in enumerate(self.messages) if message["role"] == "assistant")


def has_chat(record: Mapping[str, Any]) -> bool:
    """True if the row has a conversation, or a prompt and its completion."""
    has = {name for name in CHAT_COLUMNS if record.get(name) is not None}
    return bool(has & {"messages", "conversations"}) or {"prompt", "completion"} <= has


def read_chat(record: Mapping[str, Any]) -> Chat:
    """The conversation of a row.

    Of `prompt` and `completion`, which are lists of messages here, only the completion's messages are trained. A
    message with `weight: 0` or `train: false` is not.

    Raises:
        BadRowError: Messages, their weights or the tools are not what they should be.
    """
    given = record.get("messages")
    given = record.get("conversations") if given is None else given
    prompt = [] if given is not None else _listed(record.get("prompt"), name="prompt")
    rest = _listed(record.get("completion") if given is None else given, name="messages")
    messages = tuple(map(_message, [*prompt, *rest]))
    if record.get("conversations") is not None and isinstance(record.get("system"), str) and record["system"]:
        messages, prompt = ({"role": "system", "content": record["system"]}, *messages), [None, *prompt]
    if not messages:
        raise BadRowError(BadReason.EMPTY)
    originals = [*prompt, *rest]
    trained = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= len(prompt) and _is_trained(originals[number], number)
    ]
    return Chat(messages=messages, trained=tuple(trained), tools=_tools(record.get("tools")))


def role_of(given: Any) -> str | None:
    """The role of a message as chat templates name it; None if it has none."""
    role = (given.get("role") or given.get("from")) if isinstance(given, Mapping) else None
    return _ROLES.get(role, role) if isinstance(role, str) else None


def _listed(value: Any, *, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _bad(f"{name} must be a list of messages, is {type(value).__name__}")
    return list(value)


def _bad(detail: str) -> BadRowError:
    return BadRowError(BadReason.BAD_MESSAGES, detail)


def _is_trained(message: Mapping[str, Any], number: int) -> bool:
    for name in ("weight", "train"):
        value = message.get(name)
        if value is not None and value not in (0, 1):
            raise BadRowError(BadReason.BAD_WEIGHT, f"{name} of message {number} is {value!r}, must be 0 or 1")
        if value is not None and not value:
            return False
    return True


def _message(given: Any) -> Message:
    """The message with role and content, of OpenAI's or ShareGPT's keys."""
    if not isinstance(given, Mapping):
        raise _bad("messages must be objects with role and content, or with from and value")
    if "role" not in given and "from" in given:
        return _of_sharegpt(given)
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise _bad("a message has no role")
    message = {name: value for name, value in given.items() if name not in ("weight", "train") and value is not None}
    message["content"] = _content(message.get("content"))
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call) for call in _listed(message["tool_calls"], name="tool_calls")]
    if not message["content"] and role == "assistant" and not message.keys() - {"role", "content"}:
        raise _bad("a message of the assistant is empty")
    return message


def _of_sharegpt(given: Mapping[str, Any]) -> Message:
    role, value = given.get("from"), given.get("value")
    if not isinstance(role, str) or not isinstance(value, str):
        raise _bad("from and value of a message must be text")
    if role != "function_call":
        return _message({"role": _ROLES.get(role, role), "content": value})
    calls = _parsed(value, name="a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in calls]}


def _content(value: Any) -> str:
    """The text of a content, which may come in parts."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = _listed(value, name="a content")
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise _bad("parts of a content must be of type text; rows with images need data.processor")
    return "".join(part["text"] for part in parts)


def _call(given: Any) -> Message:
    """The call of a function as templates take it: with arguments as an object, which OpenAI writes as JSON text."""
    if not isinstance(given, Mapping):
        raise _bad("tool_calls must be objects")
    call = dict(given) if isinstance(given.get("function"), Mapping) else {"type": "function", "function": given}
    function = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise _bad("a tool call has no function name")
    if isinstance(function.get("arguments"), str) and function["arguments"].strip():
        function["arguments"] = _parsed(function["arguments"], name="arguments of a tool call")
    return {**call, "function": function}


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
