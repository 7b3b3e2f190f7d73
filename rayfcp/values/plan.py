"""The plan of one global batch: which rank holds which tokens, and which keys and values travel when.

Frozen and free of tensors, handles, clocks and environment: the same input gives the same bytes.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # without numpy, the values import fast
    from rayfcp.values.arrays import Ints

Position = TypeVar("Position", int, "Ints")
"""A number, or an array of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens `[start, stop)` of `sequence` in one microbatch, of a sequence that is cut over several.

    Its queries also see `start` tokens of context: the keys and values of the sequence's slices in earlier microbatches
    of the same pipeline.
    """

    sequence: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One pass of a stage. Prints as `F3` (forward of microbatch 3) or `B3` (its backward)."""

    microbatch: int
    backward: bool = False

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Microbatches `[start, stop)` of the batch in a pipeline; every stage finishes them before it begins the next
    pipeline.

    `actions[p]` is the order of stage p: each microbatch once forward, ascending, and once backward. Every stage runs
    backward passes in the same order, and a slice before the slices of its sequence that precede it.
    `recomputed_layers[p][m - start]`: how many layers of stage p keep only their input (and what keys and values later
    slices need) in microbatch m. `predicted_s`: from the first load to the last backward pass, other pipelines apart.
    """

    start: int
    stop: int
    actions: tuple[tuple[Action, ...], ...]
    recomputed_layers: tuple[tuple[int, ...], ...]
    predicted_s: float

    @property
    def num_stages(self) -> int:
        return len(self.actions)


class InfeasiblePlanError(ValueError):
    """No plan exists; the message names the binding constraint, its bound and the remedy."""


class Primitive(StrEnum):
    """Exchange of a group around attention."""

    RING = "ring"
    ULYSSES = "ulysses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tokens `[start, stop)` of `sequence`, held by `rank`."""

    sequence: int
    start: int
    stop: int
    rank: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Keys and values of `blocks` (indices into `Layout.blocks`, one owner) go from source to target, ranks or
    (`Layout.heads`) runs of ranks.

    The source is any rank that holds the blocks by then: their owner, or one that received them.
    """

    blocks: tuple[int, ...]
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Transfers that form a matching: every rank sends at most once and receives at most once.

    During them a rank attends to the keys that the round before brought (in round 0: to its own blocks).
    """

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Overlap of rounds with attention when they do not run one by one.

    `coalesce` rounds in a row are in flight in one phase, and there is one phase more than that takes. In each phase a
    rank attends to an equal share of all its pairs (`phase_share`): first to keys that arrived in earlier phases, in
    order, then to its own blocks. Keys that arrive in phase p are attended to in phase `due_phase(p)` at the latest, so
    that a rank holds the keys of at most `num_buffers` phases. Cost model, planner and program follow this definition.
    """

    coalesce: int
    num_buffers: int

    def phase_of(self, number: Position) -> Position:
        """The phase in which round `number` is in flight."""
        return number // self.coalesce

    def due_phase(self, arrived: Position) -> Position:
        """The last phase in which keys that arrive in phase `arrived` are attended to."""
        return arrived + self.num_buffers - 1


def phase_share(total: float, phase: int, num_phases: int, done: float) -> float:
    """Work of a phase when each of `num_phases` has an equal share of `total` and `done` was done before."""
    return max(total * (phase + 1) / num_phases - done, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Blocks of an earlier microbatch of the pipeline whose keys and values are still where that microbatch put
    them, in its order: queries see them, and transfers may carry them."""

    microbatch: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Placement of the tokens of a microbatch, and the rounds in which keys and values travel.

    Blocks of one rank and one sequence come in ascending order of `start`. Without `pacing`, rounds run one by one.
    `Transfer.blocks` number the blocks of the layout, then those of `context`.

    With `heads` u above 1, ranks form runs of u, run k = ranks [k u, (k + 1) u), that exchange tokens for heads around
    attention. `source` and `target` of transfers then number runs: rank A u + j of a run A sends its share of the heads
    of the blocks that all of A holds to rank B u + j of run B. `Block.rank` stays a rank.
    """

    blocks: tuple[Block, ...]
    rounds: tuple[Round, ...]
    pacing: Pacing | None = None
    heads: int = 1
    context: tuple[Context, ...] = ()

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """Own blocks, then those of context."""
        return self.blocks + tuple(block for each in self.context for block in each.blocks)

    def runs(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each run; `heads` divides `num_ranks`."""
        return tuple(tuple(range(first, first + self.heads)) for first in range(0, num_ranks, self.heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that share sequences in one microbatch; `len(ranks)` is the degree. `sequences` are ids."""

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    primitive: Primitive = Primitive.RING

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShare:
    """Rank `rank` encodes images `[first, last)` of `sequence`, counted over all of its runs."""

    rank: int
    sequence: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPlan:
    """One forward and backward pass of all ranks.

    `layout` is None when the groups' primitives fix it (`rayfcp.plan.layout.lay_out` expands it).
    A rank in no group runs one padding token. `group_s[g]` is the predicted seconds of group g. Of a sequence that
    `slices` names, the microbatch holds that slice; all its slices are in groups of the same ranks and primitive.
    Images are encoded before the pass, by rank as `encoding` says, in `encoder_s` predicted seconds of `predicted_s`,
    forward and backward; their features then go to the ranks of their tokens.
    """

    groups: tuple[Group, ...]
    group_s: tuple[float, ...]
    predicted_s: float
    layout: Layout | None = None
    slices: tuple[Slice, ...] = ()
    encoding: tuple[EncoderShare, ...] = ()
    encoder_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The plan of one global batch with its predicted seconds, their lower bound, and the reason of the choice.

    With several stages, `pipelines` says in which order stages pass the microbatches, all of them in order, and which
    layers are recomputed (`recomputed_layers` is 0 then); with `keeps_attention` these keep output and logsumexp of
    attention, which is not repeated. `predicted_s` is the sum over pipelines, and a microbatch's
    its forward and backward on its slowest stage.
    """

    strategy: str
    num_ranks: int
    generation: int
    microbatches: tuple[MicrobatchPlan, ...]
    recomputed_layers: int
    predicted_s: float
    lower_bound_s: float
    reason: str
    pipelines: tuple[PipelinePlan, ...] = ()
    keeps_attention: bool = False

    @property
    def num_stages(self) -> int:
        return self.pipelines[0].num_stages if self.pipelines else 1

    @property
    def gap(self) -> float:
        """Predicted makespan over lower bound; at least 1 up to rounding."""
        return self.predicted_s / self.lower_bound_s if self.lower_bound_s > 0 else 1.0

    @property
    def degrees(self) -> dict[int, int]:
        """Number of groups of each degree over all microbatches."""
        counts = Counter(group.degree for microbatch in self.microbatches for group in microbatch.groups)
        return dict(sorted(counts.items()))

    @property
    def plan_hash(self) -> str:
        """16 hex digits over the printed plan (floats print exactly): equal plans, equal hashes, in any process."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()
