"""Programs that pass microbatches forward and none backward: those of a plan without the rest, and checked as such."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.plan import hardware_profile, model_profile
from rayfcp.program import (
    Backward,
    Forward,
    Free,
    Instruction,
    Load,
    RankProgram,
    Receive,
    Send,
    StageFlow,
    check_progress,
    lower,
)
from rayfcp.simulate.simulate import simulate
from rayfcp.values import Primitive
from tests.examples import examples
from tests.program.changes import with_parts
from tests.program.helpers import random_plan
from tests.program.pipelines import random_pipelines, split_split_hybrid
from tests.program.test_progress import Stepping


def forward_part(program: RankProgram) -> list[Instruction]:
    """Of a training program, in the order of microbatches, with nothing recomputed."""
    kept: list[Instruction] = []
    for item in program.instructions:
        if isinstance(item, Forward):
            kept.append(replace(item, recomputed_layers=0, keeps_attention=False))
        elif isinstance(item, Load) or (isinstance(item, Send | Receive) and item.flow is StageFlow.ACTIVATION):
            kept.append(item)
    return sorted(kept, key=lambda item: item.microbatch)


@examples(40)
@given(seed=st.integers(0, 10_000), num_stages=st.integers(1, 4), num_ranks=st.integers(1, 4))
def test_pipelines_lose_their_backward_passes(seed: int, num_stages: int, num_ranks: int) -> None:
    plan, sequences = random_pipelines(seed, num_stages=num_stages, num_ranks=num_ranks)
    programs = lower(plan, sequences, forward_only=True)
    check_progress(programs, forward_only=True)
    assert Stepping(programs).ends()
    for program, trained in zip(programs, lower(plan, sequences), strict=True):
        assert [item for item in program.instructions if not isinstance(item, Free)] == forward_part(trained)
        freed = [item.microbatch for item in program.instructions if isinstance(item, Free)]
        assert sorted(freed) == sorted(item.microbatch for item in trained.instructions if isinstance(item, Free))


@examples(20)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(1, 6))
def test_programs_are_checked_and_simulated_and_take_less(seed: int, num_ranks: int) -> None:
    plan, sequences, _ = random_plan(seed, num_ranks=num_ranks)
    timelines = [
        simulate(
            lower(plan, sequences, forward_only=forward_only),
            model=model_profile("qwen3-1.7b"),
            hardware=hardware_profile("cpu"),
        )
        for forward_only in (True, False)
    ]
    assert timelines[0].iteration_s < 0.6 * timelines[1].iteration_s
    for forward, trained in zip(*(each.peak_memory_bytes for each in timelines), strict=True):
        assert 0 < forward < trained


def test_stages_are_simulated() -> None:
    plan, sequences = split_split_hybrid(Primitive.RING)
    settings = {"model": model_profile("qwen3-1.7b"), "hardware": hardware_profile("cpu")}
    forward, trained = (simulate(lower(plan, sequences, forward_only=only), **settings) for only in (True, False))
    assert forward.iteration_s < 0.6 * trained.iteration_s
    assert max(forward.peak_memory_bytes) < max(trained.peak_memory_bytes)
    assert not any(span.kind.value == "backward" for span in forward.spans)


@pytest.mark.parametrize("primitive", list(Primitive))
def test_what_is_kept_is_freed_after_its_last_reader(primitive: Primitive) -> None:
    program = lower(*split_split_hybrid(primitive), forward_only=True)[0]
    order = [
        f"{type(item).__name__} {item.microbatch}" for item in program.instructions if isinstance(item, Forward | Free)
    ]
    assert order == ["Forward 0", "Forward 1", "Forward 2", "Free 0", "Free 1"]


def test_wrong_programs_are_refused() -> None:
    programs = lower(*split_split_hybrid(Primitive.RING), forward_only=True)
    items = programs.outlines[0].instructions
    frees = [item for item in items if isinstance(item, Free)]
    others = [item for item in items if not isinstance(item, Free)]
    last = max(at for at, item in enumerate(others) if isinstance(item, Forward))
    for instructions, words in (
        (others, "instructions are"),
        ([*others[:last], *frees, *others[last:]], "whose Free comes before this one's Forward"),
        ([*items, Backward(microbatch=2, reduce=True)], "must have none"),
    ):
        first = replace(programs.outlines[0], instructions=tuple(instructions))
        wrong = with_parts(programs, outlines=[first, *programs.outlines[1:]])
        with pytest.raises(ValueError, match=words):
            check_progress(wrong, forward_only=True)
    with pytest.raises(ValueError, match="must have one a microbatch"):
        check_progress(programs)
