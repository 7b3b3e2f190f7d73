"""Lowering: from a plan to one program per stage and rank.

A batch passes through once: the layouts of all microbatches, the attention of all ranks in each kind of layers, the
exchange of image features if any, the instructions of each stage, and when stages post their sends.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from rayfcp.plan.layout import Blocks, Placement, Transfers, placements_of
from rayfcp.program.attention import lower_attention
from rayfcp.program.encoding import lower_encoding
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Encode,
    Forward,
    Free,
    Instruction,
    LayerAttention,
    Load,
    Piece,
    RankProgram,
    Receive,
    ReshuffleProgram,
    Send,
    StageFlow,
)
from rayfcp.program.pieces import Pieces
from rayfcp.program.programs import Attention, Programs, scan_tables
from rayfcp.program.progress import hand_overs_stuck
from rayfcp.program.scan import ScanProgram
from rayfcp.program.scans import ScanTable
from rayfcp.program.table import AttentionTable, Units
from rayfcp.program.windows import windowed
from rayfcp.values import (
    FULL,
    Action,
    BatchPlan,
    Group,
    LayerKind,
    MicrobatchPlan,
    Primitive,
    RecurrentKind,
    SequenceSpec,
    TokenwiseKind,
    attends,
)


def lower(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    placements: Sequence[Placement] | None = None,
    reduce_every: str = "step",
    kinds_of_stage: Sequence[Sequence[LayerKind]] = (),
    forward_only: bool = False,
) -> Programs:
    """One program per stage and rank, that of rank r on stage p at index p x num_ranks + r.

    `sequences` are those that were planned, `sequences[i].id == i`, `placements` those of
    `rayfcp.plan.layout.placements_of` where the caller has them. Gradients are reduced in the last backward pass
    (`reduce_every="step"`) or in each (`"microbatch"`). All ranks run the same number of passes: a rank without tokens
    in a microbatch runs one padding token. A group of one rank exchanges nothing, so that its primitive does not
    matter. The planner sees to it that degrees divide heads. All stages run the same attention in layers of one kind;
    only which of the sequences' `layer_kinds` they have (`kinds_of_stage`, all if absent), the layers that they
    recompute, the order of their passes and their neighbours differ. Sends follow their pass, or come somewhat later
    where stages would otherwise wait for each other. `forward_only`: return the programs' `forward_part`, as evaluation
    runs it.

    Raises:
        ValueError: a stage names a kind of layers that the sequences do not; sequences disagree on these; a layout
            cannot be run (`lower_attention`), or an encoding (`lower_encoding`).
    """
    placements = placements_of(plan, sequences) if placements is None else placements
    _check_sequences(placements, sequences)
    of_stage = _kinds(plan, sequences, kinds_of_stage)
    softmax = [_softmax(kinds) for kinds in of_stage]
    attention = _attention(plan, placements, sequences=sequences, kinds=set(chain.from_iterable(softmax)))
    pieces = [Pieces.of(each, num_ranks=plan.num_ranks) for each in placements]
    recurrent = [{kind.recurrence for kind in kinds if kind.recurrence} for kinds in of_stage]
    scans = scan_tables(pieces, sorted(set().union(*recurrent)))
    encodes = lower_encoding(plan, placements, sequences=sequences)
    outlines = [
        _outline(
            plan,
            stage,
            {kind: attention[kind] for kind in softmax[stage]},
            scans={kind: tables for kind, tables in scans.items() if kind in own},
            encodes=encodes,
            reduce_every=reduce_every,
        )
        for stage, own in enumerate(recurrent)
    ]
    programs = Programs(
        plan_hash=plan.plan_hash,
        outlines=_sends_in_order(outlines, plan) if plan.num_stages > 1 and not forward_only else outlines,
        attention=attention,
        pieces=pieces,
        encodes=encodes,
    )
    return programs.forward_part() if forward_only else programs


def _outline(
    plan: BatchPlan,
    stage: int,
    attention: Attention,
    *,
    scans: Mapping[RecurrentKind, Sequence[ScanTable]],
    encodes: Sequence[Sequence[Encode]],
    reduce_every: str,
) -> RankProgram:
    """Return what a rank with a token of padding runs on a stage; it keeps the token if any rank keeps something."""
    num_microbatches = len(plan.microbatches)
    parts: dict[str, Any] = {
        "pieces": [()] * num_microbatches,
        "encodes": [_NO_IMAGES if each else None for each in encodes],
        "passes": [
            forward_pass(
                at,
                [LayerAttention(kind=kind, attention=_padding(tables[at])) for kind, tables in attention.items()],
                scans=[tables[at].padding() for tables in scans.values()],
            )
            for at in range(num_microbatches)
        ],
    }
    return RankProgram(
        rank=0,
        num_ranks=1,
        stage=stage,
        num_stages=plan.num_stages,
        plan_hash=plan.plan_hash,
        instructions=stage_instructions(plan, stage, reduce_every=reduce_every, **parts),
    )


_NO_IMAGES = Encode(
    microbatch=-1,
    images=(),
    features=ReshuffleProgram(rank=0, num_ranks=1, num_tokens=0, num_placed=0, kept=(), rounds=()),
    rows=(),
)


def _padding(table: AttentionTable) -> AttentionProgram:
    return AttentionProgram(num_tokens=1, forward=(), backward=(), kept=((0, 1),) if len(table.kept.unit) else ())


def stage_instructions(
    plan: BatchPlan,
    stage: int,
    *,
    pieces: Sequence[tuple[Piece, ...]],
    passes: Sequence[Forward],
    reduce_every: str,
    encodes: Sequence[Encode | None] = (),
) -> tuple[Instruction, ...]:
    """Instructions of one rank on a stage.

    `pieces[m]`, `encodes[m]` and `passes[m]`, which recomputes nothing yet, are those of microbatch m.

    A forward pass follows its load, its encoding, and the activations of the stage before; a backward pass follows the
    gradients of the stage after. What a microbatch kept for later slices is freed after its backward pass.
    """
    actions = _actions(plan, stage)
    last = [action.microbatch for action, _ in actions if action.backward][-1]
    neighbours = _neighbours(plan, stage)
    instructions: list[Instruction] = []
    for action, recomputed_layers in actions:
        at, passed = action.microbatch, passes[action.microbatch]
        if not action.backward:
            passed = replace(passed, recomputed_layers=recomputed_layers, keeps_attention=plan.keeps_attention)
            instructions += _passed_forward(passed, neighbours, pieces=pieces[at], encode=encodes[at : at + 1])
            continue
        target, source = neighbours
        handed: dict[str, Any] = {
            "microbatch": at,
            "flow": StageFlow.GRADIENT,
            "num_tokens": passed.attention.num_tokens,
        }
        if source is not None:
            instructions.append(Receive(stage=source, **handed))
        instructions.append(Backward(microbatch=at, reduce=reduce_every == "microbatch" or at == last))
        if target is not None:
            instructions.append(Send(stage=target, **handed))
        if _keeps(passed):
            instructions.append(Free(microbatch=at))
    return tuple(instructions)


def _neighbours(plan: BatchPlan, stage: int) -> tuple[int | None, int | None]:
    """The stages before and after this one."""
    return stage - 1 if stage > 0 else None, stage + 1 if stage + 1 < plan.num_stages else None


def _keeps(passed: Forward) -> bool:
    return any(each.attention.inner.kept for each in passed.kinds) or any(each.tails for each in passed.scans)


def _passed_forward(
    passed: Forward,
    neighbours: tuple[int | None, int | None],
    *,
    pieces: tuple[Piece, ...],
    encode: Sequence[Encode | None],
) -> list[Instruction]:
    """A forward pass with its load, its encoding, and the activations from and to other stages."""
    at, (source, target) = passed.microbatch, neighbours
    handed: dict[str, Any] = {"microbatch": at, "flow": StageFlow.ACTIVATION, "num_tokens": passed.attention.num_tokens}
    instructions: list[Instruction] = [Load(microbatch=at, pieces=pieces)]
    instructions += [replace(each, microbatch=at) for each in encode if each]
    if source is not None:
        instructions.append(Receive(stage=source, **handed))
    instructions.append(passed)
    if target is not None:
        instructions.append(Send(stage=target, **handed))
    return instructions


def forward_pass(microbatch: int, kinds: Sequence[LayerAttention], *, scans: Sequence[ScanProgram] = ()) -> Forward:
    """A forward pass that recomputes nothing, of layers of these kinds, ascending."""
    first, *others = kinds
    return Forward(
        microbatch=microbatch,
        attention=first.attention,
        recomputed_layers=0,
        kind=first.kind,
        others=tuple(others),
        scans=tuple(scans),
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


def _check_sequences(placements: Sequence[Placement], sequences: Sequence[SequenceSpec]) -> None:
    named = np.unique(np.concatenate([each.own.sequence for each in placements])) if placements else np.empty(0)
    unknown = np.setdiff1d(named, [sequence.id for sequence in sequences]).tolist()
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


def _softmax(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Those of softmax attention; without any, `TokenwiseKind` for the tokens alone."""
    return tuple(kind for kind in kinds if attends(kind)) or (TokenwiseKind(),)


def _attention(
    plan: BatchPlan, placements: Sequence[Placement], *, sequences: Sequence[SequenceSpec], kinds: Collection[LayerKind]
) -> dict[LayerKind, tuple[AttentionTable, ...]]:
    """The attention of all microbatches in layers of each kind, which of `TokenwiseKind` exchanges nothing.

    Where a kind hides nothing of any sequence, it is that of full attention.

    Raises:
        ValueError: a layout cannot be run (`lower_attention`).
    """
    longest = max((sequence.num_tokens for sequence in sequences), default=0)
    units = [
        _units(microbatch, placement, num_ranks=plan.num_ranks)
        for microbatch, placement in zip(plan.microbatches, placements, strict=True)
    ]
    found: dict[LayerKind, tuple[AttentionTable, ...]] = {}
    for kind in sorted(kinds):
        effective = kind if kind.hides(longest) else FULL
        if not attends(effective):
            found[effective] = tuple(_tokenwise(placement, num_ranks=plan.num_ranks) for placement in placements)
        elif effective not in found:
            mine = _cut(placements, sequences, kind=effective, units=units) if effective != FULL else placements
            found[effective] = _lowered(mine, units, kind=effective)
        found[kind] = found[effective]
    return {kind: found[kind] for kind in sorted(kinds)}


def _tokenwise(placement: Placement, *, num_ranks: int) -> AttentionTable:
    """The tokens of ranks, none of which attends to any."""
    ranks = np.arange(num_ranks + 1)
    alone = Units(ranks, ranks[:-1], np.zeros(num_ranks, bool))
    own = replace(placement, blocks=placement.own, contexts=(), transfers=Transfers.of(()), num_rounds=0, pacing=None)
    return lower_attention(replace(own, heads=1), alone, kind=TokenwiseKind())


def _cut(
    placements: Sequence[Placement], sequences: Sequence[SequenceSpec], *, kind: LayerKind, units: Sequence[Units]
) -> list[Placement]:
    uncut = [sequence.id for sequence in sequences if not kind.hides(sequence.num_tokens)]
    named = []  # units as transfers number them: by a rank, or where runs share out heads one after the other
    for placement, each in zip(placements, units, strict=True):
        unit = each.of_ranks()[0]
        named.append(unit if placement.heads > 1 else each.ranks[each.first[unit]])
    return windowed(placements, kind=kind, uncut=uncut, units=named)


def _units(microbatch: MicrobatchPlan, placement: Placement, *, num_ranks: int) -> Units:
    """The runs of ranks that share out heads, by the layout or as Ulysses groups; other ranks are alone.

    Raises:
        ValueError: runs do not divide the ranks; both exist; or transfers touch ranks of a Ulysses group.
    """
    heads, groups = placement.heads, microbatch.groups
    exchanging = [group for group in groups if group.primitive is Primitive.ULYSSES and group.degree > 1]
    if heads < 1 or num_ranks % heads:
        raise ValueError(f"layout.heads is {heads}, must be at least 1 and divide the {num_ranks} ranks; plan again")
    if heads > 1 and any(group.primitive is Primitive.ULYSSES for group in groups):
        raise ValueError(
            f"layout.heads is {heads} beside Ulysses groups "
            f"{[group.ranks for group in groups if group.primitive is Primitive.ULYSSES]}, must be 1 there: heads are "
            "shared out once; make the groups rings"
        )
    ranks = np.arange(num_ranks)
    if heads > 1:
        first = np.arange(0, num_ranks + 1, heads)
        return Units(first, ranks, np.ones(len(first) - 1, bool))
    _check_rounds(exchanging, placement.transfers)
    alone = np.setdiff1d(ranks, [rank for group in exchanging for rank in group.ranks])
    units = sorted([*((rank,) for rank in alone.tolist()), *(group.ranks for group in exchanging)])
    degree = np.array([len(each) for each in units], np.int64)
    return Units(np.append(0, np.cumsum(degree)), np.array(list(chain.from_iterable(units)), np.int64), degree > 1)


def _check_rounds(exchanging: Sequence[Group], transfers: Transfers) -> None:
    for group in exchanging if len(transfers.round) else ():
        touched = np.isin(transfers.source, group.ranks) | np.isin(transfers.target, group.ranks)
        if touched.any():
            row = int(np.argmax(touched))
            ends = {int(transfers.source[row]), int(transfers.target[row])}
            raise ValueError(
                f"round {transfers.round[row]}: a transfer touches ranks {sorted(ends & set(group.ranks))} of a "
                f"{group.primitive.value} group, which must have none; drop the transfer or make the group a ring"
            )


def _lowered(placements: Sequence[Placement], units: Sequence[Units], *, kind: LayerKind) -> tuple[AttentionTable, ...]:
    """The attention of one microbatch after the other, each with what the earlier ones left it."""
    needed: dict[int, list[Blocks]] = {}
    for placement in placements:
        first = placement.num_own
        for microbatch, count in placement.contexts:
            needed.setdefault(microbatch, []).append(placement.blocks.at(slice(first, first + count)))
            first += count
    tables: list[AttentionTable] = []
    for number, (placement, mine) in enumerate(zip(placements, units, strict=True)):
        tables.append(
            lower_attention(
                placement,
                mine,
                kind=kind,
                earlier=dict(enumerate(tables)),
                needed=Blocks.joined(needed[number]) if number in needed else None,
            )
        )
    return tuple(tables)


PassOrder = Mapping[tuple[int, Action], int]
"""(stage, pass) -> position among the passes of all stages, by start."""

FORWARD_SHARE = 1 / 3
"""Share of a microbatch's seconds: a backward pass takes about two forward passes."""


def _sends_in_order(outlines: Sequence[RankProgram], plan: BatchPlan) -> Sequence[RankProgram]:
    """The outlines of all stages, with sends later where stages would otherwise wait for each other; unchanged where
    they do so however sends are posted.

    Channels between stages complete operations in the order in which they are posted. A stage that runs more than one
    microbatch ahead may have sends posted before a receive that the next stage takes only later, while that stage waits
    for something behind this receive. It cannot happen where all hand-overs of a channel follow one order of which that
    of each stage is a part: the order in which their receivers reach them.
    """
    if hand_overs_stuck(outlines) is None:
        return outlines
    order = _pass_order(plan)
    num_passes = sum(isinstance(item, Forward | Backward) for item in outlines[0].instructions)
    if len(order) < plan.num_stages * num_passes:
        return outlines
    return [replace(each, instructions=_delayed(each.instructions, stage=each.stage, order=order)) for each in outlines]


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
