"""Proof of encodings: every image is encoded once, and every feature reaches the row of its token once."""

from collections import Counter
from collections.abc import Sequence

from rayfcp.cost.images import ImageColumns
from rayfcp.program.instructions import Encode, Load, Range, RankProgram
from rayfcp.program.order import of_kind
from rayfcp.values import EncoderShare, SequenceSpec
from rayfcp.verify.tokens import Tokens

Parts = Sequence[tuple[Encode, Load]]
"""`Encode` and `Load` of each rank in one microbatch."""

Route = tuple[int, tuple[Range, ...], tuple[Range, ...]]
"""(rank that encodes, rows there, rows here)."""


def check_features(programs: Sequence[RankProgram], sequences: Sequence[SequenceSpec]) -> None:
    """Programs encode no image, or each image of the batch once, as large as it is, in the microbatch that loads
    its tokens; each feature travels once, to the row of its token. `check_order` holds.

    Raises:
        ValueError: names the microbatch and the rank.
    """
    encoded = [{item.microbatch: item for item in of_kind(program, Encode)} for program in programs]
    if not any(encoded):
        return
    images = ImageColumns.of(sequences)
    loads = [{item.microbatch: item for item in of_kind(program, Load)} for program in programs]
    for microbatch in loads[0]:
        here = {piece.sequence for each in loads for piece in each[microbatch].pieces}
        mine = images.among(here)
        if microbatch not in encoded[0]:
            if len(mine):
                raise ValueError(
                    f"microbatch {microbatch} loads sequence {mine.sequence[0]}, which has images, and encodes none; "
                    "lower the plan again"
                )
            continue
        parts = [(each[microbatch], load[microbatch]) for each, load in zip(encoded, loads, strict=True)]
        _check_once(parts, mine, microbatch=microbatch)
        _check_routes(parts, mine, microbatch=microbatch)


def _check_once(parts: Parts, mine: ImageColumns, *, microbatch: int) -> None:
    due = Counter(
        zip(*(each.tolist() for each in (mine.sequence, mine.number, mine.patches, mine.tokens)), strict=True)
    )
    found = Counter(
        (run.sequence, number, run.num_patches, run.num_tokens)
        for item, _ in parts
        for run in item.images
        for number in range(run.first, run.last)
    )
    for image in sorted((due - found) + (found - due)):
        sequence, number, patches, tokens = image
        raise ValueError(
            f"microbatch {microbatch}: image {number} of sequence {sequence}, {patches} patches and {tokens} tokens, "
            f"is encoded {found[image]} times, must be {due[image]}; lower the plan again"
        )


def _check_routes(parts: Parts, mine: ImageColumns, *, microbatch: int) -> None:
    """Every encoded row leaves once or stays, and the feature that arrives at a row is that of the token loaded
    there."""
    made = [_made(item, mine) for item, _ in parts]
    for rank, (item, load) in enumerate(parts):
        where, features = f"rank {rank}, microbatch {microbatch}", item.features
        due = Tokens.of(load.pieces).cut(item.rows)
        routes: list[Route] = [(rank, (there,), (here,)) for there, here in features.kept]
        leaving = [there for there, _ in features.kept]
        for index, step in enumerate(features.rounds):
            leaving += step.send.ranges if step.send else ()
            if step.receive:
                sent = parts[step.receive.peer][0].features.rounds[index].send
                assert sent is not None, "messages meet"
                routes.append((step.receive.peer, sent.ranges, step.receive.ranges))
        sizes = (features.rank, features.num_ranks, features.num_tokens, features.num_placed)
        if sizes != (rank, len(parts), made[rank].num_tokens, due.num_tokens):
            raise ValueError(
                f"{where}: features have (rank, num_ranks, num_tokens, num_placed) {sizes}, must be of this rank "
                "and of the rows that it encodes and takes; lower the plan again"
            )
        _check_tiles(leaving, features.num_tokens, what=f"{where}: rows of features that leave the encoder")
        arriving = [span for _, _, here in routes for span in here]
        _check_tiles(arriving, features.num_placed, what=f"{where}: rows of features that arrive")
        for source, there, here in routes:
            found, wanted = made[source].cut(there), due.cut(here)
            if found != wanted:
                raise ValueError(
                    f"{where}: features of tokens {found} from rank {source} come to rows of tokens {wanted}; lower "
                    "the plan again"
                )


def _check_tiles(ranges: Sequence[Range], num_rows: int, *, what: str) -> None:
    """Each row is in exactly one of the ranges."""
    at = 0
    for start, stop in [*sorted(ranges), (num_rows, num_rows + 1)]:
        if start != at or stop <= start:
            raise ValueError(f"{what}: [{start}, {stop}) where row {at} of {num_rows} is due; each must be there once")
        at = stop


def _made(item: Encode, mine: ImageColumns) -> Tokens:
    """The tokens of the images that a rank encodes, in order."""
    shares = [EncoderShare(rank=0, sequence=run.sequence, first=run.first, last=run.last) for run in item.images]
    places = [place for low, high in mine.places(shares) for place in range(low, high)]
    start = mine.start[places]
    return Tokens(mine.sequence[places], start=start, stop=start + mine.tokens[places])
