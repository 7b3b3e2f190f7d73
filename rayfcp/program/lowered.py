"""Lowering of the attention of all microbatches, for one kind of layers after the other."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rayfcp.program.attention import lower_attention
from rayfcp.program.context import Order
from rayfcp.program.heads import Run, lower_heads, slot_order
from rayfcp.program.instructions import AttentionProgram, HeadProgram
from rayfcp.program.windowed import Bands, windowed
from rayfcp.values import BatchPlan, Block, Group, Layout, Mask, MicrobatchPlan, Primitive, SequenceSpec, bands_of

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
