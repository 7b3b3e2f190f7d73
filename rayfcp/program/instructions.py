"""The instructions of a rank: tokens to load, passes forward and backward, and the keys and values that travel.

A `RankProgram` is the whole of one rank's work on one global batch. It contains all shapes, so that none travel on the
wire. The simulator and the executor run the same program.

A rank stores keys and values in numbered slots. Slot 0 holds its own tokens, in the order in which they
were loaded; every further slot holds what one message brought. Ranges are half-open and count tokens
from the start of their slot (queries: from the start of slot 0).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import numpy.typing as npt

from rayfcp.values import FULL, LayerKind

if TYPE_CHECKING:
    from rayfcp.program.scan import ScanProgram

Range = tuple[int, int]

Column = npt.NDArray[np.int64]

RowPair = tuple[Range, Range]
"""Rows of the same tokens in the training loop's order and in the plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshuffleMessage:
    """All tokens that travel between this rank and rank `peer` in one direction, in the order of the plan's side.

    `ranges` are rows of the loop's order on the rank that brings the tokens, of slot 0 on the rank that attends.
    """

    peer: int
    ranges: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshuffleRound:
    """The messages of one rank in a round on the way in. On the way out the round runs transposed: received tokens are
    sent back."""

    send: ReshuffleMessage | None = None
    receive: ReshuffleMessage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshuffleProgram:
    """One rank's part in bringing a loop's tokens to the plan's ranks and their outputs back.

    The rank brings `num_tokens` tokens and attends with `num_placed`; either may be 0. `kept`: tokens that stay,
    ascending in slot 0. Every rank has the same number of rounds; over all ranks each round is a matching.
    """

    rank: int
    num_ranks: int
    num_tokens: int
    num_placed: int
    kept: tuple[RowPair, ...]
    rounds: tuple[ReshuffleRound, ...]

    @property
    def is_identity(self) -> bool:
        """True if the rank brings tokens that all stay in their order, and attends with no others."""
        whole = (0, self.num_tokens)
        return self.num_placed == self.num_tokens and self.kept == ((whole, whole),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImages:
    """Images `[first, last)` of `sequence`, counted over all its runs: each `num_patches` patches, which become
    `num_tokens` rows of features."""

    sequence: int
    first: int
    last: int
    num_patches: int
    num_tokens: int

    @property
    def count(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Encode `images`, in this order, and send the features, a row for each of their tokens, to the ranks that hold the
    tokens.

    `features` brings rows from the order in which the rank encodes them to the order of its own tokens: arriving rows
    replace the rows `rows` (ascending) of the loaded tokens' embeddings. If one rank has an `Encode` for a microbatch,
    all have; a rank without images encodes a placeholder of weight 0, so that the encoder's shards are gathered
    everywhere. If any microbatch has one, so has the last, whose backward pass sums gradients over ranks. `Backward`
    sends the gradients of the features back and, unless the encoder is frozen, differentiates it.
    """

    microbatch: int
    images: tuple[EncodedImages, ...]
    features: ReshuffleProgram
    rows: tuple[Range, ...]


def wanted_images(instructions: Iterable[object]) -> tuple[tuple[int, int, int], ...]:
    """(sequence, first, last) of all images that a program encodes, in order, each once."""
    encodes = (item for item in instructions if isinstance(item, Encode))
    return tuple(dict.fromkeys((each.sequence, each.first, each.last) for item in encodes for each in item.images))


class Payload(StrEnum):
    """Content of a message. Keys and values between rounds of attention: [2, tokens, kv_heads, head_dim]. Exchanges of
    degree d carry a share of the heads, h = heads / d and k = max(kv_heads / d, 1): [tokens, h, head_dim] of outputs,
    [tokens, h + 2 k, head_dim] of queries, keys and values. Inside such a group kv_heads is k."""

    KV = "kv"
    """Keys and values in the model's dtype."""
    GRAD = "grad"
    """Partial dK and dV, summed in fp32 (fp64 for fp64 models)."""
    QKV = "qkv"
    """Ulysses: queries, keys and values, from tokens to heads."""
    OUT = "out"
    """Ulysses: attention outputs, from heads back to tokens."""
    OUT_GRAD = "out_grad"
    """Ulysses: gradients of outputs, from tokens to heads."""
    QKV_GRAD = "qkv_grad"
    """Ulysses: gradients of queries, keys and values, from heads back to tokens."""
    HALO = "halo"
    """Recurrent layers (`rayfcp.program.scan`): inputs of a causal convolution, `[tokens, channels]`."""
    HALO_GRAD = "halo_grad"
    """Their gradients, in the model's dtype."""
    SUMMARY = "summary"
    """Transitions and increments of parts of sequences, of a share of the heads, in fp32 at least, as all states."""
    STATE = "state"
    """States before parts."""
    ADJOINT = "adjoint"
    """Gradients of states through a part's own outputs."""
    STATE_GRAD = "state_grad"
    """Gradients of states behind parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One side of a transfer: the tokens `ranges` of `slot`, to or from rank `peer`.

    Received keys and values fill their slot. A received gradient is added to `ranges` of the slot's
    gradient: of slot 0 when it comes home, of the same blocks' slot when it is passed on.
    """

    peer: int
    payload: Payload
    slot: int
    ranges: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        ranges = self.ranges
        if len(ranges) == 1:  # nearly always, and rings have many messages
            return ranges[0][1] - ranges[0][0]
        return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Queries `query` of slot 0 attend to keys `key` of `slot`.

    `causal` ranges are as long as each other: the i-th query attends to keys up to the i-th. `flipped` (only where
    `causal`) both are read from their ends: the i-th query attends to keys from the i-th on. Otherwise every query of
    the range attends to every key of the range.
    """

    query: Range
    slot: int
    key: Range
    causal: bool
    flipped: bool = False

    @property
    def num_pairs(self) -> int:
        queries, keys = self.query[1] - self.query[0], self.key[1] - self.key[0]
        return queries * (queries + 1) // 2 if self.causal else queries * keys


WHOLE, CAUSAL, FLIPPED = range(3)
"""The pairs of an attend's rectangle that are computed: all, those of `Attend.causal`, those of `Attend.flipped`."""


class Attends(Sequence[Attend]):
    """An immutable sequence of attends, stored as a table `[attends, 6]`; equal to any sequence of the same.

    Columns: query start, query stop, slot, key start, key stop, kind (`WHOLE`, `CAUSAL` or `FLIPPED`).

    >>> attend = Attend(query=(0, 3), slot=0, key=(0, 3), causal=True)
    >>> table = Attends.of([attend])
    >>> table == (attend,), table[0].num_pairs, table.num_pairs
    (True, 6, 6)
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Column) -> None:
        self.columns = columns
        columns.flags.writeable = False

    @classmethod
    def of(cls, attends: Iterable[Attend]) -> "Attends":
        """The table of these attends."""
        if isinstance(attends, cls):
            return attends
        rows = [(*each.query, each.slot, *each.key, _kind(each)) for each in attends]
        return cls(np.array(rows, np.int64).reshape(-1, 6))

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs of all attends."""
        queries, keys = self.lengths
        square = self.columns[:, 5] != WHOLE
        return int(np.where(square, queries * (queries + 1) // 2, queries * keys).sum())

    @property
    def lengths(self) -> tuple[Column, Column]:
        """Queries and keys of each attend."""
        return self.columns[:, 1] - self.columns[:, 0], self.columns[:, 4] - self.columns[:, 3]

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> Attend: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Attend, ...]: ...
    def __getitem__(self, index: int | slice) -> Attend | tuple[Attend, ...]:
        if isinstance(index, slice):
            return tuple(_attend(row) for row in self.columns[index].tolist())
        return _attend(self.columns[index].tolist())

    def __iter__(self) -> Iterator[Attend]:
        return map(_attend, self.columns.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Attends):
            return np.array_equal(self.columns, other.columns)
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Attend.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Attends({list(self)})"

    def __reduce__(self) -> tuple[type["Attends"], tuple[Column]]:
        return Attends, (self.columns,)


def _kind(attend: Attend) -> int:
    return FLIPPED if attend.flipped else int(attend.causal)


def _attend(row: list[int]) -> Attend:
    kind = row[5]
    return Attend(
        query=(row[0], row[1]), slot=row[2], key=(row[3], row[4]), causal=kind != WHOLE, flipped=kind == FLIPPED
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRound:
    """Messages posted together, and the attends that are computed meanwhile, from slots that are complete.

    Lowering gives `attends` as a table, `rayfcp.program.Attends`.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    attends: Sequence[Attend] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSlot:
    """Slot `slot` is full from the start: the keys and values that `microbatch`, an earlier one, has at `span` of its
    slot 0. Gradients of the slot are added there, before that microbatch runs backward."""

    slot: int
    microbatch: int
    span: Range

    @property
    def num_tokens(self) -> int:
        return self.span[1] - self.span[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProgram:
    """One rank's part in the attention of one microbatch; every layer runs it.

    `backward` brings the same keys and values in the same slots again, computes the same attends, and
    sends every partial dK, dV to where it is summed. `context`: slots that earlier microbatches left; `kept`: ranges of
    slot 0 that later microbatches need, ascending, from this forward pass to `Free`.
    """

    num_tokens: int
    forward: tuple[AttentionRound, ...]
    backward: tuple[AttentionRound, ...]
    context: tuple[ContextSlot, ...] = ()
    kept: tuple[Range, ...] = ()

    @property
    def inner(self) -> "AttentionProgram":
        """The rounds and slots, itself."""
        return self

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs computed forward."""
        return sum(attend.num_pairs for step in self.forward for attend in step.attends)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProgram:
    """One rank's part in attention that is divided by heads (DeepSpeed-Ulysses, Jacobs et al., 2023).

    `ranks[p]` holds `tokens[p]` tokens of the group's sequences laid end to end, of all heads (a rank without tokens:
    its one padding token). Before attention each sends every other one its own tokens of that rank's 1/d of the query
    heads, and of the key and value heads, replicated beyond their count. Then every rank has all `sum(tokens)` tokens
    of its heads, in order, as its slot 0, and runs `attention` on them. The outputs go back the same way; backward
    exchanges their gradients, runs the attention's backward, and sends the gradients of queries, keys and values back.
    `rayfcp.program.exchange_rounds` lists exchanges round by round.

    All ranks of a group have the same `ranks`, `tokens` and, up to the peers, `attention`: that of a lone Ulysses
    group is one round without messages.
    """

    num_tokens: int
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    attention: AttentionProgram

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def inner(self) -> AttentionProgram:
        """The rounds and slots, between the exchanges."""
        return self.attention

    @property
    def num_pairs(self) -> float:
        """(query, key) pairs computed forward, in pairs of all heads."""
        return self.attention.num_pairs / self.degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens `[start, stop)` of `sequence` (position in the global batch)."""

    sequence: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bring the tokens of `pieces`, in this order, with their positions and targets as far as the stage needs them.

    No pieces: one padding token, a sequence of its own, with loss weight 0.
    """

    microbatch: int
    pieces: tuple[Piece, ...]


class StageFlow(StrEnum):
    """Content of a hand-over between stages, `[tokens, hidden]` in the model's dtype."""

    ACTIVATION = "activation"
    """From a stage's last layer to the next stage's first, in forward."""
    GRADIENT = "gradient"
    """Its gradient, back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send `num_tokens` tokens of a microbatch to this rank's device of the neighbouring stage `stage`. Does not block;
    sends of one flow leave in program order."""

    microbatch: int
    flow: StageFlow
    stage: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Wait for the `Send` of this rank's device of the neighbouring stage `stage`."""

    microbatch: int
    flow: StageFlow
    stage: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Release the keys and values that a microbatch kept for later ones, and their gradients."""

    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The attention of a stage's layers of one kind."""

    kind: LayerKind
    attention: AttentionProgram | HeadProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run all layers of the stage: the first stage embeds before, the last one takes the loss after. The first
    `recomputed_layers` layers of the stage keep only their input, with `keeps_attention` also output and logsumexp of
    attention, whose rounds are not repeated in the backward pass then.

    Layers of `kind` run `attention`; `others` are the stage's other kinds of layers, ascending from there. All kinds
    have the same tokens, shared out by heads alike. `scans`: of its recurrent kinds.
    """

    microbatch: int
    attention: AttentionProgram | HeadProgram
    recomputed_layers: int
    kind: LayerKind = FULL
    others: tuple[LayerAttention, ...] = ()
    scans: tuple["ScanProgram", ...] = ()
    keeps_attention: bool = False

    @property
    def kinds(self) -> tuple[LayerAttention, ...]:
        """All kinds of layers of the stage."""
        return (LayerAttention(kind=self.kind, attention=self.attention), *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Differentiate the loss of a microbatch (on stages before the last: the activations that they sent, with the
    received gradient); with `reduce`, gradients are summed over ranks on the way."""

    microbatch: int
    reduce: bool


Instruction = Load | Encode | Receive | Forward | Send | Backward | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """The instructions of one rank on one stage for one global batch; its tensor-parallel devices run the same.

    `plan_hash` is that of the plan from which the programs of all ranks were lowered.
    """

    rank: int
    num_ranks: int
    stage: int
    num_stages: int
    plan_hash: str
    instructions: tuple[Instruction, ...]

    @property
    def place(self) -> str:
        """Rank, and stage if there are several, in words."""
        return f"rank {self.rank}" if self.num_stages == 1 else f"stage {self.stage} rank {self.rank}"


Kind = TypeVar("Kind", bound=Instruction)


def of_kind(program: RankProgram, kind: type[Kind]) -> list[Kind]:
    """The instructions of one kind, in order."""
    return [item for item in program.instructions if isinstance(item, kind)]


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Ranges in the same order with neighbours that touch joined.

    >>> merged([(0, 2), (2, 5), (7, 9)])
    ((0, 5), (7, 9))
    """
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ascending ranges that hold what these hold.

    >>> union({(4, 6), (0, 3), (2, 4), (8, 9)})
    ((0, 6), (8, 9))
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)
