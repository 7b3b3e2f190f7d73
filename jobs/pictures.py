"""Writes rows of text and real pictures, and the processor of a tiny Qwen3-VL, without any download.

The pictures are photographs that come with scikit-image; the videos are pans over them.

    python jobs/pictures.py build/pictures
"""

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import skimage
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SUBJECTS = ("astronaut", "camera", "cat", "coffee", "coins", "moon", "page", "rocket", "text")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, without tools."""

TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def write_processor(folder: Path, *, max_pixels: int) -> None:
    """A tokenizer of bytes with Qwen3-VL's special tokens, and Qwen3-VL's rules for pictures with `max_pixels`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={**TOKENS, "message_token": "<|im_start|>"},
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    rules = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "processor_class": "Qwen3VLProcessor"}
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = {**rules, **normal, **_size(max_pixels), "image_processor_type": "Qwen2VLImageProcessor"}
    videos = {**rules, **normal, **_size(8 * max_pixels), "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _size(max_pixels: int) -> dict[str, dict[str, int]]:
    """The least and the most pixels after resizing: of an image, of all frames of a video."""
    return {"size": {"shortest_edge": 32 * 32, "longest_edge": max_pixels}}


def write_rows(folder: Path, *, num_rows: int, seed: int) -> None:
    """`rows.jsonl` of conversations about parts of photographs, whose files lie beside it."""
    draw = random.Random(seed)
    photographs = {name: _photograph(name) for name in SUBJECTS}
    (folder / "files").mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as rows:
        for number in range(num_rows):
            subjects = draw.sample(SUBJECTS, draw.choice((1, 1, 2)))
            is_video = len(subjects) == 1 and draw.random() < 0.3
            own = photographs[subjects[0]]
            pictures = _pan(own, draw) if is_video else [_part(photographs[name], draw) for name in subjects]
            names = [f"files/{number:04d}-{index}.jpg" for index in range(len(pictures))]
            for name, picture in zip(names, pictures, strict=True):
                (folder / name).write_bytes(picture)
            rows.write(json.dumps(_row(subjects, names, is_video=is_video)) + "\n")


def _row(subjects: list[str], names: list[str], *, is_video: bool) -> dict[str, Any]:
    question = "<video>What passes by?" if is_video else "<image>" * len(names) + "What is this?"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": " and ".join(f"the {name}" for name in subjects)},
    ]
    return {"messages": messages, "videos": [names]} if is_video else {"messages": messages, "images": names}


def _photograph(name: str) -> Image.Image:
    pixels = np.asarray(getattr(skimage.data, name)())
    return Image.fromarray(pixels).convert("RGB")


def _part(picture: Image.Image, draw: random.Random) -> bytes:
    width, height = (draw.randint(64, min(edge, 224)) for edge in picture.size)
    return _cut(
        picture, draw.randint(0, picture.width - width), draw.randint(0, picture.height - height), width, height
    )


def _pan(picture: Image.Image, draw: random.Random) -> list[bytes]:
    """Frames of a window that moves to the right."""
    width, height = 64, 64
    frames, top = draw.randint(3, 8), draw.randint(0, picture.height - height)
    return [_cut(picture, 8 * number, top, width, height) for number in range(frames)]


def _cut(picture: Image.Image, *box: int) -> bytes:
    left, top, width, height = box
    file = io.BytesIO()
    picture.crop((left, top, left + width, top + height)).save(file, format="JPEG", quality=90)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-pixels", type=int, default=128 * 128)
    given = parser.parse_args()
    write_processor(given.folder / "processor", max_pixels=given.max_pixels)
    write_rows(given.folder / "rows", num_rows=given.rows, seed=given.seed)


if __name__ == "__main__":
    main()
