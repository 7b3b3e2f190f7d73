"""Which primitives a planner may use."""

from collections.abc import Collection

import numpy as np

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.costs.model import CostModel
from rayfcp.values import InfeasiblePlanError, Primitive


def require(primitive: Primitive, *, options: PlanConfig, strategy: str) -> None:
    """`options.primitives` allows the one primitive that a strategy is made of.

    Raises:
        InfeasiblePlanError: it does not; names the strategy, the primitive and the remedy.
    """
    if primitive.value not in options.primitives:
        raise InfeasiblePlanError(
            f"strategy {strategy} needs primitive {primitive.value}, plan.primitives is "
            f"{', '.join(options.primitives)}; add {primitive.value} to plan.primitives"
        )


def exchange_degrees(cost: CostModel, *, num_ranks: int, primitives: Collection[str]) -> list[int]:
    """Degrees above 1 that Ulysses groups may have, which share out the model's heads; none where plans have no such
    groups."""
    if Primitive.ULYSSES.value not in primitives:
        return []
    degrees = np.arange(2, num_ranks + 1)
    found: list[int] = degrees[np.isfinite(cost.terms(degrees, primitive=Primitive.ULYSSES)[0].moved_s)].tolist()
    return found
