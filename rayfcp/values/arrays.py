"""Types of numpy arrays, and what is done with columns in several packages."""

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def expanded(counts: Ints) -> tuple[Ints, Ints]:
    """Item i `counts[i]` times, and the number of each time.

    >>> expanded(np.array([2, 1]))
    (array([0, 0, 1]), array([0, 1, 0]))
    """
    at = np.repeat(np.arange(len(counts)), counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)


def firsts(joined: Bools) -> Ints:
    """The first item of the series of each item; item i + 1 is in the series of item i where `joined[i]`.

    >>> firsts(np.array([True, False, True]))
    array([0, 0, 2, 2])
    """
    opens = np.append(True, ~joined)
    return np.maximum.accumulate(np.where(opens, np.arange(len(opens)), 0))
