"""The registry of strategies: one small file each, one line here."""

from rayfcp.plan.strategies import flex_ring, ring
from rayfcp.plan.strategies.interface import Proposal, Strategy
from rayfcp.plan.words import pick

_STRATEGIES: dict[str, Strategy] = {
    "flex-ring": flex_ring.propose,
    "ring": ring.propose,
}


def names() -> tuple[str, ...]:
    """Names of all strategies, as `plan.strategy` takes them."""
    return tuple(_STRATEGIES)


def get(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    return _STRATEGIES[pick(name, _STRATEGIES, what="plan.strategy")]


__all__ = ["Proposal", "Strategy", "get", "names"]
