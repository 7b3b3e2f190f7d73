"""Copies of a module and its optimizer: filled from any cut of the tensors, or refused with a reason. Made by a thread
through small buffers, as on accelerators, with streams that do everything at once; their order: `test_ordering`."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayfcp.execute.devices import page_locks
from rayfcp.execute.devices.page_locks import PageLocks
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.reports import CollectiveFailedError
from rayfcp.execute.state import copying
from rayfcp.execute.state.copies import MAX_SPARE, CopyFolder
from rayfcp.execute.state.copying import Copier, Source, load_copies
from rayfcp.values.state import Box, KeptStates, ShardEntry, ShardHeader, StateId
from tests.examples import examples
from tests.execute.copying import pieces
from tests.execute.fake_cudart import PAGE, Cudart
from tests.waiting import until

STATE = StateId(version=3, generation=1)
PLACE = MeshPosition(rank=0, num_ranks=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CopyFolder]:
    """New folders for copies, one after the other."""
    root = tmp_path_factory.mktemp("copies")
    return (CopyFolder(root / str(number)) for number in count())


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
    module: nn.Module, optimizer: torch.optim.Optimizer, *, copies: CopyFolder, state: StateId = STATE
) -> ShardHeader:
    made = Copier(module, optimizer, position=PLACE, copies=copies)
    made.take(state)
    made.settle()
    assert made.copied == state
    return next(header for header in copies.headers() if header.state == state)


def source(copies: CopyFolder, header: ShardHeader) -> Source:
    read = partial(copies.read, header.state, header.number)
    return Source(header=header, read=lambda wanted, into: read(wanted=wanted, into=into))


def rows_of(copies: CopyFolder, header: ShardHeader, *, number: int, keep: tuple[int, int]) -> Source:
    """State of a device that holds rows `[keep[0], keep[1])` of every tensor of 7 rows."""
    start, stop = keep
    entries, parts, at = [], [], 0
    for entry in header.entries:
        box = Box(offsets=(start, *entry.box.offsets[1:]), sizes=(stop - start, *entry.box.sizes[1:]))
        (piece,) = pieces(copies, header, wanted=[(entry.name, entry.kind, box)])
        parts.append(piece.reshape(-1).view(np.uint8))
        entries.append(ShardEntry(name=entry.name, kind=entry.kind, box=box, dtype=entry.dtype, start_byte=at))
        at += entries[-1].num_bytes
    cut = replace(header, number=number, entries=tuple(entries), num_bytes=at)
    new = copies.begin(cut)
    new.buffer[:] = np.concatenate(parts)
    assert new.publish()
    return source(copies, cut)


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
def test_filled_from_any_cut_the_next_update_is_the_same(
    folders: Iterator[CopyFolder], steps: int, cuts: set[int], dtype: torch.dtype
) -> None:
    """Also when nothing was updated yet, and into one that has state of its own."""
    old, new = make(seed=0, steps=steps, dtype=dtype), make(seed=1, steps=1, dtype=dtype)
    copies = next(folders)
    header = taken(*old, copies=copies)
    bounds = [0, *sorted(cuts), 7]
    parts = [rows_of(copies, header, number=1 + at, keep=pair) for at, pair in enumerate(pairwise(bounds))]
    load_copies(*new, sources=[parts[-1], *parts])
    assert_same(old, new)
    for module, optimizer in (old, new):
        module(torch.ones(2, 5, dtype=dtype)).square().sum().backward()
        optimizer.step()
    assert_same(old, new)


def test_a_copy_is_of_its_moment(folders: Iterator[CopyFolder]) -> None:
    """Later updates do not change a snapshot."""
    module, optimizer = make(seed=0, steps=1)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    copies = next(folders)
    header = taken(module, optimizer, copies=copies)
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], next(module.parameters()))
    load_copies(module, optimizer, sources=[source(copies, header)])
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_copies_that_do_not_make_a_state_are_refused(folders: Iterator[CopyFolder]) -> None:
    old, new, copies = make(seed=0, steps=1), make(seed=1, steps=0), next(folders)
    header = taken(*old, copies=copies)
    low, high = (rows_of(copies, header, number=n, keep=keep) for n, keep in ((1, (0, 4)), (2, (4, 7))))
    with pytest.raises(
        ValueError, match=r"parameter of 0\.weight .* has 35 elements, copies give 20; give those of all"
    ):
        load_copies(*new, sources=[low])
    with pytest.raises(ValueError, match="has 35 elements, copies give 40"):
        load_copies(*new, sources=[low, rows_of(copies, header, number=3, keep=(3, 7))])
    other = replace(high, header=replace(high.header, state=StateId(version=3, generation=2)))
    with pytest.raises(ValueError, match="copies are of 2 states"):
        load_copies(*new, sources=[low, other])
    other = replace(high, header=replace(high.header, scalars={"step": 2.0}))
    with pytest.raises(ValueError, match="must have the same"):
        load_copies(*new, sources=[low, other])
    with pytest.raises(ValueError, match=r"has elements of 8 bytes, copies have \[4\]"):
        load_copies(*make(seed=0, steps=0, dtype=torch.float64), sources=[low, high])


def test_numbers_that_differ_between_parameters_are_refused(folders: Iterator[CopyFolder]) -> None:
    module, optimizer = make(seed=0, steps=1)
    optimizer.state[module[0].weight]["step"] += 1
    with pytest.raises(RuntimeError, match=r"step of the optimizer is \[1.0, 2.0\]"):
        taken(module, optimizer, copies=next(folders))


def test_a_copy_that_is_gone_when_it_is_read_is_a_failed_exchange(folders: Iterator[CopyFolder]) -> None:
    """Not an error of the program: others may hold what is left."""
    (module, optimizer), copies = make(seed=0, steps=1), next(folders)
    header = taken(module, optimizer, copies=copies)
    copies.drop_generations(STATE.generation)
    with pytest.raises(CollectiveFailedError, match="no copy of device 0 at version 3, generation 1"):
        load_copies(module, optimizer, sources=[source(copies, header)])


class Event:
    """As an accelerator's, in streams that have done everything that they were given."""

    def record(self, _stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Streams:
    """Device on which a thread copies through buffers of 24 bytes, once it `may_copy`; one that `is_broken` fails."""

    def __init__(self) -> None:
        self.may_copy, self.is_broken, self.threads = threading.Event(), False, set[str]()
        self.may_copy.set()
        self.Event, self.stream, self.current_stream = Event, lambda _: nullcontext(), lambda: None
        self.Stream = lambda: SimpleNamespace(wait_event=self._wait)

    def _wait(self, _event: Event) -> None:
        assert self.may_copy.wait(60)
        self.threads.add(threading.current_thread().name)
        if self.is_broken:
            raise RuntimeError("FORCE STOP")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    allocate = partial(np.empty, dtype=np.uint8)
    found.backend = SimpleNamespace(streams=found, allocate_host=allocate, page_locks=None)
    monkeypatch.setattr(copying, "backend_of", lambda _: found.backend)
    monkeypatch.setattr(copying, "BOUNCE_BYTES", 24)
    return found


def test_a_thread_copies_what_the_host_would(
    streams: Streams, folders: Iterator[CopyFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that hold less than most tensors, and more than some."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model, copies = make(seed=0, steps=2, dtype=dtype), next(folders)
        taken(*model, copies=copies)
        with monkeypatch.context() as patch:
            patch.setattr(copying, "backend_of", lambda _: SimpleNamespace(streams=None))
            taken(*model, copies=copies, state=replace(STATE, version=4))
        one, other = copies.headers()
        wanted = [(entry.name, entry.kind, entry.box) for entry in one.entries]
        assert one.entries == other.entries and one.scalars == other.scalars
        for a, b in zip(*(pieces(copies, each, wanted=wanted) for each in (one, other)), strict=True):
            np.testing.assert_array_equal(a, b)
        other_model = make(seed=1, steps=0, dtype=dtype)
        load_copies(*other_model, sources=[source(copies, one)])
        assert_same(model, other_model)
    assert {each.rpartition("_")[0] for each in streams.threads} == {"snapshots"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_copies_straight_into_files_that_are_registered(
    dtype: torch.dtype, streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, and no part of it into two registrations; tensors are of several pages."""
    monkeypatch.setattr(page_locks, "PIECE_BYTES", PAGE)
    runtime, copy_ = Cudart(), torch.Tensor.copy_
    locks = streams.backend.page_locks = PageLocks(lambda: runtime)
    num_straight = 0

    def checked(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        nonlocal num_straight
        if non_blocking and locks.cuts(target.view(torch.uint8).numpy()) is not None:
            runtime.check_copy(target)
            num_straight += 1
        return copy_(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", checked)
    module = nn.Sequential(nn.Linear(130, 70), nn.Linear(3, 3)).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters())
    copies = CopyFolder(tmp_path, page_locks=locks)
    runtime.may_register.clear()
    for version in (1, 2):
        taken(module, optimizer, copies=copies, state=replace(STATE, version=version))
        assert (num_straight > 4) == (version == 2), "five parts, of which one is cut"
        runtime.may_register.set()
        copies.drop(KeptStates(since=replace(STATE, version=2)))
        until(lambda: sum(stop - start for start, stop in runtime.ranges.items()) >= copies.num_bytes)
    other = nn.Sequential(nn.Linear(130, 70), nn.Linear(3, 3)).to(dtype)
    (header,) = copies.headers()
    load_copies(other, torch.optim.AdamW(other.parameters()), sources=[source(copies, header)])
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    copies.close()
    assert not runtime.ranges


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_parts_of_tensors_take_their_bytes_in_order(is_host: bool, dtype: torch.dtype, streams: Streams) -> None:
    """Rows, columns, a scalar; nothing beside them changes."""
    with nullcontext() if not is_host else pytest.MonkeyPatch.context() as patch:
        if patch is not None:
            patch.setattr(copying, "backend_of", lambda _: SimpleNamespace(streams=None))
        for part in (np.s_[:], np.s_[2:5], np.s_[:, 3:], np.s_[1:7:2, :3], np.s_[4, 2]):
            whole = torch.zeros(8, 5, dtype=dtype)
            wanted = torch.arange(whole[part].numel()).add(1).to(dtype).reshape(whole[part].shape)
            data = wanted.reshape(-1).view(torch.uint8).numpy()
            for buffer in copying._host_memory(whole[part]):
                buffer[:], data = data[: len(buffer)], data[len(buffer) :]
            assert len(data) == 0 and torch.equal(whole[part], wanted)
            assert whole.count_nonzero() == wanted.numel()


def test_a_copy_is_there_only_once_the_thread_has_made_it(streams: Streams, folders: Iterator[CopyFolder]) -> None:
    """Also without anybody who waits for it."""
    copies = next(folders)
    made = Copier(*make(seed=0, steps=1), position=PLACE, copies=copies)
    streams.may_copy.clear()
    made.take(STATE)
    assert not copies.headers() and made.copied is None
    streams.may_copy.set()
    until(lambda: copies.has(STATE, 0), every_s=0.001)
    made.settle()
    assert made.copied == STATE


def test_states_in_quick_succession_are_all_copied_in_little_memory(
    streams: Streams, folders: Iterator[CopyFolder]
) -> None:
    """Whoever waits and the thread publish in turn, neither for ever."""
    copies, model = next(folders), make(seed=0, steps=1)
    made = Copier(*model, position=PLACE, copies=copies)
    for version in range(200):
        state = StateId(version=version, generation=0)
        copies.drop(KeptStates(since=StateId(version=version - 1, generation=0)))
        made.take(state)
        if version % 3:
            made.settle()
            assert made.copied == state and copies.has(state, 0)
    made.settle()
    assert len([*copies.path.glob("*.*")]) <= 2 + 1 + MAX_SPARE
    assert made.seconds > 0.0


def test_a_copy_whose_device_was_stopped_is_lost_and_its_memory_used_again(
    streams: Streams, folders: Iterator[CopyFolder]
) -> None:
    copies = next(folders)
    made = Copier(*make(seed=0, steps=1), position=PLACE, copies=copies)
    for version in range(4):
        streams.is_broken = version % 2 == 0
        made.take(StateId(version=version, generation=0))
        if streams.is_broken:
            with pytest.raises(RuntimeError, match="FORCE STOP"):
                made.hold_update()
            made.hold_update()  # nothing is left to wait for
        else:
            made.abandon()
    assert [header.state.version for header in copies.headers()] == [1, 3]
    assert len([*copies.path.glob("*.*")]) == 2


def test_a_copy_whose_folder_was_removed_meanwhile_is_none(streams: Streams, folders: Iterator[CopyFolder]) -> None:
    copies = next(folders)
    made = Copier(*make(seed=0, steps=1), position=PLACE, copies=copies)
    streams.may_copy.clear()
    made.take(STATE)
    copies.remove()
    streams.may_copy.set()
    made.hold_update()
    assert made.copied is None


def test_without_memory_there_is_no_copy_and_a_line_in_the_log(
    folders: Iterator[CopyFolder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copies = next(folders)
    made = Copier(*make(seed=0, steps=1), position=PLACE, copies=copies)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        made.take(STATE)
    assert not copies.headers() and made.copied is None
    assert f"No space left on device in {copies.path}" in caplog.text
    made.take(STATE)
    assert made.copied == STATE


def test_a_device_that_holds_nothing_of_what_is_trained(folders: Iterator[CopyFolder]) -> None:
    """As of few adapters on many ranks."""
    module, copies = nn.Linear(5, 7).requires_grad_(False), next(folders)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    header = taken(module, optimizer, copies=copies)
    assert (header.entries, header.num_bytes) == ((), 0)
    load_copies(module, optimizer, sources=[source(copies, header)])
