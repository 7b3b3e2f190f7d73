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
- `scan`: recurrent layers, whose kind a line `scan halo=3` names. `0:16#0.2+3:6` are rows 0 to 16 of slot 0, part 2 of
  chain 0, with rows 3 to 6 of the halo buffer; `head` and `tail` parts without tokens, `sequence#chain.part@rows`, a
  head with `<microbatch`; `chain` the ranks of its parts. `halo >1 13:16@0:3` sends rows to those of rank 1's halo
  buffer; without a rank they stay. `summary`, `state`, `adjoint` and `state_grad` list the parts in messages.
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
    Payload,
    Range,
    RankProgram,
    ReshuffleRound,
    Send,
)
from rayfcp.program.scan import ChainEnd, HaloCopy, ScanProgram, Segment
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
    for each in item.scans:
        yield from _scan_lines(each)


def _scan_lines(scan: ScanProgram) -> Iterator[str]:
    yield f"scan halo={scan.kind.halo}"
    yield "  " + " ".join(map(_segment, scan.segments))
    ends = [f"head {_end(each)}<{each.microbatch}" for each in scan.heads]
    ends += [f"tail {_end(each)}" for each in scan.tails]
    if ends:
        yield "  " + " ".join(ends)
    for number, chain in scan.chains.items():
        yield f"  chain {number} {','.join(map(str, chain.ranks))}"
    if scan.halos:
        yield "  halo " + " ".join(_copy(each, scan.rank) for each in scan.halos)
    for payload, step in (
        (Payload.SUMMARY, scan.summaries),
        (Payload.STATE, scan.states),
        (Payload.ADJOINT, scan.adjoints),
        (Payload.STATE_GRAD, scan.state_grads),
    ):
        words = [
            f"{sign}{each.peer} {_items(each.items)}"
            for sign, way in ((">", step.sends), ("<", step.receives))
            for each in way
        ]
        if words:
            yield f"  {payload.value} {' '.join(words)}"


def _segment(part: Segment) -> str:
    chain = f"#{part.chain}.{part.part}" if part.chain >= 0 else ""
    return _ranges([part.rows]) + chain + (f"+{_ranges([part.halo])}" if part.halo[0] < part.halo[1] else "")


def _end(part: ChainEnd) -> str:
    return f"{part.sequence}#{part.chain}.{part.part}@{_ranges([part.rows])}"


def _copy(copy: HaloCopy, rank: int) -> str:
    way = "" if copy.receiver == copy.sender else f">{copy.receiver} " if copy.sender == rank else f"<{copy.sender} "
    return f"{way}{_ranges(copy.source)}@{_ranges(copy.target)}"


def _items(items: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{chain}.{part}" for chain, part in items)


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
