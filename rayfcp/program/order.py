"""What the instructions of all ranks must be, before their messages are looked at."""

from collections.abc import Sequence

from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Forward,
    HeadProgram,
    Load,
    Payload,
    RankProgram,
)


def check_order(programs: Sequence[RankProgram]) -> None:
    """Every rank loads, passes forward and passes backward each microbatch once, and sums the gradients.

    Microbatches are 0..M-1, in this order for each kind of instruction; passes of different microbatches
    may interleave. The last backward pass reduces, so that no gradient stays on its rank. Program r is
    that of rank r, all are of one stage.

    Raises:
        ValueError: an instruction is missing, double, out of order or of the wrong size; names the rank.
    """
    if not programs:
        raise ValueError("programs is empty, must hold one program for each rank; lower the plan")
    num_microbatches = sum(isinstance(item, Load) for item in programs[0].instructions)
    if num_microbatches == 0:
        raise ValueError("rank 0 has no Load, must have one for each microbatch (at least 1); lower the plan again")
    for index, program in enumerate(programs):
        _check_labels(program, programs[0], index=index, num_ranks=len(programs))
        _check_passes(program, num_microbatches)
        _check_forwards(program)


def _check_labels(program: RankProgram, first: RankProgram, *, index: int, num_ranks: int) -> None:
    if (program.rank, program.num_ranks) != (index, num_ranks):
        raise ValueError(
            f"program at position {index} has rank {program.rank} and num_ranks {program.num_ranks}, must be {index} "
            f"and {num_ranks}; give the programs of all ranks, in the order of ranks"
        )
    stage = (program.stage, program.num_stages)
    if stage != (first.stage, first.num_stages) or not 0 <= program.stage < program.num_stages:
        raise ValueError(
            f"rank {index}: stage is {program.stage} of num_stages {program.num_stages}, must be within it and that of "
            f"rank 0 ({first.stage} of {first.num_stages}); check one stage at a time"
        )


def _check_passes(program: RankProgram, num_microbatches: int) -> None:
    for kind in (Load, Forward, Backward):
        found = [item.microbatch for item in program.instructions if isinstance(item, kind)]
        if found != list(range(num_microbatches)):
            raise ValueError(
                f"rank {program.rank}: {kind.__name__} names microbatches {found}, must name each of "
                f"[0, {num_microbatches}) once, in this order; a rank without tokens runs one padding token"
            )
    place = {(type(item), item.microbatch): at for at, item in enumerate(program.instructions)}
    for number in range(num_microbatches):
        if not place[Load, number] < place[Forward, number] < place[Backward, number]:
            raise ValueError(
                f"rank {program.rank}: instructions of microbatch {number} are out of order, must be Load, Forward, "
                "Backward; lower the plan again"
            )
    last = [item for item in program.instructions if isinstance(item, Backward)][-1]
    if not last.reduce:
        raise ValueError(
            f"rank {program.rank}: reduce is False in the last Backward (microbatch {last.microbatch}), must be True; "
            "otherwise gradients are never summed over ranks"
        )


def _check_forwards(program: RankProgram) -> None:
    loaded = {
        item.microbatch: sum(piece.num_tokens for piece in item.pieces)
        for item in program.instructions
        if isinstance(item, Load)
    }
    for item in program.instructions:
        if not isinstance(item, Forward):
            continue
        where, due = f"rank {program.rank}, microbatch {item.microbatch}", max(1, loaded[item.microbatch])
        if item.recomputed_layers < 0:
            raise ValueError(f"{where}: recomputed_layers is {item.recomputed_layers}, must be at least 0; plan again")
        if item.attention.num_tokens != due:
            raise ValueError(
                f"{where}: num_tokens is {item.attention.num_tokens}, must be the {due} that Load brings "
                "(1 of padding if none); lower the plan again"
            )
        if isinstance(item.attention, HeadProgram):
            _check_heads(item.attention, program, where=where)
            _check_payloads(item.attention.attention, where=where)
        else:
            _check_payloads(item.attention, where=where)


def _check_heads(attention: HeadProgram, program: RankProgram, *, where: str) -> None:
    """The group has this rank and others, each once, and at least one token (of padding) on each."""
    ranks, tokens = attention.ranks, attention.tokens
    inside = all(0 <= rank < program.num_ranks for rank in ranks)
    if program.rank not in ranks or len(set(ranks)) < max(2, len(ranks)) or not inside:
        raise ValueError(
            f"{where}: ranks of the Ulysses group are {ranks}, must be {program.rank} and others of "
            f"[0, {program.num_ranks}), each once; lower the plan again"
        )
    if len(tokens) != len(ranks) or min(tokens) < 1 or tokens[ranks.index(program.rank)] != attention.num_tokens:
        raise ValueError(
            f"{where}: tokens of the Ulysses group are {tokens} for ranks {ranks}, must be at least 1 for each and "
            f"num_tokens, {attention.num_tokens}, for this rank; lower the plan again"
        )
    if attention.attention.num_tokens != sum(tokens):
        raise ValueError(
            f"{where}: the attention of the Ulysses group has num_tokens {attention.attention.num_tokens}, must be the "
            f"{sum(tokens)} of all its ranks; lower the plan again"
        )


def _check_payloads(attention: AttentionProgram, *, where: str) -> None:
    for step in attention.forward + attention.backward:
        for message in step.sends + step.receives:
            if message.payload not in (Payload.KV, Payload.GRAD):
                raise ValueError(
                    f"{where}: a round carries {message.payload.value}, must be kv or grad; lower the plan again"
                )
