"""When sends are posted between stages whose channels complete operations in the order in which they are posted.

A stage that sends on at once what it has passed may have sends before a receive that the next stage takes only later,
while that stage waits for something behind this receive. Orders in which stages run further ahead than one microbatch
come to that (`rayfcp.program.progress` refuses them). It cannot happen where all hand-overs of a channel follow one
order of which that of each stage is a part: that of the turns in which their receivers come to them.

Lowering of the attention of all microbatches, for one kind of layers after the other.

The instructions of one rank on one stage, in the order of the plan's actions.

Lowering: from a plan to one program per stage and rank.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rayfcp.plan.layout import layouts_of
from rayfcp.program.attention import Order, lower_attention
from rayfcp.program.encoding import lower_encoding
from rayfcp.program.heads import Run, lower_heads, slot_order
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Encode,
    Flow,
    Forward,
    Free,
    HeadProgram,
    Instruction,
    LayerKind,
    Load,
    Piece,
    RankProgram,
    Receive,
    Send,
)
from rayfcp.program.progress import hand_overs_end
from rayfcp.program.windows import Bands, windowed
from rayfcp.values import (
    Action,
    BatchPlan,
    Block,
    Group,
    Layout,
    Mask,
    MicrobatchPlan,
    Primitive,
    SequenceSpec,
    bands_of,
)

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


Programs = list[tuple[AttentionProgram | HeadProgram, ...]]
"""By microbatch, then rank."""


def attention_of(
    plan: BatchPlan, layouts: Sequence[Layout], *, sequences: Sequence[SequenceSpec], windows: Collection[int]
) -> dict[int, Programs]:
    """Of each of `windows`, the attention of all microbatches in layers with this window (0: none).

    Where no sequence is longer than the window, it is that of layers without one.

    Raises:
        ValueError: a layout cannot be run (`lower_attention`, `lower_heads`).
    """
    longest = max((sequence.num_tokens for sequence in sequences), default=0)
    found: dict[int, Programs] = {}
    for window in windows:
        effective = window if window < longest else 0
        if effective not in found:
            found[effective] = _passes(plan, layouts, sequences, window=effective).all()
        found[window] = found[effective]
    return found


def _passes(plan: BatchPlan, layouts: Sequence[Layout], sequences: Sequence[SequenceSpec], *, window: int) -> "_Passes":
    masks = {sequence.id: sequence.mask for sequence in sequences}
    if not window:
        mutual = {each.id: found for each in sequences if (found := each.mutual_bands())}
        return _Passes(plan, layouts, masks, mutual=mutual)
    bands = {each.id: bands_of(each, window=window) for each in sequences}
    uncut = {sequence.id for sequence in sequences if sequence.num_tokens <= window}
    units = [
        _units(layout, microbatch, num_ranks=plan.num_ranks)
        for layout, microbatch in zip(layouts, plan.microbatches, strict=True)
    ]
    return _Passes(plan, windowed(layouts, bands=bands, uncut=uncut, units=units), masks, bands)


def _units(layout: Layout, microbatch: MicrobatchPlan, *, num_ranks: int) -> dict[int, int]:
    """Of each rank the run that it is in, or a number for its group where that shares out heads."""
    found = {rank: rank // max(layout.heads, 1) for rank in range(num_ranks)}
    for group in exchanging(microbatch):
        found |= dict.fromkeys(group.ranks, found[group.ranks[0]])
    return found


def exchanging(microbatch: MicrobatchPlan) -> list[Group]:
    """The groups that share out heads."""
    return [group for group in microbatch.groups if group.primitive is Primitive.ULYSSES and group.degree > 1]


@dataclass(frozen=True, slots=True)
class _Passes:
    """Lowers the attention of one microbatch after the other, each with what the earlier ones left it."""

    plan: BatchPlan
    layouts: Sequence[Layout]
    masks: dict[int, Mask]
    bands: Bands | None = None
    mutual: Bands | None = None

    def all(self) -> Programs:
        """By microbatch, then rank."""
        needed: list[set[tuple[int, int]]] = [set() for _ in self.layouts]
        for layout in self.layouts:
            for context in layout.context:
                needed[context.microbatch] |= {(block.sequence, block.start) for block in context.blocks}
        orders = {at: self._orders(at) for at, blocks in enumerate(needed) if blocks}
        return [self._lowered(at, orders=orders, needed=needed[at]) for at in range(len(self.layouts))]

    def _orders(self, number: int) -> dict[int, Order]:
        """Of each rank, the order of the slot 0 that it (with whom it shares heads) had in a microbatch."""
        layout, num_ranks = self.layouts[number], self.plan.num_ranks
        sharing = [group.ranks for group in exchanging(self.plan.microbatches[number])]
        orders: dict[int, Order] = {}
        for run in (*layout.runs(num_ranks), *sharing):  # runs are of one rank each where no heads are shared out
            orders |= dict.fromkeys(run, slot_order(layout, run))
        return orders

    def _lowered(
        self, number: int, *, orders: dict[int, dict[int, Order]], needed: Collection[tuple[int, int]]
    ) -> tuple[AttentionProgram | HeadProgram, ...]:
        layout, num_ranks = self.layouts[number], self.plan.num_ranks
        _check_heads(layout, self.plan.microbatches[number], num_ranks=num_ranks)
        if layout.heads > 1:
            runs = layout.runs(num_ranks)
            by_rank = self._by_heads(layout, runs, orders=orders, needed=needed)
            return tuple(by_rank[rank] for rank in range(num_ranks))
        in_rows = {at: [each[rank] for rank in range(num_ranks)] for at, each in orders.items()}
        groups = exchanging(self.plan.microbatches[number])
        rest = _rest(layout, groups)
        programs: list[AttentionProgram | HeadProgram] = [
            *lower_attention(
                rest,
                masks=self.masks,
                num_ranks=num_ranks,
                bands=self.bands,
                mutual=self.mutual,
                earlier=in_rows,
                needed=needed,
            )
        ]
        for group in groups:
            _check_rounds(group, layout)
            held = _part(layout, group.ranks)
            by_rank = self._by_heads(held, [group.ranks], orders=orders, needed=needed)
            for rank, program in by_rank.items():
                programs[rank] = program
        return tuple(programs)

    def _by_heads(
        self,
        layout: Layout,
        runs: Sequence[Run],
        *,
        orders: dict[int, dict[int, Order]],
        needed: Collection[tuple[int, int]],
    ) -> dict[int, HeadProgram]:
        return lower_heads(
            layout, runs, masks=self.masks, bands=self.bands, mutual=self.mutual, earlier=orders, needed=needed
        )


def _rest(layout: Layout, exchanging: Sequence[Group]) -> Layout:
    """What is not on ranks of Ulysses groups; all of it where transfers name blocks by number."""
    if not exchanging or any(step.transfers for step in layout.rounds):
        return layout
    taken = {rank for group in exchanging for rank in group.ranks}
    return _part(layout, {block.rank for block in layout.all_blocks} - taken)


def _part(layout: Layout, ranks: Collection[int]) -> Layout:
    """What lies on these ranks; nothing travels."""
    context = tuple(replace(each, blocks=_lying(each.blocks, ranks)) for each in layout.context)
    return Layout(blocks=_lying(layout.blocks, ranks), rounds=(), context=context)


def _lying(blocks: Sequence[Block], ranks: Collection[int]) -> tuple[Block, ...]:
    return tuple(block for block in blocks if block.rank in ranks)


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


def staged(
    plan: BatchPlan,
    stage: int,
    *,
    pieces: Sequence[tuple[Piece, ...]],
    attention: Sequence[Sequence[LayerKind]],
    reduce_every: str,
    encodes: Sequence[Encode | None] = (),
) -> tuple[Instruction, ...]:
    """What a stage does; `pieces[m]`, `encodes[m]` and `attention[m]`, of the kinds of layers that the stage has, are
    the rank's of microbatch m.

    A forward pass is preceded by its load, by what it encodes, and by what the stage before sends, followed by what
    goes to the next stage; a backward pass likewise, the other way. What a microbatch kept for later slices goes after
    its backward pass.
    """
    actions = _actions(plan, stage)
    last = [action.microbatch for action, _ in actions if action.backward][-1]
    before, after = _neighbours(stage, num_stages=plan.num_stages)
    instructions: list[Instruction] = []
    for action, recomputed_layers in actions:
        at, (kind, *others) = action.microbatch, attention[action.microbatch]
        program = kind.attention
        taken, given, flow = (after, before, Flow.GRADIENT) if action.backward else (before, after, Flow.ACTIVATION)
        if not action.backward:
            instructions.append(Load(microbatch=at, pieces=pieces[at]))
            instructions += [each for each in encodes[at : at + 1] if each]
        if taken is not None:
            instructions.append(Receive(microbatch=at, flow=flow, stage=taken, num_tokens=program.num_tokens))
        if action.backward:
            instructions.append(Backward(microbatch=at, reduce=reduce_every == "microbatch" or at == last))
        else:
            instructions.append(
                Forward(
                    microbatch=at,
                    attention=program,
                    recomputed_layers=recomputed_layers,
                    window=kind.window,
                    others=tuple(others),
                )
            )
        if given is not None:
            instructions.append(Send(microbatch=at, flow=flow, stage=given, num_tokens=program.num_tokens))
        if action.backward and any(each.attention.inner.kept for each in attention[at]):
            instructions.append(Free(microbatch=at))
    return tuple(instructions)


def _neighbours(stage: int, *, num_stages: int) -> tuple[int | None, int | None]:
    """The stage before and the stage after, if any.

    >>> _neighbours(0, num_stages=2), _neighbours(1, num_stages=2)
    ((None, 1), (0, None))
    """
    return stage - 1 if stage > 0 else None, stage + 1 if stage + 1 < num_stages else None


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


RUNTIME_PRIMITIVES = frozenset({Primitive.RING, Primitive.ULYSSES})
"""What training can run."""
ALL_PRIMITIVES = frozenset(Primitive)
"""What can be lowered, checked and simulated."""


def lower(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    reduce_every: str = "step",
    primitives: Collection[Primitive] = RUNTIME_PRIMITIVES,
    windows_of_stage: Sequence[Sequence[int]] = (),
) -> tuple[RankProgram, ...]:
    """One program per stage and rank, that of rank r on stage p at index p x num_ranks + r.

    `sequences` are those that were planned, `sequences[i].id == i`. Gradients are reduced in the last
    backward pass (`reduce_every="step"`) or in each (`"microbatch"`). All ranks run the same number of
    passes: a rank without tokens in a microbatch runs one padding token. A group of one rank exchanges
    nothing, so that its primitive does not matter. That heads divide is the planner's to see to. All stages run the
    same attention in layers of one window; only which of the sequences' `windows` their layers have
    (`windows_of_stage`, all if absent), what they recompute, the order of their passes and their neighbours differ
    (`staged`). Sends follow their pass, or come somewhat later where stages would otherwise wait for each other
    (`turns`).

    Raises:
        ValueError: a group of several ranks has a primitive that is not in `primitives`; a stage names a window that
            the sequences do not; sequences disagree on these; a layout cannot be run (`lower_attention`,
            `lower_heads`), or an encoding (`lower_encoding`).
    """
    _check_primitives(plan, primitives)
    layouts = layouts_of(plan, sequences)
    of_stage = _windows(plan, sequences, windows_of_stage)
    windows = sorted({each for own in of_stage for each in own})
    passes = attention_of(plan, layouts, sequences=sequences, windows=windows)
    loads = [_pieces(layout, num_ranks=plan.num_ranks) for layout in layouts]
    encodes = lower_encoding(plan, layouts, sequences=sequences)
    plan_hash = plan.plan_hash
    programs = tuple(
        RankProgram(
            rank=rank,
            num_ranks=plan.num_ranks,
            stage=stage,
            num_stages=plan.num_stages,
            plan_hash=plan_hash,
            instructions=staged(
                plan,
                stage,
                pieces=[each[rank] for each in loads],
                encodes=[each[rank] if each else None for each in encodes],
                attention=[
                    [LayerKind(window=window, attention=passes[window][at][rank]) for window in of_stage[stage]]
                    for at in range(len(layouts))
                ],
                reduce_every=reduce_every,
            ),
        )
        for stage in range(plan.num_stages)
        for rank in range(plan.num_ranks)
    )
    return programs if hand_overs_end(programs[:: plan.num_ranks]) else _in_turns(programs, turns_of(plan))


def _windows(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], of_stage: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Of each stage, ascending; those of a stage without layers are those of all."""
    if len(kinds := {sequence.windows for sequence in sequences}) > 1:
        raise ValueError(
            f"sequences have windows {sorted(kinds)}, must all have those of one model; give them the same"
        )
    known = tuple(window for each in kinds for window, _ in each) or (0,)
    found = [tuple(sorted(set(own))) or known for own in of_stage] or [known] * plan.num_stages
    if len(found) != plan.num_stages or not {window for own in found for window in own} <= set(known):
        raise ValueError(
            f"windows_of_stage is {tuple(of_stage)}, must name for each of {plan.num_stages} stages some of {known}, "
            "which the sequences have; take both from one model"
        )
    return found


def _in_turns(programs: Sequence[RankProgram], turns: Turns) -> tuple[RankProgram, ...]:
    """With sends where they hold nobody up; as they are where stages wait for each other however these are posted."""
    if len(turns) < programs[0].num_stages * _num_passes(programs[0]):
        return tuple(programs)
    return tuple(
        replace(each, instructions=in_turns(each.instructions, stage=each.stage, turns=turns)) for each in programs
    )


def _num_passes(program: RankProgram) -> int:
    return sum(isinstance(item, Forward | Backward) for item in program.instructions)


def _check_primitives(plan: BatchPlan, primitives: Collection[Primitive]) -> None:
    for number, microbatch in enumerate(plan.microbatches):
        for index, group in enumerate(microbatch.groups):
            if group.degree > 1 and group.primitive not in primitives:
                raise ValueError(
                    f"microbatch {number} group {index}: primitive is {group.primitive.value}, must be one of "
                    f"{sorted(each.value for each in primitives)}; plan with these (plan.primitives)"
                )


def _pieces(layout: Layout, *, num_ranks: int) -> list[tuple[Piece, ...]]:
    """What each rank loads."""
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        pieces[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    return [tuple(each) for each in pieces]
