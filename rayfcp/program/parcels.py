"""Rows on their way from one order over the ranks to another, as `rayfcp.program.reshuffle` plans it."""

from dataclasses import dataclass

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
