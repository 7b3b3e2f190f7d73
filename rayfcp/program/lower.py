"""Lowering: from a plan to one program per stage and rank."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rayfcp.plan.layout import layouts_of
from rayfcp.program.attention import lower_attention
from rayfcp.program.context import Order
from rayfcp.program.deadlock import hand_overs_end
from rayfcp.program.heads import lower_heads, slot_order
from rayfcp.program.instructions import AttentionProgram, Backward, Forward, HeadProgram, Piece, RankProgram
from rayfcp.program.staged import staged
from rayfcp.program.turns import Turns, in_turns, turns_of
from rayfcp.values import BatchPlan, Block, Group, Layout, Mask, MicrobatchPlan, Primitive, SequenceSpec

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
) -> tuple[RankProgram, ...]:
    """One program per stage and rank, that of rank r on stage p at index p x num_ranks + r.

    `sequences` are those that were planned, `sequences[i].id == i`. Gradients are reduced in the last
    backward pass (`reduce_every="step"`) or in each (`"microbatch"`). All ranks run the same number of
    passes: a rank without tokens in a microbatch runs one padding token. A group of one rank exchanges
    nothing, so that its primitive does not matter. That heads divide is the planner's to see to. All stages run the
    same attention; only what they recompute, the order of their passes and their neighbours differ (`staged`). Sends
    follow their pass, or come somewhat later where stages would otherwise wait for each other (`turns`).

    Raises:
        ValueError: a group of several ranks has a primitive that is not in `primitives`; or a layout cannot be
            run (`lower_attention`, `lower_heads`).
    """
    _check_primitives(plan, primitives)
    layouts = layouts_of(plan, sequences)
    passes = _Passes(plan, layouts, masks={sequence.id: sequence.mask for sequence in sequences}).all()
    loads = [_pieces(layout, num_ranks=plan.num_ranks) for layout in layouts]
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
                attention=[each[rank] for each in passes],
                reduce_every=reduce_every,
            ),
        )
        for stage in range(plan.num_stages)
        for rank in range(plan.num_ranks)
    )
    return programs if hand_overs_end(programs[:: plan.num_ranks]) else _in_turns(programs, turns_of(plan))


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


@dataclass(frozen=True, slots=True)
class _Passes:
    """Lowers the attention of one microbatch after the other, each with what the earlier ones left it."""

    plan: BatchPlan
    layouts: Sequence[Layout]
    masks: dict[int, Mask]

    def all(self) -> list[tuple[AttentionProgram | HeadProgram, ...]]:
        """By microbatch, then rank."""
        needed: list[set[tuple[int, int]]] = [set() for _ in self.layouts]
        for layout in self.layouts:
            for context in layout.context:
                needed[context.microbatch] |= {(block.sequence, block.start) for block in context.blocks}
        orders = {at: self._orders(at) for at, blocks in enumerate(needed) if blocks}
        return [self._lowered(at, orders=orders, needed=needed[at]) for at in range(len(self.layouts))]

    def _exchanging(self, number: int) -> list[Group]:
        groups = self.plan.microbatches[number].groups
        return [group for group in groups if group.primitive is Primitive.ULYSSES and group.degree > 1]

    def _orders(self, number: int) -> dict[int, Order]:
        """Of each rank, the order of the slot 0 that it (with whom it shares heads) had in a microbatch."""
        layout, num_ranks = self.layouts[number], self.plan.num_ranks
        sharing = [group.ranks for group in self._exchanging(number)]
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
            by_rank = lower_heads(layout, runs, masks=self.masks, earlier=orders, needed=needed)
            return tuple(by_rank[rank] for rank in range(num_ranks))
        in_rows = {at: [each[rank] for rank in range(num_ranks)] for at, each in orders.items()}
        groups = self._exchanging(number)
        rest = _rest(layout, groups)
        programs: list[AttentionProgram | HeadProgram] = [
            *lower_attention(rest, masks=self.masks, num_ranks=num_ranks, earlier=in_rows, needed=needed)
        ]
        for group in groups:
            _check_rounds(group, layout)
            held = _part(layout, group.ranks)
            by_rank = lower_heads(held, [group.ranks], masks=self.masks, earlier=orders, needed=needed)
            for rank, program in by_rank.items():
                programs[rank] = program
        return tuple(programs)


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


def _pieces(layout: Layout, *, num_ranks: int) -> list[tuple[Piece, ...]]:
    """What each rank loads."""
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for block in layout.blocks:
        pieces[block.rank].append(Piece(sequence=block.sequence, start=block.start, stop=block.stop))
    return [tuple(each) for each in pieces]
