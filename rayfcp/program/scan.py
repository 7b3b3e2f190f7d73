"""Recurrent layers in a microbatch: states of sequences that are cut, passed between ranks in two rounds.

A *segment* is a run of consecutive tokens of a sequence that lie side by side in a rank's slot 0. It is an affine map
of the layer's state, `S_out = T S_in + U`. The segments of a sequence in their order are the parts of a *chain*; a
sequence of a single segment needs nothing from others. With parts 0 to n - 1, S[i] the state before part i, S[0] = 0:

1. Forward, the owners of parts 0 to n - 2 send U of each share of the heads to the rank that folds that share, and all
   but part 0 also T (`Payload.SUMMARY`). It computes `S[i + 1] = T_i S[i] + U_i`.
2. The owners of parts 1 to n - 1 get S[i] back from all who fold (`Payload.STATE`).
3. Backward, with R_i the gradient of S[i] through the outputs of part i, the owners of parts 1 to n - 1 send R_i
   (`Payload.ADJOINT`) to those who fold, which have kept T and compute `dS[i] = T_i^t dS[i + 1] + R_i`, from
   `dS[n - 1] = R_{n - 1}` on.
4. The owners of parts 0 to n - 2 get dS[i + 1], the gradient of their own final state (`Payload.STATE_GRAD`).

The distinct ranks of a chain, in the order of their first parts, fold it: of m ranks the one at position j has the
heads `[H j // m, H (j + 1) // m)` of H. Where ranks outnumber heads, those that would share a head share its columns,
which T does not mix: each has T whole, and c ranks to a head move c |T| + 2 |U| for each of their parts, others
|T| + 2 |U|. That is two rounds whatever the degree (docs/programs.md compares a tree). In a chain over two ranks
each folds all heads for itself (`Chain.gathered`), and rounds 2 and 4 move nothing.

Slices of a pipeline: a chain may begin with a *head*, a part without tokens that stands for the state which an earlier
microbatch left on a rank: its U. It may end with a *tail*, a part without tokens, whose S is kept by a rank for a later
microbatch, and whose R is the gradient that this one brought: dS of the state behind its head.

Causal convolutions need the `halo` tokens before a segment. They lie in the *halo buffer*: the rows of all segments,
one after the other, and of tails, which keep the last rows of their sequence. They come from rows of slot 0, behind
which, from row `num_tokens` on, lie those that the heads have kept (`Payload.HALO`); their gradients go back and are
added (`Payload.HALO_GRAD`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rayfcp.program.instructions import Range
from rayfcp.values import RecurrentKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows `rows` of slot 0, part `part` of chain `chain` (-1: all of its sequence). `halo`: its rows of the halo
    buffer; fewer than the kind's `halo` near the start of the sequence."""

    rows: Range
    chain: int
    part: int
    halo: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEnd:
    """A head or tail of `sequence`, part `part` of chain `chain`, on this rank. `rows`: a head's, behind those of slot
    0, or a tail's of the halo buffer. `microbatch`: the one whose tail, of the same sequence, a head was."""

    sequence: int
    chain: int
    part: int
    rows: Range
    microbatch: int = -1


class Share(NamedTuple):
    """Heads of a layer, and columns of the state of each, which are those of values; possibly none."""

    heads: Range
    columns: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A sequence in several parts. `ranks[i]`: that of part i. `folders`: the ranks that fold, in order."""

    ranks: tuple[int, ...]
    folders: tuple[int, ...]

    @property
    def gathered(self) -> bool:
        """Each of the ranks folds all heads for itself."""
        return len(self.folders) <= 2

    def share(self, rank: int, *, num_heads: int, num_columns: int) -> Share:
        """What a rank folds."""
        if self.gathered:
            return Share((0, num_heads), (0, num_columns))
        at, count = self.folders.index(rank), len(self.folders)
        if count <= num_heads:
            return Share((num_heads * at // count, num_heads * (at + 1) // count), (0, num_columns))
        head = num_heads * at // count
        first, last = (-(-each * count // num_heads) for each in (head, head + 1))  # those of the same head
        begin, end = (num_columns * each // (last - first) for each in (at - first, at - first + 1))
        return Share((head, head + 1), (begin, end)) if begin < end else Share((0, 0), (0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMessage:
    """All that travels of a round between this rank and rank `peer` in one direction: of each (chain, part) of `items`
    the share that the end which folds has. Both ends have the same items in the same order. Where that is nothing of
    any item, which both ends know, nothing is sent."""

    peer: int
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRound:
    """Messages of one of the rounds above; what stays on a rank is none."""

    sends: tuple[StateMessage, ...] = ()
    receives: tuple[StateMessage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HaloCopy:
    """Rows `source` of slot 0 and of heads, on rank `sender`, for rows `target` of the halo buffer on `receiver`; this
    rank is one of them or both."""

    sender: int
    receiver: int
    source: tuple[Range, ...]
    target: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanProgram:
    """One rank's part in the recurrence of one microbatch, in layers of `kind`.

    `segments` are ascending and make up slot 0. `chains`: by number, those of which this rank has a part. The rounds
    are those above, 1 to 4; `halos` come before them, one round.
    """

    rank: int
    kind: RecurrentKind
    num_tokens: int
    segments: tuple[Segment, ...]
    heads: tuple[ChainEnd, ...] = ()
    tails: tuple[ChainEnd, ...] = ()
    chains: Mapping[int, Chain] = field(default_factory=dict)
    summaries: StateRound = StateRound()
    states: StateRound = StateRound()
    adjoints: StateRound = StateRound()
    state_grads: StateRound = StateRound()
    halos: tuple[HaloCopy, ...] = ()
    num_halo_rows: int = 0
