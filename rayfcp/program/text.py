"""`Encode` as text:

    encode 0 3[0:2]x1024>256 5[4:9]x64>16 rows=0:256,300:380 kept=0:256@0:256
      >1 256:512 <2 256:336
      -

Pictures are sequence[first:last]xPATCHES>TOKENS; `rows` take the features, `kept` says which rows of those encoded
here, @ which of those placed, stay. Then come the rounds of the exchange, `-` where a rank has nothing to do in one:
`>` sends these rows of what it encoded, `<` receives into these of what it places.

A program as text, one instruction a line and one line a round: print it, read it, diff it, parse it back.

    program rank=0/2 stage=0/1 plan=0123456789abcdef
    load 0 3[0:64] 3[192:256]
    forward 0 tokens=128 recompute=0
      >1 kv 0[0:128] <1 kv 1[0:128] * 0:128@0[0:128]c
      * 64:128@1[0:128]
    ~
      >1 kv 0[0:128] <1 kv 1[0:128] * 0:128@0[0:128]c
    backward 0 reduce
    load 1 5[0:40]
    forward 1 tokens=40 recompute=0 heads=0:40,2:39
      * 0:79@0[0:79]c
    ~
      * 0:79@0[0:79]c

`>` sends, `<` receives, `*` attends (queries@slot[keys], `c` for causal); after `~` come the rounds of
the backward pass of that forward. `heads` are the ranks that exchange tokens for heads around these rounds, and
their tokens. Between stages, and with slices:

    receive 1 activation stage=0 tokens=40
    forward 1 tokens=40 recompute=2 keeps=0:40 context=1:0[0:128]
    send 1 gradient stage=0 tokens=40
    free 1

`keeps` are the ranges of slot 0 that later microbatches need; `context` says slot:microbatch[span] of what earlier ones
left. Attends end in `c` where they are causal, `f` where causal and flipped. A stage's layers may have windows:

    forward 1 tokens=40 recompute=0 window=8
      * 0:8@0[0:8]c * 32:40@0[32:40]c ...
    ~
      ...
    window 16 keeps=24:40
      * 0:16@0[0:16]c ...
    ~
      ...

first what layers of the first window (0, none, if absent) run, then those of each other one. What a vision encoder does
stands between load and forward (`rayfcp.program.text`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from rayfcp.program.instructions import (
    Attend,
    AttentionProgram,
    AttentionRound,
    Backward,
    ContextSlot,
    Encode,
    EncodedPictures,
    Flow,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    LayerKind,
    Load,
    Message,
    Parcel,
    Payload,
    Piece,
    Range,
    RankProgram,
    Receive,
    ReshuffleProgram,
    ReshuffleRound,
    Send,
)

_ENCODE_HEAD = re.compile(
    r"encode (\d+)((?: \d+\[\d+:\d+\]x\d+>\d+)*)(?: rows=(\d+:\d+(?:,\d+:\d+)*))?"
    r"(?: kept=(\d+:\d+@\d+:\d+(?:,\d+:\d+@\d+:\d+)*))?$"
)
_PICTURES = re.compile(r"(\d+)\[(\d+):(\d+)\]x(\d+)>(\d+)")
_PAIR = re.compile(r"(\d+):(\d+)@(\d+):(\d+)")
_FEATURE_SPAN = re.compile(r"(\d+):(\d+)")
_PARCEL = re.compile(r"([<>])(\d+) (\d+:\d+(?:,\d+:\d+)*)")


def encode_lines(item: Encode) -> Iterator[str]:
    """The instruction, then its rounds."""
    yield _head(item)
    yield from (_feature_round_line(step) for step in item.features.rounds)


def parse_encode(lines: Sequence[str], at: int, *, rank: int, num_ranks: int) -> tuple[Encode, int]:
    """The instruction whose first line is `at`, and the line behind it.

    Raises:
        ValueError: a line is not of the form; the message holds its number and text.
    """
    found = _ENCODE_HEAD.match(lines[at])
    if found is None:
        raise ValueError(f"line {at + 1}: {lines[at]!r} is no encode; see rayfcp.program.text for the form")
    pictures = tuple(
        EncodedPictures(sequence=sequence, first=first, last=last, num_patches=patches, num_tokens=tokens)
        for sequence, first, last, patches, tokens in (map(int, each) for each in _PICTURES.findall(found.group(2)))
    )
    rows = _spans(found.group(3) or "")
    kept = tuple(((a, b), (c, d)) for a, b, c, d in (map(int, each) for each in _PAIR.findall(found.group(4) or "")))
    at, rounds = at + 1, list[ReshuffleRound]()
    while at < len(lines) and lines[at].startswith("  "):
        rounds.append(_parse_feature_round(lines[at], at))
        at += 1
    features = ReshuffleProgram(
        rank=rank,
        num_ranks=num_ranks,
        num_tokens=sum(each.count * each.num_tokens for each in pictures),
        num_placed=sum(stop - start for start, stop in rows),
        kept=kept,
        rounds=tuple(rounds),
    )
    return Encode(microbatch=int(found.group(1)), pictures=pictures, features=features, rows=rows), at


def _head(item: Encode) -> str:
    words = [f"encode {item.microbatch}"]
    words += [f"{p.sequence}[{p.first}:{p.last}]x{p.num_patches}>{p.num_tokens}" for p in item.pictures]
    if item.rows:
        words.append(f"rows={_text(item.rows)}")
    if item.features.kept:
        words.append("kept=" + ",".join(f"{_text((there,))}@{_text((here,))}" for there, here in item.features.kept))
    return " ".join(words)


def _text(ranges: Sequence[Range]) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in ranges)


def _feature_round_line(step: ReshuffleRound) -> str:
    ends = ((">", step.send), ("<", step.receive))
    words = [f"{sign}{parcel.peer} {_text(parcel.ranges)}" for sign, parcel in ends if parcel]
    return "  " + (" ".join(words) or "-")


def _parse_feature_round(line: str, at: int) -> ReshuffleRound:
    parcels = {sign: Parcel(peer=int(peer), ranges=_spans(ranges)) for sign, peer, ranges in _PARCEL.findall(line)}
    step = ReshuffleRound(send=parcels.get(">"), receive=parcels.get("<"))
    if _feature_round_line(step) != line:
        raise ValueError(f"line {at + 1}: {line!r} is no round; see rayfcp.program.text for the form")
    return step


def _spans(text: str) -> tuple[Range, ...]:
    return tuple((int(start), int(stop)) for start, stop in _FEATURE_SPAN.findall(text))


_HEAD = re.compile(r"program rank=(\d+)/(\d+) stage=(\d+)/(\d+) plan=([0-9a-f]*)$")
_MESSAGE = re.compile(r"([<>])(\d+) (kv|grad) (\d+)((?:\[\d+:\d+\])*)")
_ATTEND = re.compile(r"\* (\d+):(\d+)@(\d+)\[(\d+):(\d+)\]([cf]?)")
_RANGE = re.compile(r"\[(\d+):(\d+)\]")
_PIECE = re.compile(r"(\d+)\[(\d+):(\d+)\]")
_SPAN = re.compile(r"(\d+):(\d+)")
_CONTEXT = re.compile(r"(\d+):(\d+)\[(\d+):(\d+)\]")
_SLOTS = r"(?: keeps=(\d+:\d+(?:,\d+:\d+)*))?(?: context=(\d+:\d+\[\d+:\d+\](?:,\d+:\d+\[\d+:\d+\])*))?$"
_FORWARD = re.compile(
    r"forward (\d+) tokens=(\d+) recompute=(\d+)(?: window=(\d+))?(?: heads=(\d+:\d+(?:,\d+:\d+)*))?" + _SLOTS
)
_WINDOW = re.compile(r"window (\d+)" + _SLOTS)
_BACKWARD = re.compile(r"backward (\d+)( reduce)?$")
_BETWEEN_STAGES = re.compile(r"(send|receive) (\d+) (activation|gradient) stage=(\d+) tokens=(\d+)$")
_FREE = re.compile(r"free (\d+)$")


def to_text(program: RankProgram) -> str:
    """Print a program; `from_text(to_text(p)) == p`."""
    head = (
        f"program rank={program.rank}/{program.num_ranks} stage={program.stage}/{program.num_stages} "
        f"plan={program.plan_hash}"
    )
    return "\n".join([head, *(line for item in program.instructions for line in _lines(item))]) + "\n"


def from_text(text: str) -> RankProgram:
    """Parse what `to_text` printed.

    Raises:
        ValueError: a line is not of the form; the message holds its number and text.
    """
    lines = text.splitlines()
    head = _HEAD.match(lines[0]) if lines else None
    if head is None:
        raise ValueError(f"line 1: {lines[0] if lines else ''!r} is no program header; expected 'program rank=R/N ...'")
    rank, num_ranks, stage, num_stages = (int(group) for group in head.groups()[:4])
    return RankProgram(
        rank=rank,
        num_ranks=num_ranks,
        stage=stage,
        num_stages=num_stages,
        plan_hash=head.group(5),
        instructions=tuple(_parse(lines, rank=rank, num_ranks=num_ranks)),
    )


def _lines(item: Instruction) -> Iterator[str]:
    if isinstance(item, Load):
        pieces = "".join(f" {piece.sequence}[{piece.start}:{piece.stop}]" for piece in item.pieces)
        yield f"load {item.microbatch}{pieces}"
    elif isinstance(item, Encode):
        yield from encode_lines(item)
    elif isinstance(item, Forward):
        yield from _forward_lines(item)
    elif isinstance(item, Backward):
        yield f"backward {item.microbatch}{' reduce' if item.reduce else ''}"
    elif isinstance(item, Free):
        yield f"free {item.microbatch}"
    else:
        kind = "send" if isinstance(item, Send) else "receive"
        yield f"{kind} {item.microbatch} {item.flow.value} stage={item.stage} tokens={item.num_tokens}"


def _forward_lines(item: Forward) -> Iterator[str]:
    attention = item.attention
    head = f"forward {item.microbatch} tokens={attention.num_tokens} recompute={item.recomputed_layers}"
    if item.window:
        head += f" window={item.window}"
    if isinstance(attention, HeadProgram):
        head += f" heads={_spans_text(zip(attention.ranks, attention.tokens, strict=True))}"
    yield from _attention_lines(head, attention.inner)
    for kind in item.others:
        yield from _attention_lines(f"window {kind.window}", kind.attention.inner)


def _attention_lines(head: str, attention: AttentionProgram) -> Iterator[str]:
    if attention.kept:
        head += f" keeps={_spans_text(attention.kept)}"
    if attention.context:
        slots = (f"{each.slot}:{each.microbatch}[{each.span[0]}:{each.span[1]}]" for each in attention.context)
        head += f" context={','.join(slots)}"
    yield head
    yield from (_round_line(step) for step in attention.forward)
    yield "~"
    yield from (_round_line(step) for step in attention.backward)


def _spans_text(spans: Iterable[Range]) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in spans)


def _round_line(step: AttentionRound) -> str:
    parts = [_message_text(">", message) for message in step.sends]
    parts += [_message_text("<", message) for message in step.receives]
    parts += [
        f"* {a.query[0]}:{a.query[1]}@{a.slot}[{a.key[0]}:{a.key[1]}]{'f' if a.flipped else 'c' if a.causal else ''}"
        for a in step.attends
    ]
    return "  " + " ".join(parts)


def _message_text(sign: str, message: Message) -> str:
    ranges = "".join(f"[{start}:{stop}]" for start, stop in message.ranges)
    return f"{sign}{message.peer} {message.payload.value} {message.slot}{ranges}"


def _parse(lines: list[str], *, rank: int, num_ranks: int) -> Iterator[Instruction]:
    at = 1
    while at < len(lines):
        if found := _FORWARD.match(lines[at]):
            item, at = _parse_forward(found, lines, at)
            yield item
        elif lines[at].startswith("encode "):
            encode, at = parse_encode(lines, at, rank=rank, num_ranks=num_ranks)
            yield encode
        else:
            yield _parse_line(lines[at], at)
            at += 1


def _parse_line(line: str, at: int) -> Instruction:
    if found := _BACKWARD.match(line):
        return Backward(microbatch=int(found.group(1)), reduce=found.group(2) is not None)
    if found := _BETWEEN_STAGES.match(line):
        microbatch, stage, num_tokens = (int(found.group(number)) for number in (2, 4, 5))
        kind = Send if found.group(1) == "send" else Receive
        return kind(microbatch=microbatch, flow=Flow(found.group(3)), stage=stage, num_tokens=num_tokens)
    if found := _FREE.match(line):
        return Free(microbatch=int(found.group(1)))
    if line.startswith("load "):
        return _parse_load(line, at)
    raise ValueError(
        f"line {at + 1}: {line!r} is no instruction; expected load, encode, receive, forward, send, backward or free"
    )


def _parse_forward(found: re.Match[str], lines: list[str], at: int) -> tuple[Forward, int]:
    """The instruction whose first line is `at`, and the line behind it."""
    microbatch, num_tokens, recomputed, window = (int(group or 0) for group in found.groups()[:4])
    heads, kept, context = (group or "" for group in found.groups()[4:])
    shares = _spans(heads)
    ours, at = _parse_attention(lines, at, num_tokens, shares=shares, slots=(kept, context))
    others: list[LayerKind] = []
    while at < len(lines) and (other := _WINDOW.match(lines[at])):
        kept, context = (group or "" for group in other.groups()[1:])
        theirs, at = _parse_attention(lines, at, num_tokens, shares=shares, slots=(kept, context))
        others.append(LayerKind(window=int(other.group(1)), attention=theirs))
    forward = Forward(
        microbatch=microbatch, attention=ours, recomputed_layers=recomputed, window=window, others=tuple(others)
    )
    return forward, at


def _parse_attention(
    lines: list[str], at: int, num_tokens: int, *, shares: tuple[Range, ...], slots: tuple[str, str]
) -> tuple[AttentionProgram | HeadProgram, int]:
    """The rounds under line `at`, and the line behind them."""
    forward, at = _parse_rounds(lines, at + 1)
    if at >= len(lines) or lines[at] != "~":
        raise ValueError(f"line {at + 1}: expected '~' and the backward rounds of the forward before it")
    backward, at = _parse_rounds(lines, at + 1)
    kept, context = slots
    attention = AttentionProgram(
        num_tokens=sum(tokens for _, tokens in shares) if shares else num_tokens,
        forward=forward,
        backward=backward,
        context=_context(context),
        kept=_spans(kept),
    )
    if not shares:
        return attention, at
    ranks, tokens = tuple(rank for rank, _ in shares), tuple(tokens for _, tokens in shares)
    return HeadProgram(num_tokens=num_tokens, ranks=ranks, tokens=tokens, attention=attention), at


def _context(text: str) -> tuple[ContextSlot, ...]:
    slots = [tuple(int(group) for group in groups) for groups in _CONTEXT.findall(text)]
    return tuple(
        ContextSlot(slot=slot, microbatch=microbatch, span=(start, stop)) for slot, microbatch, start, stop in slots
    )


def _parse_load(line: str, at: int) -> Load:
    words = line.split()[1:]
    pieces = [_PIECE.fullmatch(word) for word in words[1:]]
    if not words or not words[0].isdigit() or not all(pieces):
        raise ValueError(f"line {at + 1}: {line!r} is no load; expected 'load MICROBATCH SEQUENCE[START:STOP] ...'")
    triples = [tuple(int(group) for group in piece.groups()) for piece in pieces if piece]
    return Load(
        microbatch=int(words[0]),
        pieces=tuple(Piece(sequence=sequence, start=start, stop=stop) for sequence, start, stop in triples),
    )


def _parse_rounds(lines: list[str], at: int) -> tuple[tuple[AttentionRound, ...], int]:
    rounds: list[AttentionRound] = []
    while at < len(lines) and lines[at].startswith("  "):
        rounds.append(_parse_round(lines[at]))
        if _round_line(rounds[-1]) != lines[at]:
            raise ValueError(f"line {at + 1}: {lines[at]!r} is no round; see rayfcp.program.text for the form")
        at += 1
    return tuple(rounds), at


def _parse_round(line: str) -> AttentionRound:
    sends: list[Message] = []
    receives: list[Message] = []
    for sign, peer, payload, slot, ranges in _MESSAGE.findall(line):
        message = Message(peer=int(peer), payload=Payload(payload), slot=int(slot), ranges=_ranges(ranges))
        (sends if sign == ">" else receives).append(message)
    attends = tuple(
        Attend(query=(int(q0), int(q1)), slot=int(slot), key=(int(k0), int(k1)), causal=bool(kind), flipped=kind == "f")
        for q0, q1, slot, k0, k1, kind in _ATTEND.findall(line)
    )
    return AttentionRound(sends=tuple(sends), receives=tuple(receives), attends=attends)


def _ranges(text: str) -> tuple[Range, ...]:
    return tuple((int(start), int(stop)) for start, stop in _RANGE.findall(text))
