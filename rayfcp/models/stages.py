"""One pipeline stage cut out of a library model, in place; names of the remaining modules do not change.

The list of layers keeps its length: modules without weights replace the layers of other stages and return their input.
The decoder runs unchanged, so that whatever its family does around layers (rotary tables, masks) is done on every
stage. What it does to embeddings before the first layer is done once, since on later stages the first layer is replaced
by one that returns the activations received from the previous stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from rayfcp.models.library import REWARD_HEAD, decoder_layers, decoder_of, has_reward_head, text_of
from rayfcp.models.recurrent import FAMILIES as RECURRENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers `[start, stop)` of `num_layers`; the first stage embeds, the last has the final norm and the head."""

    start: int
    stop: int
    num_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.num_layers:
            raise ValueError(
                f"a stage has layers [{self.start}, {self.stop}), must have at least one of the model's "
                f"{self.num_layers}; lower cluster.pipeline_stages"
            )

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers


def stages_of(layers_of_stage: Sequence[int]) -> tuple[Stage, ...]:
    """Stages in order, by their numbers of layers.

    >>> [(stage.start, stage.stop) for stage in stages_of((3, 2))]
    [(0, 3), (3, 5)]
    """
    ends = list(accumulate(layers_of_stage))
    return tuple(
        Stage(start=stop - size, stop=stop, num_layers=ends[-1])
        for stop, size in zip(ends, layers_of_stage, strict=True)
    )


class SkippedModule(nn.Module):
    """Replaces a module of another stage: returns its input, or 0 if it gets no activations. `num_outputs`: as a tuple
    of so many, 0 for none."""

    def __init__(self, module: nn.Module, *, num_outputs: int = 0) -> None:
        super().__init__()
        self._num_outputs = num_outputs
        # Decoders read attributes of their layers, such as the type of their attention.
        plain = {name: value for name, value in vars(module).items() if isinstance(value, str | int | float)}
        vars(self).update({name: value for name, value in plain.items() if name not in vars(self)})

    def forward(self, *args: Any, **keywords: Any) -> Any:
        found = (each for each in (*args, *keywords.values()) if isinstance(each, Tensor) and each.is_floating_point())
        return self._returned(next(found, 0.0))

    def _returned(self, found: Any) -> Any:
        return (found, *[None] * (self._num_outputs - 1)) if self._num_outputs else found


class StageInput(SkippedModule):
    """Replaces the model's first layer on a later stage: returns the received activations, set in `hidden`."""

    hidden: Tensor | None = None

    def forward(self, *_args: Any, **_keywords: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        return self._returned(hidden)


def head_of(library: Any) -> Any:
    """The module that makes logits, or rewards, of the decoder's output; None if there is none."""
    return getattr(library, REWARD_HEAD) if has_reward_head(library.config) else library.get_output_embeddings()


def before_head(library: Any) -> Any:
    """The module between the decoder and `head_of`, which only some families have; None in others."""
    found, head = getattr(library, "lm_head", None), head_of(library)
    return found if isinstance(found, nn.Module) and found is not head else None


def is_tied(library: Any) -> bool:
    """True if embedding and head are one matrix."""
    outputs = head_of(library)
    return outputs is not None and library.get_input_embeddings().weight is outputs.weight


def cut(library: Any, stage: Stage) -> None:
    """Remove what `stage` does not run. A tied matrix stays on the first and last stage, under both its names.

    Raises:
        TypeError: The model's decoder has no list of layers.
        ValueError: The stage is of a model with another number of layers.
    """
    decoder = decoder_of(library)
    layers = decoder_layers(decoder)
    if len(layers) != stage.num_layers:
        raise ValueError(f"the stage is of {stage.num_layers} layers, {type(decoder).__name__} has {len(layers)}")
    for module in list(_others(library, stage)):
        name = next(name for name, each in library.named_modules() if each is module)
        library.set_submodule(name, SkippedModule(module))
    family = RECURRENT.get(text_of(library.config).model_type)
    num_outputs = family.num_outputs if family else 0
    for number, layer in enumerate(layers):
        if not stage.start <= number < stage.stop:
            skipped = StageInput if number == 0 else SkippedModule
            layers[number] = skipped(layer, num_outputs=num_outputs)


def _others(library: Any, stage: Stage) -> Iterator[nn.Module]:
    """Modules outside of the layers that other stages run: embeddings, final norm, head."""
    embedding = library.get_input_embeddings()
    keeps_embedding = stage.is_first or (stage.is_last and is_tied(library))
    is_ours = stage.is_first
    decoder = decoder_of(library)
    layers = decoder_layers(decoder)
    for module in decoder.children():
        if module is layers:
            is_ours = stage.is_last
        elif any(True for _ in module.parameters()) and not (keeps_embedding if module is embedding else is_ours):
            yield module
    if not stage.is_last:
        yield head_of(library)


def enter(decoder: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """Let the decoder's first layer return `hidden`, `[tokens, hidden]`; the decoder's arguments for it."""
    first = decoder_layers(decoder)[0]
    assert isinstance(first, StageInput)
    first.hidden = hidden.unsqueeze(0)
    return {"inputs_embeds": first.hidden.detach()}
