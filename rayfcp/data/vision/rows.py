"""Rows with pictures as files have them, and what they become.

A row has `messages` (role and content) or a text, and `images` or `videos`. A content is text, or a list of parts of
type `text`, `image` and `video`. `<image>` and `<video>` in a text stand for the next image and the next video. An
image is bytes, a path, or `{"bytes": ..., "path": ...}`; a video is a list of images, its frames. Paths count from the
folder of the row's file.
"""

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfcp.config import ConfigError
from rayfcp.data.manifest import join, resolve
from rayfcp.data.rows import IGNORED, BadReason, BadRowError, RawPictures, Row, RowPictures, make_row
from rayfcp.data.vision.images import header_size
from rayfcp.data.vision.layout import RUN_FIELDS, Grid
from rayfcp.data.vision.processors import PictureTokenizer

COLUMNS = ("messages", "images", "videos")
_MARKER = re.compile(r"<(image|video)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRules:
    """What the user says of pictures; see `DataConfig`."""

    max_pixels: int
    fps: float | None
    are_targets: bool


def raw_pictures(record: Mapping[str, Any], *, text_column: str) -> RawPictures | None:
    """What a record has of the columns above, None if nothing."""
    found = {name: record.get(name) for name in COLUMNS}
    if all(value is None for value in found.values()):
        return None
    return RawPictures(text=record.get(text_column) if found["messages"] is None else None, **found)


def picture_row(
    raw: RawPictures, *, tokenizer: PictureTokenizer, rules: PictureRules, url: str, vocab_size: int | None
) -> Row:
    """The row tokenised, with its pictures' files; `url`: the file that it stands in.

    Raises:
        BadRowError: anything of it cannot be used.
    """
    images = _listed(raw.images, of="images")
    videos = [_frames(video) for video in _listed(raw.videos, of="videos")]
    text = _rendered(raw, tokenizer)
    folder = url.rsplit("/", 1)[0]
    files = {
        False: [[_file(image, folder=folder, rules=rules)] for image in images],
        True: [[_file(frame, folder=folder, rules=rules) for frame in frames] for frames in videos],
    }
    grids = [_grid(each, is_video=kind, tokenizer=tokenizer) for kind in (False, True) for each in files[kind]]
    tokens, items, runs = tokenizer.encode_pictures(text, grids, fps=rules.fps)
    labels = None
    if items and not rules.are_targets:
        labels = np.where(tokenizer.is_mark(tokens), IGNORED, tokens).astype(np.int32)
    row = make_row(tokens, labels=labels, vocab_size=vocab_size)
    left = {kind: iter(each) for kind, each in files.items()}
    parts = tuple(part.data for item in items for part in next(left[bool(item.is_video)]))
    if not items:
        return row
    numbers = [[getattr(run, name) for name in RUN_FIELDS] for run in runs]
    return replace(row, pictures=RowPictures(items=np.array(items), runs=np.array(numbers), parts=parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    data: bytes
    size: tuple[int, int]


def _rendered(raw: RawPictures, tokenizer: PictureTokenizer) -> str:
    """The text with the library's markers."""
    family = tokenizer.family
    if raw.messages is not None:
        messages = [_message(each) for each in _listed(raw.messages, of="messages")]
        try:
            return str(family.processor.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates are programs
            detail = " ".join(str(error).split())[:120]
            raise BadRowError(BadReason.WRONG_TYPE, f"messages do not fit the chat template: {detail}") from error
    if not isinstance(raw.text, str):
        raise BadRowError(BadReason.MISSING_COLUMN, "pictures without text or messages")
    marked = {"image": family.image_marker, "video": family.video_marker}
    return _MARKER.sub(lambda match: marked[match.group(1)], raw.text)


def _message(message: Any) -> dict[str, Any]:
    """With its content as a list of parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRowError(BadReason.WRONG_TYPE, "messages must hold objects with role and content")
    content = message.get("content")
    parts = _parts_of_text(content) if isinstance(content, str) else map(_part, _listed(content, of="content"))
    return {"role": message["role"], "content": list(parts)}


def _parts_of_text(text: str) -> Iterator[dict[str, str]]:
    for number, piece in enumerate(_MARKER.split(text)):
        if number % 2:
            yield {"type": piece}
        elif piece:
            yield {"type": "text", "text": piece}


def _part(part: Any) -> dict[str, str]:
    """Of its columns only what its type has: tables fill all others with nulls."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "video"):
        return {"type": kind}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise BadRowError(BadReason.WRONG_TYPE, "parts of a content must be of type text, image or video")


def _listed(value: Any, *, of: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping):
        return [value]
    if not isinstance(value, list | tuple):
        raise BadRowError(BadReason.WRONG_TYPE, f"{of} must be a list")
    return list(value)


def _frames(video: Any) -> list[Any]:
    if not isinstance(video, list | tuple) or not video:
        raise BadRowError(BadReason.WRONG_TYPE, "a video must be a list of frames")
    return list(video)


def _file(picture: Any, *, folder: str, rules: PictureRules) -> _File:
    """The bytes of a picture, once its header was found good."""
    data, path = picture, picture
    if isinstance(picture, Mapping):
        data, path = picture.get("bytes"), picture.get("path")
    if isinstance(data, bytes):
        return _File(data=data, size=header_size(io.BytesIO(data), max_pixels=rules.max_pixels))
    if not isinstance(path, str) or not path:
        raise BadRowError(BadReason.WRONG_TYPE, "a picture must be bytes or a path")
    try:
        fs, place = resolve(path if "://" in path or path.startswith("/") else join(folder, path))
        with fs.open(place, "rb") as file:
            size = header_size(file, max_pixels=rules.max_pixels)
            file.seek(0)
            return _File(data=file.read(), size=size)
    except (OSError, ConfigError) as error:
        raise BadRowError(BadReason.PICTURE_MISSING, f"{path}: {' '.join(str(error).split())[:80]}") from error
    except BadRowError as error:
        raise BadRowError(error.reason, f"{path}: {error.detail}") from error


def _grid(files: list[_File], *, is_video: bool, tokenizer: PictureTokenizer) -> Grid:
    sizes = {file.size for file in files}
    if len(sizes) > 1:
        raise BadRowError(BadReason.PICTURE_UNREADABLE, f"frames of {len(sizes)} sizes in one video")
    family, (size,) = tokenizer.family, sizes
    try:
        return family.video_grid(size, len(files)) if is_video else family.image_grid(size)
    except ValueError as error:  # the library's rule has bounds of its own
        raise BadRowError(BadReason.PICTURE_UNREADABLE, " ".join(str(error).split())[:120]) from error
