"""Sequences and blocks as columns."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Mutual(NamedTuple):
    """Mutual pictures of causal sequences, ascending by (sequence, start): `[start, stop)`; those of sequence s are
    `first[s]` to `first[s + 1]`. `cells`: (query, key) cells which all before a picture add, and in the last entry
    all of them."""

    first: Ints
    start: Ints
    stop: Ints
    cells: Floats


class Pool(NamedTuple):
    """The sequences of a microbatch. `density[s]`: computed cells a token in the mean, (L + 1) / 2 causal, L full, less
    where layers have windows, more with `mutual` pictures. Of these token t has `level[s]` + `rising[s]` x (t + 1), and
    what its picture adds."""

    length: Ints
    full: Bools
    density: Floats
    level: Floats
    rising: Floats
    mutual: Mutual


class Pieces(NamedTuple):
    """Blocks, ascending by (sequence, start): `[start, stop)` of sequence `owner` on rank `rank` of `num_ranks`; those
    of sequence s are `first[s]` to `first[s + 1]`."""

    owner: Ints
    start: Ints
    stop: Ints
    rank: Ints
    first: Ints
    num_ranks: int
