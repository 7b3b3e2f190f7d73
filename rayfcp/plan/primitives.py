"""Which primitives a planner may use."""

from rayfcp.config.plan import PlanConfig
from rayfcp.values import InfeasiblePlanError, Primitive


def require(primitive: Primitive, *, options: PlanConfig, strategy: str) -> None:
    """`options.primitives` allows the one primitive that a strategy is made of.

    Raises:
        InfeasiblePlanError: it does not; names the strategy, the primitive and the remedy.
    """
    if primitive.value not in options.primitives:
        remedy = (
            "training runs rings only: use `rayfcp compare`, or another strategy"
            if primitive is Primitive.ULYSSES
            else f"add {primitive.value} to plan.primitives"
        )
        raise InfeasiblePlanError(
            f"strategy {strategy} needs primitive {primitive.value}, plan.primitives is "
            f"{', '.join(options.primitives)}; {remedy}"
        )
