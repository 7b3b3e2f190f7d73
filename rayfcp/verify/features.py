"""Proof of encodings: every image is encoded once, and every feature reaches the row of its token once."""

from collections.abc import Mapping, Sequence

import numpy as np

from rayfcp.cost.images import ImageColumns
from rayfcp.program.instructions import Encode, Load, Range, RankProgram
from rayfcp.program.order import of_kind
from rayfcp.values import BatchPlan, EncoderShare, SequenceSpec
from rayfcp.verify.tokens import Tokens

Parts = Sequence[tuple[Encode, Load]]
"""`Encode` and `Load` of each rank in one microbatch."""

Route = tuple[int, tuple[Range, ...], tuple[Range, ...]]
"""(rank that encodes, rows there, rows here)."""


def check_shares(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, due: bool = False) -> None:
    """A plan encodes each image once, in the microbatch that has its tokens, or, if that is not `due`, none.

    Raises:
        ValueError: names the microbatch, the sequence and the image.
    """
    if not due and not any(each.encoding for each in plan.microbatches):
        return
    images = ImageColumns.of(sequences)
    for number, microbatch in enumerate(plan.microbatches):
        here = {each for group in microbatch.groups for each in group.sequences}
        mine = images.among(here)
        times = np.zeros(len(mine), np.int64)
        for share in microbatch.encoding:
            theirs = mine.sequence == share.sequence
            own = theirs & (mine.number >= share.first) & (mine.number < share.last)
            times += own
            if not 0 <= share.first < share.last or own.sum() != share.last - share.first:
                raise ValueError(
                    f"microbatch {number}: rank {share.rank} encodes images [{share.first}, {share.last}) of "
                    f"sequence {share.sequence}, of which the microbatch has {theirs.sum()}; plan again"
                )
        for wrong in np.flatnonzero(times != 1)[:1].tolist():
            raise ValueError(
                f"microbatch {number}: image {mine.number[wrong]} of sequence {mine.sequence[wrong]} is encoded "
                f"{times[wrong]} times, must be once; plan again"
            )


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
    sizes: Mapping[tuple[int, int], tuple[int, int]] = {
        (sequence, number): (patches, tokens)
        for sequence, number, patches, tokens in zip(
            mine.sequence.tolist(), mine.number.tolist(), mine.patches.tolist(), mine.tokens.tolist(), strict=True
        )
    }
    seen: set[tuple[int, int]] = set()
    for rank, (item, _) in enumerate(parts):
        for run in item.images:
            for number in range(run.first, run.last):
                key = run.sequence, number
                if sizes.get(key) != (run.num_patches, run.num_tokens) or key in seen:
                    raise ValueError(
                        f"rank {rank}, microbatch {microbatch}: image {number} of sequence {run.sequence}, of "
                        f"{run.num_patches} patches and {run.num_tokens} tokens, is encoded "
                        f"{'again' if key in seen else f'but not there, or of others, {sizes.get(key)}'}; each image "
                        "is encoded once; lower the plan again"
                    )
                seen.add(key)
    if missing := sizes.keys() - seen:
        sequence, number = min(missing)
        raise ValueError(
            f"microbatch {microbatch}: image {number} of sequence {sequence} is encoded by no rank; each image is "
            "encoded once; lower the plan again"
        )


def _check_routes(parts: Parts, mine: ImageColumns, *, microbatch: int) -> None:
    """The feature that arrives at a row is that of the token loaded there; `check_order` found that one arrives."""
    made = [_made(item, mine) for item, _ in parts]
    for rank, (item, load) in enumerate(parts):
        due = Tokens.of(load.pieces).cut(item.rows)
        routes: list[Route] = [(rank, (there,), (here,)) for there, here in item.features.kept]
        for index, step in enumerate(item.features.rounds):
            if step.receive:
                sent = parts[step.receive.peer][0].features.rounds[index].send
                assert sent is not None, "parcels meet"
                routes.append((step.receive.peer, sent.ranges, step.receive.ranges))
        for source, there, here in routes:
            found, wanted = made[source].cut(there), due.cut(here)
            if found != wanted:
                raise ValueError(
                    f"microbatch {microbatch}: features of tokens {found} from rank {source} come to rows of tokens "
                    f"{wanted} on rank {rank}; lower the plan again"
                )


def _made(item: Encode, mine: ImageColumns) -> Tokens:
    """The tokens of the images that a rank encodes, in order."""
    shares = [EncoderShare(rank=0, sequence=run.sequence, first=run.first, last=run.last) for run in item.images]
    places = [place for low, high in mine.places(shares) for place in range(low, high)]
    start = mine.start[places]
    return Tokens(mine.sequence[places], start=start, stop=start + mine.tokens[places])
