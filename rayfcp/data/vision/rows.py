"""Rows with images, from files to tokens.

A row has `messages` (role and content) or a text, and `images` or `videos`. A content is text, or a list of parts of
type `text`, `image` and `video`. `<image>` and `<video>` in a text stand for the next image and the next video. An
image is bytes, a path, or `{"bytes": ..., "path": ...}`; a video is a list of images, its frames. Paths are relative to
the folder of the row's file.
"""

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rayfcp.config import ConfigError
from rayfcp.config.data import DataConfig
from rayfcp.data.manifest import join, resolve
from rayfcp.data.messages import LOST_KEYS
from rayfcp.data.rows import IGNORED, BadReason, BadRowError, TokenRow, make_row
from rayfcp.data.vision.images import header_size
from rayfcp.data.vision.layout import RUN_FIELDS, MediaGrid, RowImages
from rayfcp.data.vision.processors import ImageTokenizer

_MARKER = re.compile(r"<(image|video)>")


class _File(NamedTuple):
    data: bytes
    size: tuple[int, int]


class RowEncoder:
    """Encodes rows by the model's processor and the rules of `data`; a `MediaEncoder` of `rayfcp.data.readers`."""

    def __init__(self, tokenizer: ImageTokenizer, data: DataConfig) -> None:
        self._tokenizer, self._data = tokenizer, data

    def __call__(self, media: Mapping[str, Any], url: str) -> TokenRow:
        """Tokens of the row and the files of its images. `url`: the file that holds the row.

        Raises:
            BadRowError: Anything in it cannot be used.
        """
        try:
            return self._encoded(media, url)
        except BadRowError as error:
            error.num_images = sum(
                len(each) for name in ("images", "videos") if isinstance(each := media.get(name), list)
            )
            raise

    def _encoded(self, media: Mapping[str, Any], url: str) -> TokenRow:
        tokenizer, folder = self._tokenizer, url.rsplit("/", 1)[0]
        images = _listed(media.get("images"), name="images")
        videos = [_frames(video) for video in _listed(media.get("videos"), name="videos")]
        text = _rendered(media, tokenizer)
        files = {
            False: [[self._file(image, folder=folder)] for image in images],
            True: [[self._file(frame, folder=folder) for frame in frames] for frames in videos],
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

    def _file(self, image: Any, *, folder: str) -> _File:
        """The bytes of an image, after its header was checked."""
        data, path = image, image
        max_pixels = self._data.max_picture_pixels
        if isinstance(image, Mapping):
            data, path = image.get("bytes"), image.get("path")
        if isinstance(data, bytes):
            return _File(data=data, size=header_size(io.BytesIO(data), max_pixels=max_pixels))
        if not isinstance(path, str) or not path:
            raise BadRowError(BadReason.WRONG_TYPE, "an image must be bytes or a path")
        try:
            fs, place = resolve(path if "://" in path or path.startswith("/") else join(folder, path))
            with fs.open(place, "rb") as file:
                size = header_size(file, max_pixels=max_pixels)
                file.seek(0)
                return _File(data=file.read(), size=size)
        except (OSError, ConfigError) as error:
            raise BadRowError(BadReason.IMAGE_MISSING, f"{path}: {error}") from error
        except BadRowError as error:
            raise BadRowError(error.reason, f"{path}: {error.detail}") from error


def _rendered(media: Mapping[str, Any], tokenizer: ImageTokenizer) -> str:
    """The text with the library's markers."""
    family = tokenizer.family
    if media.get("messages") is not None:
        messages = [_message(each) for each in _listed(media["messages"], name="messages")]
        try:
            return str(family.processor.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template is a program
            raise BadRowError(BadReason.WRONG_TYPE, f"messages do not fit the chat template: {error}") from error
    if not isinstance(media["text"], str):
        raise BadRowError(BadReason.MISSING_COLUMN, "images without text or messages")
    marked = {"image": family.image_marker, "video": family.video_marker}
    return _MARKER.sub(lambda match: marked[match.group(1)], media["text"])


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


def _frames(video: Any) -> list[Any]:
    if not isinstance(video, list | tuple) or not video:
        raise BadRowError(BadReason.WRONG_TYPE, "a video must be a list of frames")
    return list(video)


def _grid(files: list[_File], *, is_video: bool, tokenizer: ImageTokenizer) -> MediaGrid:
    sizes = {file.size for file in files}
    if len(sizes) > 1:
        raise BadRowError(BadReason.IMAGE_UNREADABLE, f"frames of {len(sizes)} sizes in one video")
    family, (size,) = tokenizer.family, sizes
    try:
        return family.video_grid(size, len(files)) if is_video else family.image_grid(size)
    except ValueError as error:  # the library's rule has bounds of its own
        raise BadRowError(BadReason.IMAGE_UNREADABLE, error) from error
