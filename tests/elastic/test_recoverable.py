"""The newest complete state, against brute force."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rayfcp.elastic.recoverable import ShardCopy, newest
from rayfcp.values import ShardHeader, StateId
from tests.examples import examples


def copy(version: int, number: int, *, of: int, where: str, generation: int = 0) -> ShardCopy:
    header = ShardHeader(
        state=StateId(version=version, generation=generation),
        number=number,
        num_devices=of,
        entries=(),
        num_bytes=0,
        scalars={},
    )
    return ShardCopy(header=header, peer=None, node_id=where)


@st.composite
def copies(draw: st.DrawFn) -> list[ShardCopy]:
    """Copies of up to three versions in two generations, on three nodes; some complete, most not."""
    sizes = {generation: draw(st.integers(1, 3)) for generation in (0, 1)}
    found = []
    for _ in range(draw(st.integers(0, 14))):
        generation = draw(st.integers(0, 1))
        found.append(
            copy(
                draw(st.integers(3, 5)),
                draw(st.integers(0, sizes[generation] - 1)),
                of=sizes[generation],
                where=f"n{draw(st.integers(0, 2))}",
                generation=generation,
            )
        )
    return found


def complete(held: Sequence[ShardCopy]) -> list[StateId]:
    """All states of which each number has a copy, by trying all."""
    states = [StateId(version=version, generation=generation) for version in range(3, 6) for generation in (0, 1)]
    found = []
    for state in states:
        mine = [each.header for each in held if each.header.state == state]
        if mine and {header.number for header in mine} == set(range(mine[0].num_devices)):
            found.append(state)
    return found


@examples(300)
@given(copies(), st.integers(2, 6))
def test_newest_is_what_trying_all_finds(held: list[ShardCopy], up_to: int) -> None:
    found = newest(held, up_to=up_to)
    allowed = [each for each in held if each.header.state.version <= up_to]
    assert found.state == max(complete(allowed), default=None)
    assert found.generation == max((each.header.state.generation for each in held), default=-1)
    assert [each.header.number for each in found.copies] == list(range(len(found.copies)))
    assert len(found.copies) == (found.copies[0].header.num_devices if found.state else 0)
    for copy in found.copies:
        mine = [each for each in held if (each.header.state, each.header.number) == (found.state, copy.header.number)]
        assert copy in mine


def test_the_reason_says_what_newer_states_lack() -> None:
    held = [copy(7, 0, of=3, where="w0"), copy(7, 2, of=3, where="w2")]
    held += [copy(6, number, of=3, where=f"w{number}") for number in (0, 2)]
    held += [copy(6, 1, of=3, where="w0")]
    assert newest(held, up_to=9).reason == (
        "the state after step 6 (generation 0) has all 3 shards in the memory of 2 nodes; "
        "the state after step 7 (generation 0) lacks shard 1 of 3"
    )


def test_the_reason_of_none_names_what_is_missing() -> None:
    held = [copy(version, 0, of=4, where="w0", generation=2) for version in range(2)]
    assert newest(held, up_to=9).state is None
    assert newest(held, up_to=9).reason == (
        "no state in memory is complete: the state after step 1 (generation 2) lacks shards 1, 2, 3 of 4; "
        "the state after step 0 (generation 2) lacks shards 1, 2, 3 of 4"
    )
    assert newest([], up_to=9).reason == "no state in memory: 0 copies are alive"


def test_copies_that_disagree_are_no_state() -> None:
    held = [copy(2, 0, of=1, where="w0"), copy(2, 1, of=2, where="w1"), copy(1, 0, of=1, where="w0")]
    found = newest(held, up_to=9)
    assert found.state == StateId(version=1, generation=0)
    assert "the state after step 2 (generation 0) has copies for 1 and 2 devices" in found.reason


def test_the_same_version_of_a_later_generation_is_newer_and_they_never_mix() -> None:
    held = [copy(4, 0, of=2, where="w0"), copy(4, 1, of=2, where="w1"), copy(4, 0, of=1, where="w0", generation=1)]
    assert newest(held, up_to=9).state == StateId(version=4, generation=1)
    assert newest(held[:2], up_to=9).state == StateId(version=4, generation=0)
    mixed = [copy(4, 0, of=2, where="w0"), copy(4, 1, of=2, where="w1", generation=1)]
    assert newest(mixed, up_to=9).state is None


def test_a_state_of_steps_that_the_run_went_back_from_is_none() -> None:
    held = [copy(5, 0, of=1, where="w0"), copy(4, 0, of=1, where="w1")]
    found = newest(held, up_to=9, belongs=lambda state: state.version < 5)
    assert found.state == StateId(version=4, generation=0)
