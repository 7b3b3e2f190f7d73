"""What of the block planner can be chosen."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """`block_tokens`: of a block, from the cost model if None. `placement`: equal shares of tokens and cells with the
    fewest cuts (`shares`), or blocks of one size by Algorithm 1 of the paper (`lpt`). `pairing`, of `lpt`: block i
    goes with its mirror image (`zigzag`), or each alone (`free`). `alpha`, `beta`: weights of memory and compute.
    `tolerance`: a rank may hold 1 + that times the mean tokens, if memory permits. `search_moves`: moves and swaps
    after `lpt`, 0 for none. `coalesce`: rounds that run as one, the fewest that hide as much as any if None.
    `num_buffers`: stages of received transfers that a rank holds at once. `paced`: transfers come when their target
    has computed those before, else in the order of the colouring alone.
    """

    block_tokens: int | None = None
    placement: Literal["shares", "lpt"] = "shares"
    pairing: Literal["zigzag", "free"] = "zigzag"
    alpha: float = 1.0
    beta: float = 1.0
    tolerance: float = 0.02
    search_moves: int = 2000
    coalesce: int | None = None
    num_buffers: int = 3
    paced: bool = True

    def __post_init__(self) -> None:
        least = {"block_tokens": 1, "alpha": 0, "beta": 0, "tolerance": 0, "search_moves": 0, "coalesce": 1}
        least["num_buffers"] = 2
        for field in fields(self):
            value, bound = getattr(self, field.name), least.get(field.name)
            if bound is not None and value is not None and value < bound:
                raise ValueError(f"{field.name} is {value}, must be at least {bound}; raise it")
