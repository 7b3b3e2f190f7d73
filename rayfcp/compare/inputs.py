"""What a comparison is asked for, as plain values."""

from dataclasses import dataclass
from typing import Any, Literal

ReduceEvery = Literal["microbatch", "step"]
Packing = Literal["joint", "bfd"]
Degrees = Literal["exact", "dp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The arguments of `rayfcp compare`.

    `lengths`: file or `dist:NAME`. `model`, `hardware`: names or YAML paths. `frozen_vision`: the model's vision
    encoder is not trained. None: `memory_gib` of the hardware, no fixed `max_tokens_per_rank`, the best
    `recompute_layers`, `reduce_every` and (with stages) `gather_every` for each strategy.
    `packing`, `degrees`: as `plan.packing` and `plan.degrees` of a run; bfd and dp are the paper's two stages.
    """

    lengths: str
    model: str
    frozen_vision: bool = False
    hardware: str
    devices: int
    stages: int = 1
    tensor_parallel: int = 1
    global_batch: int
    batches: int
    max_seqlen: int
    memory_gib: float | None = None
    max_tokens_per_rank: int | None = None
    recompute_layers: int | None = None
    reduce_every: ReduceEvery | None = None
    gather_every: ReduceEvery | None = None
    packing: Packing = "joint"
    degrees: Degrees = "exact"
    strategies: tuple[str, ...] = ("all",)
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """The fields by name, `auto` for what each strategy chooses."""
        given = {name: getattr(self, name) for name in self.__slots__}
        for name in ("recompute_layers", "reduce_every", "gather_every"):
            given[name] = "auto" if given[name] is None else given[name]
        return {**given, "strategies": list(self.strategies)}
