"""The public validator: proof that a plan does what a single process would do, and can be run."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rayfcp.plan import lay_out
from rayfcp.program.cells import check_cells
from rayfcp.program.deadlock import check_progress
from rayfcp.program.instructions import AttentionProgram, Forward, Load, Piece, RankProgram
from rayfcp.program.lower import lower
from rayfcp.program.replay import Cells, Replay
from rayfcp.values import BatchPlan, ClusterSpec, Layout, SequenceSpec


def check_plan(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> None:
    """Prove a plan.

    Each token of each sequence is placed once; each (query, key) cell of each mask is computed once,
    forward and backward; each partial gradient reaches its owner once; rounds are matchings; no rank
    holds more than `cluster.max_tokens_per_rank` in a microbatch; no rank can deadlock; the lower bound
    does not exceed the prediction.

    Raises:
        ValueError: what fails, where, with the value and its bound.
    """
    _check_shape(plan, sequences, cluster=cluster)
    for number, microbatch in enumerate(plan.microbatches):
        layout = lay_out(microbatch, sequences)
        _check_matchings(layout, number, num_ranks=plan.num_ranks)
        _check_memory(layout, number, cluster=cluster)
    check_programs(lower(plan, sequences), sequences)


def check_programs(programs: Sequence[RankProgram], sequences: Sequence[SequenceSpec]) -> None:
    """Prove the programs of all ranks, however they were made.

    Raises:
        ValueError: tokens, cells or gradients are missing or double, or a rank would wait for ever.
    """
    _check_tokens(programs, sequences)
    _check_attention(programs, sequences)
    check_progress(programs)


def _check_shape(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec) -> None:
    if plan.num_ranks != cluster.num_ranks:
        raise ValueError(f"plan.num_ranks is {plan.num_ranks}, the cluster has {cluster.num_ranks}; plan again")
    if plan.generation != cluster.generation:
        raise ValueError(f"plan.generation is {plan.generation}, the cluster's is {cluster.generation}; plan again")
    if plan.lower_bound_s > plan.predicted_s * (1 + 1e-9):
        raise ValueError(f"lower_bound_s is {plan.lower_bound_s}, above predicted_s {plan.predicted_s}")
    for index, sequence in enumerate(sequences):
        if sequence.id != index:
            raise ValueError(f"sequence at position {index} has id {sequence.id}; ids are positions in the batch")
    for number, microbatch in enumerate(plan.microbatches):
        ranks = [rank for group in microbatch.groups for rank in group.ranks]
        outside = [rank for rank in ranks if not 0 <= rank < plan.num_ranks]
        if outside or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"microbatch {number}: groups name ranks {ranks}; each of [0, {plan.num_ranks}) at most once"
            )


def _check_matchings(layout: Layout, number: int, *, num_ranks: int) -> None:
    for index, step in enumerate(layout.rounds):
        for end in ("source", "target"):
            ranks = [getattr(transfer, end) for transfer in step.transfers]
            if len(set(ranks)) != len(ranks) or any(not 0 <= rank < num_ranks for rank in ranks):
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
    """Each cell once in each direction; each partial dK, dV home once; forward and backward agree."""
    computed: dict[bool, list[Cells]] = {False: [], True: []}
    for parts in _microbatches(programs):
        for backward in (False, True):
            replay = Replay(parts, backward=backward)
            busy = {key for key in replay.cells if parts[key[0]][1].pieces}
            computed[backward] += [cell for key in sorted(busy) for cell in replay.cells[key]]
        home = replay.partials_at_home()
        wrong = [key for key in replay.cells if home[key] != 1]
        if wrong or replay.lost_partials():
            raise ValueError(
                f"dK, dV of attend {wrong[:1]} (rank, round, position) do not reach their owner exactly once"
            )
    for backward, cells in computed.items():
        check_cells(cells, sequences, direction="backward" if backward else "forward")


def _microbatches(programs: Sequence[RankProgram]) -> Iterator[list[tuple[AttentionProgram, Load]]]:
    loads = [[item for item in program.instructions if isinstance(item, Load)] for program in programs]
    forwards = [[item for item in program.instructions if isinstance(item, Forward)] for program in programs]
    if len({len(each) for each in loads + forwards}) > 1:
        raise ValueError("ranks run different numbers of passes; a rank without tokens runs one padding token")
    for number in range(len(loads[0])):
        yield [(forward[number].attention, load[number]) for forward, load in zip(forwards, loads, strict=True)]
