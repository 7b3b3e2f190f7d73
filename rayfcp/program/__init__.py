"""Programs of ranks: instructions, lowering of plans, text round trip, static checks."""

from rayfcp.program.deadlock import check_progress
from rayfcp.program.encode import Encode, EncodedPictures
from rayfcp.program.heads import exchange_rounds, head_rounds, rounds_of, spans
from rayfcp.program.instructions import (
    Attend,
    AttentionProgram,
    AttentionRound,
    Backward,
    ContextSlot,
    Flow,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    LayerKind,
    Load,
    Message,
    Payload,
    Piece,
    RankProgram,
    Receive,
    Send,
)
from rayfcp.program.lower import ALL_PRIMITIVES, RUNTIME_PRIMITIVES, lower
from rayfcp.program.parcels import Parcel, Range, ReshuffleProgram, ReshuffleRound
from rayfcp.program.reshuffle import lower_reshuffle
from rayfcp.program.table import Attends
from rayfcp.program.text import from_text, to_text
from rayfcp.program.validate import check_plan, check_programs

__all__ = [
    "ALL_PRIMITIVES",
    "RUNTIME_PRIMITIVES",
    "Attend",
    "Attends",
    "AttentionProgram",
    "AttentionRound",
    "Backward",
    "ContextSlot",
    "Encode",
    "EncodedPictures",
    "Flow",
    "Forward",
    "Free",
    "HeadProgram",
    "Instruction",
    "LayerKind",
    "Load",
    "Message",
    "Parcel",
    "Payload",
    "Piece",
    "Range",
    "RankProgram",
    "Receive",
    "ReshuffleProgram",
    "ReshuffleRound",
    "Send",
    "check_plan",
    "check_programs",
    "check_progress",
    "exchange_rounds",
    "from_text",
    "head_rounds",
    "lower",
    "lower_reshuffle",
    "rounds_of",
    "spans",
    "to_text",
]
