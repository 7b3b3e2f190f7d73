"""The section `model.architecture`: the shape of a model that starts from random weights."""

from pydantic import Field, model_validator

from rayfcp.config.section import Count, Section


class VisionConfig(Section):
    """Shape of a vision encoder; 2 x 2 patches become one token of the language model."""

    num_layers: Count = 4
    hidden_size: Count = 64
    num_heads: Count = 4
    ffn_size: Count = 256
    patch_size: Count = Field(default=16, description="pixels along a side")
    image_size: Count = Field(
        default=256, description="pixels along a side: of a tile (internvl), of the table of places (qwen3_vl)"
    )
    deepstack_layers: tuple[int, ...] = Field(
        default=(), description="encoder layers whose features the first layers of a qwen3_vl add, one each"
    )
    image_token: int | None = Field(
        default=None, ge=0, description="id that stands for an image; the vocabulary's last if absent"
    )
    video_token: int | None = Field(default=None, ge=0, description="id that stands for a video (qwen3_vl)")

    @model_validator(mode="after")
    def _patches_fit(self) -> "VisionConfig":
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size is {self.hidden_size}, must be a multiple of 4 x num_heads ({self.num_heads}) for rotary "
                "positions in two dimensions; change one"
            )
        if self.image_size % (2 * self.patch_size):
            raise ValueError(
                f"image_size is {self.image_size}, must be a multiple of 2 x patch_size ({self.patch_size}); change one"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.deepstack_layers):
            raise ValueError(
                f"deepstack_layers is {self.deepstack_layers}, must lie in [0, {self.num_layers}); change it"
            )
        return self


class ArchitectureConfig(Section):
    """Shape of a model that starts from random weights (any `model_type` that transformers knows)."""

    model_type: str = "qwen3"
    num_layers: Count = 4
    hidden_size: Count = 128
    num_heads: Count = 4
    num_kv_heads: Count = 2
    head_dim: Count = 32
    ffn_size: Count = 384
    vocab_size: Count | None = Field(default=None, description="the tokenizer's if absent")
    max_positions: Count = 8192
    tied_embeddings: bool = True
    num_experts: Count = Field(default=1, description="MLPs of a layer, each of ffn_size, where a family has several")
    experts_per_token: Count = Field(default=1, description="those that a token passes, chosen by a router")
    vision: VisionConfig | None = Field(default=None, description="of a qwen3_vl or internvl; the default if absent")

    @model_validator(mode="after")
    def _heads_and_experts_fit(self) -> "ArchitectureConfig":
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, must be even for rotary positions; try {self.head_dim + 1}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, must be a multiple of num_kv_heads ({self.num_kv_heads}); change one"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, must be at most num_experts ({self.num_experts}); "
                "change one"
            )
        return self

    @model_validator(mode="after")
    def _vision_fits_family(self) -> "ArchitectureConfig":
        if self.vision is not None and self.model_type not in VISION_FAMILIES:
            raise ValueError(
                f"vision is set, must be absent for model_type {self.model_type!r}; drop it, or set model_type to one "
                f"of {', '.join(VISION_FAMILIES)}"
            )
        layers = self.vision.deepstack_layers if self.vision is not None else ()
        if layers and (self.model_type != "qwen3_vl" or len(layers) > self.num_layers):
            raise ValueError(
                f"vision.deepstack_layers is {layers}, must be none but for qwen3_vl, and there at most num_layers "
                f"({self.num_layers}); shorten it"
            )
        return self


VISION_FAMILIES = ("qwen3_vl", "internvl")
"""Values of `model_type` with a vision encoder."""
