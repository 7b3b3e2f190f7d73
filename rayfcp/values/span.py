"""A stretch of time on one rank, predicted by the simulator or measured by the executor."""

from dataclasses import dataclass
from enum import StrEnum


class SpanKind(StrEnum):
    """What a rank did."""

    LOAD = "load"
    ENCODE = "encode"
    FORWARD = "forward"
    BACKWARD = "backward"
    ATTENTION = "attention"
    TRANSFER = "transfer"
    REDUCE = "reduce"
    UPDATE = "update"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`[start_s, stop_s)` on `rank`, in seconds of the wall clock (measured) or from 0 (predicted).

    `amount` is bytes for transfers, FLOPs for computation, 0 where it is not known.
    """

    rank: int
    stage: int
    kind: SpanKind
    label: str
    start_s: float
    stop_s: float
    amount: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s
