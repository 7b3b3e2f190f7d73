"""Rows with images, from files to tokens.

A row is a conversation or a text, as without images, beside columns `images` and `videos`. Marks of images are
`<image>` and `<video>` in a text, and parts of a content of type `image` and `video`. A part may name its image
(`references`); all other marks stand for the next image or the next video of the columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.data.chat import ChatEncoder, check_texts_alone
from rayfcp.data.messages import PICTURE_MARK, Chat, Message, check_marks, messages_in, read_chat
from rayfcp.data.rows import BadReason, BadRowError, TokenRow, checked_text
from rayfcp.data.tokenizer import SpannedTokens
from rayfcp.data.vision.layout import RUN_FIELDS, MediaGrid, RowImages
from rayfcp.data.vision.processors import ImageTokenizer, ImageTokens, load_processor
from rayfcp.data.vision.references import PictureReader, frames_of, listed, videos_of
from rayfcp.values.counted import counted

Content = str | list[Message]
Reference = tuple[str, Any]
"""Kind (image or video), and the value that names it or has its bytes."""


class _Item(NamedTuple):
    grid: MediaGrid
    parts: tuple[bytes, ...]


class RowEncoder(ChatEncoder):
    """Encodes rows by the rules of `data` and its processor, whose chat template renders conversations if
    `data.chat_template` names none."""

    def encode(self, media: Mapping[str, Any], url: str) -> list[TokenRow]:
        """Return the samples of the row, with the files of its images; a `MediaEncoder` of `rayfcp.data.readers`.
        `url`: the file that holds the row.

        Raises:
            BadRowError: Anything in it cannot be used, or marks and images do not match.
        """
        try:
            return self._samples(media, url)
        except BadRowError as error:
            error.num_images = _num_pictures(media)
            raise

    def _samples(self, media: Mapping[str, Any], url: str) -> list[TokenRow]:
        chat = None
        names = ("text",) if media.get("text") is not None else ("prompt", "completion")
        contents: list[Any] = [media.get(name) for name in names]
        if len(names) > 1:
            contents = list(map(messages_in, contents))
        if all(isinstance(each, str | bytes) for each in contents):
            check_texts_alone(media, what=" and ".join(names))
            contents = [checked_text(each, name=name) for name, each in zip(names, contents, strict=True)]
        else:
            chat = read_chat(media)
            contents = [message["content"] for message in chat.messages]
        columns = {"image": listed(media.get("images"), name="images"), "video": videos_of(media.get("videos"))}
        if chat is None and len(contents) == 1 and not any(map(self._marks, _split(_parts(contents[0])[0]))):
            # A caption: its images come first.
            contents = ["".join(f"<{kind}>" * len(each) for kind, each in columns.items()) + str(contents[0])]
        contents, references = self._referred(contents, columns)
        folder = url.rsplit("/", 1)[0]
        pictures = tuple(tuple(self._picture(*each, folder=folder) for each in own) for own in references)
        if chat is not None:
            messages = zip(chat.messages, contents, strict=True)
            shown = tuple({**message, "content": content} for message, content in messages)
            samples = self._conversation(replace(chat, messages=shown, pictures=pictures))
        elif len(contents) > 1:
            samples = [self._completion(*map(self._text, contents), pictures=[*pictures[0], *pictures[1]])]
        else:
            tokens = self._tokens(self._text(contents[0]), is_document=True, pictures=pictures[0])
            samples = [self._row(tokens, None)]
        return [replace(sample, num_rows=int(not number)) for number, sample in enumerate(samples)]

    @cached_property
    def _read(self) -> PictureReader:
        return PictureReader(self._data, account=self._account)

    @cached_property
    def _processor(self) -> ImageTokenizer:
        return load_processor(str(self._data.processor))

    def _referred(
        self, contents: Sequence[Content], columns: Mapping[str, Sequence[Any]]
    ) -> tuple[list[Content], list[list[Reference]]]:
        """Return contents with a part for each mark, and the references of their images in the order of the marks.

        Raises:
            BadRowError: More or fewer marks than images, or in another order.
        """
        parts = [[piece for part in _parts(content) for piece in _split(part)] for content in contents]
        marks = [[mark for part in own for mark in self._marks(part)] for own in parts]
        for kind, column in columns.items():
            named = [mark.get("reference") is not None for own in marks for mark in own if mark["type"] == kind]
            check_marks(len(named), len(column) + sum(named), kind=kind)
        left = {kind: enumerate(column) for kind, column in columns.items()}
        references = [[(mark["type"], _reference(mark, left[mark["type"]])) for mark in own] for own in marks]
        return [_content(own) for own in parts], references

    def _marks(self, part: Message) -> list[Message]:
        """Return the marks of a part: itself, or the processor's own in its text."""
        if part["type"] != "text":
            return [part]
        return [{"type": kind} for kind in self._processor.kinds_in(part["text"])]

    def _text(self, content: Content) -> str:
        """Return a content as text with the processor's markers, for rows that no template renders."""
        family = self._processor.family
        markers = {"image": family.image_marker, "video": family.video_marker}
        return "".join(markers.get(part["type"]) or part["text"] for part in _parts(content))

    def _conversation(self, chat: Chat) -> list[TokenRow]:
        """Return the samples of a conversation. All contents become lists if the template takes no others."""
        try:
            return super()._conversation(chat)
        except BadRowError as error:
            if error.reason not in (BadReason.TEMPLATE_ERROR, BadReason.NOT_RENDERED):
                raise
            messages = tuple({**each, "content": _parts(each["content"])} for each in chat.messages)
            try:
                return super()._conversation(replace(chat, messages=messages))
            except BadRowError:
                raise error from None

    def _tokens(self, text: str, *, is_document: bool, pictures: Sequence[Any] = ()) -> SpannedTokens:
        for mark in PICTURE_MARK.finditer(text):
            if mark.group() not in self._processor.mark_kinds:
                detail = f"{mark.group()} stands where no image can be, e.g. in thoughts, calls or tools"
                raise BadRowError(BadReason.MARKERS_MISMATCH, detail)
        if not pictures and not self._processor.kinds_in(text):
            return super()._tokens(text, is_document=is_document)
        grids = [each.grid for each in pictures]
        found = self._processor.encode_images(
            checked_text(text, name="text"), grids, fps=self._data.video_fps, is_document=is_document
        )
        left = {kind: iter([each for each in pictures if each.grid.is_video is kind]) for kind in (False, True)}
        return replace(
            found, parts=tuple(part for item in found.items for part in next(left[bool(item.is_video)]).parts)
        )

    def _row(self, tokens: SpannedTokens, is_trained: npt.NDArray[np.bool_] | None) -> TokenRow:
        if not isinstance(tokens, ImageTokens) or not tokens.items:
            return super()._row(tokens, is_trained)
        if not self._data.picture_targets:
            is_word = ~self._processor.is_mark(tokens.ids)
            is_trained = is_word if is_trained is None else is_trained & is_word
        numbers = np.array([[getattr(run, name) for name in RUN_FIELDS] for run in tokens.runs])
        images = RowImages(items=np.array(tokens.items), runs=numbers, parts=tokens.parts)
        return replace(super()._row(tokens, is_trained), images=images)

    def _picture(self, kind: str, reference: Any, *, folder: str) -> _Item:
        is_video = kind == "video"
        files = [self._read(each, folder=folder) for each in (frames_of(reference) if is_video else [reference])]
        sizes = {file.size for file in files}
        if len(sizes) > 1:
            raise BadRowError(BadReason.IMAGE_SHAPE, f"frames of {len(sizes)} sizes in one video")
        family, (size,) = self._processor.family, sizes
        try:
            grid = family.video_grid(size, len(files)) if is_video else family.image_grid(size)
        except ValueError as error:  # the library's rule has bounds of its own
            what = f"a video of {counted(len(files), 'frame')}" if is_video else "an image"
            detail = f"{what} of {size[1]} x {size[0]} pixels is refused by the processor: {error}"
            raise BadRowError(BadReason.IMAGE_SHAPE, detail) from error
        return _Item(grid=grid, parts=tuple(file.data for file in files))


def _parts(content: Content) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _split(part: Message) -> list[Message]:
    """Return a text as parts: one for each mark and each text between marks."""
    if part["type"] != "text":
        return [part]
    pieces = enumerate(PICTURE_MARK.split(part["text"]))
    return [{"type": piece} if number % 2 else {"type": "text", "text": piece} for number, piece in pieces if piece]


def _content(parts: list[Message]) -> Content:
    """Return the content as templates take it: a text if it has no images."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [part if part["type"] == "text" else {"type": part["type"]} for part in parts]


def _reference(mark: Message, left: Any) -> Any:
    """Return the reference of a mark, or the next of its column."""
    if mark.get("reference") is not None:
        return mark["reference"]
    number, reference = next(left)
    if mark.get("index") not in (None, number):
        detail = f"index {mark['index']} in a part of type {mark['type']}, which stands for number {number}"
        raise BadRowError(BadReason.MARKERS_MISMATCH, f"{detail}; name images in the order of their marks")
    return reference


def _num_pictures(media: Mapping[str, Any]) -> int:
    """Images and videos in the columns and the messages of a row; 0 if they cannot be listed."""
    try:
        found = len(listed(media.get("images"), name="images")) + len(videos_of(media.get("videos")))
        contents = [each["content"] for each in read_chat(media).messages] if _is_chat(media) else []
    except BadRowError:
        return 0
    return found + sum(part.get("reference") is not None for each in contents for part in _parts(each))


def _is_chat(media: Mapping[str, Any]) -> bool:
    return not any(isinstance(media.get(name), str | bytes) for name in ("text", "completion"))
