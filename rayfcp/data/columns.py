"""Forms of rows: choice of the form by the columns that have values, and of the columns that it does not use."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rayfcp.data.formats import Record
from rayfcp.data.masks import MASK_COLUMNS, UNREAD_MASKS
from rayfcp.data.messages import BESIDE, CHAT_FORMS, Forms
from rayfcp.data.rows import TEACHER_COLUMNS, BadReason, BadRowError, RawRow, checked_text, printable

MEDIA_COLUMNS = ("messages", "images", "videos")
"""Columns of rows with images, read if there is a `MediaEncoder`."""
TOKEN_COLUMNS = ("input_ids", "labels", *MASK_COLUMNS)

_BESIDE_TEXT = ("tools", "system")
_PICTURES = ("images", "videos")
_VERDICTS = ("label", "kto_tag")
"""Columns that say of an answer, by true or false, whether it is good (KTO). A bad one must not be trained."""
LARGE_COLUMNS = frozenset((*TEACHER_COLUMNS, *_PICTURES))
"""Columns whose rows may hold megabytes each."""
_NAMED_COLUMNS = 8
"""Number of a row's columns that an error names."""


class RowForm(NamedTuple):
    """A form of rows: a row has it if it has values for all of `needs`. `uses`: further columns that it reads;
    `refuses`: columns without a place in it, whose values must not be lost."""

    kind: Literal["tokens", "text", "chat", "media"]
    needs: tuple[str, ...]
    uses: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.needs, *self.uses, *self.refuses)


class _Choice(NamedTuple):
    form: RowForm
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """Columns that rows are read from: tokens with their masks, a text, the media columns if `media`, conversations if
    `chat`. With `whole` only rows of these forms are read, and `chat` encodes them.

    A row is read in the first form whose needed columns it has. A text may also be a list of messages.
    """

    text: str
    media: bool = False
    chat: bool = False
    whole: Forms = ()
    _choices: dict[Any, _Choice] = field(default_factory=dict, init=False, repr=False, compare=False)

    def choose(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read of a table.

        Raises:
            BadRowError: No row of it can be used.
        """
        forms = self._forms(has_messages=False)
        if not any(set(form.needs) <= set(names) for form in forms):
            raise self.missing(names)
        known = dict.fromkeys([*(name for form in forms for name in form.columns), *_PICTURES, *_VERDICTS])
        return [name for name in known if name in names]

    def row(self, record: Record) -> RawRow:
        """Return the row of a record, with the columns that it does not use.

        Raises:
            BadRowError: It has no form, or a column without a place in its form.
        """
        values = record.values
        given = tuple(name for name, value in values.items() if value is not None)
        filled = tuple(name for name in given if not _is_empty(values[name]))
        has_messages = isinstance(values.get(self.text), list | tuple)
        key = (given, filled, has_messages, self.text in values)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choice(record, given=given, filled=filled, has_messages=has_messages)
            if len(self._choices) < _MAX_CHOICES:
                self._choices[key] = choice
        form, ignored = choice
        if record.unread:
            ignored = (*ignored, *map(printable, record.unread))
        if form.kind == "text":
            text = checked_text(values.get(self.text), name=self.text)
            return RawRow(row=record.row, text=text, ignored=ignored)
        used = {name: values[name] for name in (*form.needs, *form.uses) if values.get(name) is not None}
        if form.kind == "chat" and (verdict := next((name for name in _VERDICTS if values.get(name) is False), None)):
            raise BadRowError(BadReason.UNUSED_COLUMN, f"{verdict} is false: leave rows with bad answers out")
        if form.kind == "chat" and form.needs == (self.text,):
            used["messages"] = used.pop(self.text)
        if form.kind == "media":
            used = {"text": values.get(self.text), **used}
        columns: dict[str, Any] = {form.kind: used}
        return RawRow(row=record.row, ignored=ignored, **columns)

    def missing(self, names: Sequence[str]) -> BadRowError:
        """Return the error of a row or table whose columns fit no form."""
        if self.whole:
            absent = [name for name in self.whole[-1][0] if name not in names]
            known = f"no {' and no '.join(absent)}, which these rows need"
        else:
            known = f"neither input_ids nor {self.text}"
            known += ", messages, conversations, prompt and completion, nor instruction and output" * self.chat
        others = len(names) - _NAMED_COLUMNS
        found = ", ".join(map(printable, names[:_NAMED_COLUMNS])) + (f" and {others} more" if others > 0 else "")
        remedy = "" if self.whole else "; set data.text_column"
        if not self.whole and {"chosen", "rejected"} <= set(names):
            remedy = "; set loss.type to dpo or reward for pairs"
        return BadRowError(BadReason.MISSING_COLUMN, f"has columns {found or 'none'}, {known}{remedy}")

    def _forms(self, *, has_messages: bool) -> list[RowForm]:
        if self.whole:
            return [RowForm("chat", needs, uses) for needs, uses in self.whole]
        forms = [RowForm("tokens", ("input_ids",), TOKEN_COLUMNS, (*UNREAD_MASKS, *_PICTURES * self.media))]
        if self.media:
            forms += [RowForm("media", (name,), (*MEDIA_COLUMNS, self.text), BESIDE) for name in MEDIA_COLUMNS]
        if has_messages and self.chat:
            forms.append(RowForm("chat", (self.text,), BESIDE))
        else:
            forms.append(RowForm("text", (self.text,), refuses=_BESIDE_TEXT))
        if self.chat:
            forms += [RowForm("chat", needs, uses) for needs, uses in CHAT_FORMS]
        return forms

    def _choice(
        self, record: Record, *, given: tuple[str, ...], filled: tuple[str, ...], has_messages: bool
    ) -> _Choice:
        forms = self._forms(has_messages=has_messages)
        fitting = [form for form in forms if set(form.needs) <= set(filled)]
        fitting = fitting or [form for form in forms if set(form.needs) <= set(given)]
        if not fitting and self.text in record.values and not self.whole:
            fitting = [RowForm("text", (self.text,))]
        if not fitting:
            raise self.missing(given)
        form = fitting[0]
        # If a row also has the conversation behind its text or tokens, tools belong to that conversation.
        refused = set(form.refuses).difference(*(each.uses for each in fitting[1:] if each.kind == "chat"))
        if form.kind != "media" and not self.media:
            refused |= set(_PICTURES)
        if found := sorted(refused.intersection(filled)):
            raise self._refusal(form, found[0])
        used = {*form.needs, *form.uses}
        return _Choice(form, tuple(printable(name) for name in filled if name not in used))

    def _refusal(self, form: RowForm, name: str) -> BadRowError:
        beside = f"{name} beside {form.needs[0]}"
        if name in _PICTURES and not self.media:
            return BadRowError(BadReason.NO_PROCESSOR, f"{beside}: set data.processor, or leave the column out")
        if name in UNREAD_MASKS:
            return BadRowError(BadReason.UNUSED_COLUMN, f"{beside} is not read: give {UNREAD_MASKS[name]}")
        remedy = "leave the column out" if form.kind != "text" else "give messages, or leave the column out"
        return BadRowError(BadReason.UNUSED_COLUMN, f"{beside} has no place there: {remedy}")


_MAX_CHOICES = 1 << 12
"""Bound on remembered forms, since each row may have column names of its own."""


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict) and not value
