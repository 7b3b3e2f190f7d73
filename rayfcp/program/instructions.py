"""Rows on their way from one order over the ranks to another, as `rayfcp.program.reshuffle` plans it.

The instruction for a vision encoder: which pictures a rank encodes, and where their features go.

The instructions of a rank: what it loads, passes forward and backward, and which keys and values travel.

A `RankProgram` is the whole of one rank's work on one global batch. Shapes are in it, so that nothing
about shapes ever travels on the wire. The simulator and the executor run the same program.

A rank stores keys and values in numbered slots. Slot 0 holds its own tokens, in the order in which they
were loaded; every further slot holds what one message brought. Ranges are half-open and count tokens
from the start of their slot (queries: from the start of slot 0).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

Range = tuple[int, int]

Pair = tuple[Range, Range]
"""The same tokens in the loop's order and in the plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """All tokens that travel between this rank and rank `peer` in one direction, in the order of the plan's side.

    `ranges` count in the loop's order on the rank that brings the tokens, in slot 0 on the rank that attends.
    """

    peer: int
    ranges: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshuffleRound:
    """What one rank sends and receives in a round on the way in. On the way out the round runs transposed: what was
    received is sent back."""

    send: Parcel | None = None
    receive: Parcel | None = None

    @property
    def num_tokens(self) -> int:
        """Of the larger parcel: links carry both directions at once."""
        return max(each.num_tokens if each else 0 for each in (self.send, self.receive))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshuffleProgram:
    """One rank's part in bringing a loop's tokens to the plan's ranks and their outputs back.

    The rank brings `num_tokens` tokens and attends with `num_placed`; either may be 0. `kept` are those that stay,
    ascending in slot 0. Every rank has the same number of rounds; over all ranks each round is a matching.
    """

    rank: int
    num_ranks: int
    num_tokens: int
    num_placed: int
    kept: tuple[Pair, ...]
    rounds: tuple[ReshuffleRound, ...]

    @property
    def is_identity(self) -> bool:
        """The rank brings tokens, and all stay where they are, in their order; it attends with no others."""
        whole = (0, self.num_tokens)
        return self.num_placed == self.num_tokens and self.kept == ((whole, whole),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPictures:
    """Pictures `[first, last)` of `sequence`, counted over all its runs: each `num_patches` patches, which become
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
    """Encode `pictures`, in this order, and hand the features, a row for each of their tokens, to the ranks that hold
    the tokens.

    `features` brings rows from the order in which the rank encodes them to the order of its own tokens: those that
    arrive take the place of the rows `rows` (ascending) of what was loaded. All ranks have an `Encode` for a microbatch
    if any has; without pictures a rank encodes one that weighs nothing, so that the encoder's shards are gathered
    everywhere. Where any microbatch has one the last one has, whose backward pass sums gradients over ranks.
    `Backward` takes the gradients of the features the same way back and then, unless the encoder is frozen, through it.
    """

    microbatch: int
    pictures: tuple[EncodedPictures, ...]
    features: ReshuffleProgram
    rows: tuple[Range, ...]


def wanted_pictures(instructions: Iterable[object]) -> tuple[tuple[int, int, int], ...]:
    """Sequence, first and last of all pictures that a program encodes, in order, each once."""
    encodes = (item for item in instructions if isinstance(item, Encode))
    return tuple(dict.fromkeys((each.sequence, each.first, each.last) for item in encodes for each in item.pictures))


class Payload(StrEnum):
    """What a message carries. Keys and values between rounds of attention: [2, tokens, kv_heads, head_dim].
    Exchanges of degree d: the target's or source's share of the heads, h = heads / d and k = max(kv_heads / d, 1) of
    them: [tokens, h, head_dim] of outputs, [tokens, h + 2 k, head_dim] of queries, keys and values. Inside such a
    group kv_heads is k."""

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
        num_tokens = 0
        for start, stop in self.ranges:
            num_tokens += stop - start
        return num_tokens


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
    def num_cells(self) -> int:
        queries, keys = self.query[1] - self.query[0], self.key[1] - self.key[0]
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRound:
    """Messages posted together, and what is computed while they fly (from slots that are complete).

    Lowering gives `attends` as a table, `rayfcp.program.Attends`.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    attends: Sequence[Attend] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSlot:
    """Slot `slot` is full from the start: the keys and values that `microbatch`, an earlier one, has at `span` of its
    slot 0. What backward adds to the slot's gradient is added there, before that microbatch runs backward."""

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
    sends every partial dK, dV to where it is summed. `context`: slots that earlier microbatches left; `kept`: what
    of slot 0 later microbatches need (in ascending ranges), from this forward pass to `Free`.
    """

    num_tokens: int
    forward: tuple[AttentionRound, ...]
    backward: tuple[AttentionRound, ...]
    context: tuple[ContextSlot, ...] = ()
    kept: tuple[Range, ...] = ()

    @property
    def inner(self) -> "AttentionProgram":
        """The rounds and slots: itself."""
        return self

    @property
    def num_cells(self) -> int:
        """(query, key) cells computed forward."""
        return sum(attend.num_cells for step in self.forward for attend in step.attends)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProgram:
    """One rank's part in attention that is shared out by heads (Jacobs et al., 2023): tokens against heads.

    `ranks[p]` holds `tokens[p]` tokens of the group's sequences laid end to end, of all heads (a rank
    without tokens: its one padding token). Before attention each sends every other its own tokens of that
    rank's 1/d of the query heads (key and value heads alike, replicated beyond their count); then all
    `sum(tokens)` tokens of its heads lie on every rank, in order, and every rank runs `attention` on those heads,
    its slot 0. The outputs go back the same way; backward exchanges their gradients, runs the attention's
    backward, and sends the gradients of queries, keys and values back. `rayfcp.program.heads.head_rounds` writes
    this out, round by round.

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
    def num_cells(self) -> float:
        """(query, key) cells computed forward, in cells of all heads."""
        return self.attention.num_cells / self.degree


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
    """Bring the tokens of `pieces`, in this order, with their positions and targets: each stage what it needs of these.

    No pieces: one padding token, a sequence of its own, with loss weight 0.
    """

    microbatch: int
    pieces: tuple[Piece, ...]


class Flow(StrEnum):
    """What passes between stages, `[tokens, hidden]` in the model's dtype."""

    ACTIVATION = "activation"
    """From a stage's last layer to the next stage's first, in forward."""
    GRADIENT = "gradient"
    """Its gradient, back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Hand `num_tokens` tokens of a microbatch to this rank's device of stage `stage`, a neighbour. The program goes
    on at once; sends of one flow leave in the order of the program."""

    microbatch: int
    flow: Flow
    stage: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Wait for what this rank's device of stage `stage`, a neighbour, sends."""

    microbatch: int
    flow: Flow
    stage: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Let go of the keys and values that a microbatch kept for others, and of their gradients."""

    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What layers whose queries see `window` keys at most, themselves included, run (0: layers without a window)."""

    window: int
    attention: AttentionProgram | HeadProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run all layers of the stage: the first stage embeds before, the last one takes the loss after. The first
    `recomputed_layers` layers of the stage keep only their input.

    Layers with window `window` run `attention`; `others` are the stage's other kinds of layers, windows ascending from
    there. All kinds have the same tokens, shared out by heads alike.
    """

    microbatch: int
    attention: AttentionProgram | HeadProgram
    recomputed_layers: int
    window: int = 0
    others: tuple[LayerKind, ...] = ()

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """All kinds of layers of the stage."""
        return (LayerKind(window=self.window, attention=self.attention), *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Differentiate the loss of a microbatch (on stages before the last: what they sent on, with the gradient that
    came back); with `reduce`, gradients are summed over ranks on the way."""

    microbatch: int
    reduce: bool


Instruction = Load | Encode | Receive | Forward | Send | Backward | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """All that one rank does on one stage for one global batch, in order; its tensor-parallel devices do the same.

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
        """Whose program it is, in words."""
        return f"rank {self.rank}" if self.num_stages == 1 else f"stage {self.stage} rank {self.rank}"
