"""That keys and values which a microbatch keeps for later ones are there while these read them, and no longer.

What an `Encode` must be: in its place, on all ranks, of sizes that agree, in rounds that meet.

All ranks encode a microbatch together, for they gather the encoder's shards, and then run the rounds of the exchange
one after the other. In each both ends of a parcel have it, so nobody waits for ever; the gradients take the same rounds
back inside the backward pass.

That a stage takes from its neighbours what it needs, and hands on what they need, once each and in its place.

What the instructions of all ranks and stages must be, before their messages are looked at.
"""

from collections.abc import Iterator, Mapping, Sequence

from rayfcp.program.columns import union
from rayfcp.program.instructions import (
    AttentionProgram,
    Backward,
    Encode,
    Flow,
    Forward,
    Free,
    HeadProgram,
    Load,
    Parcel,
    Payload,
    Range,
    RankProgram,
    Receive,
    Send,
)
from rayfcp.program.windows import check_likeness, check_loads, check_windows, windows_of


def check_reuse(program: RankProgram) -> None:
    """A context is of an earlier microbatch, which keeps just what later ones read, in layers of each window; and the
    backward pass of every reader comes before that microbatch's own: only then are its gradients whole. `check_order`
    found each pass once, with the same windows.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    backward = [item.microbatch for item in program.instructions if isinstance(item, Backward)]
    turn = {number: at for at, number in enumerate(backward)}
    forwards = [item for item in program.instructions if isinstance(item, Forward)]
    for at in range(len(forwards[0].kinds)):
        attention = {item.microbatch: item.kinds[at].attention.inner for item in forwards}
        _check_kind(attention, turn, place=program.place)


def _check_kind(attention: Mapping[int, AttentionProgram], turn: Mapping[int, int], *, place: str) -> None:
    read: dict[int, set[Range]] = {number: set() for number in turn}
    for number, here in attention.items():
        for slot in here.context:
            where = f"{place}, microbatch {number}: slot {slot.slot} is context of {slot.microbatch}"
            if not 0 <= slot.microbatch < number or slot.num_tokens < 1:
                raise ValueError(
                    f"{where}, tokens {slot.span}; must be at least one token of an earlier microbatch; lower the plan "
                    "again"
                )
            if turn[slot.microbatch] < turn[number]:
                raise ValueError(
                    f"{where}, whose Backward comes before this one's, must come after it: otherwise it lacks the "
                    "gradients of its keys and values; reverse them"
                )
            read[slot.microbatch].add(slot.span)
    for number, here in attention.items():
        if here.kept != (due := union(read[number])):
            raise ValueError(
                f"{place}, microbatch {number}: kept is {here.kept}, must be what later microbatches read of it, "
                f"{due}; lower the plan again"
            )


def check_frees(program: RankProgram) -> None:
    """What a microbatch keeps is freed once, after its backward pass; nothing else is.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    freed = [item.microbatch for item in program.instructions if isinstance(item, Free)]
    forwards = [item for item in program.instructions if isinstance(item, Forward)]
    due = [item.microbatch for item in forwards if any(kind.attention.inner.kept for kind in item.kinds)]
    if sorted(freed) != due:
        raise ValueError(f"{program.place}: Free names microbatches {freed}, must name {due} once: those that keep")
    done: set[int] = set()
    for item in program.instructions:
        if isinstance(item, Backward):
            done.add(item.microbatch)
        elif isinstance(item, Free) and item.microbatch not in done:
            raise ValueError(
                f"{program.place}: Free of microbatch {item.microbatch} comes before its Backward, must come after it"
            )


def check_encodes(programs: Sequence[RankProgram]) -> None:
    """Each `Encode` stands between its microbatch's Load and Forward, all ranks have it, its sizes agree, and parcels
    meet round by round.

    Raises:
        ValueError: names the rank and the microbatch.
    """
    encoded = [encodes_of(program) for program in programs]
    if not any(encoded):
        return
    if programs[0].num_stages > 1:
        raise ValueError(
            f"programs encode pictures on {programs[0].num_stages} stages, must have 1; plan with "
            "cluster.pipeline_stages=1"
        )
    last = max(item.microbatch for item in programs[0].instructions)
    for program, mine in zip(programs, encoded, strict=True):
        if mine.keys() != encoded[0].keys() or last not in mine:
            raise ValueError(
                f"{program.place}: Encode names microbatches {sorted(mine)}, must name those of rank 0, "
                f"{sorted(encoded[0])}, with the last one, {last}; lower one plan for all"
            )
        _check_places(program)
    for microbatch in encoded[0]:
        _check_rounds([each[microbatch] for each in encoded])


def encodes_of(program: RankProgram) -> dict[int, Encode]:
    """By microbatch."""
    return {item.microbatch: item for item in program.instructions if isinstance(item, Encode)}


def _check_places(program: RankProgram) -> None:
    place = {(type(item), item.microbatch): at for at, item in enumerate(program.instructions)}
    for at, item in enumerate(program.instructions):
        if not isinstance(item, Encode):
            continue
        number, where = item.microbatch, f"{program.place}, microbatch {item.microbatch}"
        if not place[Load, number] < at < place[Forward, number] or place[Encode, number] != at:
            raise ValueError(f"{where}: Encode must stand once between Load and Forward; lower the plan again")
        features = item.features
        if (features.rank, features.num_ranks) != (program.rank, program.num_ranks):
            raise ValueError(
                f"{where}: features are of rank {features.rank} of {features.num_ranks}, must be of "
                f"{program.rank} of {program.num_ranks}; lower the plan again"
            )
        _check_sizes(item, where=where)


def _check_sizes(item: Encode, *, where: str) -> None:
    """Every row that is made leaves once or stays, every row that is due arrives once or is there."""
    features = item.features
    made = sum(each.count * each.num_tokens for each in item.pictures)
    taken = sum(stop - start for start, stop in item.rows)
    if (features.num_tokens, features.num_placed) != (made, taken):
        raise ValueError(
            f"{where}: features bring {features.num_tokens} rows and place {features.num_placed}, must be the {made} "
            f"of its pictures and the {taken} of rows; lower the plan again"
        )
    leaving, arriving = ([pair[side] for pair in features.kept] for side in (0, 1))
    for step in features.rounds:
        leaving += step.send.ranges if step.send else ()
        arriving += step.receive.ranges if step.receive else ()
    _check_tiles(leaving, made, what=f"{where}: rows of features that leave the encoder")
    _check_tiles(arriving, taken, what=f"{where}: rows of features that arrive")


def _check_tiles(ranges: Sequence[Range], num_rows: int, *, what: str) -> None:
    """Each of so many rows is in exactly one of the ranges."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at or stop <= start:
            raise ValueError(f"{what}: [{start}, {stop}) where row {at} is due; each of {num_rows} must be there once")
        at = stop
    if at != num_rows:
        raise ValueError(f"{what}: {at} of {num_rows} are there; each must be, once")


def _check_rounds(items: Sequence[Encode]) -> None:
    counts = {len(item.features.rounds) for item in items}
    if len(counts) > 1:
        raise ValueError(
            f"microbatch {items[0].microbatch}: features travel in {sorted(counts)} rounds, must be as many on all "
            "ranks; lower one plan for all"
        )
    for rank, index, parcel, other in _parcels(items):
        if other is None or other.peer != rank or other.num_tokens != parcel.num_tokens:
            raise ValueError(
                f"microbatch {items[0].microbatch} round {index}: rank {rank} and rank {parcel.peer} disagree on the "
                f"{parcel.num_tokens} rows of features between them, one would wait for ever; lower one plan for all"
            )


def _parcels(items: Sequence[Encode]) -> Iterator[tuple[int, int, Parcel, Parcel | None]]:
    """(rank, round, parcel, the same on the other rank) of all parcels, from both ends."""
    for rank, item in enumerate(items):
        for index, step in enumerate(item.features.rounds):
            for parcel, sends in ((step.send, True), (step.receive, False)):
                if parcel is None:
                    continue
                if not 0 <= parcel.peer < len(items) or parcel.peer == rank:
                    raise ValueError(
                        f"microbatch {item.microbatch} round {index}: rank {rank} has a parcel with rank "
                        f"{parcel.peer}, must be with another of {len(items)}; lower the plan again"
                    )
                there = items[parcel.peer].features.rounds[index]
                yield rank, index, parcel, there.receive if sends else there.send


_NeighbourHandOver = tuple[type[Send] | type[Receive], Flow, int]
"""Kind, flow, neighbouring stage."""


def check_neighbours(program: RankProgram) -> None:
    """Each microbatch is received before its pass and sent on after it, where there is a stage to do so with.

    Activations go from stage p to p + 1 and their gradients back, all tokens of the microbatch at once. The first
    stage receives no activations and sends no gradients, the last one the other way round. `check_order` found each
    pass once.

    Raises:
        ValueError: a Send or Receive is missing, double, out of place, of another size or with another stage.
    """
    due = set(_due(program.stage, num_stages=program.num_stages))
    tokens: dict[int, int] = {}
    passes: dict[tuple[int, Flow], int] = {}
    found: dict[tuple[int, _NeighbourHandOver], int] = {}
    for at, item in enumerate(program.instructions):
        if isinstance(item, Forward):
            tokens[item.microbatch] = item.attention.num_tokens
            passes[item.microbatch, Flow.ACTIVATION] = at
        elif isinstance(item, Backward):
            passes[item.microbatch, Flow.GRADIENT] = at
        elif isinstance(item, Send | Receive):
            key = item.microbatch, (type(item), item.flow, item.stage)
            if key[1] not in due or key in found:
                raise ValueError(
                    f"{program.place}: {_words(*key)} is {'double' if key in found else 'not due'}; must be one of "
                    f"{[_words(item.microbatch, each) for each in sorted(due, key=str)]}, once; lower the plan again"
                )
            found[key] = at
    for microbatch, num_tokens in tokens.items():
        for each in due:
            if (microbatch, each) not in found:
                raise ValueError(f"{program.place}: {_words(microbatch, each)} is missing; lower the plan again")
            passed = passes[microbatch, each[1]]
            _check_place(program, found[microbatch, each], passed, num_tokens=num_tokens)
    if strange := [_words(*key) for key in found if key[0] not in tokens]:
        raise ValueError(f"{program.place}: {strange[0]} belongs to no Forward; lower the plan again")


def _due(stage: int, *, num_stages: int) -> Iterator[_NeighbourHandOver]:
    if stage > 0:
        yield Receive, Flow.ACTIVATION, stage - 1
        yield Send, Flow.GRADIENT, stage - 1
    if stage + 1 < num_stages:
        yield Send, Flow.ACTIVATION, stage + 1
        yield Receive, Flow.GRADIENT, stage + 1


def _check_place(program: RankProgram, at: int, passed: int, *, num_tokens: int) -> None:
    item = program.instructions[at]
    assert isinstance(item, Send | Receive)
    words = _words(item.microbatch, (type(item), item.flow, item.stage))
    if (at < passed) is isinstance(item, Send):
        raise ValueError(
            f"{program.place}: {words} is {'before' if at < passed else 'after'} the pass that it belongs to; receive "
            "before, send after it"
        )
    if item.num_tokens != num_tokens:
        raise ValueError(
            f"{program.place}: {words} is of {item.num_tokens} tokens, must be the microbatch's {num_tokens}; "
            "lower the plan again"
        )


def _words(microbatch: int, hand_over: _NeighbourHandOver) -> str:
    kind, flow, stage = hand_over
    way = "to" if kind is Send else "from"
    return f"{kind.__name__} of the {flow.value} of microbatch {microbatch} {way} stage {stage}"


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
