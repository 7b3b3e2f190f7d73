"""Checks of the instructions of all ranks and stages, each for itself and against one another, before their messages
are matched (`rayfcp.program.progress`).

Each microbatch has its instructions in one order, with the hand-overs that neighbouring stages need, and ranks and
stages agree on microbatches, kinds of layers and the order of passes. Keys and values that a microbatch keeps for later
ones stay until these have read them, and no longer.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from rayfcp.program.attends import check_parts
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Encode,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    Load,
    Range,
    RankProgram,
    Receive,
    Send,
    StageFlow,
    union,
)
from rayfcp.program.programs import Programs, kinds_of
from rayfcp.program.table import AttentionTable, Units
from rayfcp.values import LayerKind
from rayfcp.values.arrays import Ints

Attention = AttentionProgram | HeadProgram
Kind = TypeVar("Kind", bound=Instruction)


def of_kind(program: RankProgram, kind: type[Kind]) -> list[Kind]:
    """The instructions of one kind, in order."""
    return [item for item in program.instructions if isinstance(item, kind)]


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


def check_order(programs: Sequence[RankProgram], *, forward_only: bool = False) -> None:
    """Every rank loads, passes forward and passes backward each microbatch once on each stage, and sums the gradients;
    with `forward_only` none is passed backward.

    Microbatches are 0..M-1, loaded and passed forward in this order. Backward passes come in one order on all ranks and
    stages, in which no microbatch precedes one that reads its keys and values; passes of different microbatches may
    interleave, alike on all ranks of a stage. The last backward pass reduces, so that no gradient stays on its rank.
    All stages load alike, and attend alike in layers of one kind. Program p x num_ranks + r is that of rank r on stage
    p.

    Raises:
        ValueError: an instruction is missing, double, out of order or of the wrong size; names the rank.
    """
    if not programs:
        raise ValueError("programs is empty, must hold one program for each stage and rank; lower the plan")
    first = programs[0]
    num_microbatches = len(of_kind(first, Load))
    if num_microbatches == 0:
        raise ValueError("rank 0 has no Load, must have one for each microbatch (at least 1); lower the plan again")
    encoded = {item.microbatch for item in of_kind(first, Encode)}
    _check_encoded(encoded, first.num_stages, num_microbatches)
    known: dict[tuple[int, LayerKind], RankProgram] = {}
    for index, program in enumerate(programs):
        _check_labels(program, first, index=index, num_programs=len(programs))
        _check_passes(program, num_microbatches, forward_only=forward_only)
        _check_instructions(program, encoded)
        _check_alike(program, programs[index - program.rank], first=first)
        if any((program.rank, kind) not in known for kind in kinds_of(program)):
            _check_attention(program)
            _check_reuse(program)
        for kind in kinds_of(program):
            _check_stages(program, known.setdefault((program.rank, kind), program), kind=kind)
        for mine, due in zip(of_kind(program, Load), of_kind(programs[program.rank], Load), strict=True):
            if mine.pieces != due.pieces:
                raise ValueError(_differ(program, programs[program.rank], "pieces", microbatch=mine.microbatch))


def check_outlines(programs: Programs, *, forward_only: bool = False) -> None:
    """`check_order` of programs in columns: all ranks of a stage run its outline, and load what they attend to.

    Raises:
        ValueError: as `check_order`.
    """
    first, num_microbatches = programs.outlines[0], programs.num_microbatches
    for table in programs.tables:
        table.check()
    for pieces in programs.pieces:
        check_parts("pieces", pieces.first, count=programs.num_ranks, size=len(pieces.sequence))
    encoded = {at for at, items in enumerate(programs.encodes) if items}
    _check_encoded(encoded, first.num_stages, num_microbatches)
    for stage, outline in enumerate(programs.outlines):
        _check_labels(outline, first, index=stage, num_programs=len(programs.outlines))
        _check_passes(outline, num_microbatches, forward_only=forward_only)
        _check_instructions(outline, encoded)
        _check_alike(outline, outline, first=first)
        turns = _Turns(outline)
        for kind in kinds_of(outline):
            _check_reused(programs.attention[kind], turns, place=outline.place)
    for kind, tables in programs.attention.items():
        for number, (table, pieces) in enumerate(zip(tables, programs.pieces, strict=True)):
            if not np.array_equal(table.tokens, np.maximum(pieces.tokens_of_ranks(), 1)):
                raise ValueError(
                    f"microbatch {number}: layers of {kind} attend over other numbers of tokens than ranks load (1 of "
                    "padding if none); lower the plan again"
                )


class _Turns:
    """When microbatches read what earlier ones keep, and until when that is there: from Forward to Backward, which come
    in the reverse order; in programs without Backward from Forward to Free."""

    def __init__(self, program: RankProgram) -> None:
        at = {(type(item), item.microbatch): at for at, item in enumerate(program.instructions)}
        self.forward_only = not of_kind(program, Backward)
        self._reads, self._ends = (
            {number: place for (kind, number), place in at.items() if kind is wanted}
            for wanted in ((Forward, Free) if self.forward_only else (Backward, Backward))
        )

    @property
    def microbatches(self) -> Collection[int]:
        return self._reads

    def check(self, where: str, number: int, *, earlier: int) -> None:
        """
        Raises:
            ValueError: microbatch `number` reads of one that is not earlier, or not there any more.
        """
        if not 0 <= earlier < number:
            raise ValueError(f"{where} is context of {earlier}, must be of an earlier microbatch; lower the plan again")
        if self._ends.get(earlier, self._reads[number]) >= self._reads[number]:
            return
        if self.forward_only:
            raise ValueError(
                f"{where} is context of {earlier}, whose Free comes before this one's Forward, must come after it; "
                "lower the plan again"
            )
        raise ValueError(
            f"{where} is context of {earlier}, whose Backward comes before this one's, must come after it: otherwise "
            "it lacks the gradients of its keys and values; reverse them"
        )


def _check_reused(tables: Sequence[AttentionTable], turns: _Turns, *, place: str) -> None:
    """`_check_kept` of all ranks."""
    read: dict[int, list[Ints]] = defaultdict(list)
    for number, table in enumerate(tables):
        context = table.context
        for slot, earlier in sorted(set(zip(context.slot.tolist(), context.microbatch.tolist(), strict=True))):
            turns.check(f"{place}, microbatch {number}: slot {slot}", number, earlier=earlier)
        ranks = table.units.ranks[table.units.first[context.unit]]
        for earlier in np.unique(context.microbatch).tolist():
            rows = context.microbatch == earlier
            unit = tables[earlier].place_of_rank[0][ranks[rows]]
            _check_shares(table.units, tables[earlier].units, mine=context.unit[rows], theirs=unit, microbatch=earlier)
            read[earlier].append(np.stack((unit, context.start[rows], context.stop[rows])))
    for number, table in enumerate(tables):
        due = _united(np.concatenate(read[number], axis=1)) if number in read else np.empty((3, 0), np.int64)
        if not np.array_equal(np.stack(table.kept), due):
            raise ValueError(
                f"{place}, microbatch {number}: what is kept must be what later microbatches read of it; lower the "
                "plan again"
            )


def _check_shares(now: Units, then: Units, *, mine: Ints, theirs: Ints, microbatch: int) -> None:
    """Context comes from the ranks that share out heads here too."""
    for unit, other in set(zip(mine.tolist(), theirs.tolist(), strict=True)):
        here, there = (
            each.ranks[each.first[at] : each.first[at + 1]].tolist() for each, at in ((now, unit), (then, other))
        )
        if here != there:
            raise ValueError(
                f"rank {here[0]}: context of microbatch {microbatch} was shared out by heads over ranks {there}, must "
                f"be over {here} as here; keep a sequence's slices in groups of the same ranks and primitive"
            )


def _united(rows: Ints) -> Ints:
    """Ascending ranges (unit, start, stop) that hold what these hold."""
    unit, start, stop = rows[:, np.lexsort((rows[1], rows[0]))]
    most = int(stop.max(initial=0)) + 1
    reach = np.maximum.accumulate(unit * most + stop)
    opens = np.append(True, (unit * most + start)[1:] > reach[:-1])[: len(unit)]
    return np.stack((unit[opens], start[opens], reach[np.append(opens[1:], True)[: len(unit)]] % most))


def _check_encoded(encoded: Collection[int], num_stages: int, num_microbatches: int) -> None:
    if encoded and (num_stages > 1 or num_microbatches - 1 not in encoded):
        raise ValueError(
            f"programs of {num_stages} stages encode images of microbatches {sorted(encoded)}, must have 1 stage "
            f"and encode in the last microbatch, {num_microbatches - 1}, too; lower the plan again"
        )


def _check_labels(program: RankProgram, first: RankProgram, *, index: int, num_programs: int) -> None:
    if first.num_ranks < 1 or first.num_ranks * first.num_stages != num_programs:
        raise ValueError(
            f"programs holds {num_programs}, must hold one for each of num_ranks {first.num_ranks} on each of "
            f"num_stages {first.num_stages}; give the programs of all ranks and stages"
        )
    stage, rank = divmod(index, first.num_ranks)
    found = (program.rank, program.num_ranks, program.stage, program.num_stages)
    if found != (due := (rank, first.num_ranks, stage, first.num_stages)):
        raise ValueError(
            f"program at position {index} has (rank, num_ranks, stage, num_stages) {found}, must have {due}; give the "
            "programs of all ranks, in the order of ranks, stage by stage"
        )


def _check_passes(program: RankProgram, num_microbatches: int, *, forward_only: bool) -> None:
    if ((count := len(of_kind(program, Backward))) == 0 and not forward_only) or (count and forward_only):
        raise ValueError(
            f"{program.place}: it has {count} Backward, must have {'none' if forward_only else 'one a microbatch'} "
            f"where forward_only is {forward_only}; lower the plan with it"
        )
    for kind in (Load, Forward):
        found = [item.microbatch for item in of_kind(program, kind)]
        if found != list(range(num_microbatches)):
            raise ValueError(
                f"{program.place}: {kind.__name__} names microbatches {found}, must name each of "
                f"[0, {num_microbatches}) once, in this order; a rank without tokens runs one padding token"
            )
    if (least := min(item.recomputed_layers for item in of_kind(program, Forward))) < 0:
        raise ValueError(f"{program.place}: recomputed_layers is {least}, must be at least 0; plan again")
    if not all(item.reduce for item in of_kind(program, Backward)[-1:]):
        raise ValueError(
            f"{program.place}: reduce is False in the last Backward, must be True; otherwise gradients are never "
            "summed over ranks"
        )


def _check_instructions(program: RankProgram, encoded: Collection[int]) -> None:
    """Each microbatch has all its instructions once, in order: received before the pass and sent on after it. What
    follows the last pass, backward unless there are none, may come in any order."""
    found: dict[int, list[str]] = defaultdict(list)
    for item in program.instructions:
        found[item.microbatch].append(describe(item))
    last = "Backward" if of_kind(program, Backward) else "Forward"
    for item in of_kind(program, Forward):
        due = list(_due(program, item, encodes=item.microbatch in encoded, backward=last == "Backward"))
        here, passed = found.pop(item.microbatch), due.index(last) + 1
        if here[:passed] != due[:passed] or sorted(here[passed:]) != sorted(due[passed:]):
            raise ValueError(
                f"{program.place}, microbatch {item.microbatch}: instructions are {here}, must be {due}; lower the "
                "plan again"
            )
    if found:
        raise ValueError(f"{program.place}: {min(found.items())} belongs to no Forward; lower the plan again")


def _due(program: RankProgram, item: Forward, *, encodes: bool, backward: bool) -> Iterator[str]:
    """The instructions of a microbatch, in words. Activations go from stage p to p + 1 and their gradients back, all
    tokens of the microbatch at once."""
    stage, (activation, gradient) = program.stage, StageFlow
    sizes = {"microbatch": item.microbatch, "num_tokens": item.attention.num_tokens}
    yield "Load"
    if encodes:
        yield "Encode"
    if stage > 0:
        yield describe(Receive(flow=activation, stage=stage - 1, **sizes))
    yield "Forward"
    if stage + 1 < program.num_stages:
        yield describe(Send(flow=activation, stage=stage + 1, **sizes))
        if backward:
            yield describe(Receive(flow=gradient, stage=stage + 1, **sizes))
    if backward:
        yield "Backward"
    if backward and stage > 0:
        yield describe(Send(flow=gradient, stage=stage - 1, **sizes))
    if any(kind.attention.inner.kept for kind in item.kinds):
        yield "Free"


def describe(item: Instruction) -> str:
    """The kind of an instruction, and what a hand-over carries."""
    name = type(item).__name__
    if not isinstance(item, Send | Receive):
        return name
    way = "to" if isinstance(item, Send) else "from"
    return (
        f"{name} of the {item.flow.value} of microbatch {item.microbatch}, {item.num_tokens} tokens, {way} stage "
        f"{item.stage}"
    )


def _check_alike(program: RankProgram, other: RankProgram, *, first: RankProgram) -> None:
    """All ranks of a stage (`other`: the first) run the same passes and hand-overs in one order, through layers of the
    same kinds with the same exchange of tokens for heads; all stages pass backward in the order of `first`."""
    for mine, theirs in zip_longest(_outline(program), _outline(other)):
        if mine != theirs:
            raise ValueError(
                f"{program.place}: {mine} where {other.place} has {theirs}, must be the same on all ranks of a stage; "
                "lower one plan for all"
            )
    due = kinds_of(other)
    for item in of_kind(program, Forward):
        where, found = f"{program.place}, microbatch {item.microbatch}", tuple(each.kind for each in item.kinds)
        if found != due or list(found) != sorted(set(found)):
            raise ValueError(
                f"{where}: kinds of layers are {found}, must ascend and be those of {other.place}, "
                f"{due}; lower one plan for all"
            )
        if item.others and len({_heads_of(kind.attention) for kind in item.kinds}) > 1:
            raise ValueError(f"{where}: layers of kinds {found} share out heads differently; lower the plan again")
    orders = [[item.microbatch for item in of_kind(each, Backward)] for each in (program, first)]
    if orders[0] != orders[1]:
        raise ValueError(
            f"{program.place}: Backward comes in the order {orders[0]}, must be that of {first.place}, {orders[1]}; "
            "lower one plan for all"
        )


_SETTINGS = ("flow", "reduce", "recomputed_layers", "keeps_attention")


def _outline(program: RankProgram) -> Iterator[tuple[object, ...]]:
    """What all ranks of a stage do alike: instruction, microbatch and their settings."""
    for item in program.instructions:
        if not isinstance(item, Free):
            settings = [getattr(item, name) for name in _SETTINGS if hasattr(item, name)]
            yield type(item).__name__, item.microbatch, *settings


def _heads_of(attention: Attention) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (attention.ranks, attention.tokens) if isinstance(attention, HeadProgram) else ((), ())


def _check_stages(program: RankProgram, other: RankProgram, *, kind: LayerKind) -> None:
    """A rank runs the same attention in layers of a kind on both stages."""
    at, there = kinds_of(program).index(kind), kinds_of(other).index(kind)
    for mine, theirs in zip(of_kind(program, Forward), of_kind(other, Forward), strict=True):
        value, due = mine.kinds[at].attention, theirs.kinds[there].attention
        if value is not due and value != due:
            raise ValueError(_differ(program, other, "attention", microbatch=mine.microbatch))


def _differ(program: RankProgram, other: RankProgram, field: str, *, microbatch: int) -> str:
    return (
        f"{program.place}, microbatch {microbatch}: {field} differ from those of {other.place}, must be the same on "
        "all stages; lower one plan for all"
    )


def _check_attention(program: RankProgram) -> None:
    """Attention is over as many tokens as are loaded."""
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
    turns, forwards = _Turns(program), of_kind(program, Forward)
    for at in range(len(forwards[0].kinds)):
        attention = {item.microbatch: item.kinds[at].attention.inner for item in forwards}
        if any(each.context or each.kept for each in attention.values()):
            _check_kept(attention, turns, place=program.place)


def _check_kept(attention: Mapping[int, AttentionProgram], turns: _Turns, *, place: str) -> None:
    read: dict[int, set[Range]] = {number: set() for number in turns.microbatches}
    for number, reader in attention.items():
        for slot in reader.context:
            where = f"{place}, microbatch {number}: slot {slot.slot}"
            if slot.num_tokens < 1:
                raise ValueError(f"{where} has tokens {slot.span}, must have at least one; lower the plan again")
            turns.check(where, number, earlier=slot.microbatch)
            read[slot.microbatch].add(slot.span)
    for number, each in attention.items():
        if each.kept != (due := union(read[number])):
            raise ValueError(
                f"{place}, microbatch {number}: kept is {each.kept}, must be what later microbatches read of it, "
                f"{due}; lower the plan again"
            )
