"""A Hugging Face model that sees, as the interpreter wants it: a causal language model and its vision encoder."""

from typing import Any

import torch
from torch import Tensor, nn

from rayfcp.execute.interfaces import Pixels, Placed
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.encoders import ENCODERS
from rayfcp.models.stages import Stage


class VisionLM(CausalLM):
    """Wraps a `*ForConditionalGeneration`; parameters are the library's own, under `model`.

    Args:
        model: as for `CausalLM`.
        stage: all layers, as long as stages do not run with pictures.
        freeze: the encoder, mergers and projector included, keeps its weights.
    """

    def __init__(self, model: Any, *, stage: Stage | None = None, freeze: bool = False) -> None:
        super().__init__(model, stage=stage)
        self.encoder = ENCODERS[model.config.model_type](model)
        self.is_frozen = freeze
        for module in self.encoder.modules if freeze else ():
            module.requires_grad_(False)
        if hasattr(self.decoder, "_deepstack_process"):
            # The library's own asks a mask of tokens for their places, for which the host would wait.
            self.decoder._deepstack_process = _add

    @property
    def occasional(self) -> tuple[nn.Parameter, ...]:
        """The encoder's."""
        found = (parameter for module in self.encoder.modules for parameter in module.parameters())
        return tuple(parameter for parameter in found if parameter.requires_grad)

    @property
    def sharded_parts(self) -> list[nn.Module]:
        return [*self.encoder.layers, *super().sharded_parts]

    def encode(self, pixels: Pixels | None) -> Tensor:
        """Features of the pictures' tokens, `[tokens, num_mergers x hidden]`, without a graph where the encoder is
        frozen. None: those of a small picture, of which nobody needs more than that they stand in the graph."""
        device = next(self.parameters()).device
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            return self.encoder.encode(pixels or self.encoder.blank(), device)

    def blank_pictures(self, count: int, *, side: int) -> Pixels:
        return self.encoder.blank(count, side=side)

    def _entering(self, inputs: Tensor, placed: Placed | None) -> dict[str, Any]:
        if placed is None:
            return super()._entering(inputs, None)
        embedded = self.model.get_input_embeddings()(inputs)
        first, *others = placed.features.to(embedded.dtype).split(embedded.shape[1], dim=1)
        given = {"inputs_embeds": embedded.index_copy(0, placed.rows, first).unsqueeze(0)}
        return given | ({"visual_pos_masks": placed.rows, "deepstack_visual_embeds": others} if others else {})


def _add(hidden: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    """`hidden`, `[1, tokens, hidden]`, with `features` added at `rows`."""
    return hidden.index_add(1, rows, features.unsqueeze(0))
