"""What the instructions of all ranks and stages must be, before their messages are looked at."""

from collections.abc import Sequence

from rayfcp.program.encode_order import check_encodes
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Forward,
    HeadProgram,
    Load,
    Payload,
    RankProgram,
)
from rayfcp.program.kinds import check_likeness, check_loads, check_windows, windows_of
from rayfcp.program.neighbours import check_neighbours
from rayfcp.program.reuse import check_frees, check_reuse


def check_order(programs: Sequence[RankProgram]) -> None:
    """Every rank loads, passes forward and passes backward each microbatch once on each stage, and sums the gradients.

    Microbatches are 0..M-1, loaded and passed forward in this order. Backward passes come in any order that is the
    same everywhere and in which no microbatch goes before one that reads its keys and values (`check_reuse`); passes
    of different microbatches may interleave. The last backward pass reduces, so that no gradient stays on its rank.
    What neighbouring stages hand over is there once, in its place (`check_neighbours`), and so is the end of what a
    microbatch keeps for others (`check_frees`). Where pictures are encoded, all ranks do so together
    (`check_encodes`). All stages load alike, and attend alike in layers of one window.
    Program p x num_ranks + r is that of rank r on stage p.

    Raises:
        ValueError: an instruction is missing, double, out of order or of the wrong size; names the rank.
    """
    if not programs:
        raise ValueError("programs is empty, must hold one program for each stage and rank; lower the plan")
    first = programs[0]
    num_microbatches = sum(isinstance(item, Load) for item in first.instructions)
    if num_microbatches == 0:
        raise ValueError("rank 0 has no Load, must have one for each microbatch (at least 1); lower the plan again")
    known: dict[tuple[int, int], RankProgram] = {}
    for index, program in enumerate(programs):
        _check_labels(program, first, index=index, num_programs=len(programs))
        _check_passes(program, num_microbatches)
        check_windows(program, programs[index - program.rank])
        if any((program.rank, window) not in known for window in windows_of(program)):
            _check_attention(program)
            check_reuse(program)
        check_loads(program, programs[program.rank])
        for window in windows_of(program):
            check_likeness(program, known.setdefault((program.rank, window), program), window=window)
        _check_backward_order(program, first)
        check_neighbours(program)
        check_frees(program)
    check_encodes(programs)


def _check_labels(program: RankProgram, first: RankProgram, *, index: int, num_programs: int) -> None:
    num_ranks, num_stages = first.num_ranks, first.num_stages
    if num_ranks < 1 or num_stages < 1 or num_ranks * num_stages != num_programs:
        raise ValueError(
            f"programs holds {num_programs}, must hold one for each of num_ranks {num_ranks} on each of num_stages "
            f"{num_stages}; give the programs of all ranks and stages"
        )
    stage, rank = divmod(index, num_ranks)
    if (program.rank, program.num_ranks) != (rank, num_ranks):
        raise ValueError(
            f"program at position {index} has rank {program.rank} and num_ranks {program.num_ranks}, must be {rank} "
            f"and {num_ranks}; give the programs of all ranks, in the order of ranks, stage by stage"
        )
    if (program.stage, program.num_stages) != (stage, num_stages):
        raise ValueError(
            f"program at position {index} has stage {program.stage} of num_stages {program.num_stages}, must be "
            f"{stage} of {num_stages}; give the programs of all ranks, in the order of ranks, stage by stage"
        )


def _check_passes(program: RankProgram, num_microbatches: int) -> None:
    for kind in (Load, Forward, Backward):
        found = [item.microbatch for item in program.instructions if isinstance(item, kind)]
        in_order = sorted(found) if kind is Backward else found
        if in_order != list(range(num_microbatches)):
            raise ValueError(
                f"{program.place}: {kind.__name__} names microbatches {found}, must name each of "
                f"[0, {num_microbatches}) once{'' if kind is Backward else ', in this order'}; a rank without tokens "
                "runs one padding token"
            )
    place = {(type(item), item.microbatch): at for at, item in enumerate(program.instructions)}
    for number in range(num_microbatches):
        if not place[Load, number] < place[Forward, number] < place[Backward, number]:
            raise ValueError(
                f"{program.place}: instructions of microbatch {number} are out of order, must be Load, Forward, "
                "Backward; lower the plan again"
            )
    last = [item for item in program.instructions if isinstance(item, Backward)][-1]
    if not last.reduce:
        raise ValueError(
            f"{program.place}: reduce is False in the last Backward (microbatch {last.microbatch}), must be True; "
            "otherwise gradients are never summed over ranks"
        )
    for item in program.instructions:
        if isinstance(item, Forward) and item.recomputed_layers < 0:
            raise ValueError(
                f"{program.place}, microbatch {item.microbatch}: recomputed_layers is {item.recomputed_layers}, must "
                "be at least 0; plan again"
            )


def _check_backward_order(program: RankProgram, first: RankProgram) -> None:
    mine, theirs = (
        [item.microbatch for item in each.instructions if isinstance(item, Backward)] for each in (program, first)
    )
    if mine != theirs:
        raise ValueError(
            f"{program.place}: Backward comes in the order {mine}, must be that of {first.place}, {theirs}; lower one "
            "plan for all"
        )


def _check_attention(program: RankProgram) -> None:
    """Attention is over as many tokens as are loaded; its rounds carry keys, values and their gradients."""
    loaded = {
        item.microbatch: sum(piece.num_tokens for piece in item.pieces)
        for item in program.instructions
        if isinstance(item, Load)
    }
    for item in program.instructions:
        for kind in item.kinds if isinstance(item, Forward) else ():
            attention = kind.attention
            where, due = f"{program.place}, microbatch {item.microbatch}", max(1, loaded[item.microbatch])
            if attention.num_tokens != due:
                raise ValueError(
                    f"{where}: num_tokens is {attention.num_tokens}, must be the {due} that Load brings "
                    "(1 of padding if none); lower the plan again"
                )
            if isinstance(attention, HeadProgram):
                _check_heads(attention, program, where=where)
            _check_payloads(attention.inner, where=where)


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
