"""What a trainer that executes rayfcp's plans requires of them."""

import itertools
import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rayfcp.config.section import Count, Section, as_numbers

Placement = Literal["nodes", "contiguous", "aligned"]


class HostConstraints(Section):
    """Constraints of the trainer that executes the plans, part of the search; the defaults constrain nothing.

    `powers_of_two` are those up to half of the ranks, and all ranks: the groups that Megatron-LM creates for dynamic
    context parallelism.

    Raises:
        ValueError: degrees that cannot all be aligned, or a number of microbatches that is no such multiple.
    """

    degrees: Annotated[Literal["any", "powers_of_two"] | tuple[Count, ...], BeforeValidator(as_numbers)] = Field(
        default="any", description="CP degrees that groups may have: any, powers_of_two, or a list"
    )
    placement: Placement = Field(
        default="nodes",
        description="ranks of a group: as few nodes as possible, consecutive ranks, or consecutive ranks of which the "
        "first is a multiple of the degree",
    )
    all_ranks: bool = Field(default=False, description="every rank has a sequence in every microbatch")
    microbatch_multiple: Count = Field(default=1, description="the number of microbatches is a multiple of this")
    num_microbatches: Count | None = Field(default=None, description="exactly so many; searched if absent")

    @model_validator(mode="after")
    def _can_be_kept(self) -> "HostConstraints":
        if self.placement == "aligned" and self.degrees != "powers_of_two":
            degrees = [] if self.degrees == "any" else sorted(self.degrees)
            if not degrees or any(more % less for less, more in itertools.pairwise(degrees)):
                raise ValueError(
                    f"degrees is {self.degrees}, must be powers_of_two or a list in which each divides the next for "
                    "placement aligned; change one of them"
                )
        if self.num_microbatches is not None and self.num_microbatches % self.microbatch_multiple:
            raise ValueError(
                f"num_microbatches is {self.num_microbatches}, must be a multiple of microbatch_multiple "
                f"{self.microbatch_multiple}; change one of them"
            )
        return self

    @property
    def bind(self) -> bool:
        """Whether anything is constrained."""
        return self != UNCONSTRAINED

    def permitted(self, num_ranks: int) -> tuple[int, ...]:
        """Degrees of groups on so many ranks, ascending; may be empty."""
        if self.degrees == "any":
            return tuple(range(1, num_ranks + 1))
        if self.degrees == "powers_of_two":
            powers = (1 << exponent for exponent in range(num_ranks.bit_length()))
            return (*(power for power in powers if 2 * power <= num_ranks), num_ranks)
        return tuple(sorted({degree for degree in self.degrees if degree <= num_ranks}))

    def each(self) -> dict[str, "HostConstraints"]:
        """Every constraint alone, by key and value; aligned groups with their degrees, without which none exist."""
        given = self.model_dump(exclude_defaults=True)
        found = {}
        for key, value in given.items():
            alone = {key: value} | ({"degrees": self.degrees} if value == "aligned" else {})
            found[f"{key}={str(value).lower()}"] = HostConstraints.model_validate(alone)
        return found

    def least_microbatches(self, fewest: int) -> int:
        """The least permitted number of microbatches that is at least `fewest`; if none is, the largest."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        return math.ceil(fewest / self.microbatch_multiple) * self.microbatch_multiple


UNCONSTRAINED = HostConstraints()

PRESETS = {"megatron": HostConstraints(degrees="powers_of_two", placement="aligned", all_ranks=True)}
"""Constraints by name. `megatron`: dynamic context parallelism of Megatron-LM, and of verl, which uses its groups."""


def preset(value: Any) -> Any:
    """The name of a preset stands for its constraints."""
    if not isinstance(value, str):
        return value
    if value not in PRESETS:
        raise ValueError(f"must be one of {', '.join(map(repr, PRESETS))} or a section; write one of them")
    return PRESETS[value]
