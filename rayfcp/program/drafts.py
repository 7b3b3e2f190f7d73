"""Rounds of a rank while they are being filled."""

from rayfcp.program.instructions import AttentionRound, Message
from rayfcp.program.table import Attends

_NONE = Attends.of(())


class RoundDrafts:
    """What a rank sends, receives and attends to, by round."""

    __slots__ = ("attends", "receives", "sends")

    def __init__(self, num_rounds: int) -> None:
        self.sends: list[list[Message]] = [[] for _ in range(num_rounds)]
        self.receives: list[list[Message]] = [[] for _ in range(num_rounds)]
        self.attends: list[Attends] = [_NONE] * num_rounds

    def finished(self) -> tuple[AttentionRound, ...]:
        """The rounds, without empty ones at the end."""
        rounds = [
            AttentionRound(sends=tuple(sends), receives=tuple(receives), attends=attends)
            for sends, receives, attends in zip(self.sends, self.receives, self.attends, strict=True)
        ]
        while rounds and not (rounds[-1].sends or rounds[-1].receives or rounds[-1].attends):
            rounds.pop()
        return tuple(rounds)
