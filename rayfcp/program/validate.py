"""The public validator: proof that a plan does what a single process would do, and can be run."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.layout import layouts_of
from rayfcp.program.buffers import check_buffers, check_pacing
from rayfcp.program.cells import check_cells
from rayfcp.program.claims import check_claims, check_members
from rayfcp.program.deadlock import check_progress
from rayfcp.program.features import check_features, check_shares
from rayfcp.program.gathered import Part, Past, first_heads
from rayfcp.program.heads import padding_number
from rayfcp.program.instructions import Load, Piece, RankProgram
from rayfcp.program.kinds import attention_by_window
from rayfcp.program.lower import ALL_PRIMITIVES, lower
from rayfcp.program.memory import check_memory
from rayfcp.program.replay import Replay
from rayfcp.program.table import Column
from rayfcp.values import BatchPlan, ClusterSpec, Layout, SequenceSpec


def check_plan(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel | None = None
) -> None:
    """Prove a plan.

    Each token of each sequence is placed once; each (query, key) cell of each mask is computed once,
    forward and backward; each partial gradient reaches its owner once; rounds are matchings; no rank
    holds more than `cluster.max_tokens_per_rank` in a microbatch, nor more received blocks than a layout's
    pacing has buffers; pictures, if any are encoded (as they must be where `cost` has an encoder), are encoded once
    each, and each of their tokens gets its features once; no rank can deadlock; blocks lie in the
    groups that list their sequences; predicted seconds add up and the lower bound does not exceed them. With
    `cost`, what a plan of pipelines was made with: no device of any stage holds more bytes than it has room for.

    Raises:
        ValueError: what fails, where, with the value and its bound.
    """
    check_claims(plan, sequences, cluster=cluster)
    check_shares(plan, sequences, due=cost is not None and cost.encoder is not None)
    layouts = layouts_of(plan, sequences)
    for number, (microbatch, layout) in enumerate(zip(plan.microbatches, layouts, strict=True)):
        check_pacing(layout, number=number)
        check_members(layout, microbatch, number=number)
        _check_matchings(layout, number)
        _check_memory(layout, number, cluster=cluster)
    programs = lower(plan, sequences, primitives=ALL_PRIMITIVES)
    check_programs(programs, sequences)
    check_buffers(programs, [layout.pacing for layout in layouts])
    if plan.pipelines and cost is not None and cost.pipeline is not None:
        check_memory(programs, cost=cost)


def check_programs(programs: Sequence[RankProgram], sequences: Sequence[SequenceSpec]) -> None:
    """Prove the programs of all ranks and stages, however they were made.

    Raises:
        ValueError: instructions, tokens, pictures, features, cells or gradients are missing, double or out of order,
            or a rank would wait for ever.
    """
    check_progress(programs)
    _check_tokens(programs[: programs[0].num_ranks], sequences)  # all stages load alike
    check_features(programs, sequences)
    _check_attention(programs, sequences)


def _check_matchings(layout: Layout, number: int) -> None:
    for index, step in enumerate(layout.rounds):
        for end in ("source", "target"):
            ranks = [getattr(transfer, end) for transfer in step.transfers]
            if len(set(ranks)) != len(ranks):
                raise ValueError(f"microbatch {number} round {index}: {end}s {ranks} are no matching; split the round")


def _check_memory(layout: Layout, number: int, *, cluster: ClusterSpec) -> None:
    held: dict[int, int] = defaultdict(int)
    for block in layout.blocks:
        held[block.rank] += block.num_tokens
    for rank, num_tokens in sorted(held.items()):
        if num_tokens > cluster.max_tokens_per_rank:
            raise ValueError(
                f"microbatch {number}: rank {rank} holds {num_tokens} tokens, the bound is "
                f"{cluster.max_tokens_per_rank} (max_tokens_per_rank); use more microbatches"
            )


def _check_tokens(programs: Sequence[RankProgram], sequences: Sequence[SequenceSpec]) -> None:
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for program in programs:
        for item in program.instructions:
            for piece in item.pieces if isinstance(item, Load) else ():
                pieces[piece.sequence].append(piece)
    unknown = set(pieces) - {sequence.id for sequence in sequences}
    if unknown:
        raise ValueError(f"plan places sequences {sorted(unknown)}, which the batch does not have")
    for sequence in sequences:
        at = 0
        for piece in sorted(pieces[sequence.id], key=lambda piece: (piece.start, piece.stop)):
            if piece.start != at or piece.stop <= piece.start:
                raise ValueError(
                    f"sequence {sequence.id}: piece [{piece.start}, {piece.stop}) where token {at} is due; "
                    "each token is placed once"
                )
            at = piece.stop
        if at != sequence.num_tokens:
            raise ValueError(
                f"sequence {sequence.id}: {at} of {sequence.num_tokens} tokens are placed; each must be, once"
            )


def _check_attention(programs: Sequence[RankProgram], sequences: Sequence[SequenceSpec]) -> None:
    """In layers of each window: each cell once in each direction; each partial dK, dV home once; forward and backward
    agree.

    Cells of slices of a sequence add up to those of its mask over microbatches. The partial of a context goes home to
    the slot from which it is added to the earlier microbatch's, whose backward pass is still to come (`check_reuse`).
    """
    loads = [
        [item for item in each.instructions if isinstance(item, Load)] for each in programs[: programs[0].num_ranks]
    ]
    for window, of_ranks in attention_by_window(programs).items():
        rows = zip(zip(*of_ranks, strict=True), zip(*loads, strict=True), strict=True)
        microbatches = [list(zip(parts, loaded, strict=True)) for parts, loaded in rows]
        _check_kind(microbatches, sequences, window=window)


def _check_kind(microbatches: Sequence[Sequence[Part]], sequences: Sequence[SequenceSpec], *, window: int) -> None:
    computed: dict[bool, list[Column]] = {False: [], True: []}
    earlier: list[Past] = []
    for parts in microbatches:
        held = first_heads(parts, earlier=earlier)
        earlier.append((parts, held))
        for backward in (False, True):
            replay = Replay(held, backward=backward)
            cells = replay.cells()
            _check_padding(cells, parts)
            computed[backward].append(cells[cells[:, 0] >= 0])
        home = replay.partials_at_home()
        wrong = [key for key in replay.partials if home[key] != 1]
        if wrong or replay.lost_partials():
            raise ValueError(f"dK, dV of attends {wrong[:1]} (rank, round, slot) do not reach their owner exactly once")
    forward, backward_too = (np.concatenate(cells) for cells in computed.values())
    check_cells(forward, sequences, window=window, direction="forward")
    if not np.array_equal(forward, backward_too):
        check_cells(backward_too, sequences, window=window, direction="backward")


def _check_padding(cells: Column, parts: Sequence[Part]) -> None:
    """Each rank without tokens computes its padding token's one cell once."""
    computed = Counter(cells[cells[:, 0] < 0, 0].tolist())
    for rank, (_, load) in enumerate(parts):
        times = computed[padding_number(rank)]
        if not load.pieces and times != 1:
            raise ValueError(
                f"rank {rank}, microbatch {load.microbatch}: the cell of the padding token is computed {times} times, "
                "must be once; lower the plan again"
            )
