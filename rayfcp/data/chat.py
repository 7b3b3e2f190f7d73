"""Rows with conversations, and rows with a prompt and its completion, from their columns to tokens and labels.

The conversation is rendered by the chat template, the whole text is tokenised once, and offsets say which tokens lie in
what the assistant wrote: between the template's marks `{% generation %}`, or, where it has none, between the
conversation up to a turn with the generation prompt and the conversation with that turn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.account import ReadAccount
from rayfcp.data.messages import BESIDE, Chat, Message, messages_in, read_chat, with_calls_as_text
from rayfcp.data.rendered import RenderedCheck, Sample
from rayfcp.data.rows import IGNORED, BadReason, BadRowError, TokenRow, checked_text, make_row, printable
from rayfcp.data.tokenizer import SpannedTokens, Tokenizer, tokenizer_of

RULES = 2
"""Part of fingerprints: raised when the tokens or labels of some row change."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Where the assistant's text begins and ends, in a text rendered for that: code points that Unicode keeps out of text
that is interchanged."""
_MARKS = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_DATE = datetime(2024, 7, 26)
"""What `strftime_now` of templates says, so that tokens do not depend on the day: the default of Llama 3's."""
_DIRECTIVES = "YymdBbAaHMSjIp"


class Span(NamedTuple):
    """Characters `[start, stop)`."""

    start: int
    stop: int


class ChatEncoder:
    """Encodes rows by `data.chat_template`, or else the tokenizer's own template, and `data.loss_on`. `account` counts
    what is left out of rows."""

    def __init__(self, data: DataConfig, *, account: ReadAccount | None = None) -> None:
        self._data = data
        self._account = ReadAccount() if account is None else account

    def __call__(self, record: Mapping[str, Any]) -> list[TokenRow]:
        """The row's samples: one, or several where the template changes earlier turns as a conversation goes on, so
        that no single text has all of them as they were written.

        Raises:
            BadRowError: Anything in it cannot be used, or no token would enter the loss.
        """
        prompt, completion = (messages_in(record.get(name)) for name in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            check_texts_alone(record, what="a prompt and a completion of text")
            samples = [self._completion(prompt, completion)]
        else:
            samples = self._conversation(read_chat(record))
        return [replace(sample, num_rows=int(not number)) for number, sample in enumerate(samples)]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_of(self._data)

    @cached_property
    def _template(self) -> str | None:
        return template_text(self._data)

    @cached_property
    def _label(self) -> str:
        return self._data.chat_template or f"of {self._tokenizer.name}"

    @cached_property
    def _rendered_check(self) -> RenderedCheck:
        return RenderedCheck(label=self._label)

    @cached_property
    def _end_ids(self) -> frozenset[int]:
        """Tokens that may end a turn: the end token, and all other special ones."""
        library: Any = self._tokenizer.library
        added = (number for number, token in library.added_tokens_decoder.items() if token.special)
        return frozenset((*added, *library.all_special_ids))

    def _completion(self, prompt: str, completion: str, *, pictures: Sequence[Any] = ()) -> TokenRow:
        if not completion:
            raise BadRowError(BadReason.EMPTY, "completion")
        text = prompt + completion
        tokens = self._tokens(text, is_document=True, pictures=pictures)
        if self._data.loss_on == "all":
            return self._row(tokens, None)
        is_trained = trained_tokens(tokens, text=text, spans=[Span(len(prompt), len(text))])
        is_trained[-1] |= tokens.ids[-1] == self._tokenizer.eos_id
        return self._row(tokens, is_trained)

    def _conversation(self, chat: Chat) -> list[TokenRow]:
        """The samples of a conversation, with arguments of its calls as the template takes them: objects, or text."""
        if not chat.pictures and any(not isinstance(message["content"], str) for message in chat.messages):
            cause = "pairs have no images" if self._data.rows == "pairs" else "images need data.processor"
            raise BadRowError(BadReason.BAD_MESSAGES, f"parts of a content must be of type text: {cause}")
        try:
            return self._encoded(chat)
        except BadRowError as error:
            other = with_calls_as_text(chat)
            if error.reason != BadReason.TEMPLATE_ERROR or other == chat:
                raise
            try:
                return self._encoded(other)
            except BadRowError as second:
                raise (error if second.reason == BadReason.TEMPLATE_ERROR else second) from None

    def _encoded(self, chat: Chat) -> list[TokenRow]:
        template = self._chosen(chat)
        trained = chat.trained
        if self._data.loss_on == "last_assistant":
            trained = tuple(number for number in trained if number == chat.turns[-1])
        if not trained and self._data.loss_on != "all":
            raise BadRowError(BadReason.NO_TARGETS, "no message of the assistant enters the loss")
        texts = self._rendered_texts(chat, trained, template=template)
        render = partial(self._text_of, template=_dated(template))
        rows = []
        for sample, spans in texts:
            self._rendered_check.check(chat, sample, template=template, render=render)
            rows.append(
                self._sample(sample, spans, pictures=[each for own in chat.pictures[: sample.stop] for each in own])
            )
        for name in self._rendered_check.unused_keys(chat, template=template, render=render):
            self._account.count("ignored_columns", printable(name))
        if texts[-1][0].stop < len(chat.messages):
            self._account.count("ignored_columns", "messages after the last trained turn")
        return rows

    def _rendered_texts(
        self, chat: Chat, trained: tuple[int, ...], *, template: str
    ) -> list[tuple[Sample, list[Span] | None]]:
        """Return the rendered texts of the conversation, each with the spans of its trained turns; None if all is
        trained."""
        render = partial(self._rendered, chat, template=_dated(template))
        last = len(chat.messages)
        if self._data.loss_on == "all":
            return [
                (Sample(render(), stop=last, turns=chat.turns[-1:] if chat.turns[-1:] == (last - 1,) else ()), None)
            ]
        if _MARKS.search(template):
            return [(Sample(render(), stop=last, turns=trained), self._marked(chat, trained, template=template))]
        return _by_turns(trained, render=render)

    def _sample(self, sample: Sample, spans: list[Span] | None, *, pictures: Sequence[Any]) -> TokenRow:
        text = sample.text
        tokens = self._tokens(text, is_document=False, pictures=pictures)
        row = self._row(tokens, None if spans is None else trained_tokens(tokens, text=text, spans=spans))
        without_end = self._without_end(tokens, text=text, spans=[Span(0, len(text))] if spans is None else spans)
        if without_end:
            self._account.count("without_end", self._label, by=without_end)
        return row

    def _without_end(self, tokens: SpannedTokens, *, text: str, spans: list[Span]) -> int:
        """Count the turns whose last token before trailing white space does not end a turn."""
        ends = [span.stop for span in spans]
        for number, span in enumerate(spans):
            while ends[number] > span.start and text[ends[number] - 1].isspace():
                ends[number] -= 1
        last = np.minimum(np.searchsorted(tokens.stops, ends), tokens.ids.size - 1)
        return sum(token not in self._end_ids for token in tokens.ids[last].tolist())

    def _row(self, tokens: SpannedTokens, is_trained: npt.NDArray[np.bool_] | None) -> TokenRow:
        """Return the row of `tokens`; all are targets if `is_trained` is None."""
        return make_row(tokens.ids) if is_trained is None else labelled(tokens.ids, is_trained)

    def _tokens(self, text: str, *, is_document: bool, pictures: Sequence[Any] = ()) -> SpannedTokens:  # noqa: ARG002
        """Return the tokens of a text. Only `RowEncoder` has `pictures` for its marks."""
        return self._tokenizer.encode_spans(checked_text(text, name="text"), is_document=is_document)

    def _chosen(self, chat: Chat) -> str:
        """The template for this conversation: some tokenizers have one of its own for tools."""
        library = self._tokenizer.library
        if library is None or (self._template is None and not library.chat_template):
            key = "tokenizer" if self._data.processor is None else "processor"
            raise BadRowError(
                BadReason.NO_CHAT_TEMPLATE,
                f"data.{key} {self._tokenizer.name!r} must be a Hugging Face tokenizer with a chat template; name "
                "one, or set data.chat_template beside a tokenizer without",
            )
        return str(self._template or library.get_chat_template(None, list(chat.tools) if chat.tools else None))

    def _rendered(self, chat: Chat, stop: int | None = None, *, template: str, prompt: bool = False) -> str:
        """The text of the messages before `stop`, with the generation prompt after it if `prompt`."""
        return self._text_of(chat.messages[:stop], chat.tools, template=template, prompt=prompt)

    def _text_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        template: str,
        prompt: bool = False,
    ) -> str:
        library: Any = self._tokenizer.library
        try:
            return str(
                library.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    chat_template=template,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **self._data.chat_template_kwargs,
                )
            )
        except Exception as error:  # a template is a program
            raise BadRowError(BadReason.TEMPLATE_ERROR, f"{type(error).__name__}: {error}") from error

    def _marked(self, chat: Chat, trained: tuple[int, ...], *, template: str) -> list[Span]:
        """What lies between the template's marks, of the trained turns.

        The library tells places by what it has rendered before, which is wrong for marks inside of `set` blocks; so the
        marks are rendered as characters, and taken out again.
        """
        pieces = re.split(f"([{_OPEN}{_CLOSE}])", self._rendered(chat, template=_with_marks(_dated(template))))
        plain = self._rendered(chat, template=_dated(template))
        places = list(accumulate((len(piece) for piece in pieces[::2]), initial=0))[1:]
        marks = "".join(pieces[1::2])
        if "".join(pieces[::2]) != plain or marks != (_OPEN + _CLOSE) * (len(marks) // 2):
            raise BadRowError(
                BadReason.MARKS_MISMATCH, "the chat template changes its text by what stands between generation marks"
            )
        spans = list(map(Span, places[:-1:2], places[1::2]))
        if trained == chat.turns and len(spans) >= len(trained):
            return spans
        if len(spans) != len(chat.turns):
            raise BadRowError(
                BadReason.MARKS_MISMATCH,
                f"the template marks {len(spans)} places for {len(chat.turns)} turns, {len(trained)} of them trained",
            )
        return [span for span, turn in zip(spans, chat.turns, strict=True) if turn in trained]


def check_texts_alone(record: Mapping[str, Any], *, what: str) -> None:
    """
    Raises:
        BadRowError: The row has a system message or tools, which nothing renders beside texts.
    """
    if name := next((name for name in BESIDE if record.get(name)), None):
        raise BadRowError(BadReason.UNUSED_COLUMN, f"{name} beside {what} has no place there: give lists of messages")


def template_text(data: DataConfig) -> str | None:
    """Return the template of `data.chat_template`, None if it is not set. The key names a file with a template, a JSON
    file with one in the key `chat_template`, or one of the tokenizer's templates.

    Raises:
        ConfigError: The file cannot be read, or is something else.
    """
    name = data.chat_template
    if name is None:
        return None
    own = getattr(tokenizer_of(data).library, "chat_template", None)
    named: Mapping[str, str] = own if isinstance(own, Mapping) else {}
    if name in named and not Path(name).exists():
        return named[name]
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = f", or one of the tokenizer's templates ({', '.join(named)})" if named else ""
        raise ConfigError(
            f"data.chat_template is {name!r}, which cannot be read: {error}; give a file with a Jinja template{names}"
        ) from error
    found = _template_in(text)
    if found is None:
        raise ConfigError(
            f"data.chat_template is {name!r}, must hold a Jinja template, or JSON with one in its key chat_template; "
            "give such a file"
        )
    return found


def _template_in(text: str) -> str | None:
    """Return the template that a file holds; None if there is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = {"chat_template": text}
    found = values.get("chat_template") if isinstance(values, dict) else None
    if not isinstance(found, str) or not re.search(r"\{[{%]", found):
        return None
    return None if re.match(r"\s*<(!doctype|html)\b", found, flags=re.IGNORECASE) else found


def without_marks(template: str) -> str:
    """Return the template without its generation marks."""
    return _MARKS.sub("", template)


def chat_fingerprint(data: DataConfig) -> list[Any]:
    """Everything beside the tokenizer that the tokens and labels of conversations depend on."""
    template = template_text(data) or getattr(tokenizer_of(data).library, "chat_template", None)
    return [RULES, template, data.chat_template_kwargs, data.loss_on]


@lru_cache(maxsize=8)
def _with_marks(template: str) -> str:
    """The template with characters for its marks. The block that follows, or goes before, keeps what the mark said on
    white space around it."""

    def characters(mark: re.Match[str]) -> str:
        left, end, right = mark.groups(default="")
        if end:
            return f'{{%{left} set _ = 0 %}}{{{{ "{_CLOSE}" }}}}{{% endgeneration {right}%}}'
        return f'{{%{left} generation %}}{{{{ "{_OPEN}" }}}}{{% set _ = 0 {right}%}}'

    return _MARKS.sub(characters, template)


@lru_cache(maxsize=8)
def _dated(template: str) -> str:
    """The template with a fixed date in place of today's, if it asks for that."""
    if "strftime_now" not in template:
        return template
    replaced = "".join(f'|replace("%{each}", "{_DATE.strftime("%" + each)}")' for each in _DIRECTIVES)
    # The newline is dropped by the library's settings; the template begins at the start of a line, as it does alone.
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def _by_turns(trained: tuple[int, ...], *, render: Any) -> list[tuple[Sample, list[Span] | None]]:
    """Texts in which each trained turn stands once, as it follows its generation prompt, and where.

    The conversation up to the last turn is a text. Turns that stand differently in it (models for reasoning drop
    earlier thoughts) are in texts of their own, each up to the last turn that is left.
    """
    spans: dict[int, Span] = {}
    ends: dict[int, str] = {}
    for turn in trained:
        if not turn:
            raise BadRowError(BadReason.PROMPT_MISMATCH, "the conversation begins with the assistant")
        before = render(turn, prompt=True)
        ends[turn] = render(turn + 1)
        if not ends[turn].startswith(before):
            raise BadRowError(
                BadReason.PROMPT_MISMATCH,
                f"message {turn} does not follow the generation prompt in the chat template; give data.chat_template a "
                "template with generation marks",
            )
        spans[turn] = Span(len(before), len(ends[turn]))
    texts: list[tuple[Sample, list[Span] | None]] = []
    left = trained
    while left:
        text = ends[left[-1]]
        inside = tuple(turn for turn in left if text.startswith(ends[turn]))
        texts.append((Sample(text, stop=left[-1] + 1, turns=inside), [spans[turn] for turn in inside]))
        left = tuple(turn for turn in left if turn not in inside)
    return texts[::-1]


_SOLID = np.array([not chr(code).isspace() for code in range(0x3002)])
"""False for white space; the last stands for all code points after it."""


def trained_tokens(tokens: SpannedTokens, *, text: str, spans: list[Span]) -> npt.NDArray[np.bool_]:
    """Which tokens lie in the spans, `[tokens]`. White space does not count: a token that begins with the space before
    a span is in it.

    Raises:
        BadRowError: A token has text of both sides of a border.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    solid = _SOLID[np.minimum(codes, len(_SOLID) - 1)]
    inside = np.zeros(codes.size, dtype=bool)
    for span in spans:
        inside[span.start : span.stop] = True
    sums = [np.concatenate([[0], np.cumsum(values)]) for values in (solid, solid & inside, inside)]
    stops = tokens.stops
    # Some tokenizers leave white space out of a token's offsets: it belongs to the token that follows.
    before = np.concatenate([[0], np.maximum.accumulate(stops)[:-1]])
    starts = np.where(sums[0][tokens.starts] > sums[0][before], tokens.starts, np.minimum(before, tokens.starts))
    num_solid, solid_inside, num_inside = (each[stops] - each[starts] for each in sums)
    across = np.flatnonzero((solid_inside > 0) & (solid_inside < num_solid))
    if across.size:
        found = text[starts[across[0]] : stops[across[0]]]
        raise BadRowError(
            BadReason.TOKEN_ACROSS_BORDER, f"the token {found!r} is partly in the loss; separate the two with a space"
        )
    is_trained: npt.NDArray[np.bool_] = np.where(num_solid > 0, solid_inside > 0, num_inside > 0)
    return is_trained


def labelled(ids: npt.NDArray[np.int32], is_trained: npt.NDArray[np.bool_]) -> TokenRow:
    """The row of these tokens, of which the trained ones are the labels.

    Raises:
        BadRowError: No token is trained.
    """
    row = make_row(ids, labels=np.where(is_trained, ids, IGNORED))
    if not row.num_targets:
        raise BadRowError(BadReason.NO_TARGETS, "no token of an answer is left")
    return row
