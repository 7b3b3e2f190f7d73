"""The registry of strategies: one small file each, one line here."""

from rayfcp.plan.profiles.words import pick
from rayfcp.plan.strategies import (
    bytescale,
    dapple,
    dynamic_cp,
    elastic_pipeline,
    flex_block,
    flex_ring,
    flexsp,
    magi,
    ring,
    seq1f1b,
    static_cp,
    ulysses,
    wlb,
)
from rayfcp.plan.strategies.interface import Proposal, Strategy
from rayfcp.plan.strategies.staged import in_stages

_STRATEGIES: dict[str, Strategy] = {
    "flex-ring": in_stages(flex_ring.propose, recompute="each"),
    "flex-block": in_stages(flex_block.propose, recompute="each", patience=1),
    "elastic-pipeline": elastic_pipeline.propose,
    "seq1f1b": seq1f1b.propose,
    "static-cp": static_cp.propose,
    "dynamic-cp": in_stages(dynamic_cp.propose),
    "flexsp": in_stages(flexsp.propose),
    "ulysses": ulysses.propose,
    "ring": in_stages(ring.propose),
    "bytescale": in_stages(bytescale.propose),
    "wlb": in_stages(wlb.propose),
    "magi": in_stages(magi.propose),
    "dapple": dapple.propose,
}

_SLICING = frozenset({"elastic-pipeline", "seq1f1b"})


def slices(name: str) -> bool:
    """Whether a strategy may cut a sequence over several microbatches."""
    return name in _SLICING


def names() -> tuple[str, ...]:
    """Names of all strategies, as `plan.strategy` takes them."""
    return tuple(_STRATEGIES)


def get(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: unknown; names the nearest known one.
    """
    return _STRATEGIES[pick(name, _STRATEGIES, what="plan.strategy")]


__all__ = ["Proposal", "Strategy", "get", "names", "slices"]
