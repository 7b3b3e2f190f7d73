"""Conversations of rows that name the same things differently are the same."""

import json
from collections.abc import Callable

from tests.data.chat_templates import read
from tests.data.test_chat import ANSWER, SHAREGPT, TALK, USER, encoder, folder_of, learned, text_of  # noqa: F401  a fixture


def test_names_of_roles_are_the_same_under_both_keys(folder_of: Callable[..., str]) -> None:  # noqa: F811
    """What the assistant says under another name is trained, and never rendered as another's."""
    encode = encoder(folder_of(read("chatml")))
    (row,) = encode({"conversations": SHAREGPT})
    names = {"observation": "tool_response", "function_call": "tool_call"}
    for each in ({}, names):
        messages = [
            {"role": each.get(turn["from"], turn["from"]).replace("observation", "function"), "content": turn["value"]}
            for turn in SHAREGPT
        ]
        (same,) = encode({"messages": messages})
        assert (same.tokens.tolist(), same.labels.tolist()) == (row.tokens.tolist(), row.labels.tolist())
    (own,) = encode({"messages": [*TALK[:2], {"role": "observation", "content": "seen"}, TALK[3]]})
    assert "<|im_start|>observation\nseen" in text_of(own)


AS_TEXT = read("chatml").replace("call.function.arguments | tojson", "(' ' + call.function.arguments)[1:]")


def test_arguments_are_objects_or_text_as_the_template_takes_them(folder_of: Callable[..., str]) -> None:  # noqa: F811
    assert read("chatml") != AS_TEXT
    for arguments in ({"at": 1}, '{"at": 1}', {}, "", None, "{}"):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        (row,), (same,) = (encoder(folder_of(each))({"messages": messages}) for each in (read("chatml"), AS_TEXT))
        assert row.tokens.tolist() == same.tokens.tolist()
        assert ('look {"at": 1}' if arguments and len(arguments) != 2 else "look {}") in learned(row)


def test_lists_may_be_json_text(folder_of: Callable[..., str]) -> None:  # noqa: F811
    """As a column of a table holds messages whose keys differ."""
    encode = encoder(folder_of(read("chatml")))
    for name, value in (("messages", TALK), ("conversations", SHAREGPT)):
        (row,), (same,) = encode({name: value}), encode({name: json.dumps(value)})
        assert row.tokens.tolist() == same.tokens.tolist()
