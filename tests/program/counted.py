"""Pairs of programs, counted one by one."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

from rayfcp.program import HeadProgram, Load, Payload, RankProgram, lower
from rayfcp.values import BatchPlan, SequenceSpec
from rayfcp.verify import check_programs
from tests.masks import sees, with_windows
from tests.program.helpers import assert_one_change_is_found, forwards

Token = tuple[int, int]
Slots = dict[int, list[Token]]


def members_of(plan: BatchPlan) -> set[int]:
    """Sequences that groups of the plan hold."""
    return {sequence for each in plan.microbatches for group in each.groups for sequence in group.sequences}


def due(sequences: Sequence[SequenceSpec], members: set[int], *, window: int = 0) -> Counter[tuple[Token, Token]]:
    """Each pair of each mask once, in layers with this window (0: none)."""
    return Counter(
        ((each.id, query), (each.id, key))
        for each in sequences
        if each.id in members
        for query in range(each.num_tokens)
        for key in range(each.num_tokens)
        if sees(query, key, window=window)
    )


def counted(programs: Sequence[RankProgram], *, kind: int = 0) -> Counter[tuple[Token, Token]]:
    """Number of times that each (query, key) pair of tokens is computed forward with the first share of the heads, in
    layers of the kind of this number."""
    found: Counter[tuple[Token, Token]] = Counter()
    past: list[list[Slots]] = []
    loads = [[item for item in each.instructions if isinstance(item, Load)] for each in programs]
    passes = [forwards(each) for each in programs]
    for number in range(len(loads[0])):
        parts = [each[number].kinds[kind].attention for each in passes]
        groups = [part.ranks if isinstance(part, HeadProgram) else (rank,) for rank, part in enumerate(parts)]
        own = [
            [(piece.sequence, at) for piece in each[number].pieces for at in range(piece.start, piece.stop)]
            or [(-1 - rank, 0)]
            for rank, each in enumerate(loads)
        ]
        past.append([{0: [token for rank in group for token in own[rank]]} for group in groups])
        for rank, part in enumerate(parts):
            for slot in part.inner.context:
                past[-1][rank][slot.slot] = past[slot.microbatch][rank][0][slice(*slot.span)]
        firsts = [rank for rank, group in enumerate(groups) if group[0] == rank]
        for index in range(max(len(part.inner.forward) for part in parts)):
            _step(parts, index, ranks=firsts, slots=past[-1], found=found)
    return Counter({pair: times for pair, times in found.items() if pair[0][0] >= 0})


def _step(
    parts: Sequence, index: int, *, ranks: Sequence[int], slots: list[Slots], found: Counter[tuple[Token, Token]]
) -> None:
    steps = {rank: parts[rank].inner.forward[index] for rank in ranks if index < len(parts[rank].inner.forward)}
    brought = []
    for rank, step in steps.items():
        for attend in step.attends:
            queries, keys = slots[rank][0][slice(*attend.query)], slots[rank][attend.slot][slice(*attend.key)]
            both = itertools.product(range(len(queries)), range(len(keys)))
            seen = ((i, j) for i, j in both if not attend.causal or (j >= i if attend.flipped else j <= i))
            found.update((queries[i], keys[j]) for i, j in seen)
        expected = {each: iter(parts[each].inner.forward[index].receives) for each in {m.peer for m in step.sends}}
        for sent in step.sends:
            assert sent.payload is Payload.KV
            received = next(each for each in expected[sent.peer] if each.peer == rank)
            tokens = [token for span in sent.ranges for token in slots[rank][sent.slot][slice(*span)]]
            brought.append((sent.peer, received.slot, tokens))
    for target, slot, tokens in brought:
        slots[target][slot] = tokens


def assert_sound(plan: BatchPlan, sequences: Sequence[SequenceSpec], windows: Sequence[int], *, seed: int) -> None:
    """The validator takes the programs, an independent count agrees, and one change is found."""
    programs = lower(plan, sequences)
    check_programs(programs, sequences)
    for kind, window in enumerate(windows):
        assert counted(programs[: plan.num_ranks], kind=kind) == due(sequences, members_of(plan), window=window)
    if len(programs) > 1:  # alone, a rank may well recompute more or less
        sequences = with_windows(sequences, [random.Random(seed).choice(windows)])
        programs = lower(plan, sequences)
        assert_one_change_is_found(programs, sequences, seed=seed)
