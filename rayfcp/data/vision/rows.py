"""Rows with images, from files to tokens.

A row has `messages` (role and content) or a text, and `images` or `videos`. A content is text, or a list of parts of
type `text`, `image` and `video`. `<image>` and `<video>` in a text stand for the next image and the next video. An
image is bytes, a path, or `{"bytes": ..., "path": ...}`; a video is a list of images, its frames. Paths are relative to
the folder of the row's file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rayfcp.config.data import DataConfig
from rayfcp.data.account import ReadAccount
from rayfcp.data.messages import LOST_KEYS
from rayfcp.data.rows import IGNORED, BadReason, BadRowError, TokenRow, checked_text, make_row
from rayfcp.data.vision.layout import RUN_FIELDS, MediaGrid, RowImages
from rayfcp.data.vision.processors import ImageTokenizer
from rayfcp.data.vision.references import Picture, PictureReader, listed, videos_of
from rayfcp.values.counted import counted

_MARKER = re.compile(r"<(image|video)>")


class RowEncoder:
    """Encodes rows by the model's processor and the rules of `data`; a `MediaEncoder` of `rayfcp.data.readers`."""

    def __init__(self, tokenizer: ImageTokenizer, data: DataConfig, *, account: ReadAccount) -> None:
        self._tokenizer, self._data = tokenizer, data
        self._read = PictureReader(data, account=account)

    def __call__(self, media: Mapping[str, Any], url: str) -> TokenRow:
        """Tokens of the row and the files of its images. `url`: the file that holds the row.

        Raises:
            BadRowError: Anything in it cannot be used.
        """
        tokenizer, folder = self._tokenizer, url.rsplit("/", 1)[0]
        images, videos = listed(media.get("images"), name="images"), videos_of(media.get("videos"))
        text = _rendered(media, tokenizer, first=[False] * len(images) + [True] * len(videos))
        files = {
            False: [[self._read(image, folder=folder)] for image in images],
            True: [[self._read(frame, folder=folder) for frame in frames] for frames in videos],
        }
        grids = [_grid(each, is_video=kind, tokenizer=tokenizer) for kind in (False, True) for each in files[kind]]
        tokens, items, runs = tokenizer.encode_images(text, grids, fps=self._data.video_fps)
        if not items:
            return make_row(tokens)
        labels = None
        if not self._data.picture_targets:
            labels = np.where(tokenizer.is_mark(tokens), IGNORED, tokens).astype(np.int32)
        row = make_row(tokens, labels=labels)
        left = {kind: iter(each) for kind, each in files.items()}
        parts = tuple(part.data for item in items for part in next(left[bool(item.is_video)]))
        numbers = np.array([[getattr(run, name) for name in RUN_FIELDS] for run in runs])
        return replace(row, images=RowImages(items=np.array(items), runs=numbers, parts=parts))


def _rendered(media: Mapping[str, Any], tokenizer: ImageTokenizer, *, first: Sequence[bool]) -> str:
    """The text with the library's markers. A text without any is a caption: its images and videos (True) come first."""
    family = tokenizer.family
    if media.get("messages") is not None:
        messages = [_message(each) for each in _listed(media["messages"], name="messages")]
        try:
            return str(family.processor.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template is a program
            raise BadRowError(BadReason.WRONG_TYPE, f"messages do not fit the chat template: {error}") from error
    if not isinstance(media["text"], str | bytes):
        raise BadRowError(BadReason.MISSING_COLUMN, "images without text or messages")
    text = checked_text(media["text"], name="text")
    marked = {"image": family.image_marker, "video": family.video_marker}
    text = _MARKER.sub(lambda match: marked[match.group(1)], text)
    is_marked = any(token in text for token in (family.processor.image_token, family.processor.video_token))
    return text if is_marked else "".join(marked["video" if each else "image"] for each in first) + text


def _message(message: Any) -> dict[str, Any]:
    """The message with its content as a list of parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRowError(BadReason.WRONG_TYPE, "messages must hold objects with role and content")
    if lost := sorted(name for name in LOST_KEYS.intersection(message) if message[name] not in (None, "", [], {}, 1)):
        raise BadRowError(BadReason.BAD_MESSAGES, f"a message has {lost[0]}, which rows with images cannot have")
    content = message.get("content")
    parts = _text_parts(content) if isinstance(content, str) else map(_part, _listed(content, name="content"))
    return {"role": message["role"], "content": list(parts)}


def _text_parts(text: str) -> Iterator[dict[str, str]]:
    for number, piece in enumerate(_MARKER.split(text)):
        if number % 2:
            yield {"type": piece}
        elif piece:
            yield {"type": "text", "text": piece}


def _part(part: Any) -> dict[str, str]:
    """The keys that a part of its type has: tables fill all others with nulls."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "video"):
        return {"type": kind}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise BadRowError(BadReason.WRONG_TYPE, "parts of a content must be of type text, image or video")


def _listed(value: Any, *, name: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping):
        return [value]
    if not isinstance(value, list | tuple):
        raise BadRowError(BadReason.WRONG_TYPE, f"{name} must be a list")
    return list(value)


def _grid(files: list[Picture], *, is_video: bool, tokenizer: ImageTokenizer) -> MediaGrid:
    sizes = {file.size for file in files}
    if len(sizes) > 1:
        raise BadRowError(BadReason.IMAGE_SHAPE, f"frames of {len(sizes)} sizes in one video")
    family, (size,) = tokenizer.family, sizes
    try:
        return family.video_grid(size, len(files)) if is_video else family.image_grid(size)
    except ValueError as error:  # the library's rule has bounds of its own
        what = f"a video of {counted(len(files), 'frame')}" if is_video else "a picture"
        detail = f"{what} of {size[1]} x {size[0]} pixels: the processor refuses it: {error}"
        raise BadRowError(BadReason.IMAGE_SHAPE, detail) from error
