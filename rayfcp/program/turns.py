"""When sends are posted between stages whose channels complete operations in the order in which they are posted.

A stage that sends on at once what it has passed may have sends before a receive that the next stage takes only later,
while that stage waits for something behind this receive. Orders in which stages run further ahead than one microbatch
come to that (`rayfcp.program.deadlock` refuses them). It cannot happen where all hand-overs of a channel follow one
order of which that of each stage is a part: that of the turns in which their receivers come to them.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from rayfcp.program.instructions import Flow, Instruction, Receive, Send
from rayfcp.values import Action, BatchPlan

Turns = Mapping[tuple[int, Action], int]
"""(stage, pass): its turn, later for passes that begin later."""

_FORWARD_SHARE = 1 / 3
"""Of a microbatch's seconds: a backward pass takes about two forward passes."""


def turns_of(plan: BatchPlan) -> Turns:
    """The turns of all passes when every stage begins each as soon as it can, hand-overs taking no time.

    Passes that wait for each other for ever have none.
    """
    actions = [
        [each for pipeline in plan.pipelines for each in pipeline.actions[stage]] for stage in range(plan.num_stages)
    ]
    place = {action: at for at, action in enumerate(actions[0])}
    ends: dict[tuple[int, Action], float] = {}
    turns: dict[tuple[int, Action], int] = {}
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
            return turns
        start, _, stage = min(ready)
        action = actions[stage][at[stage]]
        share = 1 - _FORWARD_SHARE if action.backward else _FORWARD_SHARE
        free[stage] = ends[stage, action] = start + share * plan.microbatches[action.microbatch].predicted_s
        turns[stage, action] = len(turns)
        at[stage] += 1


def in_turns(instructions: Sequence[Instruction], *, stage: int, turns: Turns) -> tuple[Instruction, ...]:
    """A stage's instructions with each send behind the receives of its channel whose turn comes before its own, and no
    later."""
    held: dict[Flow, deque[Send]] = {flow: deque() for flow in Flow}
    coming: dict[Flow, deque[int]] = {flow: deque() for flow in Flow}
    for item in instructions:
        if isinstance(item, Receive):
            coming[item.flow].append(turns[stage, _pass_of(item)])
    found: list[Instruction] = []
    for item in instructions:
        if isinstance(item, Send):
            held[item.flow].append(item)
        else:
            found.append(item)
        if isinstance(item, Receive):
            coming[item.flow].popleft()
        for flow, sends in held.items():
            while sends and (not coming[flow] or turns[sends[0].stage, _pass_of(sends[0])] < coming[flow][0]):
                found.append(sends.popleft())
    return tuple(found)


def _pass_of(item: Send | Receive) -> Action:
    """The pass that what is handed over is for."""
    return Action(microbatch=item.microbatch, backward=item.flow is Flow.GRADIENT)
