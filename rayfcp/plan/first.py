"""Compilation of planning kernels: what the first plan of an installation takes beside planning."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayfcp.config.models import PlanConfig
from rayfcp.cost.compiled import is_kept
from rayfcp.cost.model import CostModel
from rayfcp.cost.profiles import hardware_profile, model_profile
from rayfcp.plan.batch import plan_batch
from rayfcp.plan.blocks.kernels.edge_coloring import edge_coloring
from rayfcp.plan.groups.kernels.search import run
from rayfcp.plan.strategies.registry import AUTO, strategies
from rayfcp.values import BatchPlan, ClusterSpec, SequenceSpec

COMPILES = (
    "planners are compiled first, once for this installation: about half a minute (`rayfcp warm-up` does it ahead)"
)

Kernel = Callable[..., Any]

_LAST: dict[str, tuple[Kernel, ...]] = {"flex-ring": (run,), "flex-block": (edge_coloring,)}
"""The kernels compiled last, of strategies that compile much."""

_LENGTHS = (3000, 1200, 900, 400, 400, 300, 200, 100)
_CLUSTER = ClusterSpec(num_ranks=4, max_tokens_per_rank=2048)
_BOTH = PlanConfig(primitives=("ring", "ulysses"))
_PAPER = PlanConfig(packing="bfd", degrees="dp")


def compiles_first(strategy: str) -> bool:
    """Return whether planning by a strategy, or by all of them with `auto`, has to compile its kernels; compiles
    nothing."""
    kernels = _LAST.get(strategy, ()) if strategy != AUTO else tuple(each for of in _LAST.values() for each in of)
    return not all(is_kept(each) for each in kernels)


def warm_up() -> Iterator[tuple[str, BatchPlan, list[SequenceSpec]]]:
    """Compile the kernels of all strategies by planning a small batch with each; yields name, plan and sequences of
    each once it is done. Compiled code is kept for later processes (`rayfcp.cost.compiled`)."""
    for info in strategies().values():
        if info.name != AUTO:
            yield info.name, *_planned(info.name, num_stages=2 if info.needs_stages else 1)
    yield "flex-ring, the paper's two stages", *_planned("flex-ring", options=_PAPER)
    yield "flex-ring over pipeline stages", *_planned("flex-ring", num_stages=2)


def cache_folder() -> Path | None:
    """Return the folder with compiled kernels of the joint search; None where no folder can be written to. Those of
    other kernels lie beside it."""
    cache = getattr(run, "_cache", None)
    path = getattr(cache, "cache_path", None)
    return None if path is None else Path(path)


def _planned(
    name: str, *, num_stages: int = 1, options: PlanConfig | None = None
) -> tuple[BatchPlan, list[SequenceSpec]]:
    cost = CostModel.from_profiles(
        model_profile("qwen3-1.7b"),
        hardware_profile("h100"),
        num_ranks=_CLUSTER.num_ranks,
        num_stages=num_stages,
        bytes_per_element=2,
        reduce_every="step",
    )
    sequences = [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(_LENGTHS)]
    cluster = replace(_CLUSTER, num_stages=num_stages)
    return plan_batch(sequences, cluster=cluster, cost=cost, strategy=name, options=options or _BOTH), sequences
