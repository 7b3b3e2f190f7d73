"""Keys below `model` that adapt a given model: its rotary positions, and adapters beside its frozen weights."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from rayfcp.config.section import Count, Section, Words


def known_rope(value: Any) -> Any:
    """A name of `ROPE_KEYS`, or None; `dynamic` is refused with the reason."""
    if value == "dynamic":
        raise ValueError(
            "must not depend on the length of a call, since the pieces of a sequence would get other frequencies than "
            "the whole; choose yarn"
        )
    if value is not None and not (isinstance(value, str) and value in ROPE_KEYS):
        raise ValueError(f"must be one of {', '.join(map(repr, ROPE_KEYS))}; write one of them")
    return value


_EXTENDS = ("factor", "original_max_position_embeddings")
_TABLES = ("short_factor", "long_factor")
_BANDS = ("low_freq_factor", "high_freq_factor")

ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": (("theta",), ()),
    "linear": (("factor",), ("theta", "original_max_position_embeddings")),
    "yarn": (
        ("factor",),
        (
            *("theta", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    ),
    "llama3": (("factor", *_BANDS), ("theta", "original_max_position_embeddings")),
    "longrope": (_TABLES, ("theta", *_EXTENDS, "attention_factor")),
}
"""Keys that a type needs, and those that it may have."""

Factors = tuple[PositiveFloat, ...]


class RopeConfig(Section):
    """Rotary positions in place of the model's own. Names and meaning are those of `rope_parameters` in transformers.

    `factor` times the original positions is the length that the model is extended to.
    """

    type: Annotated[Literal["default", "linear", "yarn", "llama3", "longrope"] | None, BeforeValidator(known_rope)] = (
        Field(default=None, description="the model's own positions if absent")
    )
    theta: PositiveFloat | None = Field(default=None, description="base of the frequencies; the model's if absent")
    factor: float | None = Field(default=None, ge=1.0, description="length to extend to, over the original length")
    original_max_position_embeddings: Count | None = Field(
        default=None, description="the original length in tokens; the model's if absent"
    )
    attention_factor: PositiveFloat | None = Field(default=None, description="of cos and sin; by `factor` if absent")
    beta_fast: PositiveFloat | None = Field(default=None, description="of yarn; 32 if absent")
    beta_slow: PositiveFloat | None = Field(default=None, description="of yarn; 1 if absent")
    mscale: PositiveFloat | None = Field(default=None, description="of yarn")
    mscale_all_dim: PositiveFloat | None = Field(default=None, description="of yarn")
    truncate: bool | None = Field(default=None, description="of yarn: whole numbers as bounds of its ramp")
    low_freq_factor: PositiveFloat | None = Field(default=None, description="of llama3")
    high_freq_factor: PositiveFloat | None = Field(default=None, description="of llama3")
    short_factor: Factors | None = Field(default=None, description="of longrope, one for each frequency")
    long_factor: Factors | None = Field(default=None, description="of longrope, one for each frequency")

    @property
    def given(self) -> dict[str, Any]:
        """Values of the keys beside `type` that are set."""
        found = {name: getattr(self, name) for name in type(self).model_fields if name != "type"}
        return {name: value for name, value in found.items() if value is not None}

    @model_validator(mode="after")
    def _keys_fit_type(self) -> "RopeConfig":
        if self.type is None:
            if self.given:
                name, value = next(iter(self.given.items()))
                raise ValueError(f"{name} is {value}, must be absent without model.rope.type; set the type")
            return self
        needed, optional = ROPE_KEYS[self.type]
        for name in needed:
            if name not in self.given:
                raise ValueError(f"{name} is missing, must be given for type {self.type!r}; add it")
        for name, value in self.given.items():
            if name not in (*needed, *optional):
                has = ", ".join((*needed, *optional))
                raise ValueError(f"{name} is {value}, type {self.type!r} has {has} only; leave it out")
        return self

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "RopeConfig":
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_freq_factor is {high}, must be greater than low_freq_factor ({low}); raise it")
        fast, slow = self.beta_fast or 32.0, self.beta_slow or 1.0
        if fast <= slow:
            raise ValueError(f"beta_fast is {fast}, must be greater than beta_slow ({slow}); raise it")
        short, long = self.short_factor or (), self.long_factor or ()
        if len(short) != len(long):
            raise ValueError(
                f"long_factor has {len(long)} entries, must have as many as short_factor ({len(short)}); correct one"
            )
        return self


class LoraConfig(Section):
    """Adapters of low rank (LoRA, Hu et al., 2022; DoRA, Liu et al., 2024) beside frozen weights, through PEFT."""

    rank: Count | None = Field(default=None, description="of the adapters; all weights train, without any, if absent")
    alpha: Count | None = Field(default=None, description="adapters are scaled by alpha / rank; `rank` if absent")
    targets: Words = Field(
        default=("all-linear",),
        min_length=1,
        description="names of linear layers, as PEFT's target_modules; all-linear: all but experts",
    )
    dora: bool = Field(default=False, description="also train the norm of each row (DoRA)")
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank)")
    quantize: Literal["nf4"] | None = Field(
        default=None, description="store the frozen weights of these layers in four bits (QLoRA), by bitsandbytes"
    )
    dropout: float = Field(default=0.0, description="0: recomputed layers and other numbers of ranks would draw others")

    @model_validator(mode="after")
    def _adapters_run(self) -> "LoraConfig":
        if self.dropout != 0.0:
            raise ValueError(
                f"dropout is {self.dropout}, must be 0, since recomputed layers and other numbers of ranks would draw "
                "other masks; leave it out"
            )
        defaults = type(self).model_fields
        given = (name for name in defaults if getattr(self, name) != defaults[name].default)
        if self.rank is None and (name := next(given, None)) is not None:
            raise ValueError(f"{name} is {getattr(self, name)}, must be absent without model.lora.rank; set the rank")
        return self
