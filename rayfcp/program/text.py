"""A program as text, one instruction a line and one line a round: to read and to diff; docs/programs.md has examples.

    load 0 3[0:64] 3[192:256]                                   sequence[tokens]
    encode 0 3[0:2]x1024>256 rows=0:512 kept=0:256@0:256        sequence[images]xPATCHES>TOKENS
    forward 0 tokens=128 recompute=0
      >1 kv 0[0:128] <1 kv 1[0:128] * 0:128@0[0:128]c
      * 64:128@1[0:128]
    ~
      ...
    backward 0 reduce
    send 1 gradient stage=0 tokens=40

`>` sends, `<` receives, `*` attends: queries@slot[keys], `c` where causal, `f` where causal and flipped. After `~` come
the rounds of the backward pass, after `encode` those of the exchange, `-` for one without messages of this rank.

- `attention=kept`: recomputed layers keep the output of attention, so that its rounds are not repeated.
- `heads`: the ranks that exchange tokens for heads around the rounds, and their tokens.
- `keeps`: ranges of slot 0 that later microbatches need. `context`: slot:microbatch[span] of what earlier ones left.
- `window`: of the layers that run the rounds (none, if absent); a line `window 16` begins those of the next kind.
- `rows`: those that take features. `kept`: rows of features encoded on this rank @ rows of those placed on it.
"""

from collections.abc import Iterable, Iterator

from rayfcp.program.instructions import (
    AttentionProgram,
    AttentionRound,
    Backward,
    Encode,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    Load,
    Message,
    Range,
    RankProgram,
    ReshuffleRound,
    Send,
)
from rayfcp.values import FULL


def to_text(program: RankProgram) -> str:
    """Print a program."""
    head = (
        f"program rank={program.rank}/{program.num_ranks} stage={program.stage}/{program.num_stages} "
        f"plan={program.plan_hash}"
    )
    return "\n".join([head, *(line for item in program.instructions for line in _lines(item))]) + "\n"


def _lines(item: Instruction) -> Iterator[str]:
    if isinstance(item, Load):
        pieces = "".join(f" {piece.sequence}[{piece.start}:{piece.stop}]" for piece in item.pieces)
        yield f"load {item.microbatch}{pieces}"
    elif isinstance(item, Encode):
        yield _encode_head(item)
        yield from map(_feature_round, item.features.rounds)
    elif isinstance(item, Forward):
        yield from _forward_lines(item)
    elif isinstance(item, Backward):
        yield f"backward {item.microbatch}{' reduce' if item.reduce else ''}"
    elif isinstance(item, Free):
        yield f"free {item.microbatch}"
    else:
        kind = "send" if isinstance(item, Send) else "receive"
        yield f"{kind} {item.microbatch} {item.flow.value} stage={item.stage} tokens={item.num_tokens}"


def _encode_head(item: Encode) -> str:
    words = [f"encode {item.microbatch}"]
    words += [f"{p.sequence}[{p.first}:{p.last}]x{p.num_patches}>{p.num_tokens}" for p in item.images]
    if item.rows:
        words.append(f"rows={_ranges(item.rows)}")
    if item.features.kept:
        words.append("kept=" + ",".join(f"{_ranges([own])}@{_ranges([placed])}" for own, placed in item.features.kept))
    return " ".join(words)


def _feature_round(step: ReshuffleRound) -> str:
    ends = ((">", step.send), ("<", step.receive))
    words = [f"{sign}{message.peer} {_ranges(message.ranges)}" for sign, message in ends if message]
    return "  " + (" ".join(words) or "-")


def _forward_lines(item: Forward) -> Iterator[str]:
    attention = item.attention
    head = f"forward {item.microbatch} tokens={attention.num_tokens} recompute={item.recomputed_layers}"
    if item.keeps_attention and item.recomputed_layers:
        head += " attention=kept"
    if item.kind != FULL:
        head += f" {item.kind}".replace(" window ", " window=")
    if isinstance(attention, HeadProgram):
        head += f" heads={_ranges(zip(attention.ranks, attention.tokens, strict=True))}"
    yield from _attention_lines(head, attention.inner)
    for kind in item.others:
        yield from _attention_lines(str(kind.kind), kind.attention.inner)


def _attention_lines(head: str, attention: AttentionProgram) -> Iterator[str]:
    if attention.kept:
        head += f" keeps={_ranges(attention.kept)}"
    if attention.context:
        slots = (f"{each.slot}:{each.microbatch}[{each.span[0]}:{each.span[1]}]" for each in attention.context)
        head += f" context={','.join(slots)}"
    yield head
    yield from map(_round, attention.forward)
    yield "~"
    yield from map(_round, attention.backward)


def _round(step: AttentionRound) -> str:
    parts = [_message(">", message) for message in step.sends]
    parts += [_message("<", message) for message in step.receives]
    parts += [
        f"* {a.query[0]}:{a.query[1]}@{a.slot}[{a.key[0]}:{a.key[1]}]{'f' if a.flipped else 'c' if a.causal else ''}"
        for a in step.attends
    ]
    return "  " + " ".join(parts)


def _message(sign: str, message: Message) -> str:
    ranges = "".join(f"[{start}:{stop}]" for start, stop in message.ranges)
    return f"{sign}{message.peer} {message.payload.value} {message.slot}{ranges}"


def _ranges(spans: Iterable[Range]) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in spans)
