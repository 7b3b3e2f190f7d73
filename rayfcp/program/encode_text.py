"""`Encode` as text:

    encode 0 3[0:2]x1024>256 5[4:9]x64>16 rows=0:256,300:380 kept=0:256@0:256
      >1 256:512 <2 256:336
      -

Pictures are sequence[first:last]xPATCHES>TOKENS; `rows` take the features, `kept` says which rows of those encoded
here, @ which of those placed, stay. Then come the rounds of the exchange, `-` where a rank has nothing to do in one:
`>` sends these rows of what it encoded, `<` receives into these of what it places.
"""

import re
from collections.abc import Iterator, Sequence

from rayfcp.program.encode import Encode, EncodedPictures
from rayfcp.program.parcels import Parcel, Range, ReshuffleProgram, ReshuffleRound

_HEAD = re.compile(
    r"encode (\d+)((?: \d+\[\d+:\d+\]x\d+>\d+)*)(?: rows=(\d+:\d+(?:,\d+:\d+)*))?"
    r"(?: kept=(\d+:\d+@\d+:\d+(?:,\d+:\d+@\d+:\d+)*))?$"
)
_PICTURES = re.compile(r"(\d+)\[(\d+):(\d+)\]x(\d+)>(\d+)")
_PAIR = re.compile(r"(\d+):(\d+)@(\d+):(\d+)")
_SPAN = re.compile(r"(\d+):(\d+)")
_PARCEL = re.compile(r"([<>])(\d+) (\d+:\d+(?:,\d+:\d+)*)")


def encode_lines(item: Encode) -> Iterator[str]:
    """The instruction, then its rounds."""
    yield _head(item)
    yield from (_round_line(step) for step in item.features.rounds)


def parse_encode(lines: Sequence[str], at: int, *, rank: int, num_ranks: int) -> tuple[Encode, int]:
    """The instruction whose first line is `at`, and the line behind it.

    Raises:
        ValueError: a line is not of the form; the message holds its number and text.
    """
    found = _HEAD.match(lines[at])
    if found is None:
        raise ValueError(f"line {at + 1}: {lines[at]!r} is no encode; see rayfcp.program.encode_text for the form")
    pictures = tuple(
        EncodedPictures(sequence=sequence, first=first, last=last, num_patches=patches, num_tokens=tokens)
        for sequence, first, last, patches, tokens in (map(int, each) for each in _PICTURES.findall(found.group(2)))
    )
    rows = _spans(found.group(3) or "")
    kept = tuple(((a, b), (c, d)) for a, b, c, d in (map(int, each) for each in _PAIR.findall(found.group(4) or "")))
    at, rounds = at + 1, list[ReshuffleRound]()
    while at < len(lines) and lines[at].startswith("  "):
        rounds.append(_parse_round(lines[at], at))
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


def _round_line(step: ReshuffleRound) -> str:
    ends = ((">", step.send), ("<", step.receive))
    words = [f"{sign}{parcel.peer} {_text(parcel.ranges)}" for sign, parcel in ends if parcel]
    return "  " + (" ".join(words) or "-")


def _parse_round(line: str, at: int) -> ReshuffleRound:
    parcels = {sign: Parcel(peer=int(peer), ranges=_spans(ranges)) for sign, peer, ranges in _PARCEL.findall(line)}
    step = ReshuffleRound(send=parcels.get(">"), receive=parcels.get("<"))
    if _round_line(step) != line:
        raise ValueError(f"line {at + 1}: {line!r} is no round; see rayfcp.program.encode_text for the form")
    return step


def _spans(text: str) -> tuple[Range, ...]:
    return tuple((int(start), int(stop)) for start, stop in _SPAN.findall(text))
