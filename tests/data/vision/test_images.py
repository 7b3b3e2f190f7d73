"""Sizes from headers are those of decoded images, whatever the format and whatever the orientation."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.vision.images import decoded, header_size
from tests.data.makers import few_examples
from tests.data.vision.makers import image, saved

EDGES = st.integers(1, 40)
MANY = 1 << 20


@few_examples
@given(height=EDGES, width=EDGES, kind=st.sampled_from(["PNG", "JPEG", "WEBP"]), orientation=st.integers(1, 8))
def test_headers_give_the_upright_size(height: int, width: int, kind: str, orientation: int) -> None:
    data = saved(image(height, width), kind, orientation=orientation)
    found = header_size(io.BytesIO(data), max_pixels=MANY)
    assert found == ((width, height) if orientation >= 5 else (height, width))
    assert decoded(data).size == found[::-1]


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
