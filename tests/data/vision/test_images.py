"""Sizes from headers are those of decoded images, whatever the format and whatever the orientation."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.vision.images import FORMATS, decoded, header_size
from tests.data.makers import few_examples
from tests.data.vision.makers import image, saved

EDGES = st.integers(1, 40)
MANY = 1 << 20
KINDS = ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"]
"""Formats that have an orientation."""


@few_examples
@given(height=EDGES, width=EDGES, kind=st.sampled_from(KINDS), orientation=st.integers(1, 8))
def test_headers_give_the_upright_size(height: int, width: int, kind: str, orientation: int) -> None:
    data = saved(image(height, width), kind, orientation=orientation)
    found = header_size(io.BytesIO(data), max_pixels=MANY)
    assert found == ((width, height) if orientation >= 5 else (height, width))
    assert decoded(data).size == found[::-1]
    lossless = saved(image(height, width), "PNG", orientation=orientation)
    if kind in ("PNG", "TIFF"):
        assert decoded(data).tobytes() == decoded(lossless).tobytes()


@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_are_read(kind: str) -> None:
    data = saved(image(16, 16), kind)
    assert header_size(io.BytesIO(data), max_pixels=MANY) == (16, 16)
    assert (decoded(data).mode, decoded(data).size) == ("RGB", (16, 16))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_grey_of_16_bits_is_scaled(kind: str) -> None:
    """Values that are 257 times those of 8 bits look the same; others are rounded."""
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    options = {"irreversible": False} if kind == "JPEG2000" else {}
    found = [np.asarray(decoded(saved(Image.fromarray(grey * 257 + add), kind, **options))) for add in (0, 100, 200)]
    for values, add in zip(found, (0, 0, 1), strict=True):
        np.testing.assert_array_equal(values[:, :, 0].ravel()[:-1], np.arange(255) + add)
        assert (values == values[:, :, :1]).all()


def test_values_of_unknown_range_are_refused() -> None:
    for mode in ("I", "F"):
        with pytest.raises(BadRowError, match=r"a TIFF of 32-bit values, .*; store it with 8 or 16 bits"):
            header_size(io.BytesIO(saved(image(5, 7).convert("L").convert(mode), "TIFF")), max_pixels=MANY)


@few_examples
@given(alpha=st.integers(0, 255), mode=st.sampled_from(["RGBA", "LA", "PA", "P", "RGB", "L", "I;16"]))
def test_what_is_transparent_lies_on_white(alpha: int, mode: str) -> None:
    black = Image.new("RGBA", (4, 3), (0, 0, 0, alpha))
    options: dict[str, Any] = {}
    if mode in ("P", "RGB", "L", "I;16"):  # one colour is transparent, or not
        alpha = 0 if alpha < 128 else 255
        options["transparency"] = {"RGB": (0, 0, 0)}.get(mode, 0) if not alpha else {"RGB": (1, 2, 3)}.get(mode, 9)
        black = Image.new(mode, (4, 3), 0)
    elif mode == "PA":  # conversion to it would drop the alpha
        black = Image.new(mode, (4, 3), (0, alpha))
        black.putpalette([0] * 768)
    else:
        black = black.convert(mode)
    values = np.asarray(decoded(saved(black, "TIFF" if mode == "PA" else "PNG", **options)))
    assert values.shape == (3, 4, 3)
    assert np.unique(values).tolist() == [255 - alpha]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "I;16"])
def test_all_modes_become_rgb(mode: str) -> None:
    plain = image(5, 7).convert("L") if mode == "I;16" else image(5, 7)
    data = saved(plain.convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    assert (decoded(data).mode, decoded(data).size) == ("RGB", (7, 5))


@few_examples
@given(junk=st.binary(max_size=200), keep=st.integers(0, 24))
def test_what_is_no_image_is_refused(junk: bytes, keep: int) -> None:
    data = saved(image(9, 9))[:keep] + junk
    with pytest.raises(BadRowError) as caught:
        header_size(io.BytesIO(data), max_pixels=MANY)
    assert caught.value.reason is BadReason.IMAGE_UNREADABLE


def test_the_bound_on_pixels() -> None:
    data = saved(image(8, 16))
    assert header_size(io.BytesIO(data), max_pixels=128) == (8, 16)
    with pytest.raises(BadRowError, match=r"16 x 8 pixels, data.max_picture_pixels is 127"):
        header_size(io.BytesIO(data), max_pixels=127)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_that_breaks_off_has_a_size_but_no_pixels(kind: str) -> None:
    data = saved(image(64, 48), kind)
    cut = data[: len(data) // 2]
    assert header_size(io.BytesIO(cut), max_pixels=MANY) == (64, 48)
    with pytest.raises((OSError, SyntaxError)):
        decoded(cut)
