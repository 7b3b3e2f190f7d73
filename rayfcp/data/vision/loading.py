"""Loads the processor that `data.processor` names."""

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rayfcp.config import ConfigError
from rayfcp.config.models import DataConfig
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.tokenizer import HuggingFaceTokenizer, TokenArray, Tokenizer, load_tokenizer
from rayfcp.data.vision.layout import Grid, Item, place, runs_of
from rayfcp.data.vision.processors import Family, InternVL, Qwen3VL, order_of
from rayfcp.values import Pictures


class PictureTokenizer(HuggingFaceTokenizer):
    """The tokenizer of a model that sees, and its processor: for rows with pictures, and without.

    `fingerprint` changes with whatever tokens and patches depend on.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.family = _family(name, self._tokenizer)
        processor = self.family.processor
        settings = [type(processor).__mro__[1].__name__, str(processor.chat_template), self.fingerprint]
        parts = [processor.image_processor, getattr(processor, "video_processor", None)]
        settings += [json.dumps(part.to_dict(), sort_keys=True, default=str) for part in parts if part is not None]
        self.fingerprint = hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()

    def encode_pictures(
        self, text: str, grids: Sequence[Grid], *, fps: float | None = None
    ) -> tuple[TokenArray, tuple[Item, ...], tuple[Pictures, ...]]:
        """Tokens `[tokens]` of a text with the library's markers, one for each of `grids`, images and videos each in
        their order; and where their pictures are.

        Raises:
            BadRowError: markers and pictures do not match.
        """
        ordered = self._ordered(text, grids)
        tokens = self.encode(self.family.expanded(text, grids, fps=fps))
        starts = place(tokens, ordered, marks=self.family.marks, apart=self.family.units_apart)
        items: list[Item] = []
        runs: list[Pictures] = []
        for grid, own in zip(ordered, starts, strict=True):
            stop = int(own[-1]) + grid.unit_tokens
            items.append(Item(int(grid.is_video), grid.units, grid.height, grid.width, int(own[0]), stop, grid.parts))
            runs += runs_of(own, num_tokens=grid.unit_tokens, num_patches=grid.height * grid.width)
        return tokens, tuple(items), tuple(runs)

    def _ordered(self, text: str, grids: Sequence[Grid]) -> list[Grid]:
        """As the text has them."""
        of_kind = {kind: [grid for grid in grids if grid.is_video is kind] for kind in (False, True)}
        order = order_of(self.family, text)
        for kind, name in ((False, "image"), (True, "video")):
            if order.count(kind) != len(of_kind[kind]):
                detail = f"{order.count(kind)} markers of {name}s for {len(of_kind[kind])} {name}s"
                raise BadRowError(BadReason.MARKERS_MISMATCH, detail)
        left = {kind: iter(each) for kind, each in of_kind.items()}
        return [next(left[kind]) for kind in order]

    def is_mark(self, tokens: TokenArray) -> Any:
        """Of each token whether it stands for a part of a picture, bool `[tokens]`."""
        return np.isin(tokens, list(self.family.marks))


@lru_cache(maxsize=4)
def load_processor(name: str) -> PictureTokenizer:
    """The processor that `data.processor` names; loaded once in a process.

    Raises:
        ConfigError: it cannot be loaded, or is of a family whose rules are not known here.
    """
    return PictureTokenizer(name)


def tokenizer_named(name: str, *, sees: bool) -> Tokenizer:
    """The processor of this name if it `sees`, the tokenizer otherwise."""
    return load_processor(name) if sees else load_tokenizer(name)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """What makes tokens of the rows: of `data.processor` if there is one, else `data.tokenizer`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    return tokenizer_named(data.processor or data.tokenizer, sees=data.processor is not None)


def _family(name: str, tokenizer: Any) -> Family:
    try:
        kind = _class_name(name)
        if kind in _FAMILIES:
            return _FAMILIES[kind](name, tokenizer)
    except ConfigError:
        raise
    except Exception as error:  # the library raises many kinds, for a folder without the files as for a dead network
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"data.processor is {name!r}, must be a Hugging Face processor that loads ({reason}); give the folder that "
            "holds preprocessor_config.json; pictures need pip install 'rayfcp[vision]'"
        ) from error
    raise ConfigError(
        f"data.processor is {name!r}, a {kind}, must be one of {', '.join(_FAMILIES)}; give another model"
    )


def _class_name(name: str) -> str:
    """The class of the processor, as the library finds it: in its own file, or in those of its parts."""
    base = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    mixin = importlib.import_module("transformers.processing_utils").ProcessorMixin
    found: dict[str, Any] = {**base.get_image_processor_dict(name)[0]}
    found.update({key: value for key, value in mixin.get_processor_dict(name)[0].items() if key == "processor_class"})
    return str(found.get("processor_class"))


def _processor(library: Any, name: str, **parts: Any) -> Any:
    """The library's processor. Its own constructor takes parts of its own base classes only, which it lacks where
    torchvision is not installed."""
    unchecked = type(library.__name__, (library,), {"check_argument_for_proper_class": lambda *_: object})
    kept = library.get_processor_dict(name)[0]
    settings = {key: kept[key] for key in ("chat_template", "image_seq_length") if key in kept}
    auto = importlib.import_module("transformers").AutoImageProcessor
    return unchecked(image_processor=auto.from_pretrained(name, backend="pil"), **parts, **settings)


def _qwen3_vl(name: str, tokenizer: Any) -> Family:
    library = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
    videos = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl").Qwen3VLVideoProcessor
    processor = _processor(library, name, tokenizer=tokenizer, video_processor=videos.from_pretrained(name))
    return Qwen3VL(processor)


def _internvl(name: str, tokenizer: Any) -> Family:
    library = importlib.import_module("transformers.models.internvl.processing_internvl").InternVLProcessor
    processor = _processor(library, name, tokenizer=tokenizer, video_processor=None)
    return InternVL(processor)


_FAMILIES: dict[str, Callable[[str, Any], Family]] = {"Qwen3VLProcessor": _qwen3_vl, "InternVLProcessor": _internvl}
