"""What an elastic choice says: what to do, with which devices, and why."""

from dataclasses import dataclass
from enum import StrEnum


class Move(StrEnum):
    """What can be done about the devices of a run."""

    GO_ON = "go on"
    FORM = "form"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`reason`: one sentence for people. `devices`: ids of those to go on with, in the order of their numbers, where
    `what` forms a new generation, maybe of the same devices; none otherwise. `num_stages` of that generation."""

    what: Move
    reason: str
    devices: tuple[str, ...] = ()
    num_stages: int = 1
