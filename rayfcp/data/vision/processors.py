"""The transformers library's processors: how pictures become tokens and pixels of the encoder, family by family.

Pixels are resized by Pillow and not by torchvision, which the library prefers where it is installed: so the same bytes
give the same patches on every machine, and no build of torchvision has to match torch.

Loads the processor that `data.processor` names.
"""

import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.config.models import DataConfig
from rayfcp.data.rows import BadReason, BadRowError
from rayfcp.data.tokenizer import HuggingFaceTokenizer, TokenArray, Tokenizer, load_tokenizer
from rayfcp.data.vision.layout import Grid, Item, place, runs_of
from rayfcp.values import Pictures

if TYPE_CHECKING:
    from PIL.Image import Image


Values = npt.NDArray[np.float32]
Size = tuple[int, int]
"""Height and width, in pixels."""


class Family(Protocol):
    """What one family's processor does. `processor`: the library's; `marks`: ids of tokens that stand for pictures;
    `patch_values`: numbers that make a patch;
    `has_grid_positions`: tokens have three positions each, by the library's `get_rope_index`; `units_apart`: every
    unit has other tokens around it."""

    processor: Any
    marks: frozenset[int]
    has_grid_positions: bool
    units_apart: bool
    patch_values: int
    image_marker: str
    video_marker: str
    """What stands for an image or a video in a text that no template made."""

    def image_grid(self, size: Size) -> Grid: ...

    def video_grid(self, size: Size, num_frames: int) -> Grid: ...

    def expanded(self, text: str, grids: Sequence[Grid], *, fps: float | None) -> str:
        """The text with the library's tokens in place of the markers; `grids` in the order of the markers."""
        ...

    def image_values(self, image: "Image") -> Values:
        """Pixels as the model's encoder takes them, unit by unit: `unit_shape` each."""
        ...

    def video_values(self, frames: "Sequence[Image]") -> Values: ...

    def unit_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of the values of a unit of so many patches: `[patches, patch_values]` where units differ in size,
        `[1, channels, height, width]` where all are equal tiles."""
        ...


class Qwen3VL:
    """Qwen3-VL: an image is one unit, a video one for each `temporal_patch_size` frames, with their time before it."""

    has_grid_positions = True
    units_apart = True

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._images, self._videos = processor.image_processor, processor.video_processor
        self._image_rule = importlib.import_module(type(self._images).__module__).smart_resize
        self._video_rule = importlib.import_module(type(self._videos).__module__).smart_resize
        self.marks = frozenset((processor.image_token_id, processor.video_token_id))
        self.patch_values = 3 * self._images.temporal_patch_size * self._images.patch_size**2
        self.image_marker = processor.vision_start_token + processor.image_token + processor.vision_end_token
        self.video_marker = processor.vision_start_token + processor.video_token + processor.vision_end_token

    def image_grid(self, size: Size) -> Grid:
        images = self._images
        resized = self._image_rule(
            *size,
            factor=images.patch_size * images.merge_size,
            min_pixels=images.size["shortest_edge"],
            max_pixels=images.size["longest_edge"],
        )
        height, width = (edge // images.patch_size for edge in resized)
        tokens = height * width // images.merge_size**2
        return Grid(is_video=False, units=1, height=height, width=width, unit_tokens=tokens, parts=1)

    def video_grid(self, size: Size, num_frames: int) -> Grid:
        videos = self._videos
        height, width = (edge // videos.patch_size for edge in self._frame_size(size, num_frames))
        return Grid(
            is_video=True,
            units=-(-num_frames // videos.temporal_patch_size),
            height=height,
            width=width,
            unit_tokens=height * width // videos.merge_size**2,
            parts=num_frames,
        )

    def _frame_size(self, size: Size, num_frames: int) -> Size:
        """To which all frames are resized."""
        videos = self._videos
        factor, most = videos.patch_size * videos.merge_size, videos.size["longest_edge"]
        if videos.cap_pixels_per_frame:
            least = int(videos.size["shortest_edge"] * 1.05)
            most = max(min(videos.max_video_tokens * factor**2, most // num_frames), least) * num_frames
        found: Size = self._video_rule(
            num_frames=num_frames,
            height=size[0],
            width=size[1],
            temporal_factor=videos.temporal_patch_size,
            factor=factor,
            min_pixels=videos.size["shortest_edge"],
            max_pixels=most,
        )
        return found

    def expanded(self, text: str, grids: Sequence[Grid], *, fps: float | None) -> str:
        metadata = importlib.import_module("transformers.video_utils").VideoMetadata
        images = {"image_grid_thw": _shapes(grids, is_video=False)}
        videos = {
            "video_grid_thw": _shapes(grids, is_video=True),
            "video_metadata": [
                metadata(total_num_frames=grid.parts, fps=fps or self._videos.fps, frames_indices=[*range(grid.parts)])
                for grid in grids
                if grid.is_video
            ],
        }
        return _expanded(self.processor, text, images=images, videos=videos)

    def image_values(self, image: "Image") -> Values:
        found = self._images(image, return_tensors="np")["pixel_values"]
        return np.asarray(found, dtype=np.float32)

    def video_values(self, frames: "Sequence[Image]") -> Values:
        """Frames as images, each of which fills its share of the patches in time; the last one is repeated."""
        videos = self._videos
        height, width = self._frame_size((frames[0].height, frames[0].width), len(frames))
        resized = [frame.resize((width, height), resample=int(videos.resample)) for frame in frames]
        span, size = videos.temporal_patch_size, videos.patch_size
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        rules = {name: getattr(videos, name) for name in (*names, "patch_size", "merge_size", "temporal_patch_size")}
        found = np.asarray(self._images(resized, do_resize=False, return_tensors="np", **rules)["pixel_values"])
        of_frame = found.reshape(len(frames), -1, 3, span, size * size)
        taken = np.minimum(np.arange(-(-len(frames) // span) * span), len(frames) - 1).reshape(-1, span)
        units = np.stack([of_frame[taken[:, step], :, :, step] for step in range(span)], axis=3)
        return units.reshape(-1, found.shape[1]).astype(np.float32)

    def unit_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (height * width, self.patch_values)


class InternVL:
    """InternVL: an image is cut into tiles, with a small copy of the whole behind; a frame of a video is one tile."""

    has_grid_positions = False
    units_apart = False

    def __init__(self, processor: Any) -> None:
        self.processor, self._images = processor, processor.image_processor
        # A token stands for 2 x 2 patches (the models' downsample_ratio is 0.5), which the processor does not say.
        self._patch_size = self._images.size["height"] // (2 * math.isqrt(processor.image_seq_length))
        self.patch_values = 3 * self._patch_size**2
        self._merged_kwargs = {**processor.images_kwargs}
        self.marks = frozenset((processor.image_token_id,))
        self.image_marker, self.video_marker = processor.image_token, processor.video_token

    def image_grid(self, size: Size) -> Grid:
        return self._grid(self._images.get_number_of_image_patches(*size, self._merged_kwargs), is_video=False, parts=1)

    def video_grid(self, size: Size, num_frames: int) -> Grid:  # noqa: ARG002
        return self._grid(num_frames, is_video=True, parts=num_frames)

    def _grid(self, tiles: int, *, is_video: bool, parts: int) -> Grid:
        height, width = (self._images.size[edge] // self._patch_size for edge in ("height", "width"))
        tokens = self.processor.image_seq_length
        return Grid(is_video=is_video, units=tiles, height=height, width=width, unit_tokens=tokens, parts=parts)

    def expanded(self, text: str, grids: Sequence[Grid], *, fps: float | None) -> str:  # noqa: ARG002
        images = {"num_patches": [grid.units for grid in grids if not grid.is_video]}
        videos = {"pixel_values_videos": [np.empty((grid.units, 0)) for grid in grids if grid.is_video]}
        return _expanded(self.processor, text, images=images, videos=videos)

    def image_values(self, image: "Image") -> Values:
        return self._tiles([image], self._merged_kwargs)

    def video_values(self, frames: "Sequence[Image]") -> Values:
        return self._tiles(list(frames), {**self._merged_kwargs, "crop_to_patches": False})

    def _tiles(self, pictures: "list[Image]", settings: dict[str, Any]) -> Values:
        found = self._images(pictures, return_tensors="np", **settings)["pixel_values"]
        return np.asarray(found, dtype=np.float32)

    def unit_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (1, 3, height * self._patch_size, width * self._patch_size)


def order_of(family: Family, text: str) -> list[bool]:
    """Of each marker of the library's own in the text, in order, whether it is a video's."""
    processor = family.processor
    either = f"({re.escape(processor.video_token)})|{re.escape(processor.image_token)}"
    return [match.group(1) is not None for match in re.finditer(either, text)]


def _shapes(grids: Sequence[Grid], *, is_video: bool) -> npt.NDArray[np.int64]:
    found = [(grid.units, grid.height, grid.width) for grid in grids if grid.is_video is is_video]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _expanded(processor: Any, text: str, *, images: dict[str, Any], videos: dict[str, Any]) -> str:
    """The library's own replacement of markers, told what it would have found in the decoded pictures."""
    counts = [len(next(iter(each.values()))) for each in (images, videos)]
    replaced, _ = processor.get_text_with_replacements(
        [text],
        [processor.replace_image_token(images, image_idx=index) for index in range(counts[0])],
        [processor.replace_video_token(videos, video_idx=index) for index in range(counts[1])],
    )
    return str(replaced[0])


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
