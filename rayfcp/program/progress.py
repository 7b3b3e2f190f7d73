"""The static check, before anything runs, that no rank can wait forever.

The programs of all ranks and stages are replayed together, without tags:

- every forward and backward pass gathers the layers' shards, which needs all ranks of its stage (a barrier), and then
  exchanges keys, values and gradients with them; recomputed layers repeat their forward rounds inside the backward
  pass. A rank leaves a pass when all its messages have met, so passes are checked one by one, and since all stages
  attend alike (`check_order`), one stage stands for all;
- so does the vision encoder, and then exchanges features, whose gradients take the same rounds back at the end of the
  backward pass;
- the same rank of neighbouring stages hands activations on through one channel and gradients back through another.
  Operations of a device on a channel complete in the order in which they are posted, each together with its partner
  when both are first in line. A Send is posted and the program goes on; a Receive waits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rayfcp.program.heads import rounds_of
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Encode,
    Forward,
    HeadProgram,
    RankProgram,
    Receive,
    Send,
    StageFlow,
)
from rayfcp.program.matching import attention_channel, in_step, stuck_at
from rayfcp.program.order import attention_by_kind, check_order


def check_progress(programs: Sequence[RankProgram]) -> None:
    """Prove that the programs of all ranks and stages run to their end together.

    Raises:
        ValueError: a program alone is not in order (`check_order`), or ranks disagree on the plan, on a pass, on a
            message, or would wait forever; the message names the rank and what it waits for.
    """
    check_order(programs)
    hashes = {program.plan_hash for program in programs}
    if len(hashes) > 1:
        raise ValueError(f"plan_hash differs between ranks ({', '.join(sorted(hashes))}); lower one plan for all ranks")
    for of_ranks in attention_by_kind(programs).values():
        for microbatch, parts in enumerate(zip(*of_ranks, strict=True)):
            for backward, kind in ((False, "forward"), (True, "backward")):
                _check_pass(parts, backward=backward, name=f"the {kind} pass of microbatch {microbatch}")
    _StageReplay(programs).run()


def _check_pass(parts: Sequence[AttentionProgram | HeadProgram], *, backward: bool, name: str) -> None:
    """All ranks' rounds of one direction run to their end; `parts[r]` is rank r's.

    Exchanges of tokens for heads meet by construction where the ranks of a group agree on it, and are left out then.
    """
    if all(_agrees(part, parts) for part in parts if isinstance(part, HeadProgram)):
        rounds = [part.inner.backward if backward else part.inner.forward for part in parts]
    else:
        rounds = [rounds_of(part, rank=rank, backward=backward) for rank, part in enumerate(parts)]
    if not in_step(rounds) and (stuck := stuck_at(rounds, attention_channel(rounds).matches())):
        rank, at = stuck
        step = rounds[rank][at]
        targets, sources = ([message.peer for message in each] for each in (step.sends, step.receives))
        raise ValueError(
            f"rank {rank} would wait forever at an exchange that sends to {targets} and receives from {sources}, "
            f"in {name}; the ranks' programs disagree, lower one plan for all"
        )


def _agrees(part: HeadProgram, parts: Sequence[AttentionProgram | HeadProgram]) -> bool:
    others, due = [parts[rank] for rank in part.ranks], (part.ranks, part.tokens)
    return all(isinstance(each, HeadProgram) and (each.ranks, each.tokens) == due for each in others)


def hand_overs_end(programs: Sequence[RankProgram]) -> bool:
    """True if the stages of one rank, alone, run to their end; `programs[p]` is that of stage p, each in order."""
    try:
        _StageReplay([replace(program, num_ranks=1) for program in programs]).run()
    except ValueError:
        return False
    return True


_HandOver = Send | Receive


@dataclass(frozen=True, slots=True)
class _Pass:
    """All ranks of a stage must come here, with the same words."""

    words: tuple[object, ...]


@dataclass(slots=True)
class _Device:
    """The program of one rank on one stage: operations still to run, and those posted, by flow."""

    program: RankProgram
    left: deque[_Pass | _HandOver]
    posted: dict[StageFlow, deque[_HandOver]] = field(default_factory=lambda: {flow: deque() for flow in StageFlow})


class _StageReplay:
    """All devices, each advanced as far as it gets."""

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        self._num_ranks = programs[0].num_ranks
        self._devices = [_Device(program, _operations(program)) for program in programs]
        self._arrived = [0] * programs[0].num_stages
        self._ready = deque(range(len(programs)))

    def run(self) -> None:
        """
        Raises:
            ValueError: passes or hand-overs disagree, or a device would wait forever.
        """
        while self._ready:
            self._advance(self._ready.popleft())
        for device in self._devices:
            waiting = [f"at {_describe(each)}" for each in list(device.left)[:1]]
            waiting += [f"for {_describe(queue[0])} to leave" for queue in device.posted.values() if queue]
            if waiting:
                raise ValueError(f"{device.program.place} would wait forever {waiting[0]}; the programs disagree")

    def _advance(self, number: int) -> None:
        """Up to the next operation that needs others."""
        device = self._devices[number]
        while device.left:
            head = device.left[0]
            if isinstance(head, _Pass):
                self._arrive(number // self._num_ranks)
                return
            device.posted[head.flow].append(head)
            if isinstance(head, Send):
                device.left.popleft()
            self._complete(number, head.flow)
            if isinstance(head, Receive):
                return

    def _arrive(self, stage: int) -> None:
        """One more rank has come to the next pass; the last one lets all go on."""
        self._arrived[stage] += 1
        if self._arrived[stage] < self._num_ranks:
            return
        self._arrived[stage] = 0
        first = stage * self._num_ranks
        devices = self._devices[first : first + self._num_ranks]
        for device in devices:
            if device.left[0] != devices[0].left[0]:
                raise ValueError(
                    f"{device.program.place} would wait forever at {_describe(device.left[0])}, where "
                    f"{devices[0].program.place} comes to {_describe(devices[0].left[0])}; the programs disagree"
                )
        for device in devices:
            device.left.popleft()
        self._ready.extend(range(first, first + self._num_ranks))

    def _complete(self, number: int, flow: StageFlow) -> None:
        """Hand over what is first in line on both sides, from this device on to those whose turn comes by that."""
        turns = [number]
        while turns:
            one = turns.pop()
            queue = self._devices[one].posted[flow]
            if not queue:
                continue
            other = self._partner(one, queue[0])
            others = self._devices[other].posted[flow]
            if others and self._partner(other, others[0]) == one:
                self._hand_over((one, queue.popleft()), (other, others.popleft()))
                turns += [one, other]

    def _partner(self, number: int, operation: _HandOver) -> int:
        return operation.stage * self._num_ranks + number % self._num_ranks

    def _hand_over(self, one: tuple[int, _HandOver], other: tuple[int, _HandOver]) -> None:
        (source, sent), (target, awaited) = (one, other) if isinstance(one[1], Send) else (other, one)
        if (sent.microbatch, sent.num_tokens) != (awaited.microbatch, awaited.num_tokens):
            raise ValueError(
                f"{self._devices[source].program.place} hands over {_content(sent)} where "
                f"{self._devices[target].program.place} expects {_content(awaited)}; they match in order"
            )
        self._devices[target].left.popleft()
        self._ready.append(target)


def _operations(program: RankProgram) -> deque[_Pass | _HandOver]:
    found: deque[_Pass | _HandOver] = deque()
    recomputed: dict[int, int] = {}
    for item in program.instructions:
        if isinstance(item, Encode):
            found.append(_Pass(("Encode", item.microbatch)))
        elif isinstance(item, Forward):
            recomputed[item.microbatch] = item.recomputed_layers
            found.append(_Pass(("Forward", item.microbatch, False, item.recomputed_layers)))
        elif isinstance(item, Backward):
            found.append(_Pass(("Backward", item.microbatch, item.reduce, recomputed[item.microbatch])))
        elif isinstance(item, _HandOver):
            found.append(item)
    return found


def _content(operation: _HandOver) -> str:
    return f"the {operation.flow.value} of microbatch {operation.microbatch}, {operation.num_tokens} tokens,"


def _describe(operation: _Pass | _HandOver) -> str:
    if isinstance(operation, _Pass):
        return "the pass (kind, microbatch, reduce, recomputed layers) " + repr(operation.words)
    way = "to" if isinstance(operation, Send) else "from"
    return f"{_content(operation)} {way} stage {operation.stage}"
