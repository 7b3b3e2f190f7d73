"""Pictures as bytes: their size from the header, their pixels when they are needed. All by Pillow.

The file of pictures beside a shard: their bytes end to end, so that any of them is one read of a range.
"""

import hashlib
import io
import warnings
from contextlib import ExitStack
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa

from rayfcp.config import ConfigError
from rayfcp.data.manifest import whole_file
from rayfcp.data.rows import BadReason, BadRowError, RowPictures

if TYPE_CHECKING:
    from PIL.Image import Image


_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
_ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held."""


def header_size(file: IO[bytes], *, max_pixels: int) -> tuple[int, int]:
    """Height and width of a picture, upright, from its header: no pixel is decoded.

    Raises:
        BadRowError: no picture, or one of more than `max_pixels` pixels.
    """
    library = _pillow()
    try:
        with _open(file) as image:
            width, height = image.size
            turned = _orientation(image) >= 5
    except library.DecompressionBombError as error:
        raise BadRowError(BadReason.PICTURE_TOO_LARGE, _line(error)) from error
    except Exception as error:  # formats' readers raise all kinds for broken bytes
        raise BadRowError(BadReason.PICTURE_UNREADABLE, _line(error)) from error
    if height * width > max_pixels:
        raise BadRowError(
            BadReason.PICTURE_TOO_LARGE,
            f"{width} x {height} pixels, data.max_picture_pixels is {max_pixels}",
        )
    return (width, height) if turned else (height, width)


def decoded(data: bytes) -> "Image":
    """The picture in RGB, upright; of an animation the first one.

    Raises:
        Exception: of any kind, where bytes are broken.
    """
    from PIL import ImageOps

    with _open(io.BytesIO(data)) as image:
        turned = _orientation(image) > 1
        image.load()
        upright = ImageOps.exif_transpose(image) if turned else image
        return upright.convert("RGB")


@cache
def _pillow() -> Any:
    """Pillow, with all formats loaded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("data.processor is set, which needs Pillow; pip install 'rayfcp[vision]'") from error
    Image.init()
    return Image


def _open(file: IO[bytes]) -> "Image":
    library = _pillow()
    with warnings.catch_warnings():
        # Our own bound is asked first.
        warnings.simplefilter("ignore", library.DecompressionBombWarning)
        return library.open(file, formats=_FORMATS)  # type: ignore[no-any-return]


def _orientation(image: "Image") -> int:
    """1 to 8, as the header says. What stands behind the pixels of a PNG never counts."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    found = image.getexif().get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


class PictureFile:
    """Written row by row, beside its shard and with the same life, that of `stack`."""

    def __init__(self, stack: ExitStack, fs: fsspec.AbstractFileSystem, *, path: str) -> None:
        self._file: IO[bytes] = stack.enter_context(whole_file(fs, path))
        self._hash = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[list[int], list[int], list[int]]] = []
        self.num_bytes = 0

    @property
    def digest(self) -> bytes:
        """Of all rows so far and their bytes."""
        return self._hash.digest()

    def add(self, pictures: RowPictures | None) -> None:
        """Write the files of the next row, which may have none."""
        items, runs = (
            ([], []) if pictures is None else (pictures.items.ravel().tolist(), pictures.runs.ravel().tolist())
        )
        places: list[int] = []
        for part in () if pictures is None else pictures.parts:
            self._file.write(part)
            self._hash.update(part)
            places += [self.num_bytes, len(part)]
            self.num_bytes += len(part)
        self._hash.update(repr((items, runs, places)).encode())
        self._rows.append((items, runs, places))

    def take(self) -> dict[str, pa.Array]:
        """Columns `items`, `runs` and `parts` of the rows since the last call."""
        rows, self._rows = self._rows, []
        return {name: _lists([row[at] for row in rows]) for at, name in enumerate(("items", "runs", "parts"))}


def _lists(rows: list[list[int]]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    values = np.array([number for row in rows for number in row], dtype=np.int64)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
