"""What chat templates leave out of conversations is found, however short it is, or counted where nothing is lost."""

from collections.abc import Callable

import pytest

from rayfcp.config.data import DataConfig
from rayfcp.data.account import ReadAccount
from rayfcp.data.chat import ChatEncoder
from rayfcp.data.rows import BadReason, BadRowError
from tests.data.chat_templates import read, unmarked
from tests.data.test_chat import (  # noqa: F401  a fixture
    ALL,
    ANSWER,
    CALL_AS_TEXT,
    TALK,
    TOOL,
    USER,
    Messages,
    encoder,
    folder_of,
    learned,
    text_of,
    with_keys,
)

THOUGHT = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\ntwo"}


def test_thoughts_are_learned_or_the_row_is_bad(folder_of: Callable[..., str]) -> None:  # noqa: F811
    """Templates drop earlier thoughts by design; a turn that is trained must have its own."""
    with pytest.raises(BadRowError, match=r"the chat template of /.* leaves out content of message 1 \(assistant\)"):
        encoder(folder_of(unmarked(read("deepseek"))))({"messages": [USER, THOUGHT]})
    last = encoder(folder_of(unmarked(read("deepseek"))), loss_on="last_assistant")
    assert "why" not in text_of(last({"messages": [USER, THOUGHT, *TALK[2:]]})[0])
    (row,) = encoder(folder_of(read("phi")))({"messages": [USER, THOUGHT]})
    assert learned(row) == THOUGHT["content"] + "<|end|>\n"
    first, second = encoder(folder_of(unmarked(read("thinking"))))(
        {"messages": [USER, {**ANSWER, "reasoning_content": "why"}, *TALK[2:]]}
    )
    assert "why" in learned(first) and "why" not in text_of(second)


CALLS = "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
NAMES = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
SAID = "{% for m in messages %}<|user|>{{ m.content }}"
LOSSY = [
    # Short texts, which stand by chance in other places of the text, too.
    (f"{SAID.replace('messages', 'messages[1:]')}{CALLS}{{% endfor %}}", "content of message 0"),
    (f"{SAID.replace('m.content', 'm.content[:3]')}{CALLS}{{% endfor %}}", "content of message 0"),
    (f"{SAID.replace('m.content', 'm.content if not m.role[0] == `t`')}{CALLS}{{% endfor %}}", "content of message 3"),
    (f"{SAID}{NAMES}{{% endfor %}}", "tool_calls of message 2"),
    (f"{SAID}{CALLS}{{% endfor %}}{{{{ tools[0].function.name if tools }}}}", "tools"),
]


@pytest.mark.parametrize(("template", "missing"), LOSSY)
@pytest.mark.parametrize("content", ["a", "abcd"])
def test_what_a_template_leaves_out_is_named(
    folder_of: Callable[..., str],  # noqa: F811
    template: str,
    missing: str,
    content: str,
) -> None:
    roles = ("user", "assistant", "assistant", "tool", "assistant")
    messages: Messages = [{"role": role, "content": content} for role in roles]
    messages[2] = {"role": "assistant", "content": None, "tool_calls": [CALL_AS_TEXT]}
    encode = encoder(folder_of(template.replace("`", "'")), loss_on="all")
    with pytest.raises(BadRowError, match=f"leaves out {missing}") as raised:
        encode({"messages": messages, "tools": [TOOL] if "tools[0]" in template else None})
    assert raised.value.reason == BadReason.NOT_RENDERED


def test_texts_may_be_trimmed_escaped_and_wrapped(folder_of: Callable[..., str]) -> None:  # noqa: F811
    template = (
        "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% for m in messages %}<|user|>"
        "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
        "{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}{% endfor %}"
    )
    tool = {"type": "function", "function": {**TOOL["function"], "description": 'says "é"\n  twice'}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 'a "b"\n', "n": [1.5, {"x": None}]}}}
    messages = [
        {"role": "user", "content": "  one "},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": 'line "1"\nline 2 é'},
        {"role": "assistant", "content": "done\n"},
    ]
    assert encoder(folder_of(template), loss_on="all")({"messages": messages, "tools": [tool]})


@pytest.mark.parametrize("change", [str, unmarked])
def test_keys_that_no_template_renders_are_counted(folder_of: Callable[..., str], change: Callable[[str], str]) -> None:  # noqa: F811
    template = change(read("phi")).replace("message.content", "(message.effort or '') + message.content")
    account = ReadAccount()
    encode = ChatEncoder(DataConfig(paths="unused", tokenizer=folder_of(template)), account=account)
    encode(
        {"messages": with_keys(0, id="x", timestamp=3, content=[{"type": "text", "text": "one", "cache": {"a": 1}}])}
    )
    encode({"messages": with_keys(1, id="y", effort="high ")})
    encode({"conversations": [{"from": "human", "value": "one", "lang": "en"}, {"from": "gpt", "value": "two"}]})
    assert account.ignored_columns == {
        "messages.id": 2,
        "messages.timestamp": 1,
        "messages.content.cache": 1,
        "messages.lang": 1,
    }


def test_weights_of_other_roles_are_counted(folder_of: Callable[..., str]) -> None:  # noqa: F811
    account = ReadAccount()
    data = DataConfig(paths="unused", tokenizer=folder_of(read("phi")))
    ChatEncoder(data, account=account)({"messages": with_keys(0, weight=1)})
    ChatEncoder(data, account=account)({"messages": with_keys(0, weight=0, train=False)})
    assert account.ignored_columns == {"messages.weight of user": 1}


@pytest.mark.parametrize("name", ["escape", "tojson", "trim"])
def test_escaped_texts_are_rendered(folder_of: Callable[..., str], name: str) -> None:  # noqa: F811
    template = f"{{% for m in messages %}}<|user|>{{{{ m.content | {name} }}}}{{% endfor %}}"
    messages = [{**USER, "content": " a < b & \"c\" > 'd'\n "}, ANSWER]
    assert encoder(folder_of(template), loss_on="all")({"messages": messages})


def test_messages_after_the_last_answer_are_counted(folder_of: Callable[..., str]) -> None:  # noqa: F811
    account = ReadAccount()
    data = DataConfig(paths="unused", tokenizer=folder_of(unmarked(read("phi"))))
    ChatEncoder(data, account=account)({"messages": TALK[:3]})
    assert account.ignored_columns == {"messages after the last trained turn": 1}


OUTSIDE = read("phi").replace(
    "message.content + '<|end|>\\n' }}{% endgeneration %}", "message.content }}{% endgeneration %}<|end|>"
)


@pytest.mark.parametrize(
    ("template", "count"),
    [
        (OUTSIDE, 2),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{{ 'assistant: ' if add_generation_prompt }}",
            2,
        ),
        (read("glm"), 2),
        (unmarked(read("glm")), 2),
        *((each.template, 0) for name, each in ALL.items() if name != "glm"),
        *((unmarked(each.template), 0) for name, each in ALL.items() if name not in ("glm", "zephyr")),
    ],
)
def test_turns_without_an_end_token_are_counted(folder_of: Callable[..., str], template: str, count: int) -> None:  # noqa: F811
    folder, account = folder_of(template), ReadAccount()
    ChatEncoder(DataConfig(paths="unused", tokenizer=folder), account=account)({"messages": TALK})
    assert account.without_end == ({f"of {folder}": count} if count else {})
