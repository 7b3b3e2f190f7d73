"""The rounds of a layout as columns, and what a pass over them moves and computes."""

from typing import NamedTuple

from rayfcp.plan.costs.layout_work import Index, Loads


class Rounds(NamedTuple):
    """`work_s[rank, phase]`: attention of all passes. Round r of the layout, which flies in phase `stage[r]`, has the
    transfers `bounds[r]` to `bounds[r + 1]`; `moved_s`: of all passes; `across`: whether each goes between nodes (1)
    or stays inside one (0)."""

    work_s: Loads
    stage: Index
    bounds: Index
    source: Index
    target: Index
    across: Index
    moved_s: Loads
    overlap: float


class Pass(NamedTuple):
    """Shares of attention, and of what a ring moves, in one pass; latency of a transfer; `hold`: rounds from a transfer
    to the one in which its gradients go home."""

    attention: float
    keys: float
    gradients: float
    latency_s: float
    hold: int
