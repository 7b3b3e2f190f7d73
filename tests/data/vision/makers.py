"""Processors of two families, images as bytes, and rows with them."""

import importlib.util
import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rayfcp.data.vision.processors import ImageTokenizer, load_processor

ROOT = Path(__file__).resolve().parents[3]
INTERN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<IMG_CONTEXT>\n{% elif part.type == 'video' %}<video>\n"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template of InternVL, without tools."""
TILE = 28
"""Edge of an InternVL tile: 2 x 2 patches of 14 pixels, one token."""


@lru_cache(maxsize=1)
def example() -> Any:
    """The script that writes the example's data."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "jobs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def qwen(folder: Path, *, max_pixels: int = 64 * 64) -> ImageTokenizer:
    """Qwen3-VL's processor with small images."""
    if not (folder / "qwen").exists():
        (folder / "qwen").mkdir()
        example().write_processor(folder / "qwen", max_pixels=max_pixels)
    return load_processor(str(folder / "qwen"))


def intern(folder: Path) -> ImageTokenizer:
    """InternVL's processor with tiny tiles, at most 4 of an image and a small copy."""
    folder = folder / "intern"
    if not folder.exists():
        vocabulary = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        names = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
            "message_token": "<|im_start|>",
        }
        PreTrainedTokenizerFast(
            tokenizer_object=letters, eos_token="<|im_end|>", extra_special_tokens=names
        ).save_pretrained(folder)
        rules = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": TILE, "width": TILE},
            "max_patches": 4,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(rules))
        settings = {"processor_class": "InternVLProcessor", "image_seq_length": 1}
        (folder / "processor_config.json").write_text(json.dumps(settings))
        (folder / "chat_template.jinja").write_text(INTERN_TEMPLATE)
    return load_processor(str(folder))


def image(height: int, width: int, *, seed: int = 0) -> Image.Image:
    """Random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def saved(image: Image.Image, kind: str = "PNG", *, orientation: int = 1, **options: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(file, format=kind, exif=exif, **options)
    return file.getvalue()
