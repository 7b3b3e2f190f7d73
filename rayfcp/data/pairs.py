"""Rows with a chosen and a rejected answer to one prompt, from their columns to a pair of tokens and labels.

The prompt has a column of its own, or is the beginning that both answers share: of texts their first tokens, of
conversations their first messages. Terms of tokens that both share cancel in losses of pairs. Where a row has both a
prompt and answers that begin alike, every text is rendered once:

| prompt | answers | both begin with the prompt | with a part of it | with none of it |
| --- | --- | --- | --- | --- |
| text | texts | it counts once | refused | prompt, then answer |
| text | messages, a user's first | a message of theirs has it: it counts once | refused | refused |
| messages | messages, a user's first | it counts once, with the system message of either | refused | refused |
| any | messages, the assistant's first | | refused | prompt, then answer |

Refused rows have the reason `PROMPT_MISMATCH`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from rayfcp.data.chat import ChatEncoder, check_texts_alone, labelled
from rayfcp.data.messages import BESIDE, KNOWN_KEYS, Forms, Message, instructed, messages_in, read_chat, role_of
from rayfcp.data.rows import BadReason, BadRowError, TokenRow

_ANSWERS, _INSTRUCTED = ("chosen", "rejected"), ("instruction", "input", "history")
_LIKE_PROMPTS = (*_INSTRUCTED, "question", "query", "context")
"""Columns that may hold a prompt. Unless an instruction is the prompt, they must repeat a part of it."""
PAIR_FORMS: Forms = ((_ANSWERS, ("prompt", *_LIKE_PROMPTS, "margin", *BESIDE)),)
"""Columns of rows with pairs, see `CHAT_FORMS`; the prompt may be an Alpaca row's instruction."""

_SYSTEM = ("system", "developer")
_WORD, _WORDS = re.compile(r"\w\W"), re.compile(r"\w\W+\w")
"""Patterns of a word with its end, and of two words. Two texts may share less than a word by chance, and answers may
begin with the last word of a prompt by chance, e.g. "the"."""


class PairEncoder(ChatEncoder):
    """Encodes rows with `chosen` and `rejected`: two texts, or two conversations (`ChatEncoder`)."""

    def __call__(self, record: Mapping[str, Any]) -> list[TokenRow]:
        """The chosen and the rejected sample, prompt and answer each, with the answer's tokens as labels.

        Raises:
            BadRowError: Anything in the row cannot be used, or the two are the same.
        """
        if record.get("margin"):
            raise BadRowError(
                BadReason.UNUSED_COLUMN, "margin beside chosen is not subtracted from rewards: leave the column out"
            )
        answers = [_answer(record, name) for name in _ANSWERS]
        texts = [answer for answer in answers if isinstance(answer, str)]
        prompt, is_instructed = messages_in(record.get("prompt")), False
        if not prompt and record.get("instruction"):
            prompt, is_instructed = instructed(record), True
        if len(texts) == 2 and isinstance(prompt, str | None):
            check_texts_alone(record, what="answers of text")
            told, (chosen, rejected) = self._texts(prompt, texts)
        else:
            before, *after = _conversations(prompt, answers)
            told = "\n".join(str(message["content"]) for message in _compared(before))
            chosen, rejected = (self._turns(record, before, answer) for answer in after)
        self._check_told(record, told, others=_LIKE_PROMPTS[len(_INSTRUCTED) * is_instructed :])
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise BadRowError(BadReason.EQUAL_ANSWERS, "chosen and rejected are the same")
        return [chosen, replace(rejected, num_rows=0)]

    def _texts(self, prompt: str | None, answers: Sequence[str]) -> tuple[str, list[TokenRow]]:
        """Return the prompt and the two samples."""
        if prompt is None:
            return self._documents(answers)
        shared, end = answers[0][: _num_shared(*answers)], len(prompt.rstrip())
        if 0 < end < min(map(len, answers)) and shared.startswith(prompt[:end]):
            prompt, answers = prompt[:end], [answer[end:] for answer in answers]
        elif _repeats_part(prompt, shared) or _is_repeated_once(prompt, answers):
            raise _mismatch("do not repeat the whole of")
        return prompt, [self._completion(prompt, answer) for answer in answers]

    def _documents(self, answers: Sequence[str]) -> tuple[str, list[TokenRow]]:
        """Return the prompt and the two samples of texts that begin with it."""
        chosen, rejected = (self._tokens(answer, is_document=True) for answer in answers)
        shared = _num_shared(chosen.ids.tolist(), rejected.ids.tolist())
        prompt = answers[0][: chosen.stops[shared - 1] if shared else 0]
        if answers[0] != answers[1] and not _WORD.search(prompt):
            raise _no_prompt("begin with other words")
        if shared == len(chosen.ids) == len(rejected.ids) or self._data.loss_on == "all":
            shared = 0
        return prompt, [labelled(ids, np.arange(ids.size) >= shared) for ids in (chosen.ids, rejected.ids)]

    def _turns(self, record: Mapping[str, Any], prompt: list[Any], answer: list[Any]) -> TokenRow:
        beside = {name: record.get(name) for name in BESIDE}
        samples = self._conversation(read_chat({"prompt": prompt, "completion": answer, **beside}))
        if len(samples) > 1:
            raise BadRowError(
                BadReason.PROMPT_MISMATCH,
                "the chat template changes earlier turns of the answer; set data.loss_on to last_assistant, or "
                "data.chat_template to one with generation marks",
            )
        return samples[0]

    def _check_told(self, record: Mapping[str, Any], prompt: str, *, others: Sequence[str]) -> None:
        """Count the columns that repeat a part of the prompt.

        Raises:
            BadRowError: One holds something else.
        """
        for name in (name for name in others if record.get(name)):
            value = record[name]
            if not isinstance(value, str) or value.strip() not in prompt:
                raise BadRowError(
                    BadReason.UNUSED_COLUMN,
                    f"{name} beside chosen is not read, and not a part of the prompt: put it into the column prompt, "
                    "or leave it out",
                )
            self._account.count("ignored_columns", name)


def _answer(record: Mapping[str, Any], name: str) -> str | list[Any]:
    value = messages_in(record.get(name))
    if value is None:
        raise BadRowError(BadReason.MISSING_COLUMN, name)
    if not value and isinstance(value, str | list | tuple):
        raise BadRowError(BadReason.EMPTY, name)
    return value if isinstance(value, str) else _messages(value, name=name, role="assistant")


def _conversations(prompt: Any, answers: Sequence[str | list[Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages of the prompt, and of each answer to it, by the table above.

    A text beside messages becomes a message: as a prompt of the user, as an answer of the assistant.

    Raises:
        BadRowError: There is no prompt, or two that differ.
    """
    is_blank = isinstance(prompt, str) and not prompt.strip()
    before = [] if prompt is None or is_blank else _messages(prompt, name="prompt", role="user")
    chosen, rejected = (_messages(answer, name="an answer", role="assistant") for answer in answers)
    num_shared = _num_shared(_compared(chosen), _compared(rejected))
    shared = chosen[:num_shared]
    if any(role_of(answer[0]) in ("user", *_SYSTEM) for answer in (chosen, rejected)) or not before:
        before = _with_repeated(before, shared, is_text=isinstance(prompt, str)) if before else shared
        chosen, rejected = chosen[num_shared:], rejected[num_shared:]
        if all(role_of(each) in _SYSTEM for each in before) and "user" in map(role_of, [*chosen[:1], *rejected[:1]]):
            before = []
    elif shared and any(each in _compared(before) for each in _compared(shared)):
        raise _mismatch("repeat a part of")
    if not before:
        raise _no_prompt("begin with other messages")
    return before, chosen, rejected


def _with_repeated(prompt: list[Any], shared: list[Any], *, is_text: bool) -> list[Any]:
    """Return the messages that both answers share, after the system message of the prompt, which they must repeat.

    Raises:
        BadRowError: They do not repeat the prompt, or have another system message.
    """
    known, found = _compared(prompt), _compared(shared)
    if is_text:
        is_repeated = known[0]["content"] in [message["content"] for message in found]
        first = []
    else:
        own, others = (each[: bool(each) and each[0]["role"] in _SYSTEM] for each in (known, found))
        rest = known[len(own) :]
        is_repeated = rest == found[len(others) :][: len(rest)] and (not others or own in ([], others))
        first = [] if others else prompt[: len(own)]
    if not shared or not is_repeated:
        raise _mismatch("do not repeat the whole of")
    return [*first, *shared]


def _compared(messages: Sequence[Any]) -> list[Message]:
    """Return messages with the keys that templates render, without white space around texts."""
    if not messages:
        return []
    return [
        {key: value.strip() if isinstance(value, str) else value for key, value in message.items() if key in KNOWN_KEYS}
        for message in read_chat({"messages": list(messages)}).messages
    ]


def _messages(value: Any, *, name: str, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        return [value]  # a message
    if not isinstance(value, list | tuple):
        raise BadRowError(BadReason.WRONG_TYPE, f"{name} is {type(value).__name__}, must be a text or messages")
    return list(value)


def _repeats_part(prompt: str, shared: str) -> bool:
    """True if the beginning that both answers share is the prompt's first line or its end, or holds the whole prompt.
    One word is not enough."""
    sizes = range(min(len(shared), len(prompt)), 0, -1)
    end = shared[: next((size for size in sizes if prompt.endswith(shared[:size])), 0)]
    whole = prompt.strip()
    own, others = (text.lstrip().partition("\n")[:2] for text in (prompt, shared))
    found = [end, whole if whole in shared else "", own[0] if own == others else ""]
    return any(map(_WORDS.search, found))


def _is_repeated_once(prompt: str, answers: Sequence[str]) -> bool:
    whole = prompt.strip()
    return bool(_WORDS.search(whole)) and any(answer.lstrip().startswith(whole) for answer in answers)


def _num_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Number of elements that both begin with."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _mismatch(what: str) -> BadRowError:
    return BadRowError(
        BadReason.PROMPT_MISMATCH, f"the answers {what} the prompt: leave it out of them, or repeat all of it in both"
    )


def _no_prompt(what: str) -> BadRowError:
    return BadRowError(BadReason.NO_PROMPT, f"chosen and rejected {what}, and there is no column prompt")
