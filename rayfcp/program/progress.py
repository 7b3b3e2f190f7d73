"""The static check, before anything runs, that no rank can wait forever.

All ranks of a stage run the instructions of its outline, so that one rank stands for all:

- every forward and backward pass gathers the layers' shards, which needs all ranks of its stage (a barrier), and then
  exchanges keys, values and gradients with them; recomputed layers repeat their forward rounds inside the backward
  pass, unless they keep their attention. A rank leaves a pass when all its messages have met, so passes are checked one
  by one (`AttentionTable.check`), and since all stages attend alike, once for all stages;
- recurrent layers send halos and states between those of attention, in the order of layers, which is the same on all
  ranks of a stage. Both ends of a message are read from one part of a sequence, in the same round of the same layer,
  and a rank sends another at most one message in a round, so that the rounds of all ranks meet; a rank without
  messages in a round has none to wait for (`ScanTable`);
- so does the vision encoder, and then exchanges features, whose gradients take the same rounds back at the end of the
  backward pass;
- a rank posts the messages of a round as one group call, which NCCL and HCCL run as one kernel. The sends and receives
  of all ranks in one round are a complete matching, so each group call meets only group calls of the same round;
- the same rank of neighbouring stages hands activations on through one channel and gradients back through another.
  Operations of a device on a channel complete in the order in which they are posted, each together with its partner
  when both are first in line. A Send is posted and the program goes on; a Receive waits.

Two communicators of one device need no common order: the kernels of all of them fit on it together
(`rayfcp.execute.devices.cuda.CudaBackend.group_options`), so none is kept from starting by one that waits. Without
pipeline stages there is one, nevertheless: passes, layers and rounds come in the same order on all ranks, and each
device starts a subsequence of their gathers, reductions and messages. With stages, one that runs forward passes ahead
sends activations before it receives gradients, and its neighbour has them the other way round.

Keys and values, and states, that a microbatch keeps for later ones stay until these have read them, and no longer.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from rayfcp.program.attends import check_parts
from rayfcp.program.instructions import (
    Backward,
    Encode,
    Forward,
    Free,
    Instruction,
    Load,
    RankProgram,
    Receive,
    Send,
    StageFlow,
    of_kind,
)
from rayfcp.program.programs import Programs, kinds_of, scans_of
from rayfcp.program.scans import ScanTable
from rayfcp.program.table import AttentionTable, Units
from rayfcp.values import FULL, attends
from rayfcp.values.arrays import Ints


def check_progress(programs: Programs, *, forward_only: bool = False) -> None:
    """Prove that the programs of all ranks and stages run to their end together, with `forward_only` those of `lower`
    with the same.

    Microbatches are 0..M-1, loaded and passed forward in this order on each stage, and passed backward in one order on
    all, in which no microbatch precedes one that reads its keys and values; the passes of different microbatches may
    interleave. The last backward pass reduces, so that no gradient stays on its rank.

    Raises:
        ValueError: an instruction is missing, double or out of order; stages disagree on the plan or on a pass; ranks
            disagree on a message or attend to other tokens than they load; or stages would wait forever.
    """
    first, num_microbatches = programs.outlines[0], programs.num_microbatches
    _check_tables(programs)
    encoded = {at for at, items in enumerate(programs.encodes) if items}
    _check_encoded(encoded, first.num_stages, num_microbatches)
    for at in sorted(encoded):
        _check_exchange(programs.encodes[at], at, num_ranks=programs.num_ranks)
    for stage, outline in enumerate(programs.outlines):
        found = (outline.stage, outline.num_stages, outline.plan_hash)
        if found != (due := (stage, programs.num_stages, programs.plan_hash)):
            raise ValueError(
                f"the outline at position {stage} has (stage, num_stages, plan_hash) {found}, must have {due}; lower "
                "one plan for all stages"
            )
        _check_passes(outline, num_microbatches, forward_only=forward_only)
        _check_kinds(outline, programs)
        _check_instructions(outline, programs, encoded)
        _check_turns(outline, first)
        turns = _Turns(outline)
        for kind in kinds_of(outline):
            _check_reused(programs.attention[kind], turns, place=outline.place)
        for scan in scans_of(outline):
            _check_states(programs.scans[scan], turns, place=outline.place)
    if problem := hand_overs_stuck(programs.outlines):
        raise ValueError(f"{problem}; hand-overs of a channel match in order, lower one plan for all")


def _check_tables(programs: Programs) -> None:
    """In layers of each kind ranks attend over the tokens that they load, sharing out heads alike."""
    for pieces in programs.pieces:
        check_parts("pieces", pieces.first, count=programs.num_ranks, size=len(pieces.sequence))
    first, done = next(filter(attends, programs.attention), FULL), set[int]()
    for kind, tables in programs.attention.items():
        for number, (table, pieces) in enumerate(zip(tables, programs.pieces, strict=True)):
            where = f"microbatch {number}, {kind}"
            if id(table) not in done:  # kinds that hide nothing share theirs
                _check_table(table, where)
                done.add(id(table))
            if not np.array_equal(table.tokens, np.maximum(pieces.tokens_of_ranks(), 1)):
                raise ValueError(
                    f"{where}: ranks attend over other numbers of tokens than they load (1 of padding if none); lower "
                    "the plan again"
                )
            if attends(kind) and not all(map(np.array_equal, table.units, programs.attention[first][number].units)):
                raise ValueError(f"{where}: ranks share out heads otherwise than in {first}; lower the plan again")


def _check_table(table: AttentionTable, where: str) -> None:
    try:
        table.check()
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from None


def _check_kinds(outline: RankProgram, programs: Programs) -> None:
    due = kinds_of(outline)
    for item in of_kind(outline, Forward):
        found = tuple(each.kind for each in item.kinds)
        if found != due or list(found) != sorted(set(found)) or not set(found) <= programs.attention.keys():
            raise ValueError(
                f"{outline.place}, microbatch {item.microbatch}: kinds of layers are {found}, must ascend, be those of "
                f"its first pass, {due}, and among those that are lowered; lower the plan again"
            )
        if (scans := tuple(each.kind for each in item.scans)) != scans_of(outline):
            raise ValueError(
                f"{outline.place}, microbatch {item.microbatch}: recurrent kinds are {scans}, must be those of its "
                f"first pass, {scans_of(outline)}; lower the plan again"
            )


def _check_turns(outline: RankProgram, first: RankProgram) -> None:
    orders = [[item.microbatch for item in of_kind(each, Backward)] for each in (outline, first)]
    if orders[0] != orders[1]:
        raise ValueError(
            f"{outline.place}: Backward comes in the order {orders[0]}, must be that of {first.place}, {orders[1]}; "
            "lower one plan for all"
        )


def _check_passes(outline: RankProgram, num_microbatches: int, *, forward_only: bool) -> None:
    num_backward = len(of_kind(outline, Backward))
    if forward_only != (num_backward == 0):
        due = "none" if forward_only else "one a microbatch"
        raise ValueError(
            f"{outline.place}: it has {num_backward} Backward, must have {due} where forward_only is {forward_only}; "
            "lower the plan with it"
        )
    for kind in (Load, Forward):
        found = [item.microbatch for item in of_kind(outline, kind)]
        if found != list(range(num_microbatches)):
            raise ValueError(
                f"{outline.place}: {kind.__name__} names microbatches {found}, must name each of "
                f"[0, {num_microbatches}) once, in this order; a rank without tokens runs one padding token"
            )
    if (least := min(item.recomputed_layers for item in of_kind(outline, Forward))) < 0:
        raise ValueError(f"{outline.place}: recomputed_layers is {least}, must be at least 0; plan again")
    if not all(item.reduce for item in of_kind(outline, Backward)[-1:]):
        raise ValueError(
            f"{outline.place}: reduce is False in the last Backward, must be True; otherwise gradients are never "
            "summed over ranks"
        )


def _check_instructions(outline: RankProgram, programs: Programs, encoded: Collection[int]) -> None:
    """Each microbatch has all its instructions once, in order: received before the pass and sent on after it. What
    follows the last pass, backward unless there are none, may come in any order."""
    found: dict[int, list[str]] = defaultdict(list)
    for item in outline.instructions:
        found[item.microbatch].append(_describe(item))
    last = "Backward" if of_kind(outline, Backward) else "Forward"
    for item in of_kind(outline, Forward):
        at = item.microbatch
        keeps = any(len(programs.attention[kind][at].kept.unit) for kind in kinds_of(outline))
        keeps = keeps or any(programs.scans[kind][at].is_tail.any() for kind in scans_of(outline))
        due = list(_due(outline, at, encodes=at in encoded, keeps=keeps, backward=last == "Backward"))
        here, passed = found.pop(at), due.index(last) + 1
        if here[:passed] != due[:passed] or sorted(here[passed:]) != sorted(due[passed:]):
            raise ValueError(
                f"{outline.place}, microbatch {at}: instructions are {here}, must be {due}; lower the plan again"
            )
    if found:
        raise ValueError(f"{outline.place}: {min(found.items())} belongs to no Forward; lower the plan again")


def _due(outline: RankProgram, microbatch: int, *, encodes: bool, keeps: bool, backward: bool) -> Iterator[str]:
    """The instructions of a microbatch, in words. Activations go from stage p to p + 1 and their gradients back."""
    stage, (activation, gradient) = outline.stage, StageFlow
    yield "Load"
    if encodes:
        yield "Encode"
    if stage > 0:
        yield _hand_over("Receive", activation, microbatch, stage=stage - 1)
    yield "Forward"
    if stage + 1 < outline.num_stages:
        yield _hand_over("Send", activation, microbatch, stage=stage + 1)
        if backward:
            yield _hand_over("Receive", gradient, microbatch, stage=stage + 1)
    if backward:
        yield "Backward"
    if backward and stage > 0:
        yield _hand_over("Send", gradient, microbatch, stage=stage - 1)
    if keeps:
        yield "Free"


def _describe(item: Instruction) -> str:
    """The kind of an instruction, and what a hand-over carries."""
    name = type(item).__name__
    if not isinstance(item, Send | Receive):
        return name
    return _hand_over(name, item.flow, item.microbatch, stage=item.stage)


def _hand_over(name: str, flow: StageFlow, microbatch: int, *, stage: int) -> str:
    return f"{name} of the {flow.value} of microbatch {microbatch} {'to' if name == 'Send' else 'from'} stage {stage}"


class _Turns:
    """When microbatches read what earlier ones keep, and until when that is there: from Forward to Backward, which come
    in the reverse order; in programs without Backward from Forward to Free."""

    def __init__(self, outline: RankProgram) -> None:
        at = {(type(item), item.microbatch): at for at, item in enumerate(outline.instructions)}
        self._forward_only = not of_kind(outline, Backward)
        self._reads, self._ends = (
            {number: place for (kind, number), place in at.items() if kind is wanted}
            for wanted in ((Forward, Free) if self._forward_only else (Backward, Backward))
        )

    def check(self, where: str, number: int, *, earlier: int) -> None:
        """
        Raises:
            ValueError: microbatch `number` reads of one that is not earlier, or not there any more.
        """
        if not 0 <= earlier < number:
            raise ValueError(f"{where} is context of {earlier}, must be of an earlier microbatch; lower the plan again")
        if self._ends.get(earlier, self._reads[number]) >= self._reads[number]:
            return
        if self._forward_only:
            raise ValueError(
                f"{where} is context of {earlier}, whose Free comes before this one's Forward, must come after it; "
                "lower the plan again"
            )
        raise ValueError(
            f"{where} is context of {earlier}, whose Backward comes before this one's, must come after it: otherwise "
            "it lacks the gradients of its keys and values; reverse them"
        )


def _check_reused(tables: Sequence[AttentionTable], turns: _Turns, *, place: str) -> None:
    """Check on all ranks that what microbatches keep is exactly what later ones read, while it is there."""
    read: dict[int, list[Ints]] = defaultdict(list)
    for number, table in enumerate(tables):
        context = table.context
        for slot, earlier in sorted(set(zip(context.slot.tolist(), context.microbatch.tolist(), strict=True))):
            turns.check(f"{place}, microbatch {number}: slot {slot}", number, earlier=earlier)
        ranks = table.rank(context.unit)
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


def _check_states(tables: Sequence[ScanTable], turns: _Turns, *, place: str) -> None:
    """Heads are states of earlier microbatches, which are there by then."""
    for number, table in enumerate(tables):
        for earlier in np.unique(table.parts.microbatch[table.is_head]).tolist():
            turns.check(f"{place}, microbatch {number}: the state before a sequence", number, earlier=earlier)


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


def _check_exchange(items: Sequence[Encode], microbatch: int, *, num_ranks: int) -> None:
    """All ranks encode, and both ends of a message of features have it in the same round, with as many tokens."""
    where = f"features of microbatch {microbatch}"
    counts = {len(item.features.rounds) for item in items}
    if len(items) != num_ranks or len(counts) > 1 or {item.microbatch for item in items} != {microbatch}:
        raise ValueError(
            f"{where}: {len(items)} of {num_ranks} ranks encode, in {sorted(counts)} rounds, must be all in as many; "
            "lower one plan for all"
        )
    for at, steps in enumerate(zip(*(item.features.rounds for item in items), strict=True)):
        sent = {(rank, step.send.peer): step.send.num_tokens for rank, step in enumerate(steps) if step.send}
        due = {(step.receive.peer, rank): step.receive.num_tokens for rank, step in enumerate(steps) if step.receive}
        wrong = [pair for pair in sorted(sent | due) if sent.get(pair) != due.get(pair) or pair[0] == pair[1]]
        if wrong:
            source, target = wrong[0]
            raise ValueError(
                f"{where}, round {at}: rank {source} sends {sent.get(wrong[0], 0)} tokens to rank {target}, which "
                f"expects {due.get(wrong[0], 0)}; lower one plan for all"
            )


def hand_overs_stuck(outlines: Sequence[RankProgram]) -> str | None:
    """The first stage whose hand-overs do not all end, and the one at which it stops, in words; None if all end.
    `outlines[p]` is that of stage p."""
    left = [deque(item for item in each.instructions if isinstance(item, Send | Receive)) for each in outlines]
    lines = {(stage, flow): deque[Send | Receive]() for stage in range(len(outlines)) for flow in StageFlow}
    waits_for: list[Receive | None] = [None] * len(outlines)
    moved = True
    while moved:
        moved = False
        for stage, items in enumerate(left):
            while items and not waits_for[stage]:
                item = items.popleft()
                lines[stage, item.flow].append(item)
                waits_for[stage] = item if isinstance(item, Receive) else None
        for (stage, flow), line in lines.items():
            others = lines.get((line[0].stage, flow)) if line and isinstance(line[0], Send) else None
            if others and isinstance(others[0], Receive) and others[0].stage == stage:
                sent, awaited = line.popleft(), others.popleft()
                if sent.microbatch != awaited.microbatch:
                    return f"{outlines[stage].place}: {_describe(sent)} meets {_describe(awaited)}"
                waits_for[sent.stage], moved = None, True
    for (stage, _), line in lines.items():
        if line:
            return f"{outlines[stage].place} would wait forever at: {_describe(waits_for[stage] or line[0])}"
    return None
