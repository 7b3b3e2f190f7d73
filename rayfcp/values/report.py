"""Reports of committed steps (lines of `steps.jsonl`), and spans of time on a rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """(sum of maxima - sum of means) / sum of maxima over microbatches, per resource, in [0, 1). `encoder`: imbalance
    of the seconds of images, None for a model without a vision encoder."""

    compute: float
    attention: float
    memory: float
    communication: float
    encoder: float | None = None

    @property
    def by_resource(self) -> dict[str, float]:
        """The resources that are known, by name."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStats:
    """Rewards of `num_pairs` pairs of answers: means of the chosen and of the rejected ones, and the share of pairs of
    which the chosen one has the higher reward."""

    num_pairs: int
    chosen: float
    rejected: float
    accuracy: float

    @property
    def margin(self) -> float:
        """How much higher the chosen ones are."""
        return self.chosen - self.rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """A state on an evaluation set of `tokens` targets: mean loss over them in nats, or over `pairs`; NaN without
    targets. `broken_rows`: rows without targets since an image of theirs cannot be decoded."""

    loss: float
    tokens: int
    pairs: PairStats | None = None
    broken_rows: int = 0

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that is too large for a float; NaN for pairs, and without targets."""
        if self.pairs is not None:
            return math.nan
        return math.inf if self.loss >= MAX_LOSS else math.exp(self.loss)


MAX_LOSS = 700.0
"""Beyond, exp passes the largest float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """A mixture's source in a step. `loss`: mean over its targets, None without targets and for pairs."""

    num_sequences: int
    num_tokens: int
    num_targets: int
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step. Seconds, ratios in 0..1; `step` counts from 1, the number of updates applied.

    `loss`: None for a batch without targets, whose update is skipped. `num_targets`: None in lines of earlier versions.
    `step_s`: from dispatch to the last rank's report. `predicted_s`: the plan's. `plan_s`: lengths to BatchPlan on the
    planner. `prepare_s`: lengths to checked programs, serialized for the workers, on the planner (NaN in lines of
    earlier versions). `plan_wait_s`: seconds that the step waited for its plan. `mfu`: model FLOPs / (step_s x peak of
    the devices in use). `bubble`: share of rank time spent waiting for other ranks, their messages, gathers and
    reductions included (NaN on accelerators). `degrees`: groups per degree. `recovered`: the step ran again after a
    failure. `strategy`, `reason`: the strategy of the plan, and one sentence on why it was chosen. `eval`: the state
    after the step on each evaluation set; `sources`: of a mixture, by name; `pairs`: of a loss of pairs. All are absent
    in the line if empty.
    """

    step: int
    loss: float | None
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_targets: int | None = None
    num_sequences: int
    step_s: float
    predicted_s: float
    plan_s: float
    prepare_s: float = math.nan
    plan_wait_s: float
    mfu: float
    attention_mfu: float
    imbalance: Imbalance
    bubble: float
    gap: float
    strategy: str
    world_size: int
    degrees: dict[int, int]
    num_microbatches: int
    plan_hash: str
    samples_hash: str
    recovered: bool = False
    reason: str = ""
    eval: dict[str, EvalResult] = field(default_factory=dict)
    sources: Mapping[str, SourceReport] = field(default_factory=dict)
    pairs: PairStats | None = None


class SpanKind(StrEnum):
    """Activity of a rank."""

    LOAD = "load"
    SCORE = "score"
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
    """Time `[start_s, stop_s)` on `rank`, in seconds of the wall clock (measured) or from 0 (predicted).

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
