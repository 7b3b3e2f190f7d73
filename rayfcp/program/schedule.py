"""When stages of a pipeline post their sends.

Channels between stages complete operations in the order in which they are posted. A stage that sends as soon as it has
passed may have sends posted before a receive that the next stage takes only later, while that stage waits for something
behind this receive. Orders in which stages run further ahead than one microbatch come to that
(`rayfcp.program.progress` refuses them). It cannot happen where all hand-overs of a channel follow one order of which
that of each stage is a part: the order in which their receivers reach them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rayfcp.program.instructions import (
    Backward,
    Forward,
    Instruction,
    RankProgram,
    Receive,
    Send,
    StageFlow,
)
from rayfcp.program.progress import hand_overs_stuck
from rayfcp.values import Action, BatchPlan

PassOrder = Mapping[tuple[int, Action], int]
"""(stage, pass) -> position among the passes of all stages, by start."""

_FORWARD_SHARE = 1 / 3
"""Share of a microbatch's seconds: a backward pass takes about two forward passes."""


def with_sends_in_order(programs: Sequence[RankProgram], plan: BatchPlan) -> tuple[RankProgram, ...]:
    """The programs, with sends later where stages would otherwise wait for each other; unchanged where they do so
    however sends are posted."""
    if hand_overs_stuck(programs[:: plan.num_ranks]) is None:
        return tuple(programs)
    order = pass_order(plan)
    num_passes = sum(isinstance(item, Forward | Backward) for item in programs[0].instructions)
    if len(order) < plan.num_stages * num_passes:
        return tuple(programs)
    return tuple(
        replace(each, instructions=_delayed(each.instructions, stage=each.stage, order=order)) for each in programs
    )


def pass_order(plan: BatchPlan) -> PassOrder:
    """The order of passes by start when every stage begins each as soon as it can, hand-overs taking no time.

    Passes that would wait for each other forever are missing.
    """
    actions = [
        [each for pipeline in plan.pipelines for each in pipeline.actions[stage]] for stage in range(plan.num_stages)
    ]
    place = {action: at for at, action in enumerate(actions[0])}
    ends: dict[tuple[int, Action], float] = {}
    order: dict[tuple[int, Action], int] = {}
    at, free = [0] * plan.num_stages, [0.0] * plan.num_stages
    while True:
        ready = []
        for stage, done in enumerate(at):
            if done == len(actions[stage]):
                continue
            action = actions[stage][done]
            source = stage + 1 if action.backward else stage - 1
            came = ends.get((source, action)) if 0 <= source < plan.num_stages else 0.0
            if came is not None:
                ready.append((max(free[stage], came), place[action], stage))
        if not ready:
            return order
        start, _, stage = min(ready)
        action = actions[stage][at[stage]]
        share = 1 - _FORWARD_SHARE if action.backward else _FORWARD_SHARE
        free[stage] = ends[stage, action] = start + share * plan.microbatches[action.microbatch].predicted_s
        order[stage, action] = len(order)
        at[stage] += 1


def _delayed(instructions: Sequence[Instruction], *, stage: int, order: PassOrder) -> tuple[Instruction, ...]:
    """A stage's instructions with each send right behind the receives of its channel that come before it in `order`."""
    held: dict[StageFlow, deque[Send]] = {flow: deque() for flow in StageFlow}
    coming: dict[StageFlow, deque[int]] = {flow: deque() for flow in StageFlow}
    for item in instructions:
        if isinstance(item, Receive):
            coming[item.flow].append(order[stage, _pass_of(item)])
    found: list[Instruction] = []
    for item in instructions:
        if isinstance(item, Send):
            held[item.flow].append(item)
        else:
            found.append(item)
        if isinstance(item, Receive):
            coming[item.flow].popleft()
        for flow, sends in held.items():
            while sends and (not coming[flow] or order[sends[0].stage, _pass_of(sends[0])] < coming[flow][0]):
                found.append(sends.popleft())
    return tuple(found)


def _pass_of(item: Send | Receive) -> Action:
    """The pass that needs what is handed over."""
    return Action(microbatch=item.microbatch, backward=item.flow is StageFlow.GRADIENT)
