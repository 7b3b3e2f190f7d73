"""Features on their way: rows arrive where their tokens are, and gradients go back the same way."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayfcp.execute.attention.schedule import rows_of
from rayfcp.execute.parallel.transport import AttentionStats, Fabric, Transport
from rayfcp.execute.vision import PlacedFeatures, place_features
from rayfcp.program import Encode, Piece, ReshuffleProgram, lower_reshuffle
from rayfcp.values import Block, Layout
from tests.examples import examples
from tests.execute.dense import run_ranks
from tests.execute.threads import InProcessTransport

WIDTH = 3


def any_layouts(num_ranks: int, num_rows: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Which rows each rank has, in order, before and after."""
    draw = random.Random(seed)
    before: list[list[int]] = [[] for _ in range(num_ranks)]
    after: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in draw.sample(range(num_rows), num_rows):
        before[draw.randrange(num_ranks)].append(row)
    for row in range(num_rows):
        after[draw.randrange(num_ranks)].append(row)
    return before, after


def place(
    features: Tensor, program: ReshuffleProgram, *, transport: Transport, stats: AttentionStats
) -> PlacedFeatures:
    """Features on the rank of their tokens, whose rows do not matter."""
    item = Encode(microbatch=0, images=(), features=program, rows=())
    return place_features(features, item, transport=transport, stats=stats)


@examples(40)
@given(num_ranks=st.integers(1, 4), num_rows=st.integers(0, 12), seed=st.integers(0, 999))
def test_rows_and_gradients_find_their_way(num_ranks: int, num_rows: int, seed: int) -> None:
    """Ranks that have no rows before or after take part, and stand in the graph."""
    before, after = any_layouts(num_ranks, num_rows, seed)
    pieces = [[Piece(sequence=0, start=row, stop=row + 1) for row in own] for own in before]
    blocks = [Block(sequence=0, start=row, stop=row + 1, rank=rank) for rank, own in enumerate(after) for row in own]
    programs = lower_reshuffle(pieces, Layout(blocks=tuple(blocks), rounds=()))
    rows, weights = torch.randn(2, num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    fabric, all_stats = Fabric(num_ranks), [AttentionStats() for _ in programs]
    given_rows = [rows[own].requires_grad_() for own in before]
    found: dict[int, Tensor] = {}

    def work(rank: int) -> None:
        transport = InProcessTransport(fabric, rank)
        found[rank] = place(given_rows[rank], programs[rank], transport=transport, stats=all_stats[rank]).features
        (found[rank] * weights[after[rank]]).sum().backward()

    run_ranks(work, num_ranks=num_ranks, fabric=fabric)
    travelling = sum(len(set(own) - set(after[rank])) for rank, own in enumerate(before))
    assert sum(each.bytes_sent for each in all_stats) == 2 * travelling * WIDTH * rows.element_size()
    for rank, own in enumerate(before):
        assert torch.equal(found[rank], rows[after[rank]])
        gradient = given_rows[rank].grad
        assert gradient is not None and torch.equal(gradient, weights[own])


def test_frozen_features_go_one_way() -> None:
    (program,) = lower_reshuffle([[]], Layout(blocks=(), rounds=()))
    transport = InProcessTransport(Fabric(1), 0)
    found = place(torch.ones(0, 2), program, transport=transport, stats=AttentionStats()).features
    assert found.shape == (0, 2) and not found.requires_grad


def test_images_of_other_sizes_are_refused() -> None:
    (program,) = lower_reshuffle([[]], Layout(blocks=(), rounds=()))
    with pytest.raises(ValueError, match="rank 0 has features of 5 tokens, its program 0; give the images"):
        place(torch.ones(5, 2), program, transport=InProcessTransport(Fabric(1), 0), stats=AttentionStats())


def test_rows_by_number() -> None:
    device = torch.device("cpu")
    assert rows_of(((1, 3), (7, 8)), device).tolist() == [1, 2, 7] and rows_of((), device).tolist() == []
