"""Work and moved tokens of layouts, counted one by one."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from rayfcp.cost.work import layout_work
from rayfcp.program import Forward, Payload, lower
from rayfcp.values import FULL, Layout, SequenceSpec
from tests.execute.layouts import plan_of
from tests.masks import kinds, sees


def of_windows(lengths: Sequence[int], windows: Sequence[int]) -> list[SequenceSpec]:
    """Sequences whose model has one layer of the first window, two of the second, and so on."""
    layer_kinds = tuple((kind, 1 + at) for at, kind in enumerate(kinds(*windows)))
    return [
        SequenceSpec(id=at, num_tokens=n, num_targets=n - 1, layer_kinds=layer_kinds) for at, n in enumerate(lengths)
    ]


def assert_pairs_counted(layout: Layout, sequences: Sequence[SequenceSpec], *, num_ranks: int) -> None:
    """Pairs of each rank's own keys, and of those that each transfer brings."""
    by_id = {each.id: each for each in sequences}
    work = layout_work(layout, by_id=by_id, num_ranks=num_ranks)

    def pairs(rank: int, keys: list[int]) -> float:
        both = itertools.product((each for each in layout.blocks if each.rank == rank), keys)
        return sum(
            _share(by_id[block.sequence], query, key)
            for block, other in both
            if layout.blocks[other].sequence == block.sequence
            for query in range(block.start, block.stop)
            for key in range(layout.blocks[other].start, layout.blocks[other].stop)
        )

    own = [[at for at, each in enumerate(layout.blocks) if each.rank == rank] for rank in range(num_ranks)]
    assert work.own_pairs == pytest.approx(np.array([pairs(rank, own[rank]) for rank in range(num_ranks)]))
    transfers = [each for step in layout.rounds for each in step.transfers]
    assert work.pairs == pytest.approx(np.array([pairs(each.target, list(each.blocks)) for each in transfers]))


def assert_moves_counted(layout: Layout, sequences: Sequence[SequenceSpec], *, num_ranks: int) -> None:
    """Tokens that each rank receives, as the program has them."""
    work = layout_work(layout, by_id={each.id: each for each in sequences}, num_ranks=num_ranks)
    moved = [
        sum(
            message.num_tokens
            for item in program.instructions
            if isinstance(item, Forward)
            for step in item.attention.inner.forward
            for message in step.receives
            if message.payload is Payload.KV
        )
        for program in lower(plan_of(layout, sequences, num_ranks=num_ranks), sequences)
    ]
    found = np.bincount(work.target, work.moved_tokens, minlength=num_ranks)
    assert found == pytest.approx(np.array(moved))


def _share(sequence: SequenceSpec, query: int, key: int) -> float:
    """Share of layers in which the query attends to the key."""
    layers = sequence.layer_kinds or ((FULL, 1),)
    seeing = sum(count for kind, count in layers if sees(query, key, window=kind.window or -kind.chunk))
    return seeing / sum(count for _, count in layers)
