"""What a search of layouts finds out about a strategy on a layout."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rayfcp.compare.layouts import Layout
from rayfcp.compare.measure import Scene
from rayfcp.compare.results import Entry
from rayfcp.compare.setting import Setting

Status = Literal["simulated", "predicted", "bounded", "infeasible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A strategy on a layout.

    simulated: on all batches, `entry` has the figures. predicted: its plan of the first batch takes `predicted_s`, too
    long to be simulated. bounded: no plan takes less than `lower_bound_s`, the mean over batches, and another layout is
    as fast. infeasible. `reason` says why it was not simulated.
    """

    strategy: str
    layout: Layout
    split_vocabulary: bool
    status: Status
    reason: str = ""
    lower_bound_s: float | None = None
    predicted_s: float | None = None
    setting: Setting | None = None
    entry: Entry | None = field(default=None, repr=False)
    scene: Scene | None = field(default=None, repr=False)

    @property
    def iteration_s(self) -> float:
        """Simulated seconds.

        Raises:
            ValueError: it was not simulated.
        """
        if self.entry is None or self.entry.iteration_s is None:
            raise ValueError(f"{self.strategy} on {self.layout} is {self.status}, must be simulated")
        return self.entry.iteration_s

    def as_json(self) -> dict[str, Any]:
        """A line of `layouts`."""
        entry = self.entry
        return {
            "strategy": self.strategy,
            "num_stages": self.layout.num_stages,
            "tensor_parallel": self.layout.tensor_parallel,
            "split_vocabulary": self.split_vocabulary,
            "status": self.status,
            "reason": self.reason or (entry.reason if entry else ""),
            "lower_bound_s": self.lower_bound_s,
            "predicted_s": self.predicted_s,
            "iteration_s": entry.iteration_s if entry else None,
            "peak_memory_gib": entry.peak_memory_gib if entry else None,
            "recomputed_layers": entry.recomputed_layers if entry else None,
            "reduce_every": entry.reduce_every if entry else None,
            "gather_every": entry.gather_every if entry else None,
            "layers_of_stage": list(entry.layers_of_stage) if entry else [],
        }
