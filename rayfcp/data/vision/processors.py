"""The transformers library's processors, by family: how images become tokens and the encoder's pixels.

Pixels are resized by Pillow, not by torchvision, which the library prefers where it is installed: the same bytes give
the same patches on every machine, and no build of torchvision has to match torch.
"""

import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.config import ConfigError
from rayfcp.data.hub import locate, reason_of
from rayfcp.data.messages import check_marks
from rayfcp.data.tokenizer import HuggingFaceTokenizer, SpannedTokens, TokenArray
from rayfcp.data.vision.layout import Integers, MediaGrid, MediaItem, place, runs_of
from rayfcp.values import Images

if TYPE_CHECKING:
    from PIL.Image import Image


_MARK_CHARACTERS = 64
"""Characters before and after an image in which its marks are searched, longer than e.g.
`<|vision_start|><1234.5 seconds>`."""

PixelArray = npt.NDArray[np.float32]
Size = tuple[int, int]
"""Height and width, in pixels."""


class Expanded(NamedTuple):
    """Text whose markers were replaced. `markers`, int64 `[markers, 3]`: start and end of each marker in the original
    text, and the length of its replacement."""

    text: str
    markers: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens(SpannedTokens):
    """Tokens of a text with images: `items` and `runs` say where images lie, `parts` are their files. Tokens of an
    image span the characters of its marker."""

    items: tuple[MediaItem, ...]
    runs: tuple[Images, ...]
    parts: tuple[bytes, ...] = ()


class Qwen3VL:
    """Qwen3-VL: an image is one unit; a video has one per `temporal_patch_size` frames, after a text with their
    time."""

    has_grid_positions = True
    units_apart = True

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._images, self._videos = processor.image_processor, processor.video_processor
        self._image_rule = importlib.import_module(type(self._images).__module__).smart_resize
        self._video_rule = importlib.import_module(type(self._videos).__module__).smart_resize
        self.marks = frozenset((processor.image_token_id, processor.video_token_id))
        self.patch_values = 3 * self._images.temporal_patch_size * self._images.patch_size**2
        start, end = map(re.escape, (processor.vision_start_token, processor.vision_end_token))
        self.opening, self.closing = rf"((?:{start})?<[\d.]+ seconds>)?{start}", rf"(?:{end}){{1,2}}"
        self.image_marker = processor.vision_start_token + processor.image_token + processor.vision_end_token
        self.video_marker = processor.vision_start_token + processor.video_token + processor.vision_end_token

    def image_grid(self, size: Size) -> MediaGrid:
        images = self._images
        resized = self._image_rule(
            *size,
            factor=images.patch_size * images.merge_size,
            min_pixels=images.size["shortest_edge"],
            max_pixels=images.size["longest_edge"],
        )
        height, width = (edge // images.patch_size for edge in resized)
        tokens = height * width // images.merge_size**2
        return MediaGrid(is_video=False, units=1, height=height, width=width, unit_tokens=tokens, parts=1)

    def video_grid(self, size: Size, num_frames: int) -> MediaGrid:
        videos = self._videos
        height, width = (edge // videos.patch_size for edge in self._frame_size(size, num_frames))
        return MediaGrid(
            is_video=True,
            units=-(-num_frames // videos.temporal_patch_size),
            height=height,
            width=width,
            unit_tokens=height * width // videos.merge_size**2,
            parts=num_frames,
        )

    def _frame_size(self, size: Size, num_frames: int) -> Size:
        """Size that all frames are resized to."""
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

    def expanded(self, text: str, grids: Sequence[MediaGrid], *, fps: float | None) -> Expanded:
        """The text with the library's tokens in place of the markers; `grids` in the order of the markers."""
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

    def image_values(self, image: "Image") -> PixelArray:
        """Inputs of the model's encoder, unit by unit: `unit_shape` each."""
        found = self._images(image, return_tensors="np")["pixel_values"]
        return np.asarray(found, dtype=np.float32)

    def video_values(self, frames: "Sequence[Image]") -> PixelArray:
        """Patches of frames: each frame, as an image, fills its share of the patches in time; the last is repeated."""
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
        """Shape of the values of a unit of `height` x `width` patches: `[patches, patch_values]`, since units differ in
        size; `[1, channels, height, width]` for InternVL, whose units are equal tiles."""
        return (height * width, self.patch_values)


class InternVL:
    """InternVL: an image is cut into tiles, followed by a small copy of the whole; a frame of a video is one tile."""

    has_grid_positions = False
    units_apart = False

    def __init__(self, processor: Any) -> None:
        self.processor, self._images = processor, processor.image_processor
        # A token stands for 2 x 2 patches (downsample_ratio 0.5 of the models), which the processor does not state.
        self._patch_size = self._images.size["height"] // (2 * math.isqrt(processor.image_seq_length))
        self.patch_values = 3 * self._patch_size**2
        self._settings = dict(processor.images_kwargs)
        self.marks = frozenset((processor.image_token_id,))
        start, end = map(re.escape, (processor.start_image_token, processor.end_image_token))
        self.opening, self.closing = rf"(?:Frame\d+: )?{start}", end
        self.image_marker, self.video_marker = processor.image_token, processor.video_token

    def image_grid(self, size: Size) -> MediaGrid:
        return self._grid(self._images.get_number_of_image_patches(*size, self._settings), is_video=False, parts=1)

    def video_grid(self, size: Size, num_frames: int) -> MediaGrid:  # noqa: ARG002
        return self._grid(num_frames, is_video=True, parts=num_frames)

    def _grid(self, tiles: int, *, is_video: bool, parts: int) -> MediaGrid:
        height, width = (self._images.size[edge] // self._patch_size for edge in ("height", "width"))
        tokens = self.processor.image_seq_length
        return MediaGrid(is_video=is_video, units=tiles, height=height, width=width, unit_tokens=tokens, parts=parts)

    def expanded(self, text: str, grids: Sequence[MediaGrid], *, fps: float | None) -> Expanded:  # noqa: ARG002
        images = {"num_patches": [grid.units for grid in grids if not grid.is_video]}
        videos = {"pixel_values_videos": [np.empty((grid.units, 0)) for grid in grids if grid.is_video]}
        return _expanded(self.processor, text, images=images, videos=videos)

    def image_values(self, image: "Image") -> PixelArray:
        found = self._images([image], return_tensors="np", **self._settings)["pixel_values"]
        return np.asarray(found, dtype=np.float32)

    def video_values(self, frames: "Sequence[Image]") -> PixelArray:
        settings = {**self._settings, "crop_to_patches": False}
        return np.asarray(self._images(list(frames), return_tensors="np", **settings)["pixel_values"], dtype=np.float32)

    def unit_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (1, 3, height * self._patch_size, width * self._patch_size)


ProcessorFamily = Qwen3VL | InternVL
"""Rules of one family. `processor`: the library's; `marks`: ids of tokens that stand for images; `patch_values`:
numbers per patch; `has_grid_positions`: tokens have three positions each, by the library's `get_rope_index`;
`units_apart`: every unit has other tokens around it; `opening`, `closing`: patterns of the text that the library puts
around the tokens of an image or a video; `image_marker`, `video_marker`: placeholders of an image or a
video in a text that no chat template rendered."""


def _shapes(grids: Sequence[MediaGrid], *, is_video: bool) -> npt.NDArray[np.int64]:
    found = [(grid.units, grid.height, grid.width) for grid in grids if grid.is_video is is_video]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _expanded(processor: Any, text: str, *, images: dict[str, Any], videos: dict[str, Any]) -> Expanded:
    """The library's own replacement of markers, given what it would have found in the decoded images."""
    counts = [len(next(iter(each.values()))) for each in (images, videos)]
    replaced, offsets = processor.get_text_with_replacements(
        [text],
        [processor.replace_image_token(images, image_idx=index) for index in range(counts[0])],
        [processor.replace_video_token(videos, video_idx=index) for index in range(counts[1])],
    )
    found = [(*each["span"], len(each["replacement"])) for each in offsets[0]]
    return Expanded(text=replaced[0], markers=np.array(found, dtype=np.int64).reshape(-1, 3))


class ImageTokenizer(HuggingFaceTokenizer):
    """Tokenizer and processor of a VLM, for rows with and without images. `fingerprint` covers both."""

    def __init__(self, name: str) -> None:
        locate(name, key="data.processor")
        super().__init__(name)
        self.family = _family(name, self._tokenizer)
        processor = self.family.processor
        known = self._tokenizer.get_vocab()
        self.mark_kinds = {processor.image_token: "image", processor.video_token: "video"}
        self.picture_marks = {known[mark]: kind for mark, kind in self.mark_kinds.items() if mark in known}
        if processor.chat_template:
            self._tokenizer.chat_template = processor.chat_template
        settings = [type(processor).__mro__[1].__name__, str(processor.chat_template), self.fingerprint]
        parts = [processor.image_processor, getattr(processor, "video_processor", None)]
        settings += [json.dumps(part.to_dict(), sort_keys=True, default=str) for part in parts if part is not None]
        self.fingerprint = hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()

    def encode_images(
        self, text: str, grids: Sequence[MediaGrid], *, fps: float | None = None, is_document: bool = True
    ) -> ImageTokens:
        """Tokens of a text with the library's markers, one for each of `grids` (images and videos each in their order),
        and where their images are. With `is_document`, tokens that begin and end a document are added.

        Raises:
            BadRowError: Markers and images do not match.
        """
        ordered = self._ordered(text, grids)
        expanded = self.family.expanded(text, grids, fps=fps)
        tokens = self.encode_spans(expanded.text, is_document=is_document)
        starts = place(tokens.ids, ordered, marks=self.family.marks, apart=self.family.units_apart)
        items: list[MediaItem] = []
        runs: list[Images] = []
        for grid, own in zip(ordered, starts, strict=True):
            stop = int(own[-1]) + grid.unit_tokens
            shape = (grid.units, grid.height, grid.width)
            span = self._with_marks(expanded.text, tokens, start=int(own[0]), stop=stop)
            items.append(MediaItem(int(grid.is_video), *shape, *span, grid.parts))
            runs += runs_of(own, num_tokens=grid.unit_tokens, num_patches=grid.height * grid.width)
        first, ends = _original_spans(tokens, markers=expanded.markers, length=len(text))
        return ImageTokens(ids=tokens.ids, starts=first, stops=ends, items=tuple(items), runs=tuple(runs))

    def _with_marks(self, text: str, tokens: SpannedTokens, *, start: int, stop: int) -> tuple[int, int]:
        """Extend tokens `[start, stop)` of an image or a video in `text` by the marks that open and close it."""
        first, last = int(tokens.starts[start]), int(tokens.stops[stop - 1])
        if opening := re.search(rf"(?:{self.family.opening})\Z", text[max(first - _MARK_CHARACTERS, 0) : first]):
            start = int(np.searchsorted(tokens.stops, first - len(opening.group()), side="right"))
        if closing := re.match(self.family.closing, text[last : last + _MARK_CHARACTERS]):
            stop = int(np.searchsorted(tokens.starts, last + len(closing.group())))
        return start, stop

    def kinds_in(self, text: str) -> list[str]:
        """Return the kinds of the processor's marks in a text, in order."""
        return [self.mark_kinds[mark] for mark in re.findall("|".join(map(re.escape, self.mark_kinds)), text)]

    def _ordered(self, text: str, grids: Sequence[MediaGrid]) -> list[MediaGrid]:
        """`grids` in the order of their markers in the text."""
        of_kind = {kind: [grid for grid in grids if grid.is_video is kind] for kind in (False, True)}
        order = [kind == "video" for kind in self.kinds_in(text)]
        for is_video, own in of_kind.items():
            check_marks(order.count(is_video), len(own), kind="video" if is_video else "image")
        left = {kind: iter(each) for kind, each in of_kind.items()}
        return [next(left[kind]) for kind in order]

    def is_mark(self, tokens: TokenArray) -> Any:
        """True for each token that stands for a part of an image, `[tokens]`."""
        return np.isin(tokens, list(self.family.marks))


def _original_spans(tokens: SpannedTokens, *, markers: Integers, length: int) -> tuple[Integers, Integers]:
    """First characters and ends of the tokens of an expanded text, in the original text of `length` characters."""
    widths, ends = np.ones(length + 1, dtype=np.int64), np.arange(1, length + 2)
    for start, stop, width in markers.tolist():
        widths[start:stop] = 0
        widths[start], ends[start] = width, stop
    characters = np.repeat(np.arange(length + 1), widths)
    stops = ends[characters[np.maximum(tokens.stops, 1) - 1]]
    return characters[tokens.starts], np.where(tokens.stops > tokens.starts, stops, characters[tokens.stops])


@lru_cache(maxsize=4)
def load_processor(name: str) -> ImageTokenizer:
    """The processor named by `data.processor`, loaded once per process.

    Raises:
        ConfigError: It cannot be loaded, or is of an unknown family.
    """
    return ImageTokenizer(name)


def _family(name: str, tokenizer: Any) -> ProcessorFamily:
    source, local_only = locate(name, key="data.processor")
    try:
        kind = _class_name(source, local_files_only=local_only)
        if kind in _FAMILIES:
            return _FAMILIES[kind][0](_processor(kind, source, tokenizer, local_files_only=local_only))
    except Exception as error:  # the library raises errors of many kinds for missing files and for a dead network
        raise ConfigError(
            f"data.processor is {name!r}, must be a Hugging Face processor that loads ({reason_of(error)}); give the "
            "folder that holds preprocessor_config.json; images need pip install 'rayfcp[vision]'"
        ) from error
    raise ConfigError(
        f"data.processor is {name!r}, a {kind}, must be one of {', '.join(_FAMILIES)}; give another model"
    )


def _class_name(name: str, **options: Any) -> str:
    """Class of the processor, where the library looks for it: in its own file, or in those of its parts."""
    base = importlib.import_module("transformers.image_processing_base").ImageProcessingMixin
    mixin = importlib.import_module("transformers.processing_utils").ProcessorMixin
    own = mixin.get_processor_dict(name, **options)[0]
    return str(own.get("processor_class") or base.get_image_processor_dict(name, **options)[0].get("processor_class"))


def _processor(kind: str, name: str, tokenizer: Any, *, local_files_only: bool) -> Any:
    """The library's processor. Its own constructor checks the classes of its parts, which it lacks where torchvision is
    not installed."""
    _, module, video_class = _FAMILIES[kind]
    folder = f"transformers.models.{module}"
    library = getattr(importlib.import_module(f"{folder}.processing_{module}"), kind)
    videos = None
    if video_class is not None:
        own = getattr(importlib.import_module(f"{folder}.video_processing_{module}"), video_class)
        videos = own.from_pretrained(name, local_files_only=local_files_only)
    unchecked = type(library.__name__, (library,), {"check_argument_for_proper_class": lambda *_: object})
    kept = library.get_processor_dict(name, local_files_only=local_files_only)[0]
    settings = {key: kept[key] for key in ("chat_template", "image_seq_length") if key in kept}
    auto = importlib.import_module("transformers").AutoImageProcessor
    images = auto.from_pretrained(name, backend="pil", local_files_only=local_files_only, trust_remote_code=False)
    return unchecked(image_processor=images, tokenizer=tokenizer, video_processor=videos, **settings)


_FAMILIES: dict[str, tuple[Callable[[Any], ProcessorFamily], str, str | None]] = {
    "Qwen3VLProcessor": (Qwen3VL, "qwen3_vl", "Qwen3VLVideoProcessor"),
    "InternVLProcessor": (InternVL, "internvl", None),
}
"""By class of the library's processor: rules, module of the library, and class of its video processor."""
