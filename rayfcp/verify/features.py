"""Proof of encodings: every image is encoded once, and every feature reaches the row of its token once."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from rayfcp.cost.images import ImageColumns
from rayfcp.program.instructions import Encode, Range
from rayfcp.program.pieces import Pieces
from rayfcp.program.programs import Programs
from rayfcp.values import EncoderShare, SequenceSpec
from rayfcp.values.arrays import Ints, expanded
from rayfcp.values.sequence import POSITIONS


def check_features(programs: Programs, sequences: Sequence[SequenceSpec]) -> None:
    """Programs, which passed `check_progress`, encode no image, or each image of the batch once, as large as it is, in
    the microbatch that loads its tokens; each feature travels once, to the row of its token.

    Raises:
        ValueError: names the microbatch and the rank.
    """
    if not any(programs.encodes):
        return
    images = ImageColumns.of(sequences)
    for microbatch, (encodes, pieces) in enumerate(zip(programs.encodes, programs.pieces, strict=True)):
        mine = images.among(np.unique(pieces.sequence).tolist())
        if encodes:
            _check_once(encodes, mine, microbatch=microbatch)
            _check_routes(encodes, pieces, mine, microbatch=microbatch)
        elif len(mine):
            raise ValueError(
                f"microbatch {microbatch} loads sequence {mine.sequence[0]}, which has images, and encodes none; "
                "lower the plan again"
            )


def _check_once(encodes: Sequence[Encode], mine: ImageColumns, *, microbatch: int) -> None:
    due = Counter(
        zip(*(each.tolist() for each in (mine.sequence, mine.number, mine.patches, mine.tokens)), strict=True)
    )
    found = Counter(
        (run.sequence, number, run.num_patches, run.num_tokens)
        for item in encodes
        for run in item.images
        for number in range(run.first, run.last)
    )
    for image in sorted((due - found) + (found - due)):
        sequence, number, patches, tokens = image
        raise ValueError(
            f"microbatch {microbatch}: image {number} of sequence {sequence}, {patches} patches and {tokens} tokens, "
            f"is encoded {found[image]} times, must be {due[image]}; lower the plan again"
        )


def _check_routes(encodes: Sequence[Encode], pieces: Pieces, mine: ImageColumns, *, microbatch: int) -> None:
    """Every encoded row leaves once or stays, and the feature that arrives at a row is that of the token loaded
    there."""
    made = [_made(item, mine) for item in encodes]
    left = [np.zeros(len(tokens), np.int64) for tokens in made]
    for rank, item in enumerate(encodes):
        where, features = f"rank {rank}, microbatch {microbatch}", item.features
        here = slice(*pieces.first[rank : rank + 2].tolist())
        loaded = _tokens(pieces.sequence[here], pieces.start[here], pieces.stop[here])
        due = loaded[_rows(item.rows, len(loaded), what=f"{where}: rows that take features")]
        sizes = (features.rank, features.num_ranks, features.num_tokens, features.num_placed)
        if sizes != (rank, len(encodes), len(made[rank]), len(due)):
            raise ValueError(
                f"{where}: features have (rank, num_ranks, num_tokens, num_placed) {sizes}, must be of this rank "
                "and of the rows that it encodes and takes; lower the plan again"
            )
        came = np.zeros(len(due), np.int64)
        for source, ranges, places in _routes(encodes, rank):
            row = _rows(ranges, len(made[source]), what=f"{where}: features from rank {source}")
            place = _rows(places, len(due), what=f"{where}: rows of features that arrive")
            if len(row) != len(place) or (made[source][row] != due[place]).any():
                raise ValueError(
                    f"{where}: features from rank {source} come to the rows of other tokens; lower the plan again"
                )
            np.add.at(left[source], row, 1)
            np.add.at(came, place, 1)
        _check_each_once(came, what=f"{where}: rows of features that arrive")
    for rank, times in enumerate(left):
        _check_each_once(times, what=f"rank {rank}, microbatch {microbatch}: rows of features that leave the encoder")


def _routes(encodes: Sequence[Encode], rank: int) -> Iterator[tuple[int, Sequence[Range], Sequence[Range]]]:
    """The rank that encodes, rows there, rows here: of all features that come to a rank."""
    for there, here in encodes[rank].features.kept:
        yield rank, (there,), (here,)
    for index, step in enumerate(encodes[rank].features.rounds):
        if step.receive:
            sent = encodes[step.receive.peer].features.rounds[index].send
            assert sent is not None, "messages meet"
            yield step.receive.peer, sent.ranges, step.receive.ranges


def _rows(ranges: Sequence[Range], count: int, *, what: str) -> Ints:
    """The rows of ranges, in their order.

    Raises:
        ValueError: a range is not within `count` rows.
    """
    start, stop = np.array(ranges, np.int64).reshape(-1, 2).T
    if ((start < 0) | (start >= stop) | (stop > count)).any():
        raise ValueError(f"{what} are {tuple(ranges)}, must be within {count} rows; lower the plan again")
    at, step = expanded(stop - start)
    return np.asarray(start[at] + step)


def _check_each_once(times: Ints, *, what: str) -> None:
    if (times != 1).any():
        row = int(np.argmax(times != 1))
        raise ValueError(f"{what}: row {row} of {len(times)} is there {times[row]} times, must be once")


def _made(item: Encode, mine: ImageColumns) -> Ints:
    """The tokens of the images that a rank encodes, in order."""
    shares = [EncoderShare(rank=0, sequence=run.sequence, first=run.first, last=run.last) for run in item.images]
    places = [place for low, high in mine.places(shares) for place in range(low, high)]
    start = mine.start[places]
    return _tokens(mine.sequence[places], start, start + mine.tokens[places])


def _tokens(sequence: Ints, start: Ints, stop: Ints) -> Ints:
    """A number for each token of ranges, in order."""
    at, step = expanded(stop - start)
    return np.asarray(sequence[at].astype(np.int64) * POSITIONS + start[at] + step)
