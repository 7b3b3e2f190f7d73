"""Images as bytes, by Pillow: their size from the header, their pixels when needed; and the image file of a shard."""

import hashlib
import io
import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa

from rayfcp.config import ConfigError
from rayfcp.data.formats.opening import named_head
from rayfcp.data.manifest import whole_file
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.vision.layout import RowImages

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats that are read. Formats that start other programs (EPS, WMF) or have no header of their
own are never tried."""
_OTHERS = (
    (re.compile(rb".{4}ftyp(hei[cfmsx]|hev[cx]|mif1|msf1)", re.DOTALL), "HEIC"),
    (
        re.compile(rb".{4}ftyp(?!avi[fs])|\x1aE\xdf\xa3|RIFF.{4}AVI ", re.DOTALL),
        "a film, whose frames must be given as images",
    ),
    (
        re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg", re.DOTALL),
        "SVG",
    ),
    (re.compile(rb"%!PS|\xc5\xd0\xd3\xc6"), "EPS"),
    (re.compile(rb"8BPS"), "PSD"),
    (re.compile(rb"\xff\x0a|\x00\x00\x00\x0cJXL "), "JPEG XL"),
)
"""Patterns of the first bytes of formats that are not read, and their names."""
_HEAD_BYTES, _PREFIX_BYTES = 512, 16
"""First bytes that are looked at, and those by which Pillow's formats are recognised."""
_ORIENTATION, _BITS, _PHOTOMETRIC, _EDGES = 0x0112, 0x0102, 0x0106, (0x0100, 0x0101)
"""Tags of EXIF and TIFF: edges are width and height."""
_ADDRESS = re.compile(r"<[^<>]* object at 0x[0-9a-f]+>")


def header_size(file: IO[bytes], *, max_pixels: int) -> tuple[int, int]:
    """Height and width of an upright image from its header; no pixel is decoded.

    Raises:
        BadRowError: Not an image, one of more than `max_pixels` pixels, or one with values of unknown range.
    """
    with _open(file) as image:
        tags = _tiff_tags(image)
        width, height = (tags.get(tag, edge) for tag, edge in zip(_EDGES, image.size, strict=True))  # not upright yet
        unknown, kind = _unknown_range(image), image.format
        try:
            turned = _orientation(image) >= 5
        except Exception as error:  # of broken EXIF data
            raise BadRowError(BadReason.IMAGE_UNREADABLE, f"a {kind} with broken EXIF data: {error}") from error
    if unknown:
        detail = f"a {kind} of {unknown}; store it with 8 or 16 bits"
        raise BadRowError(BadReason.IMAGE_UNREADABLE, detail)
    if height * width > max_pixels:
        detail = f"{width} x {height} pixels, data.max_picture_pixels is {max_pixels}"
        raise BadRowError(BadReason.IMAGE_TOO_LARGE, detail)
    return (width, height) if turned else (height, width)


def decoded(data: bytes) -> "Image":
    """Return the image in RGB, upright; of an animation the first frame. 16-bit grey is scaled to 8 bits, and
    transparency is laid on white.

    Raises:
        Exception: The bytes are broken; the type depends on the format.
    """
    from PIL import ImageOps

    with _open(io.BytesIO(data)) as image:
        turned = _orientation(image) > 1
        image.load()
        return _in_rgb(ImageOps.exif_transpose(image) if turned else image)


def _in_rgb(image: "Image") -> "Image":
    library = _pillow()
    if image.mode.startswith("I"):  # 16 bits, which Pillow's own conversion clips at 255
        values = np.asarray(image)
        grey = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
        if isinstance(clear := image.info.get("transparency"), int):
            grey[values == clear] = 255
        return library.fromarray(grey).convert("RGB")  # type: ignore[no-any-return]
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    white = library.new("RGBA", seen.size, "white")
    return library.alpha_composite(white, seen).convert("RGB")  # type: ignore[no-any-return]


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
    """Open the image by the format of its first bytes. `Image.open` would apply Pillow's bound on pixels, which holds
    for the whole process, and its errors name unknown formats by a memory address.

    Raises:
        BadRowError: The bytes begin like no format that is read, or the header is broken.
    """
    library = _pillow()
    head = file.read(_HEAD_BYTES)
    other = next((kind for pattern, kind in _OTHERS if pattern.match(head)), None) or named_head(head)
    for name in FORMATS:
        factory, accepts = library.OPEN.get(name, (None, None))
        if factory is None or not (accepted := accepts(head[:_PREFIX_BYTES])):
            continue
        if isinstance(accepted, str):
            raise BadRowError(BadReason.IMAGE_UNREADABLE, f"{name}, which this build of Pillow does not read")
        file.seek(0)
        try:
            return factory(file, "")  # type: ignore[no-any-return]
        except Exception as error:  # the formats' readers raise errors of all kinds for broken bytes
            if other is None:
                detail = f"a broken {name}: {_ADDRESS.sub('it', str(error)) or type(error).__name__}"
                raise BadRowError(BadReason.IMAGE_UNREADABLE, detail) from error
    found = (other or f"bytes that begin with {head[:8].hex(' ')}") if head else "an empty file"
    raise BadRowError(BadReason.IMAGE_UNREADABLE, f"{found}, must be one of {', '.join(FORMATS)}")


def _orientation(image: "Image") -> int:
    """1 to 8, by the header. EXIF data after the pixels of a PNG is ignored, as it is not in the header."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    found = image.getexif().get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _tiff_tags(image: "Image") -> Mapping[int, Any]:
    return image.tag_v2 if image.format == "TIFF" else {}  # type: ignore[attr-defined]


def _unknown_range(image: "Image") -> str | None:
    """Return a description of values that cannot be scaled to 8 bits; None if all can be."""
    tags = _tiff_tags(image)
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):  # PPM's are scaled to 16 bits by Pillow
        return "32-bit values, whose range it does not state"
    if image.mode.startswith("I;16") and (tags.get(_BITS) == (12,) or tags.get(_PHOTOMETRIC) == 0):
        return "12-bit values" if tags.get(_BITS) == (12,) else "16-bit values with white as 0"
    return None


class ImageFile:
    """Writes the image file beside a shard, row by row: the bytes of different images end to end, so that an image is
    one read of a range. Equal images are written once. It is closed with `stack`, as the shard is."""

    def __init__(self, stack: ExitStack, fs: fsspec.AbstractFileSystem, *, path: str) -> None:
        self._file: IO[bytes] = stack.enter_context(whole_file(fs, path))
        self._hash = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[list[int], list[int], list[int]]] = []
        self._starts: dict[bytes, int] = {}
        self._read_bytes = self.num_bytes = 0

    @property
    def digest(self) -> bytes:
        """Hash of all rows so far and their bytes. It does not depend on which images are equal."""
        return self._hash.digest()

    def add(self, images: RowImages | None) -> None:
        """Write the parts of the next row that no earlier row has."""
        items, runs = ([], []) if images is None else (images.items.ravel().tolist(), images.runs.ravel().tolist())
        places: list[int] = []
        named: list[int] = []
        for part in () if images is None else images.parts:
            start = self._starts.setdefault(hashlib.blake2b(part, digest_size=16).digest(), self.num_bytes)
            if start == self.num_bytes:
                self._file.write(part)
                self.num_bytes += len(part)
            places += [start, len(part)]
            self._hash.update(part)
            named += [self._read_bytes, len(part)]
            self._read_bytes += len(part)
        self._hash.update(repr((items, runs, named)).encode())
        self._rows.append((items, runs, places))

    def take(self) -> dict[str, pa.Array]:
        """Columns `items`, `runs` and `parts` of the rows since the last call."""
        rows, self._rows = self._rows, []
        kind = pa.list_(pa.int64())
        return {name: pa.array([row[at] for row in rows], kind) for at, name in enumerate(("items", "runs", "parts"))}
