"""Orders of stages: those that end are taken, those that do not are refused with a line that says where."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.program import (
    Backward,
    Forward,
    Free,
    Instruction,
    Load,
    Programs,
    RankProgram,
    Receive,
    Send,
    StageFlow,
    check_progress,
    lower,
)
from rayfcp.values import Group, PipelinePlan, Primitive
from tests.examples import examples
from tests.masks import specs
from tests.program.changes import with_outlines, with_parts
from tests.program.pipelines import actions, chunk, plan_of, random_pipelines, split_split_hybrid

Outlines = list[RankProgram]


class Stepping:
    """Steps each device over and over until nothing moves: passes need all ranks of the stage, what is posted on a
    channel leaves in order when both sides are first in line. Attention is left out."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self.num_ranks = programs[0].num_ranks
        self.todo = [[item for item in each.instructions if not isinstance(item, Load | Free)] for each in programs]
        self.lines: list[dict[StageFlow, list[Send | Receive]]] = [{flow: [] for flow in StageFlow} for _ in programs]
        self.waits = [False] * len(programs)

    def ends(self) -> bool:
        moved = True
        while moved:
            moved = any([self.step(at) for at in range(len(self.todo))])
            for at in range(len(self.todo)):
                for flow in StageFlow:
                    moved = self.hand_over(at, flow) or moved
        return not any(self.todo) and not any(line for each in self.lines for line in each.values())

    def step(self, at: int) -> bool:
        if not self.todo[at] or self.waits[at]:
            return False
        item = self.todo[at][0]
        if isinstance(item, Send | Receive):
            self.lines[at][item.flow].append(item)
            self.waits[at] = isinstance(item, Receive)
            self.todo[at] = self.todo[at][isinstance(item, Send) :]
            return True
        stage = range(at - at % self.num_ranks, at - at % self.num_ranks + self.num_ranks)
        if not all(self.todo[each] and type(self.todo[each][0]) is type(item) for each in stage):
            return False
        for each in stage:
            self.todo[each].pop(0)
        return True

    def hand_over(self, at: int, flow: StageFlow) -> bool:
        line = self.lines[at][flow]
        if not line or not isinstance(line[0], Send):
            return False
        other = line[0].stage * self.num_ranks + at % self.num_ranks
        theirs = self.lines[other][flow]
        if not theirs or not isinstance(theirs[0], Receive):
            return False
        if theirs[0].stage * self.num_ranks + at % self.num_ranks != at or theirs[0].microbatch != line[0].microbatch:
            return False
        line.pop(0), theirs.pop(0), self.todo[other].pop(0)
        self.waits[other] = False
        return True


@examples(40)
@given(seed=st.integers(0, 10_000), num_stages=st.integers(1, 4), num_ranks=st.integers(1, 4))
def test_pipelines_end(seed: int, num_stages: int, num_ranks: int) -> None:
    plan, sequences = random_pipelines(seed, num_stages=num_stages, num_ranks=num_ranks)
    programs = lower(plan, sequences)
    assert Stepping(programs).ends()
    check_progress(programs)


def strewn(program: RankProgram, rng: random.Random) -> RankProgram:
    """Sends somewhat later, receives somewhat earlier, passes in another order that is one for a rank alone."""
    items = list(program.instructions)
    for _ in range(rng.randrange(1, 30)):
        at = rng.randrange(len(items) - 1)
        one, other = items[at], items[at + 1]
        passes = isinstance(one, Forward | Backward) and isinstance(other, Forward | Backward)
        if one.microbatch != other.microbatch and not (passes and type(one) is type(other)):
            items[at : at + 2] = [other, one]
    return replace(program, instructions=tuple(items))


@examples(120)
@given(seed=st.integers(0, 10**6), num_stages=st.integers(2, 4))
def test_progress_agrees_with_stepping_each_device(seed: int, num_stages: int) -> None:
    rng = random.Random(seed)
    plan, sequences = random_pipelines(seed % 50, num_stages=num_stages, num_ranks=2)
    programs = with_outlines(lower(plan, sequences), lambda outlines: [strewn(each, rng) for each in outlines])
    try:
        check_progress(programs)
    except ValueError as problem:
        if "wait forever" in str(problem) or "match in order" in str(problem):
            assert not Stepping(programs).ends()
    else:
        assert Stepping(programs).ends()


def on_stage(
    stage: int, change: Callable[[list[Instruction]], Sequence[Instruction]]
) -> Callable[[Outlines], Outlines]:
    """A change on all ranks of a stage."""
    return lambda outlines: [
        replace(each, instructions=tuple(change(list(each.instructions)))) if each.stage == stage else each
        for each in outlines
    ]


def without(kind: type, microbatch: int) -> Callable[[list[Instruction]], Sequence[Instruction]]:
    return lambda items: [each for each in items if not (isinstance(each, kind) and each.microbatch == microbatch)]


def changed(kind: type, **changes: object) -> Callable[[list[Instruction]], Sequence[Instruction]]:
    """The first instruction of the kind with changes."""

    def change(items: list[Instruction]) -> Sequence[Instruction]:
        at = next(index for index, each in enumerate(items) if isinstance(each, kind))
        return [*items[:at], replace(items[at], **changes), *items[at + 1 :]]  # type: ignore[arg-type]

    return change


def moved(kind: type, microbatch: int, *, to: int) -> Callable[[list[Instruction]], Sequence[Instruction]]:
    def change(items: list[Instruction]) -> Sequence[Instruction]:
        rest = deque(each for each in items if not (isinstance(each, kind) and each.microbatch == microbatch))
        rest.insert(to % (len(rest) + 1), next(each for each in items if each not in rest))
        return rest

    return change


STAGE_MUTATIONS: dict[str, tuple[Callable[[Outlines], Outlines], str]] = {
    "a send lost": (on_stage(0, without(Send, 1)), "microbatch 1: instructions are"),
    "a receive lost": (on_stage(1, without(Receive, 1)), "microbatch 1: instructions are"),
    "a send twice": (
        on_stage(0, lambda items: [*items, *[e for e in items if isinstance(e, Send)][:1]]),
        "microbatch 0: instructions are",
    ),
    "a send of another flow": (on_stage(0, changed(Send, flow=StageFlow.GRADIENT)), "Send of the gradient"),
    "a send to a stage that is none": (on_stage(1, changed(Send, stage=2)), "to stage 2.*must be"),
    "a send to itself": (on_stage(0, changed(Send, stage=0)), "to stage 0.*must be"),
    "a receive after its pass": (on_stage(1, moved(Receive, 0, to=-1)), "microbatch 0: instructions are"),
    "a send before its pass": (on_stage(0, moved(Send, 0, to=0)), r"microbatch 0: instructions are \['Send"),
    "sends that change places": (on_stage(0, moved(Send, 0, to=8)), "match in order"),
    "a free lost": (on_stage(0, without(Free, 0)), "must be .*'Free'"),
    "a free twice": (on_stage(0, lambda items: [*items, items[-1]]), "'Free', 'Free'.*must be"),
    "a free of nothing": (on_stage(1, lambda items: [*items, Free(microbatch=2)]), "'Free'.*must be"),
    "a free before its backward": (on_stage(0, moved(Free, 0, to=0)), r"instructions are \['Free'"),
    "stages that change places": (lambda outlines: outlines[::-1], "position 0 has .* must have"),
    "a stage of another plan": (
        lambda outlines: [*outlines[:-1], replace(outlines[-1], plan_hash="0" * 16)],
        "plan_hash.* one plan for all stages",
    ),
    "a microbatch not passed forward": (on_stage(0, without(Forward, 1)), r"Forward names microbatches \[0, 2\]"),
    "a microbatch not passed backward": (on_stage(0, without(Backward, 1)), "microbatch 1: instructions are"),
    "passes out of order": (on_stage(0, moved(Forward, 0, to=-1)), "Forward names microbatches"),
    "fewer than no recomputed layers": (on_stage(1, changed(Forward, recomputed_layers=-1)), "must be at least 0"),
    "gradients never summed": (
        on_stage(1, lambda items: [replace(e, reduce=False) if isinstance(e, Backward) else e for e in items]),
        "reduce is False in the last Backward",
    ),
    "a load twice": (on_stage(0, lambda items: [*items, items[0]]), "Load names microbatches"),
}


@pytest.mark.parametrize("primitive", Primitive)
@pytest.mark.parametrize("name", STAGE_MUTATIONS)
def test_mutated_stages_are_refused(name: str, primitive: Primitive) -> None:
    plan, sequences = split_split_hybrid(primitive)
    programs = lower(plan, sequences)
    check_progress(programs)
    change, named = STAGE_MUTATIONS[name]
    with pytest.raises(ValueError, match=named):
        check_progress(with_outlines(programs, change))


def whole(*orders: str) -> Programs:
    """Two whole sequences, one a microbatch, on as many stages as there are orders."""
    sequences = specs([5, 3])
    microbatches = [chunk([Group(ranks=(0, 1), sequences=(number,))]) for number in range(2)]
    only = PipelinePlan(
        start=0,
        stop=2,
        actions=tuple(map(actions, orders)),
        recomputed_layers=((0, 0),) * len(orders),
        predicted_s=2.0,
    )
    return lower(plan_of(microbatches, [only], num_ranks=2), sequences)


def test_stages_that_wait_for_each_other_are_refused() -> None:
    check_progress(whole("F0 F1 B0 B1", "F0 B0 F1 B1"))
    check_progress(whole("F0 F1 B1 B0", "F0 F1 B1 B0"))
    with pytest.raises(
        ValueError, match="stage 0 rank 0 would wait forever at: Receive of the gradient of microbatch 0"
    ):
        check_progress(whole("F0 B0 F1 B1", "F0 F1 B0 B1"))


def test_stages_with_other_orders_of_backward_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"stage 1 rank 0: Backward comes in the order \[1, 0\], must be that of stage 0"
    ):
        check_progress(whole("F0 F1 B0 B1", "F0 F1 B1 B0"))


@pytest.mark.parametrize("primitive", Primitive)
def test_a_slice_before_the_slices_that_read_it_is_refused(primitive: Primitive) -> None:
    plan, sequences = split_split_hybrid(primitive)
    order = actions("F0 F1 F2 B2 B0 B1")
    wrong = replace(plan.pipelines[0], actions=(order, order))
    with pytest.raises(ValueError, match="microbatch 1: slot 1 is context of 0, whose Backward comes before"):
        check_progress(lower(replace(plan, pipelines=(wrong,)), sequences))


@pytest.mark.parametrize("primitive", Primitive)
def test_context_that_is_not_kept_is_refused(primitive: Primitive) -> None:
    plan, sequences = split_split_hybrid(primitive, num_stages=1)
    programs = lower(plan, sequences)
    (kind, (first, *others)) = next(iter(programs.attention.items()))
    less = replace(first, kept=first.kept._replace(stop=first.kept.stop - 1))
    with pytest.raises(ValueError, match="must be what later microbatches read of it"):
        check_progress(with_parts(programs, attention={kind: (less, *others)}))
