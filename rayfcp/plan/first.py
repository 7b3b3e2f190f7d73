"""What the first plan of an installation takes beside planning."""

from collections.abc import Callable
from typing import Any

from rayfcp.cost.compiled import is_kept
from rayfcp.plan.blocks.kernels.improve import improve as improve_blocks
from rayfcp.plan.groups.kernels.ruin import kick, ruin

COMPILES = "planners are compiled first, once for this installation: about a minute"

Kernel = Callable[..., Any]

_LAST: dict[str, tuple[Kernel, ...]] = {"flex-ring": (kick, ruin), "flex-block": (improve_blocks,)}
"""What a strategy compiles last, of those that compile much."""


def compiles_first(strategy: str) -> bool:
    """Whether planning by a strategy, or by all of them with `auto`, has to compile its kernels. Nothing is compiled to
    tell."""
    kernels = _LAST.get(strategy, ()) if strategy != "auto" else tuple(each for of in _LAST.values() for each in of)
    return not all(is_kept(each) for each in kernels)
