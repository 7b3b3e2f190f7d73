"""The library's encoders on many images at once: each image's features are those that it has alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rayfcp.data.vision.decoding import DecodedImages
from rayfcp.models.vision import VisionLM
from tests.examples import examples
from tests.models.vlm import PATCH, vlm_config, vlm_model

SIDES = st.integers(1, 4).map(lambda half: 2 * half)
MODELS = {family: vlm_model(vlm_config(family), dtype="float64") for family in ("qwen3_vl", "internvl")}


def images_of(family: str, grids: list[tuple[int, int]]) -> list[DecodedImages]:
    rng = np.random.default_rng(len(grids))
    found = []
    for height, width in grids:
        shape = (height * width, 6 * PATCH**2) if family == "qwen3_vl" else (1, 3, height * PATCH, width * PATCH)
        values = rng.standard_normal(shape).astype(np.float32)
        found.append(DecodedImages(values=values, grids=np.array([[height, width]])))
    return found


def joined(images: list[DecodedImages]) -> DecodedImages:
    values, grids = ([getattr(each, name) for each in images] for name in ("values", "grids"))
    return DecodedImages(values=np.concatenate(values), grids=np.concatenate(grids))


def assert_apart(model: VisionLM, images: list[DecodedImages]) -> None:
    together = model.encode(joined(images))
    alone = torch.cat([model.encode(each) for each in images])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-11)
    assert len(together) == sum(int(each.grids.prod()) // 4 for each in images)


@examples(20)
@given(grids=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4))
def test_images_of_any_sizes(grids: list[tuple[int, int]]) -> None:
    assert_apart(MODELS["qwen3_vl"], images_of("qwen3_vl", grids))


@examples(8)
@given(side=SIDES, count=st.integers(1, 4))
def test_tiles(side: int, count: int) -> None:
    """Images of the size that the position table has, and of others."""
    assert_apart(MODELS["internvl"], images_of("internvl", [(side, side)] * count))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("side", [0, 2, 6])
def test_blank_images(family: str, side: int) -> None:
    """Those of ranks without images, and those that are timed."""
    model = MODELS[family]
    blank = model.blank_images(2, side=side)
    assert blank.grids.tolist() == [[side or 2] * 2] * 2 and not blank.values.any()
    assert len(model.encode(blank)) == 2 * (side or 2) ** 2 // 4
    assert len(model.encode(None)) == 1


class Kernels(TorchDispatchMode):
    """Counts calls of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "attention" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", MODELS)
def test_our_kernel_attends(family: str) -> None:
    """Our kernel serves every layer, on the CPU image by image."""
    images = images_of(family, [(4, 4)] * 3)
    with Kernels() as kernels, torch.no_grad():
        MODELS[family].encode(joined(images))
    assert kernels.count == 3 * len(MODELS[family].encoder.layers)
