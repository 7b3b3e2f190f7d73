"""Lowering: from a plan to one program per stage and rank.

A batch passes through once: the layouts of all microbatches, the attention of all ranks in each kind of layers, the
exchange of image features if any, the instructions of each stage, and when stages post their sends.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rayfcp.plan.layout import layouts_of
from rayfcp.program.attention import Needed, Order, Orders, lower_attention
from rayfcp.program.encoding import lower_encoding
from rayfcp.program.heads import lower_heads, slot_order
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Encode,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    LayerAttention,
    Load,
    Piece,
    RankProgram,
    Receive,
    Send,
    StageFlow,
)
from rayfcp.program.progress import hand_overs_stuck
from rayfcp.program.reshuffle import pieces_of
from rayfcp.program.windows import windowed
from rayfcp.values import (
    FULL,
    Action,
    BatchPlan,
    Block,
    Group,
    LayerKind,
    Layout,
    MicrobatchPlan,
    Primitive,
    SequenceSpec,
)

Attention = tuple[AttentionProgram | HeadProgram, ...]
"""The attention of one microbatch, by rank."""


def lower(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    layouts: Sequence[Layout] | None = None,
    reduce_every: str = "step",
    kinds_of_stage: Sequence[Sequence[LayerKind]] = (),
) -> tuple[RankProgram, ...]:
    """One program per stage and rank, that of rank r on stage p at index p x num_ranks + r.

    `sequences` are those that were planned, `sequences[i].id == i`, `layouts` those of `rayfcp.plan.layout.layouts_of`
    where the caller has them. Gradients are reduced in the last backward pass (`reduce_every="step"`) or in each
    (`"microbatch"`). All ranks run the same number of passes: a rank without tokens in a microbatch runs one padding
    token. A group of one rank exchanges nothing, so that its primitive does not matter. The planner sees to it that
    degrees divide heads. All stages run the same attention in layers of one kind; only which of the sequences'
    `layer_kinds` they have (`kinds_of_stage`, all if absent), the layers that they recompute, the order of their
    passes and their neighbours differ. Sends follow their pass, or come somewhat later where stages would otherwise
    wait for each other.

    Raises:
        ValueError: a stage names a kind of layers that the sequences do not; sequences disagree on these; a layout
            cannot be run (`lower_attention`, `lower_heads`), or an encoding (`lower_encoding`).
    """
    layouts = layouts_of(plan, sequences) if layouts is None else layouts
    _check_sequences(layouts, sequences)
    of_stage = _kinds(plan, sequences, kinds_of_stage)
    attention = _attention(plan, layouts, sequences=sequences, kinds={each for own in of_stage for each in own})
    encodes = lower_encoding(plan, layouts, sequences=sequences)
    loads = [pieces_of(layout, num_ranks=plan.num_ranks) for layout in layouts]
    plan_hash = plan.plan_hash
    programs = tuple(
        RankProgram(
            rank=rank,
            num_ranks=plan.num_ranks,
            stage=stage,
            num_stages=plan.num_stages,
            plan_hash=plan_hash,
            instructions=stage_instructions(
                plan,
                stage,
                pieces=[each[rank] for each in loads],
                encodes=[each[rank] if each else None for each in encodes],
                attention=[
                    [LayerAttention(kind=kind, attention=attention[kind][at][rank]) for kind in of_stage[stage]]
                    for at in range(len(layouts))
                ],
                reduce_every=reduce_every,
            ),
        )
        for stage in range(plan.num_stages)
        for rank in range(plan.num_ranks)
    )
    return _sends_in_order(programs, plan) if plan.num_stages > 1 else programs


def stage_instructions(
    plan: BatchPlan,
    stage: int,
    *,
    pieces: Sequence[tuple[Piece, ...]],
    attention: Sequence[Sequence[LayerAttention]],
    reduce_every: str,
    encodes: Sequence[Encode | None] = (),
) -> tuple[Instruction, ...]:
    """Instructions of one rank on a stage.

    `pieces[m]`, `encodes[m]` and `attention[m]` (one program per layer kind of the stage) are those of microbatch m.

    A forward pass follows its load, its encoding, and the activations of the stage before; a backward pass follows the
    gradients of the stage after. What a microbatch kept for later slices is freed after its backward pass.
    """
    actions = _actions(plan, stage)
    last = [action.microbatch for action, _ in actions if action.backward][-1]
    neighbours = (stage - 1 if stage > 0 else None, stage + 1 if stage + 1 < plan.num_stages else None)
    instructions: list[Instruction] = []
    for action, recomputed_layers in actions:
        at, kinds = action.microbatch, attention[action.microbatch]
        num_tokens = kinds[0].attention.num_tokens
        flow = StageFlow.GRADIENT if action.backward else StageFlow.ACTIVATION
        source, target = reversed(neighbours) if action.backward else neighbours
        if not action.backward:
            instructions.append(Load(microbatch=at, pieces=pieces[at]))
            instructions += [each for each in encodes[at : at + 1] if each]
        if source is not None:
            instructions.append(Receive(microbatch=at, flow=flow, stage=source, num_tokens=num_tokens))
        if action.backward:
            instructions.append(Backward(microbatch=at, reduce=reduce_every == "microbatch" or at == last))
        else:
            instructions.append(
                _forward(at, kinds, recomputed_layers=recomputed_layers, keeps_attention=plan.keeps_attention)
            )
        if target is not None:
            instructions.append(Send(microbatch=at, flow=flow, stage=target, num_tokens=num_tokens))
        if action.backward and any(each.attention.inner.kept for each in kinds):
            instructions.append(Free(microbatch=at))
    return tuple(instructions)


def _forward(
    microbatch: int, kinds: Sequence[LayerAttention], *, recomputed_layers: int, keeps_attention: bool
) -> Forward:
    first, *others = kinds
    return Forward(
        microbatch=microbatch,
        attention=first.attention,
        recomputed_layers=recomputed_layers,
        kind=first.kind,
        others=tuple(others),
        keeps_attention=keeps_attention,
    )


def _actions(plan: BatchPlan, stage: int) -> list[tuple[Action, int]]:
    """Passes in order, with the layers that their microbatch recomputes. Without stages, microbatch by microbatch."""
    if not plan.pipelines:
        return [
            (Action(microbatch=at, backward=backward), plan.recomputed_layers)
            for at in range(len(plan.microbatches))
            for backward in (False, True)
        ]
    return [
        (action, pipeline.recomputed_layers[stage][action.microbatch - pipeline.start])
        for pipeline in plan.pipelines
        for action in pipeline.actions[stage]
    ]


def _check_sequences(layouts: Sequence[Layout], sequences: Sequence[SequenceSpec]) -> None:
    known = {sequence.id for sequence in sequences}
    unknown = sorted({block.sequence for layout in layouts for block in layout.blocks} - known)
    if unknown:
        raise ValueError(f"blocks name sequences {unknown}, which the batch does not have; plan the batch again")


def _kinds(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], of_stage: Sequence[Sequence[LayerKind]]
) -> list[tuple[LayerKind, ...]]:
    """The kinds of layers of each stage, ascending; a stage without layers has those of all."""
    if len(kinds := {sequence.layer_kinds for sequence in sequences}) > 1:
        raise ValueError(
            f"sequences have layer_kinds {sorted(kinds)}, must all have those of one model; give them the same"
        )
    known = tuple(kind for each in kinds for kind, _ in each) or (FULL,)
    found = [tuple(sorted(set(own))) or known for own in of_stage] or [known] * plan.num_stages
    if len(found) != plan.num_stages or not {kind for own in found for kind in own} <= set(known):
        raise ValueError(
            f"kinds_of_stage is {tuple(of_stage)}, must name for each of {plan.num_stages} stages some of {known}, "
            "which the sequences have; take both from one model"
        )
    return found


def _attention(
    plan: BatchPlan, layouts: Sequence[Layout], *, sequences: Sequence[SequenceSpec], kinds: Collection[LayerKind]
) -> dict[LayerKind, list[Attention]]:
    """The attention of all microbatches in layers of each kind.

    Where a kind hides nothing of any sequence, it is that of full attention.

    Raises:
        ValueError: a layout cannot be run (`lower_attention`, `lower_heads`).
    """
    longest = max((sequence.num_tokens for sequence in sequences), default=0)
    found: dict[LayerKind, list[Attention]] = {}
    for kind in sorted(kinds):
        effective = kind if kind.hides(longest) else FULL
        if effective not in found:
            mine = _cut(plan, layouts, sequences, kind=effective) if effective != FULL else layouts
            found[effective] = _Microbatches(plan, mine, effective).lowered()
        found[kind] = found[effective]
    return found


def _cut(
    plan: BatchPlan, layouts: Sequence[Layout], sequences: Sequence[SequenceSpec], *, kind: LayerKind
) -> Sequence[Layout]:
    uncut = {sequence.id for sequence in sequences if not kind.hides(sequence.num_tokens)}
    units = [
        _units(layout, microbatch, num_ranks=plan.num_ranks)
        for layout, microbatch in zip(layouts, plan.microbatches, strict=True)
    ]
    return windowed(layouts, kind=kind, uncut=uncut, units=units)


def _units(layout: Layout, microbatch: MicrobatchPlan, *, num_ranks: int) -> dict[int, int]:
    """The run of each rank, or a number for its group where that shares out heads."""
    found = {rank: rank // max(layout.heads, 1) for rank in range(num_ranks)}
    for group in _exchanging(microbatch):
        found |= dict.fromkeys(group.ranks, found[group.ranks[0]])
    return found


def _exchanging(microbatch: MicrobatchPlan) -> list[Group]:
    """The groups that share out heads."""
    return [group for group in microbatch.groups if group.primitive is Primitive.ULYSSES and group.degree > 1]


@dataclass(frozen=True, slots=True)
class _Microbatches:
    """Lowers the attention of one microbatch after the other, each with what the earlier ones left it."""

    plan: BatchPlan
    layouts: Sequence[Layout]
    kind: LayerKind

    def lowered(self) -> list[Attention]:
        needed: list[set[tuple[int, int]]] = [set() for _ in self.layouts]
        for layout in self.layouts:
            for context in layout.context:
                needed[context.microbatch] |= {(block.sequence, block.start) for block in context.blocks}
        orders = {at: self._orders(at) for at, blocks in enumerate(needed) if blocks}
        return [self._lowered(at, orders=orders, needed=needed[at]) for at in range(len(self.layouts))]

    def _orders(self, number: int) -> dict[int, Order]:
        """The order of the slot 0 that each rank, with those that it shares heads with, had in a microbatch."""
        layout, num_ranks = self.layouts[number], self.plan.num_ranks
        sharing = [group.ranks for group in _exchanging(self.plan.microbatches[number])]
        orders: dict[int, Order] = {}
        for run in (*layout.runs(num_ranks), *sharing):  # runs are of one rank each where no heads are shared out
            orders |= dict.fromkeys(run, slot_order(layout, run))
        return orders

    def _lowered(self, number: int, *, orders: Orders, needed: Needed) -> Attention:
        layout, num_ranks = self.layouts[number], self.plan.num_ranks
        groups = _exchanging(self.plan.microbatches[number])
        _check_heads(layout, self.plan.microbatches[number], num_ranks=num_ranks)
        if layout.heads > 1:
            runs = layout.runs(num_ranks)
            by_rank = lower_heads(layout, runs, kind=self.kind, earlier=orders, needed=needed)
            return tuple(by_rank[rank] for rank in range(num_ranks))
        rest = _rest(layout, groups) if groups else layout
        programs: list[AttentionProgram | HeadProgram] = [
            *lower_attention(rest, num_ranks=num_ranks, kind=self.kind, earlier=orders, needed=needed)
        ]
        for group in groups:
            _check_rounds(group, layout)
            held = _part(layout, group.ranks)
            by_rank = lower_heads(held, [group.ranks], kind=self.kind, earlier=orders, needed=needed)
            for rank, program in by_rank.items():
                programs[rank] = program
        return tuple(programs)


def _rest(layout: Layout, exchanging: Sequence[Group]) -> Layout:
    """The blocks that are not on ranks of Ulysses groups; all of them where transfers name blocks by number."""
    if any(step.transfers for step in layout.rounds):
        return layout
    taken = {rank for group in exchanging for rank in group.ranks}
    return _part(layout, {block.rank for block in layout.all_blocks} - taken)


def _part(layout: Layout, ranks: Collection[int]) -> Layout:
    """The blocks on these ranks, without transfers."""

    def lying(blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(block for block in blocks if block.rank in ranks)

    context = tuple(replace(each, blocks=lying(each.blocks)) for each in layout.context)
    return Layout(blocks=lying(layout.blocks), rounds=(), context=context)


def _check_heads(layout: Layout, microbatch: MicrobatchPlan, *, num_ranks: int) -> None:
    if layout.heads < 1 or num_ranks % layout.heads:
        raise ValueError(
            f"layout.heads is {layout.heads}, must be at least 1 and divide the {num_ranks} ranks; plan again"
        )
    exchanging = [group.ranks for group in microbatch.groups if group.primitive is Primitive.ULYSSES]
    if layout.heads > 1 and exchanging:
        raise ValueError(
            f"layout.heads is {layout.heads} beside Ulysses groups {exchanging}, must be 1 there: heads are shared out "
            "once; make the groups rings"
        )


def _check_rounds(group: Group, layout: Layout) -> None:
    for index, step in enumerate(layout.rounds):
        for transfer in step.transfers:
            touched = {transfer.source, transfer.target} & set(group.ranks)
            if touched:
                raise ValueError(
                    f"round {index}: a transfer touches ranks {sorted(touched)} of a {group.primitive.value} group, "
                    "which must have none; drop the transfer or make the group a ring"
                )


PassOrder = Mapping[tuple[int, Action], int]
"""(stage, pass) -> position among the passes of all stages, by start."""

FORWARD_SHARE = 1 / 3
"""Share of a microbatch's seconds: a backward pass takes about two forward passes."""


def _sends_in_order(programs: tuple[RankProgram, ...], plan: BatchPlan) -> tuple[RankProgram, ...]:
    """The programs, with sends later where stages would otherwise wait for each other; unchanged where they do so
    however sends are posted.

    Channels between stages complete operations in the order in which they are posted. A stage that runs more than one
    microbatch ahead may have sends posted before a receive that the next stage takes only later, while that stage waits
    for something behind this receive. It cannot happen where all hand-overs of a channel follow one order of which that
    of each stage is a part: the order in which their receivers reach them.
    """
    if hand_overs_stuck(programs[:: plan.num_ranks]) is None:
        return programs
    order = _pass_order(plan)
    num_passes = sum(isinstance(item, Forward | Backward) for item in programs[0].instructions)
    if len(order) < plan.num_stages * num_passes:
        return programs
    return tuple(
        replace(each, instructions=_delayed(each.instructions, stage=each.stage, order=order)) for each in programs
    )


def _pass_order(plan: BatchPlan) -> PassOrder:
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
        share = 1 - FORWARD_SHARE if action.backward else FORWARD_SHARE
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
