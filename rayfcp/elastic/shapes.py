"""Which stages and ranks a number of devices makes."""

from dataclasses import dataclass

from rayfcp.elastic.facts import Facts
from rayfcp.elastic.words import counted


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """Of two shapes the larger has more stages, or as many and more ranks."""

    num_stages: int
    num_ranks: int

    def __str__(self) -> str:
        ranks = counted(self.num_ranks, "rank")
        return f"{ranks} in {self.num_stages} stages" if self.num_stages > 1 else ranks


def shape_of(num_devices: int, *, facts: Facts, most: int | None = None) -> Shape | None:
    """The configured number of stages if the devices, at most `most` of them, make a rank with it, the next lower
    one that fits if not; as many ranks as they make. None if they are too few."""
    limits = facts.limits
    if num_devices < limits.min_devices:
        return None
    usable = min(num_devices, limits.max_devices, num_devices if most is None else most)
    for fit in sorted(facts.fits, key=lambda fit: -fit.num_stages):
        if fit.num_stages <= limits.num_stages:
            num_ranks = usable // (fit.num_stages * limits.tensor_parallel)
            if num_ranks >= max(fit.min_ranks, 1):
                return Shape(num_stages=fit.num_stages, num_ranks=num_ranks)
    return None


def current_shape(facts: Facts) -> Shape:
    """Of the active generation."""
    per_rank = facts.num_stages * facts.limits.tensor_parallel
    return Shape(num_stages=facts.num_stages, num_ranks=len(facts.active) // per_rank)


def fewest_devices(facts: Facts) -> int:
    """To go on with."""
    limits = facts.limits
    ranks = min(max(fit.min_ranks, 1) * fit.num_stages for fit in facts.fits if fit.num_stages <= limits.num_stages)
    return max(limits.min_devices, ranks * limits.tensor_parallel)
