"""The section `loss`: what a run trains for."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from rayfcp.config.section import Fraction, Section

RowKind = Literal["sequences", "pairs", "distilled"]

ROWS: dict[str, RowKind] = {
    "cross_entropy": "sequences",
    "dpo": "pairs",
    "reward": "pairs",
    "distillation": "distilled",
}
"""What the rows of the data are, by the type of the loss."""

_KEYS = {"dpo": ("beta", "reference"), "reward": ("center",), "distillation": ("temperature", "share")}


class LossConfig(Section):
    """The loss. Each key but the type belongs to one of them."""

    type: Literal["cross_entropy", "dpo", "reward", "distillation"] = "cross_entropy"
    beta: PositiveFloat = Field(default=0.1, description="of dpo: factor of its rewards, which keeps the model near")
    reference: str | None = Field(
        default=None, description="of dpo: folder of the reference model; the run's initial model if absent"
    )
    center: NonNegativeFloat = Field(default=0.0, description="of reward: weight of (chosen + rejected reward)^2")
    temperature: PositiveFloat = Field(default=1.0, description="of distillation: of both distributions")
    share: Fraction = Field(default=1.0, description="of distillation: of the divergence; the rest is cross entropy")

    @property
    def options(self) -> dict[str, str | float]:
        """Type of the loss and the numbers that it uses, keyed by name."""
        names = [name for name in _KEYS.get(self.type, ()) if name != "reference"]
        return {name: getattr(self, name) for name in ("type", *names)}

    @property
    def is_of_pairs(self) -> bool:
        """True if a row is a preferred and another answer."""
        return ROWS[self.type] == "pairs"

    @model_validator(mode="after")
    def _keys_fit_type(self) -> "LossConfig":
        for owner, names in _KEYS.items():
            for name in names:
                value = getattr(self, name)
                if owner != self.type and value != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} is {value}, must be absent with loss.type {self.type!r}, as it is a key of {owner}; "
                        "leave it out, or change the type"
                    )
        return self
