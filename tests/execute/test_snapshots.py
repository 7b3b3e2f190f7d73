"""Copies of a module and its optimizer: filled from any cut of the tensors, or refused with a reason."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.execute.state.copies import HeldCopies
from rayfcp.execute.state.snapshots import Snapshots, Source, fill
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId
from tests.examples import examples

STATE = StateId(version=3, generation=1)


def make(*, seed: int, steps: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)).to(dtype)
    module[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        module(torch.randn(3, 5, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def taken(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, state: StateId = STATE
) -> tuple[HeldCopies, ShardHeader]:
    copies = HeldCopies()
    return copies, Snapshots(module, optimizer, position=MeshPosition(rank=0, num_ranks=1), copies=copies).take(state)


def source(copies: HeldCopies, header: ShardHeader) -> Source:
    ask = partial(copies.pieces, header.state, header.number)
    return Source(header=header, pieces=lambda wanted: ask(wanted=wanted))


def rows_of(copies: HeldCopies, header: ShardHeader, *, number: int, keep: tuple[int, int]) -> Source:
    """State of a device that holds rows `[keep[0], keep[1])` of every tensor of 7 rows."""
    start, stop = keep
    entries, parts, at = [], [], 0
    for entry in header.entries:
        box = Box(offsets=(start, *entry.box.offsets[1:]), sizes=(stop - start, *entry.box.sizes[1:]))
        (piece,) = copies.pieces(header.state, 0, wanted=[(entry.name, entry.kind, box)])
        parts.append(piece.reshape(-1).view(np.uint8))
        entries.append(ShardEntry(name=entry.name, kind=entry.kind, box=box, itemsize=entry.itemsize, start_byte=at))
        at += entries[-1].num_bytes
    cut = replace(header, number=number, entries=tuple(entries), num_bytes=at)
    held = HeldCopies()
    held.put(cut, np.concatenate(parts))
    return source(held, cut)


def assert_same(one: tuple[nn.Module, torch.optim.Optimizer], other: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for name, parameter in one[0].named_parameters():
        twin = other[0].get_parameter(name)
        assert torch.equal(parameter, twin), name
        assert one[1].state.get(parameter, {}).keys() == other[1].state.get(twin, {}).keys(), name
        for kind, value in one[1].state.get(parameter, {}).items():
            assert torch.equal(value, other[1].state[twin][kind]), (name, kind)
            assert value.dtype == other[1].state[twin][kind].dtype


@examples(20)
@given(st.integers(0, 2), st.sets(st.integers(1, 6)), st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
def test_filled_from_any_cut_the_next_update_is_the_same(steps: int, cuts: set[int], dtype: torch.dtype) -> None:
    """Also when nothing was updated yet, and into one that has state of its own."""
    old, new = make(seed=0, steps=steps, dtype=dtype), make(seed=1, steps=1, dtype=dtype)
    copies, header = taken(*old)
    bounds = [0, *sorted(cuts), 7]
    parts = [rows_of(copies, header, number=at, keep=pair) for at, pair in enumerate(pairwise(bounds))]
    fill(*new, sources=[parts[-1], *parts])
    assert_same(old, new)
    for module, optimizer in (old, new):
        module(torch.ones(2, 5, dtype=dtype)).square().sum().backward()
        optimizer.step()
    assert_same(old, new)


def test_a_copy_is_of_its_moment() -> None:
    """Later updates do not change a snapshot."""
    module, optimizer = make(seed=0, steps=1)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    copies, header = taken(module, optimizer)
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], next(module.parameters()))
    fill(module, optimizer, sources=[source(copies, header)])
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_copies_that_do_not_make_a_state_are_refused() -> None:
    old, new = make(seed=0, steps=1), make(seed=1, steps=0)
    copies, header = taken(*old)
    low, high = (rows_of(copies, header, number=n, keep=keep) for n, keep in enumerate(((0, 4), (4, 7))))
    with pytest.raises(
        ValueError, match=r"parameter of 0\.weight .* has 35 elements, copies give 20; give those of all"
    ):
        fill(*new, sources=[low])
    with pytest.raises(ValueError, match="has 35 elements, copies give 40"):
        fill(*new, sources=[low, rows_of(copies, header, number=2, keep=(3, 7))])
    other = replace(high, header=replace(high.header, state=StateId(version=3, generation=2)))
    with pytest.raises(ValueError, match="copies are of 2 states"):
        fill(*new, sources=[low, other])
    other = replace(high, header=replace(high.header, scalars={"step": 2.0}))
    with pytest.raises(ValueError, match="must have the same"):
        fill(*new, sources=[low, other])
    with pytest.raises(ValueError, match=r"has elements of 8 bytes, copies have \[4\]"):
        fill(*make(seed=0, steps=0, dtype=torch.float64), sources=[low, high])


def test_numbers_that_differ_between_parameters_are_refused() -> None:
    module, optimizer = make(seed=0, steps=1)
    optimizer.state[module[0].weight]["step"] += 1
    with pytest.raises(RuntimeError, match=r"step of the optimizer is \[1.0, 2.0\]"):
        taken(module, optimizer)


def test_a_copy_that_is_gone_when_it_is_read_is_a_failed_exchange() -> None:
    """Not an error of the program: others may hold what is left."""
    module, optimizer = make(seed=0, steps=1)
    copies, header = taken(module, optimizer)
    copies.drop_all()
    with pytest.raises(CollectiveFailedError, match="no complete copy of device 0"):
        fill(module, optimizer, sources=[source(copies, header)])
