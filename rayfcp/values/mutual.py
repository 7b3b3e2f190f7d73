"""Pictures whose tokens see one another in the language model: what they add to a mask.

Without pictures row q sees no keys from q + `ahead` on. A row of a picture [a, b) sees these too, the keys
[q + `ahead`, b), whatever the window. Earlier tokens of its picture are like all others: a window may not reach them.
So the transformers library has it for Gemma 3 and Gemma 4 (`create_masks_for_vision_model`): sliding layers see what is
within the window of causal mask and picture together, and that window has no upper end.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter

from rayfcp.values.bands import Band, Edge
from rayfcp.values.pictures import Pictures


def mutual_cells(runs: Sequence[Pictures], rows: tuple[int, int], *, ahead: int) -> int:
    """Cells that rows `[start, stop)` see beyond their mask; `runs` ascend.

    >>> mutual_cells([Pictures(start=2, num_tokens=3, num_patches=3)], (0, 9), ahead=1)
    3
    """
    start, stop = rows
    cells = 0
    for run in runs[bisect_right(runs, start, key=_stop) :]:
        if run.start >= stop:
            break
        cells += _cells_before(run, stop, ahead=ahead)
        cells -= _cells_before(run, start, ahead=ahead)
    return cells


_stop = attrgetter("stop")


def _cells_before(run: Pictures, position: int, *, ahead: int) -> int:
    """Of the rows before a position."""
    if position <= run.start:
        return 0
    whole, rows = divmod(position - run.start, run.stride if run.count > 1 else run.num_tokens)
    whole, rows = (whole, min(rows, run.num_tokens)) if whole < run.count else (run.count, 0)
    return whole * _cells(run, run.num_tokens, ahead=ahead) + _cells(run, rows, ahead=ahead)


def _cells(run: Pictures, rows: int, *, ahead: int) -> int:
    """Of the first rows of one picture."""
    left = run.num_tokens - ahead
    return _triangle(left) - _triangle(left - rows) if rows else 0


def _triangle(side: int) -> int:
    return side * (side + 1) // 2 if side > 0 else 0


def mutual_bands(runs: Iterable[Pictures], *, ahead: int) -> tuple[Band, ...]:
    """What rows of pictures see beyond their mask, in order of pictures; none sees nothing there."""
    return tuple(
        Band(start=start, stop=stop - ahead, low=Edge(at=ahead, slides=True), high=Edge(at=stop))
        for run in runs
        for start, stop in run.ranges()
        if start + ahead < stop
    )


def picture_stop(runs: Iterable[Pictures], position: int) -> int:
    """Behind the picture that holds a position; behind the position where none does.

    >>> [picture_stop([Pictures(start=2, num_tokens=3, num_patches=3)], at) for at in (1, 2, 4, 5)]
    [2, 5, 5, 6]
    """
    for run in runs:
        if run.start <= position < run.stop:
            first = position - (position - run.start) % (run.stride if run.count > 1 else run.num_tokens)
            return first + run.num_tokens if position < first + run.num_tokens else position + 1
    return position + 1
