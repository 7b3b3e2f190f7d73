"""One thing of one rank's program changed at random."""

import random
from dataclasses import replace
from typing import Any

from rayfcp.program import (
    AttentionProgram,
    Backward,
    ContextSlot,
    Forward,
    HeadProgram,
    Instruction,
    Load,
    RankProgram,
    Receive,
    Send,
)
from tests.program.mutations import with_num_tokens


def mutate(program: RankProgram, rng: random.Random) -> RankProgram:
    """One thing of one rank's program changed; sometimes nothing."""
    items = program.instructions
    kinds = ["label", "dropped", "doubled", "moved", "field", "content", "content", "content"]
    kind = rng.choice(kinds if program.num_stages == 1 else [each for each in kinds if each != "moved"])
    if kind == "content":
        return _with_content(program, rng)
    if kind == "label":
        field = rng.choice(["rank", "num_ranks", "stage", "num_stages"])
        return replace(program, **{field: getattr(program, field) + rng.choice([-1, 1])})
    at = rng.randrange(len(items))
    if kind == "field":
        return replace(program, instructions=(*items[:at], _with_field(items[at], rng), *items[at + 1 :]))
    if kind == "moved":
        passes = [(each, item) for each, item in enumerate(items) if isinstance(item, Load | Forward | Backward)]
        own = [each for each, item in passes if item.microbatch == items[at].microbatch]
        changed = list(items)
        for place, source in zip(own, rng.sample(own, len(own)), strict=True):
            changed[place] = items[source]
        return replace(program, instructions=tuple(changed))
    kept = 0 if kind == "dropped" else 2
    return replace(program, instructions=items[:at] + items[at : at + 1] * kept + items[at + 1 :])


def _with_field(item: Instruction, rng: random.Random) -> Instruction:
    by = rng.choice([-1, 1])
    if isinstance(item, Forward):
        changed = [with_num_tokens(item, item.attention.num_tokens + by)]
        changed.append(replace(item, recomputed_layers=item.recomputed_layers + by))
        return rng.choice(changed)
    if isinstance(item, Send | Receive) and rng.random() < 0.7:
        field = rng.choice(["stage", "num_tokens"])
        return replace(item, **{field: getattr(item, field) + by})
    return replace(item, microbatch=item.microbatch + by)


def _with_content(program: RankProgram, rng: random.Random) -> RankProgram:
    index = rng.randrange(len(program.instructions))
    items = list(program.instructions)
    item = items[index]
    if isinstance(item, Load):
        items[index] = replace(item, pieces=_changed(item.pieces, rng))
    elif isinstance(item, Forward) and isinstance(item.attention, HeadProgram):
        field = rng.choice(["ranks", "tokens", "attention", "attention"])
        value = getattr(item.attention, field)
        value = _with_rounds(value, rng) if field == "attention" else _changed(value, rng)
        items[index] = replace(item, attention=replace(item.attention, **{field: value}))
    elif isinstance(item, Forward):
        items[index] = replace(item, attention=_with_rounds(item.attention, rng))
    elif isinstance(item, Backward):
        items[index] = replace(item, reduce=not item.reduce)
    else:
        items[index] = _with_field(item, rng)
    return replace(program, instructions=tuple(items))


def _with_rounds(attention: AttentionProgram, rng: random.Random) -> AttentionProgram:
    direction = rng.choice(["forward", "backward", "backward", *(["context", "kept"] if attention.context else [])])
    if direction in ("context", "kept"):
        return replace(attention, **{direction: _changed(getattr(attention, direction), rng)})
    rounds = list(getattr(attention, direction))
    number = rng.randrange(len(rounds))
    field = rng.choice(["sends", "receives", "attends"])
    rounds[number] = replace(rounds[number], **{field: _changed(tuple(getattr(rounds[number], field)), rng)})
    return replace(attention, **{direction: tuple(rounds)})


def _changed(values: tuple, rng: random.Random) -> tuple:
    """One element dropped, doubled or altered."""
    if not values:
        return values
    at = rng.randrange(len(values))
    kind = rng.choice(["drop", "double", "alter"])
    if kind == "drop":
        return values[:at] + values[at + 1 :]
    if kind == "double":
        return values[: at + 1] + values[at:]
    return (*values[:at], _altered(values[at], rng), *values[at + 1 :])


def _altered(value: Any, rng: random.Random) -> object:
    if isinstance(value, int):
        return value + rng.choice([-1, 1])
    if isinstance(value, tuple):
        return value[0], value[1] + rng.choice([-1, 1])
    if isinstance(value, ContextSlot):
        start, stop = value.span
        changes = [{"slot": value.slot + 1}, {"microbatch": value.microbatch + 1}, {"span": (start, stop - 1)}]
        return replace(value, **rng.choice(changes))
    if hasattr(value, "ranges"):
        start, stop = value.ranges[-1]
        return rng.choice([replace(value, peer=value.peer + 1), replace(value, ranges=((start, stop + 1),))])
    if hasattr(value, "query"):
        start, stop = value.query
        changes = [replace(value, query=(start, stop + 1))]
        if value.num_pairs > 1:  # of one pair all kinds are the same
            changes.append(replace(value, causal=not value.causal, flipped=False))
            changes += [replace(value, flipped=not value.flipped)] if value.causal else []
        return rng.choice(changes)
    return replace(value, start=value.start + 1)
