"""Rows with a chosen and a rejected answer to one prompt, from their columns to a pair of tokens and labels.

The prompt has a column of its own, or is the beginning that both answers share: of texts their first tokens, of
conversations their first messages. Terms of tokens that both share cancel in losses of pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from rayfcp.data.chat import ChatEncoder, check_texts_alone, labelled
from rayfcp.data.messages import BESIDE, Forms, instructed, read_chat, role_of
from rayfcp.data.rows import BadReason, BadRowError, TokenRow

_ANSWERS, _BESIDE = ("chosen", "rejected"), ("prompt", *BESIDE)
PAIR_FORMS: Forms = (
    ((*_ANSWERS, "prompt"), _BESIDE),
    ((*_ANSWERS, "instruction"), ("input", "history", *_BESIDE)),
    (_ANSWERS, _BESIDE),
)
"""Columns of rows with pairs, see `CHAT_FORMS`; the prompt may be an Alpaca row's instruction."""


class PairEncoder(ChatEncoder):
    """Encodes rows with `chosen` and `rejected`: two texts, or two conversations (`ChatEncoder`)."""

    def __call__(self, record: Mapping[str, Any]) -> list[TokenRow]:
        """The chosen and the rejected sample, prompt and answer each, with the answer's tokens as labels.

        Raises:
            BadRowError: Anything in the row cannot be used, or the two are the same.
        """
        answers = [_answer(record, name) for name in _ANSWERS]
        texts = [answer for answer in answers if isinstance(answer, str)]
        prompt = record.get("prompt")
        if len(texts) == 2 and isinstance(prompt, str | None) and not record.get("instruction"):
            check_texts_alone(record, what="answers of text")
            chosen, rejected = self._texts(prompt, texts)
        else:
            chosen, rejected = (self._turns(record, *parts) for parts in _conversations(record, answers))
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise BadRowError(BadReason.EQUAL_ANSWERS, "chosen and rejected are the same")
        return [chosen, replace(rejected, num_rows=0)]

    def _texts(self, prompt: str | None, answers: Sequence[str]) -> list[TokenRow]:
        if prompt is not None:
            return [self._completion(prompt, answer) for answer in answers]
        if answers[0][0] != answers[1][0]:
            raise _no_prompt()
        chosen, rejected = (self._tokens(answer, is_document=True).ids for answer in answers)
        shared = _num_shared(chosen.tolist(), rejected.tolist())
        if shared == len(chosen) == len(rejected) or self._data.loss_on == "all":
            shared = 0
        return [labelled(ids, np.arange(ids.size) >= shared) for ids in (chosen, rejected)]

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


def _answer(record: Mapping[str, Any], name: str) -> str | list[Any]:
    value = record.get(name)
    if value is None:
        raise BadRowError(BadReason.MISSING_COLUMN, name)
    if isinstance(value, Mapping):
        return [value]  # a message
    if not isinstance(value, str | list | tuple):
        raise BadRowError(BadReason.WRONG_TYPE, f"{name} is {type(value).__name__}, must be a text or messages")
    if not value:
        raise BadRowError(BadReason.EMPTY, name)
    return value if isinstance(value, str) else list(value)


def _conversations(record: Mapping[str, Any], answers: Sequence[str | list[Any]]) -> list[tuple[list[Any], list[Any]]]:
    """Return the messages of the prompt, and of each answer to it.

    Conversations that do not begin with the assistant contain their prompt; a prompt beside them must repeat it, except
    for a system message of its own. A text beside messages becomes a message: as a prompt of the user, as an answer of
    the assistant.

    Raises:
        BadRowError: There is no prompt, or two that differ.
    """
    prompt = record.get("prompt")
    chosen, rejected = (_messages(answer, role="assistant") for answer in answers)
    shared = _num_shared(chosen, rejected)
    if record.get("instruction") and prompt is None:
        before = instructed(record)
    else:
        before = [] if prompt is None else _messages(prompt, role="user")
    is_system = bool(before) and role_of(before[0]) == "system"
    first, rest = before[:is_system], before[is_system:]
    if isinstance(prompt, str):
        is_repeated = any(_text_of(each).strip() == prompt.strip() for each in chosen[:shared])
    else:
        is_repeated = rest == chosen[: min(len(rest), shared)]
    if before == chosen[: min(len(before), shared)]:
        first, is_repeated = [], True
    if is_repeated:
        before, chosen, rejected = [*first, *chosen[:shared]], chosen[shared:], rejected[shared:]
    elif not {"user", "system"}.isdisjoint((role_of(chosen[0]), role_of(rejected[0]))):
        raise BadRowError(BadReason.PROMPT_MISMATCH, "an answer has a prompt of its own, which differs from the other")
    if not before:
        raise _no_prompt()
    return [(before, chosen), (before, rejected)]


def _text_of(message: Any) -> str:
    content = (message.get("content") or message.get("value")) if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else ""


def _messages(value: Any, *, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list | tuple):
        raise BadRowError(BadReason.WRONG_TYPE, f"prompt is {type(value).__name__}, must be a text or messages")
    return list(value)


def _num_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many elements both begin with."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _no_prompt() -> BadRowError:
    return BadRowError(BadReason.NO_PROMPT, "chosen and rejected begin differently, and there is no prompt")
