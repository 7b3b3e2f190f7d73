"""The rounds of a layout as columns, and what a pass over them moves and computes."""

from typing import NamedTuple

from rayfcp.plan.costs.layout_work import Index, Loads


class Rounds(NamedTuple):
    """`work_s[run, phase]`: attention of all passes. Round r of the layout, which flies in phase `stage[r]`, has the
    transfers `bounds[r]` to `bounds[r + 1]`; `moved_s` and, of a transfer, `latency_s`: of all passes; `across`:
    whether each goes between nodes (1) or stays inside one (0). `exchange_s[run]`: exchanges of all passes among the
    ranks of a run, of which there are `heads`."""

    work_s: Loads
    stage: Index
    bounds: Index
    source: Index
    target: Index
    across: Index
    moved_s: Loads
    latency_s: float
    exchange_s: Loads
    heads: int
    overlap: float


class Pass(NamedTuple):
    """Shares of attention, of what a ring moves, and of latencies and exchanges of heads, in one pass; `hold`: rounds
    from a transfer to the one in which its gradients go home."""

    attention: float
    keys: float
    gradients: float
    latencies: float
    hold: int
