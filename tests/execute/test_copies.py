"""Copies in host memory against plain arrays: parts of random boxes, chunks in any order, torn ones invisible."""

import threading
import zlib
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.execute.state.copies import MAX_SPARE, HeldCopies
from rayfcp.values.state import Box, ShardEntry, ShardHeader, StateId

DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def header_of(
    tensors: list[tuple[Box, int]], *, version: int = 1, generation: int = 0, number: int = 0, pad: int = 0
) -> ShardHeader:
    entries, at = [], 0
    for index, (box, itemsize) in enumerate(tensors):
        entry = ShardEntry(name=f"t{index}", kind="parameter", box=box, itemsize=itemsize, start_byte=at)
        entries.append(entry)
        at += entry.num_bytes + pad
    state = StateId(version=version, generation=generation)
    return ShardHeader(state=state, number=number, num_devices=4, entries=tuple(entries), num_bytes=at, scalars={})


def random_bytes(size: int, *, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def cut(size: int, chunk: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk, size)) for start in range(0, size, chunk)]


@st.composite
def boxes(draw: st.DrawFn, inside: Box | None = None) -> Box:
    """Some box, or one within another."""
    if inside is None:
        sizes = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        return Box(offsets=tuple(draw(st.integers(0, 9)) for _ in sizes), sizes=sizes)
    starts = tuple(draw(st.integers(0, size - 1)) for size in inside.sizes)
    sizes = tuple(draw(st.integers(1, size - start)) for start, size in zip(starts, inside.sizes, strict=True))
    return Box(offsets=tuple(a + b for a, b in zip(inside.offsets, starts, strict=True)), sizes=sizes)


def positions(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))))


@given(st.data())
def test_boxes_meet_where_both_have_elements(data: st.DataObject) -> None:
    one = data.draw(boxes())
    sizes = tuple(data.draw(st.integers(1, 4)) for _ in one.sizes)
    other = Box(offsets=tuple(data.draw(st.integers(0, 9)) for _ in sizes), sizes=sizes)
    common = one.meet(other)
    assert (positions(common) if common else set()) == positions(one) & positions(other)
    assert one.num_elements == len(positions(one))


@given(st.data())
def test_pieces_are_what_slices_of_the_whole_are(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(boxes(), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=3))
    header = header_of(shapes, pad=data.draw(st.sampled_from((0, 8, 64))))
    raw = random_bytes(header.num_bytes, seed=len(shapes))
    copies = HeldCopies()
    assert copies.begin(header)
    chunks = data.draw(st.permutations(cut(header.num_bytes, data.draw(st.integers(1, 50)))))
    for index, (start, stop) in enumerate(chunks):
        assert not copies.headers()
        part = raw[start:stop].tobytes()
        done = copies.write(header.state, 0, offset=start, data=part, checksum=zlib.crc32(part))
        assert done == (index == len(chunks) - 1)
    assert copies.headers() == (header,) and not copies.begin(header)
    at = data.draw(st.integers(0, len(shapes) - 1))
    entry = header.entries[at]
    wanted = data.draw(boxes(entry.box))
    (piece,) = copies.pieces(header.state, 0, wanted=[(entry.name, entry.kind, wanted)])
    whole = np.frombuffer(raw[entry.start_byte :][: entry.num_bytes].tobytes(), DTYPES[entry.itemsize])
    index = tuple(
        slice(a - b, a - b + n) for a, b, n in zip(wanted.offsets, entry.box.offsets, wanted.sizes, strict=True)
    )
    np.testing.assert_array_equal(piece, whole.reshape(entry.box.sizes)[index])
    assert piece.shape == wanted.sizes and piece.flags.c_contiguous and piece.dtype == DTYPES[entry.itemsize]


VECTOR = Box(offsets=(0,), sizes=(100,))


@given(st.integers(1, 120), st.data())
def test_copies_travel_whole_or_not_at_all(chunk_bytes: int, data: st.DataObject) -> None:
    header = header_of([(VECTOR, 4)])
    raw = random_bytes(header.num_bytes, seed=1)
    here, there = HeldCopies(), HeldCopies()
    here.put(header, raw.copy())
    there.begin(header)
    sent = [(at, bytes(part), check) for at, part, check in here.chunks(header.state, 0, chunk_bytes=chunk_bytes)]
    lost = data.draw(st.integers(0, len(sent) - 1))
    for at, part, check in [*sent[:lost], *sent[lost + 1 :], *sent[:lost]]:
        assert not there.write(header.state, 0, offset=at, data=part, checksum=check)
    assert there.headers() == ()
    with pytest.raises(LookupError, match="complete copy of device 0"):
        there.pieces(header.state, 0, wanted=[("t0", "parameter", VECTOR)])
    at, part, check = sent[lost]
    assert there.write(header.state, 0, offset=at, data=part, checksum=check)
    (piece,) = there.pieces(header.state, 0, wanted=[("t0", "parameter", VECTOR)])
    assert piece.tobytes() == raw.tobytes()


def test_a_damaged_chunk_drops_the_copy_that_comes_and_no_other() -> None:
    header = header_of([(VECTOR, 1)])
    raw = random_bytes(100, seed=2)
    copies = HeldCopies()
    copies.begin(header)
    with pytest.raises(ValueError, match="device 0 at version 1, generation 0: chunk at byte 50 is damaged"):
        copies.write(header.state, 0, offset=50, data=raw[50:], checksum=zlib.crc32(raw[50:]) ^ 1)
    with pytest.raises(LookupError, match="no copy of device 0"):
        copies.write(header.state, 0, offset=0, data=raw[:50], checksum=zlib.crc32(raw[:50]))
    assert copies.begin(header) and copies.write(header.state, 0, offset=0, data=raw, checksum=zlib.crc32(raw))
    with pytest.raises(ValueError, match="damaged"):
        copies.write(header.state, 0, offset=0, data=raw, checksum=0)
    assert copies.headers() == (header,)


@pytest.mark.parametrize(
    ("offset", "size", "why"), [(-1, 5, "beyond 100"), (98, 3, "beyond 100"), (45, 10, "into another")]
)
def test_chunks_that_do_not_fit_are_refused(offset: int, size: int, why: str) -> None:
    header = header_of([(VECTOR, 1)])
    copies = HeldCopies()
    copies.begin(header)
    copies.write(header.state, 0, offset=40, data=bytes(10), checksum=zlib.crc32(bytes(10)))
    with pytest.raises(ValueError, match=why):
        copies.write(header.state, 0, offset=offset, data=bytes(size), checksum=zlib.crc32(bytes(size)))


def test_what_cannot_be_a_copy_is_refused() -> None:
    header = header_of([(VECTOR, 1)])
    copies = HeldCopies()
    with pytest.raises(ValueError, match="buffer has 99 bytes, must have 100"):
        copies.put(header, np.zeros(99, np.uint8))
    with pytest.raises(ValueError, match="1, 2, 4 or 8 each"):
        copies.begin(header_of([(VECTOR, 3)]))
    copies.put(header, np.zeros(100, np.uint8))
    with pytest.raises(ValueError, match="lacks exp_avg of t0"):
        copies.pieces(header.state, 0, wanted=[("t0", "exp_avg", VECTOR)])
    with pytest.raises(ValueError, match="lacks parameter of t0"):
        copies.pieces(header.state, 0, wanted=[("t0", "parameter", Box(offsets=(90,), sizes=(11,)))])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), unique=True),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_older_copies_go_and_their_buffers_are_used_again(
    held: list[tuple[int, int, int]], than: tuple[int, int]
) -> None:
    copies = HeldCopies()
    for version, generation, number in held:
        header = header_of([(VECTOR, 1)], version=version, generation=generation, number=number)
        (copies.put(header, copies.spare(100)) if number else copies.begin(header))
    copies.drop_older(StateId(version=than[0], generation=than[1]))
    stay = sorted(each for each in held if each[:2] >= than)
    found = [(each.state.version, each.state.generation, each.number) for each in copies.headers()]
    assert found == [each for each in stay if each[2]]
    gone = len(held) - len(stay)
    assert copies.num_bytes == 100 * (len(stay) + min(gone, MAX_SPARE))
    before = copies.num_bytes
    buffer = copies.spare(100)
    assert copies.num_bytes == before - 100 * min(gone, 1) and len(buffer) == 100


def test_a_buffer_that_is_read_is_not_used_again() -> None:
    header = header_of([(VECTOR, 1)])
    copies = HeldCopies()
    buffer = random_bytes(100, seed=3)
    copies.put(header, buffer)
    sending = copies.chunks(header.state, 0, chunk_bytes=50)
    _, first, _ = next(sending)
    copies.drop_older(StateId(version=2, generation=0))
    assert not np.shares_memory(copies.spare(100), buffer) and bytes(first) == buffer[:50].tobytes()
    with pytest.raises(LookupError, match="dropped while it was sent"):
        next(sending)
    assert np.shares_memory(copies.spare(100), buffer)


def test_chunks_of_many_senders_at_once() -> None:
    """Each copy is complete exactly once, whoever sends which chunk twice."""
    headers = [header_of([(VECTOR, 8)], number=number) for number in range(4)]
    raws = [random_bytes(800, seed=number) for number in range(4)]
    copies, completed = HeldCopies(), []
    for header in headers:
        copies.begin(header)

    def send(first: int) -> None:
        for at in range(first, first + 20):
            for number, raw in enumerate(raws):
                part = raw[40 * (at % 20) : 40 * (at % 20) + 40]
                copies.write(headers[number].state, number, offset=40 * (at % 20), data=part, checksum=zlib.crc32(part))
        completed.append(first)

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 7, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(completed) == 3 and copies.headers() == tuple(headers)
    for number, raw in enumerate(raws):
        (piece,) = copies.pieces(headers[number].state, number, wanted=[("t0", "parameter", VECTOR)])
        assert piece.tobytes() == raw.tobytes()
