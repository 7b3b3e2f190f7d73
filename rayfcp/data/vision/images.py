"""Images as bytes, by Pillow: their size from the header, their pixels when needed; and the image file of a shard."""

import hashlib
import io
import warnings
from contextlib import ExitStack
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import fsspec
import pyarrow as pa

from rayfcp.config import ConfigError
from rayfcp.data.manifest import whole_file
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.vision.layout import RowImages

if TYPE_CHECKING:
    from PIL.Image import Image


_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
_ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation."""


def header_size(file: IO[bytes], *, max_pixels: int) -> tuple[int, int]:
    """Height and width of an upright image from its header; no pixel is decoded.

    Raises:
        BadRowError: Not an image, or one of more than `max_pixels` pixels.
    """
    library = _pillow()
    try:
        with _open(file) as image:
            width, height = image.size
            turned = _orientation(image) >= 5
    except library.DecompressionBombError as error:
        raise BadRowError(BadReason.IMAGE_TOO_LARGE, error) from error
    except Exception as error:  # the formats' readers raise errors of all kinds for broken bytes
        raise BadRowError(BadReason.IMAGE_UNREADABLE, error) from error
    if height * width > max_pixels:
        detail = f"{width} x {height} pixels, data.max_picture_pixels is {max_pixels}"
        raise BadRowError(BadReason.IMAGE_TOO_LARGE, detail)
    return (width, height) if turned else (height, width)


def decoded(data: bytes) -> "Image":
    """The image in RGB, upright; the first frame of an animation.

    Raises:
        Exception: The bytes are broken; the type depends on the format.
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
        # `max_pixels` is our own bound.
        warnings.simplefilter("ignore", library.DecompressionBombWarning)
        return library.open(file, formats=_FORMATS)  # type: ignore[no-any-return]


def _orientation(image: "Image") -> int:
    """1 to 8, by the header. EXIF data after the pixels of a PNG is ignored, as it is not in the header."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    found = image.getexif().get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


class ImageFile:
    """Writes the image file beside a shard, row by row: all bytes end to end, so that an image is one read of a range.
    It is closed with `stack`, as the shard is."""

    def __init__(self, stack: ExitStack, fs: fsspec.AbstractFileSystem, *, path: str) -> None:
        self._file: IO[bytes] = stack.enter_context(whole_file(fs, path))
        self._hash = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[list[int], list[int], list[int]]] = []
        self.num_bytes = 0

    @property
    def digest(self) -> bytes:
        """Hash of all rows so far and their bytes."""
        return self._hash.digest()

    def add(self, images: RowImages | None) -> None:
        """Write the parts of the next row, if any."""
        items, runs = ([], []) if images is None else (images.items.ravel().tolist(), images.runs.ravel().tolist())
        places: list[int] = []
        for part in () if images is None else images.parts:
            self._file.write(part)
            self._hash.update(part)
            places += [self.num_bytes, len(part)]
            self.num_bytes += len(part)
        self._hash.update(repr((items, runs, places)).encode())
        self._rows.append((items, runs, places))

    def take(self) -> dict[str, pa.Array]:
        """Columns `items`, `runs` and `parts` of the rows since the last call."""
        rows, self._rows = self._rows, []
        kind = pa.list_(pa.int64())
        return {name: pa.array([row[at] for row in rows], kind) for at, name in enumerate(("items", "runs", "parts"))}
