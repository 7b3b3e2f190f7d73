"""Programs of ranks: instructions, lowering of plans, text round trip, static checks."""

from rayfcp.program.deadlock import check_progress
from rayfcp.program.instructions import (
    Attend,
    AttentionProgram,
    AttentionRound,
    Backward,
    Forward,
    Instruction,
    Load,
    Message,
    Payload,
    Piece,
    Range,
    RankProgram,
)
from rayfcp.program.lower import lower
from rayfcp.program.text import from_text, to_text
from rayfcp.program.validate import check_plan, check_programs

__all__ = [
    "Attend",
    "AttentionProgram",
    "AttentionRound",
    "Backward",
    "Forward",
    "Instruction",
    "Load",
    "Message",
    "Payload",
    "Piece",
    "Range",
    "RankProgram",
    "check_plan",
    "check_programs",
    "check_progress",
    "from_text",
    "lower",
    "to_text",
]
