"""Forms of rows: choice of the form by the columns that have values, and of the columns that it does not use."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rayfcp.data.formats import Record
from rayfcp.data.kinds import is_film, is_picture
from rayfcp.data.masks import MASK_COLUMNS, UNREAD_MASKS
from rayfcp.data.messages import BESIDE, CHAT_FORMS, PICTURE_MARK, Forms
from rayfcp.data.rows import TEACHER_COLUMNS, BadReason, BadRowError, RawRow, checked_text, printable

TOKEN_COLUMNS = ("input_ids", "labels", *MASK_COLUMNS)

_BESIDE_TEXT = ("tools", "system")
_SINGLE = ("image", "video")
_PICTURES = ("images", "videos", *_SINGLE)
"""Columns of images that a `MediaEncoder` reads beside every form but tokens; `image` and `video` hold one."""
_VERDICTS = ("label", "kto_tag")
"""Columns that rate an answer as good (true) or bad (false), as for KTO. A bad answer must not be trained."""
LARGE_COLUMNS = frozenset((*TEACHER_COLUMNS, *_PICTURES))
"""Columns whose rows may hold megabytes each."""
_FILE_NAMES = re.compile(r"(.+_)?file_names?")
"""Columns of a file `metadata.*` that name files beside it, by the rules of the library `datasets`."""
_LIKE_PICTURES = re.compile(r"(^|_|-)(image|img|pic|picture|photo|video|film|file_?name)s?(_|-|$)", re.IGNORECASE)
"""Names of columns of tables that may name images, though they are not read. These columns are checked."""
_NAMED_COLUMNS = 8
"""Number of a row's columns that an error names."""


class RowForm(NamedTuple):
    """A form of rows: a row has it if it has values for all of `needs`. `uses`: further columns that it reads;
    `refuses`: columns without a place in it, whose values must not be lost."""

    kind: Literal["tokens", "text", "chat"]
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
    """Columns that rows are read from: tokens with their masks, a text, conversations if `chat`; with `media` also
    images beside them. With `whole` only rows of these forms are read, and `chat` encodes them.

    A row is read in the first form whose needed columns it has. A text may also be a list of messages. If
    `is_metadata`, columns such as `file_name` name images, which become `images`.
    """

    text: str
    media: bool = False
    chat: bool = False
    whole: Forms = ()
    is_metadata: bool = False
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
        known.update(dict.fromkeys(name for name in names if self.is_metadata and _FILE_NAMES.fullmatch(name)))
        known.update(dict.fromkeys(name for name in names if self.media and _LIKE_PICTURES.search(name)))
        return [name for name in known if name in names]

    def row(self, record: Record) -> RawRow:
        """Return the row of a record, with the columns that it does not use.

        Raises:
            BadRowError: It has no form, or a column without a place in its form.
        """
        values = _with_pictures(record.values) if self.is_metadata else record.values
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
        if lost := next((name for name in filled if name not in form.columns and is_files(values[name])), None):
            raise self._refusal(form, lost)
        if self.media and ignored and form.kind != "tokens" and not _has_pictures(values):
            self._check_names_none(form, {name: values[name] for name in filled if name not in form.columns})
        if record.unread:
            ignored = (*ignored, *map(printable, record.unread))
        used = {name: values[name] for name in (*form.needs, *form.uses) if values.get(name) is not None}
        if form.kind == "text":
            text = checked_text(values.get(self.text), name=self.text)
            pictures = {name: used[name] for name in form.uses if name in filled}
            if not pictures and not (self.media and PICTURE_MARK.search(text)):
                return RawRow(row=record.row, text=text, ignored=ignored)
            used = {"text": text, **pictures}
        if form.kind == "chat" and (verdict := next((name for name in _VERDICTS if _is_false(values.get(name))), None)):
            raise BadRowError(BadReason.UNUSED_COLUMN, f"{verdict} is false: leave rows with bad answers out")
        if form.kind == "chat" and form.needs == (self.text,):
            used["messages"] = used.pop(self.text)
        used.update({f"{name}s": _several(used.pop(name), name) for name in _SINGLE if name in used})
        columns: dict[str, Any] = {form.kind if form.kind == "tokens" or not self.media else "media": used}
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
        pictures = _PICTURES if self.media else ()
        forms = [RowForm("tokens", ("input_ids",), TOKEN_COLUMNS, (*UNREAD_MASKS, *pictures))]
        if has_messages and self.chat:
            forms.append(RowForm("chat", (self.text,), (*BESIDE, *pictures)))
        else:
            forms.append(RowForm("text", (self.text,), pictures, _BESIDE_TEXT))
        if self.chat:
            forms += [RowForm("chat", needs, (*uses, *pictures)) for needs, uses in CHAT_FORMS]
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
        if not self.media:
            refused |= set(_PICTURES)
        if found := sorted(refused.intersection(filled)):
            raise self._refusal(form, found[0])
        if twice := next((name for name in _SINGLE if {name, f"{name}s"} <= set(filled)), None):
            raise _two_columns(twice, f"{twice}s")
        used = {*form.needs, *form.uses}
        return _Choice(form, tuple(printable(name) for name in filled if name not in used))

    def _check_names_none(self, form: RowForm, others: Mapping[str, Any]) -> None:
        """
        Raises:
            BadRowError: A column that is not read names an image or a film, and the row has no other.
        """
        if name := next((name for name, value in others.items() if _names_picture(value)), None):
            detail = f"{printable(name)} beside {form.needs[0]} names an image or a film, and the row has no other"
            raise BadRowError(BadReason.UNUSED_COLUMN, f"{detail}: name the column image or video, or leave it out")

    def _refusal(self, form: RowForm, name: str) -> BadRowError:
        shown = "file_name" if self.is_metadata and name == "images" else printable(name)
        beside = f"{shown} beside {form.needs[0]}"
        if name in _PICTURES and not self.media and not self.whole:
            detail = f"{beside}: set data.processor, of a model that reads images, or leave the column out"
            return BadRowError(BadReason.NO_PROCESSOR, detail)
        if name in UNREAD_MASKS:
            return BadRowError(BadReason.UNUSED_COLUMN, f"{beside} is not read: give {UNREAD_MASKS[name]}")
        if name not in form.refuses and name not in _PICTURES:
            detail = (
                f"{beside} holds files, bytes with their path: leave it out, or rename it to images if it holds images"
            )
            return BadRowError(BadReason.UNUSED_COLUMN, detail)
        remedy = "leave the column out" if form.kind != "text" else "give messages, or leave the column out"
        return BadRowError(BadReason.UNUSED_COLUMN, f"{beside} has no place there: {remedy}")


_MAX_CHOICES = 1 << 12
"""Bound on remembered forms, since each row may have column names of its own."""


def _is_false(value: Any) -> bool:
    return value is False or (isinstance(value, str) and value.strip().lower() == "false")


def _several(value: Any, name: str) -> list[Any]:
    """Return the value of `image` or `video` in the form of `images` or `videos`. A list is several images, or the
    frames of one video."""
    is_several = isinstance(value, list) and (name == "image" or any(isinstance(each, list) for each in value))
    return value if is_several else [value]


def is_files(value: Any) -> bool:
    """True for a file as the library `datasets` stores it (bytes and path), or a list of files."""
    if isinstance(value, list | tuple):
        return bool(value) and is_files(value[0])
    return isinstance(value, dict) and value.keys() <= {"bytes", "path"} and value.get("bytes") is not None


def _has_pictures(values: Mapping[str, Any]) -> bool:
    """True if the row has columns of images, or messages with parts, which may name images."""
    messages = (each for value in values.values() if isinstance(value, list) for each in value)
    parts = (isinstance(each, dict) and isinstance(each.get("content"), list) for each in messages)
    return any(not _is_empty(values.get(name)) for name in _PICTURES if values.get(name) is not None) or any(parts)


def _names_picture(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and _names_picture(value[0])
    if isinstance(value, dict):
        value = value.get("path") or value.get("url")
    is_name = isinstance(value, str) and len(value) <= _MAX_NAME and "\n" not in value
    return is_name and (is_picture(value) or is_film(value))


_MAX_NAME = 2048
"""Characters of the longest path or URL; longer texts are neither."""


def _with_pictures(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row's values, with images and films that columns such as `file_name` name as `images` and `videos`.

    Raises:
        BadRowError: The row has a column of images as well.
    """
    others, found = dict(values), dict[str, list[Any]]()
    for name, value in values.items():
        names = value if isinstance(value, list) else [value]
        if not _FILE_NAMES.fullmatch(name) or not names or not all(isinstance(each, str) for each in names):
            continue
        kind = "images" if all(map(is_picture, names)) else "videos" if all(map(is_film, names)) else None
        if kind is not None:
            del others[name]
            found.setdefault(kind, []).extend(names)
    if twice := next((each for kind in found for each in (kind, kind[:-1]) if others.get(each)), None):
        raise _two_columns("file_name", twice)
    return {**others, **found}


def _two_columns(first: str, second: str) -> BadRowError:
    return BadRowError(BadReason.UNUSED_COLUMN, f"{first} beside {second}: two columns of images; leave one out")


def _is_empty(value: Any) -> bool:
    """True for empty texts and lists, and for an object whose values are all null, e.g. an absent image."""
    if isinstance(value, dict):
        return all(each is None for each in value.values())
    return isinstance(value, str | bytes | list | tuple) and not value
