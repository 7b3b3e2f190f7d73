"""Checks of the instructions of all ranks and stages, each for itself and against one another, before their messages
are matched (`rayfcp.program.progress`).

Ranks and stages agree on microbatches, kinds of layers and the order of passes. Neighbouring stages hand over what the
other needs, once each and in its place. Keys and values that a microbatch keeps for later ones stay until these have
read them, and no longer. All ranks encode images together, for they gather the encoder's shards, then run the rounds of
the exchange one after the other; in each both ends of a message have it, so no rank waits forever, and the gradients
take the same rounds back inside the backward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    Load,
    Payload,
    Range,
    RankProgram,
    Receive,
    Send,
    StageFlow,
    union,
)
from rayfcp.values import LayerKind

Attention = AttentionProgram | HeadProgram
Kind = TypeVar("Kind", bound=Instruction)


def of_kind(program: RankProgram, kind: type[Kind]) -> list[Kind]:
    """The instructions of one kind, in order."""
    return [item for item in program.instructions if isinstance(item, kind)]


def kinds_of(program: RankProgram) -> tuple[LayerKind, ...]:
    """The kinds of the stage's layers, ascending."""
    return tuple(each.kind for each in of_kind(program, Forward)[0].kinds)


def attention_by_kind(programs: Sequence[RankProgram]) -> dict[LayerKind, list[list[Attention]]]:
    """The attention of the layers of each kind, by rank, then microbatch; `check_order` holds.

    All stages that have layers of a kind run the same attention in them.
    """
    num_ranks = programs[0].num_ranks
    found: dict[LayerKind, list[list[Attention]]] = {}
    for first in range(0, len(programs), num_ranks):
        forwards = [of_kind(program, Forward) for program in programs[first : first + num_ranks]]
        for at, layers in enumerate(forwards[0][0].kinds):
            if layers.kind not in found:
                found[layers.kind] = [[item.kinds[at].attention for item in each] for each in forwards]
    return dict(sorted(found.items()))


def check_order(programs: Sequence[RankProgram]) -> None:
    """Every rank loads, passes forward and passes backward each microbatch once on each stage, and sums the gradients.

    Microbatches are 0..M-1, loaded and passed forward in this order. Backward passes come in one order on all ranks and
    stages, in which no microbatch precedes one that reads its keys and values; passes of different microbatches may
    interleave. The last backward pass reduces, so that no gradient stays on its rank. All stages load alike, and attend
    alike in layers of one kind. Program p x num_ranks + r is that of rank r on stage p.

    Raises:
        ValueError: an instruction is missing, double, out of order or of the wrong size; names the rank.
    """
    if not programs:
        raise ValueError("programs is empty, must hold one program for each stage and rank; lower the plan")
    first = programs[0]
    num_microbatches = len(of_kind(first, Load))
    if num_microbatches == 0:
        raise ValueError("rank 0 has no Load, must have one for each microbatch (at least 1); lower the plan again")
    known: dict[tuple[int, LayerKind], RankProgram] = {}
    for index, program in enumerate(programs):
        _check_labels(program, first, index=index, num_programs=len(programs))
        _check_passes(program, num_microbatches)
        _check_kinds(program, programs[index - program.rank])
        if any((program.rank, kind) not in known for kind in kinds_of(program)):
            _check_attention(program)
            _check_reuse(program)
        for kind in kinds_of(program):
            check_likeness(program, known.setdefault((program.rank, kind), program), kind=kind)
        _check_alike(program, programs[program.rank], first=first)
        _check_neighbours(program)
        _check_frees(program)


def _check_labels(program: RankProgram, first: RankProgram, *, index: int, num_programs: int) -> None:
    num_ranks, num_stages = first.num_ranks, first.num_stages
    if num_ranks < 1 or num_stages < 1 or num_ranks * num_stages != num_programs:
        raise ValueError(
            f"programs holds {num_programs}, must hold one for each of num_ranks {num_ranks} on each of num_stages "
            f"{num_stages}; give the programs of all ranks and stages"
        )
    stage, rank = divmod(index, num_ranks)
    for name, found, due in (
        ("rank and num_ranks", (program.rank, program.num_ranks), (rank, num_ranks)),
        ("stage and num_stages", (program.stage, program.num_stages), (stage, num_stages)),
    ):
        if found != due:
            raise ValueError(
                f"program at position {index} has {name} {found}, must have {due}; give the programs of all ranks, in "
                "the order of ranks, stage by stage"
            )


def _check_passes(program: RankProgram, num_microbatches: int) -> None:
    for kind in (Load, Forward, Backward):
        found = [item.microbatch for item in of_kind(program, kind)]
        in_order = sorted(found) if kind is Backward else found
        if in_order != list(range(num_microbatches)):
            raise ValueError(
                f"{program.place}: {kind.__name__} names microbatches {found}, must name each of "
                f"[0, {num_microbatches}) once{'' if kind is Backward else ', in this order'}; a rank without tokens "
                "runs one padding token"
            )
    place = {(type(item), item.microbatch): at for at, item in enumerate(program.instructions)}
    for number in range(num_microbatches):
        if not place[Load, number] < place[Forward, number] < place[Backward, number]:
            raise ValueError(
                f"{program.place}: instructions of microbatch {number} are out of order, must be Load, Forward, "
                "Backward; lower the plan again"
            )
    last = of_kind(program, Backward)[-1]
    if not last.reduce:
        raise ValueError(
            f"{program.place}: reduce is False in the last Backward (microbatch {last.microbatch}), must be True; "
            "otherwise gradients are never summed over ranks"
        )
    for item in of_kind(program, Forward):
        if item.recomputed_layers < 0:
            raise ValueError(
                f"{program.place}, microbatch {item.microbatch}: recomputed_layers is {item.recomputed_layers}, must "
                "be at least 0; plan again"
            )


def _check_kinds(program: RankProgram, first: RankProgram) -> None:
    """Every Forward has the kinds of layers of the stage's first rank, ascending, with the same exchange of
    tokens for heads."""
    due = kinds_of(first)
    for item in of_kind(program, Forward):
        where, found = f"{program.place}, microbatch {item.microbatch}", tuple(each.kind for each in item.kinds)
        if found != due or list(found) != sorted(set(found)):
            raise ValueError(
                f"{where}: kinds of layers are {found}, must ascend and be those of {first.place}, "
                f"{due}; lower one plan for all"
            )
        if item.others and len({_heads_of(kind.attention) for kind in item.kinds}) > 1:
            raise ValueError(f"{where}: layers of kinds {found} share out heads differently; lower the plan again")


def _heads_of(attention: Attention) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (attention.ranks, attention.tokens) if isinstance(attention, HeadProgram) else ((), ())


def check_likeness(program: RankProgram, other: RankProgram, *, kind: LayerKind) -> None:
    """A rank runs the same attention in layers of a kind on both stages.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    if program is other:
        return
    at, there = kinds_of(program).index(kind), kinds_of(other).index(kind)
    for mine, theirs in zip(of_kind(program, Forward), of_kind(other, Forward), strict=True):
        value, due = mine.kinds[at].attention, theirs.kinds[there].attention
        if value is not due and value != due:
            raise ValueError(_differ(program, other, "attention", microbatch=mine.microbatch))


def _check_alike(program: RankProgram, other: RankProgram, *, first: RankProgram) -> None:
    """A rank loads the same pieces on all stages (`other`: the first); all pass backward in the order of `first`."""
    for mine, theirs in zip(of_kind(program, Load), of_kind(other, Load), strict=True):
        if mine.pieces != theirs.pieces:
            raise ValueError(_differ(program, other, "pieces", microbatch=mine.microbatch))
    found, due = ([item.microbatch for item in of_kind(each, Backward)] for each in (program, first))
    if found != due:
        raise ValueError(
            f"{program.place}: Backward comes in the order {found}, must be that of {first.place}, {due}; lower one "
            "plan for all"
        )


def _differ(program: RankProgram, other: RankProgram, field: str, *, microbatch: int) -> str:
    return (
        f"{program.place}, microbatch {microbatch}: {field} differ from those of {other.place}, must be the same on "
        "all stages; lower one plan for all"
    )


def _check_attention(program: RankProgram) -> None:
    """Attention is over as many tokens as are loaded; its rounds carry keys, values and their gradients."""
    loaded = {item.microbatch: sum(piece.num_tokens for piece in item.pieces) for item in of_kind(program, Load)}
    for item in of_kind(program, Forward):
        for kind in item.kinds:
            attention = kind.attention
            where, due = f"{program.place}, microbatch {item.microbatch}", max(1, loaded[item.microbatch])
            if attention.num_tokens != due:
                raise ValueError(
                    f"{where}: num_tokens is {attention.num_tokens}, must be the {due} that Load brings "
                    "(1 of padding if none); lower the plan again"
                )
            if isinstance(attention, HeadProgram):
                _check_heads(attention, program, where=where)
            for step in attention.inner.forward + attention.inner.backward:
                for message in step.sends + step.receives:
                    if message.payload not in (Payload.KV, Payload.GRAD):
                        raise ValueError(
                            f"{where}: a round carries {message.payload.value}, must be kv or grad; lower the plan "
                            "again"
                        )


def _check_heads(attention: HeadProgram, program: RankProgram, *, where: str) -> None:
    """The group has this rank and others, each once, and at least one token (of padding) on each."""
    ranks, tokens = attention.ranks, attention.tokens
    inside = all(0 <= rank < program.num_ranks for rank in ranks)
    if program.rank not in ranks or len(set(ranks)) < max(2, len(ranks)) or not inside:
        raise ValueError(
            f"{where}: ranks of the Ulysses group are {ranks}, must be {program.rank} and others of "
            f"[0, {program.num_ranks}), each once; lower the plan again"
        )
    if len(tokens) != len(ranks) or min(tokens) < 1 or tokens[ranks.index(program.rank)] != attention.num_tokens:
        raise ValueError(
            f"{where}: tokens of the Ulysses group are {tokens} for ranks {ranks}, must be at least 1 for each and "
            f"num_tokens, {attention.num_tokens}, for this rank; lower the plan again"
        )
    if attention.attention.num_tokens != sum(tokens):
        raise ValueError(
            f"{where}: the attention of the Ulysses group has num_tokens {attention.attention.num_tokens}, must be the "
            f"{sum(tokens)} of all its ranks; lower the plan again"
        )


def _check_reuse(program: RankProgram) -> None:
    """A context is of an earlier microbatch, which keeps just what later ones read, in layers of each kind. The
    backward pass of every reader comes before that microbatch's own: only then are its gradients whole."""
    turn = {item.microbatch: at for at, item in enumerate(of_kind(program, Backward))}
    forwards = of_kind(program, Forward)
    for at in range(len(forwards[0].kinds)):
        attention = {item.microbatch: item.kinds[at].attention.inner for item in forwards}
        if any(each.context or each.kept for each in attention.values()):
            _check_kept(attention, turn, place=program.place)


def _check_kept(attention: Mapping[int, AttentionProgram], turn: Mapping[int, int], *, place: str) -> None:
    read: dict[int, set[Range]] = {number: set() for number in turn}
    for number, reader in attention.items():
        for slot in reader.context:
            where = f"{place}, microbatch {number}: slot {slot.slot} is context of {slot.microbatch}"
            if not 0 <= slot.microbatch < number or slot.num_tokens < 1:
                raise ValueError(
                    f"{where}, tokens {slot.span}; must be at least one token of an earlier microbatch; lower the plan "
                    "again"
                )
            if turn[slot.microbatch] < turn[number]:
                raise ValueError(
                    f"{where}, whose Backward comes before this one's, must come after it: otherwise it lacks the "
                    "gradients of its keys and values; reverse them"
                )
            read[slot.microbatch].add(slot.span)
    for number, each in attention.items():
        if each.kept != (due := union(read[number])):
            raise ValueError(
                f"{place}, microbatch {number}: kept is {each.kept}, must be what later microbatches read of it, "
                f"{due}; lower the plan again"
            )


def _check_frees(program: RankProgram) -> None:
    """A microbatch that keeps keys and values frees them once, after its backward pass; no other one does."""
    freed = [item.microbatch for item in of_kind(program, Free)]
    keeps = [
        item.microbatch for item in of_kind(program, Forward) if any(kind.attention.inner.kept for kind in item.kinds)
    ]
    if sorted(freed) != keeps:
        raise ValueError(f"{program.place}: Free names microbatches {freed}, must name {keeps} once: those that keep")
    place = {(type(item), item.microbatch): at for at, item in enumerate(program.instructions)}
    for number in freed:
        if place[Free, number] < place[Backward, number]:
            raise ValueError(
                f"{program.place}: Free of microbatch {number} comes before its Backward, must come after it"
            )


_HandOver = tuple[type[Send] | type[Receive], StageFlow, int]
"""Kind, flow, neighbouring stage."""


def _check_neighbours(program: RankProgram) -> None:
    """Each microbatch is received before its pass and sent on after it, where there is a stage to do so with.

    Activations go from stage p to p + 1 and their gradients back, all tokens of the microbatch at once. The first
    stage receives no activations and sends no gradients, the last one the other way round.
    """
    due = set(_due(program.stage, num_stages=program.num_stages))
    found: dict[tuple[int, _HandOver], int] = {}
    for at, item in enumerate(program.instructions):
        if not isinstance(item, Send | Receive):
            continue
        key = item.microbatch, (type(item), item.flow, item.stage)
        if key[1] not in due or key in found:
            raise ValueError(
                f"{program.place}: {_words(*key)} is {'double' if key in found else 'not due'}; must be one of "
                f"{[_words(item.microbatch, each) for each in sorted(due, key=str)]}, once; lower the plan again"
            )
        found[key] = at
    if not due:
        return
    place = {(type(item), item.microbatch): at for at, item in enumerate(program.instructions)}
    tokens = {item.microbatch: item.attention.num_tokens for item in of_kind(program, Forward)}
    for microbatch, num_tokens in tokens.items():
        for each in due:
            if (microbatch, each) not in found:
                raise ValueError(f"{program.place}: {_words(microbatch, each)} is missing; lower the plan again")
            passed = place[Forward if each[1] is StageFlow.ACTIVATION else Backward, microbatch]
            _check_place(program, found[microbatch, each], passed, num_tokens=num_tokens)
    if strange := [_words(*key) for key in found if key[0] not in tokens]:
        raise ValueError(f"{program.place}: {strange[0]} belongs to no Forward; lower the plan again")


def _due(stage: int, *, num_stages: int) -> Iterator[_HandOver]:
    if stage > 0:
        yield Receive, StageFlow.ACTIVATION, stage - 1
        yield Send, StageFlow.GRADIENT, stage - 1
    if stage + 1 < num_stages:
        yield Send, StageFlow.ACTIVATION, stage + 1
        yield Receive, StageFlow.GRADIENT, stage + 1


def _check_place(program: RankProgram, at: int, passed: int, *, num_tokens: int) -> None:
    item = program.instructions[at]
    assert isinstance(item, Send | Receive)
    words = _words(item.microbatch, (type(item), item.flow, item.stage))
    if (at < passed) is isinstance(item, Send):
        raise ValueError(
            f"{program.place}: {words} is {'before' if at < passed else 'after'} the pass that it belongs to; receive "
            "before, send after it"
        )
    if item.num_tokens != num_tokens:
        raise ValueError(
            f"{program.place}: {words} is of {item.num_tokens} tokens, must be the microbatch's {num_tokens}; "
            "lower the plan again"
        )


def _words(microbatch: int, hand_over: _HandOver) -> str:
    kind, flow, stage = hand_over
    way = "to" if kind is Send else "from"
    return f"{kind.__name__} of the {flow.value} of microbatch {microbatch} {way} stage {stage}"
