"""What an `Encode` must be: in its place, on all ranks, of sizes that agree, in rounds that meet.

All ranks encode a microbatch together, for they gather the encoder's shards, and then run the rounds of the exchange
one after the other. In each both ends of a parcel have it, so nobody waits for ever; the gradients take the same rounds
back inside the backward pass.
"""

from collections.abc import Iterator, Sequence

from rayfcp.program.encode import Encode
from rayfcp.program.instructions import Forward, Load, RankProgram
from rayfcp.program.parcels import Parcel, Range


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
