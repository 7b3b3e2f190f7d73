"""Bins of SkyRL: `SeqPacker` with rayfcp's plans."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rayfcp.adapters import bins
from rayfcp.adapters.planning import HostPlanner, planner_for


class FlexPacker:
    """A packer of SkyRL, which runs bin i on data-parallel rank i % `bin_count_multiple`.

    `bin_capacity`, `min_bin_count` and `bin_count_multiple` are SkyRL's. `cp_size`: ranks of a bin, whose capacity is
    that of all of them; `pad_to`: the multiple to which the host pads each sequence. A longer sequence than a bin is
    alone in one if `exceed`, as in SkyRL's `balanced`, and otherwise refused. `model` and `hardware` with further
    `settings` of `HostPlanner`, or a `planner`, predict times.
    """

    def __init__(
        self,
        bin_capacity: int,
        *,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        cp_size: int = 1,
        pad_to: int = 1,
        exceed: bool = False,
        **settings: Any,
    ) -> None:
        for name, value, least in (
            ("min_bin_count", min_bin_count, 0),
            ("bin_count_multiple", bin_count_multiple, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}; raise it")
        self.bin_capacity, self.min_bin_count, self.bin_count_multiple = bin_capacity, min_bin_count, bin_count_multiple
        self._sizes: dict[str, Any] = {"cp_size": cp_size, "pad_to": pad_to, "exceed": exceed}
        self._planner = planner_for(**settings)

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Return the positions of sequences by bin.

        Raises:
            InfeasiblePlanError: A sequence longer than a bin, or fewer sequences than bins.
        """
        return bins.pack(
            self._planner,
            sequence_lengths,
            capacity=self.bin_capacity,
            num_replicas=self.bin_count_multiple or 1,
            num_bins=self.min_bin_count or 1,
            **self._sizes,
        )


def install(bin_packing: Any, **settings: Any) -> HostPlanner:
    """Put `FlexPacker` in the place of all packers of the module `skyrl.train.dataset.bin_packing`.

    `settings`: `planner`, or arguments of `HostPlanner`, and `cp_size` and `pad_to`. Returns the planner, whose
    `observe` takes the time of a step.
    """
    sizes = {key: settings.pop(key) for key in ("cp_size", "pad_to") if key in settings}
    planner = planner_for(**settings)
    for strategy in bin_packing.PackingStrategy:
        soft = strategy is bin_packing.PackingStrategy.BALANCED
        bin_packing._PACKERS[strategy] = partial(FlexPacker, planner=planner, exceed=soft, **sizes)
    return planner
