"""Zig-zag cuts: a causal sequence in 2d slices, of which each of d ranks holds one early and one late."""


def zigzag(num_tokens: int, *, degree: int, first: int = 0) -> tuple[list[list[tuple[int, int]]], int]:
    """Cut `[0, num_tokens)` for the positions of a group; position p holds slices p and 2d - 1 - p.

    Returns each position's non-empty ranges in ascending order, ranges that touch as one, and the
    `first` of the group's next sequence. Slices differ by at most one token. The tokens left over go
    round the positions, `first` on: first to their early slices, then to their late ones. As sequence
    follows sequence the round goes on where it stopped, so that the tokens of a group's positions
    also differ by at most one, however many sequences it holds. Any length, any degree, no padding.

    >>> zigzag(9, degree=2)
    ([[(0, 3), (7, 9)], [(3, 7)]], 1)
    """
    if degree == 1:
        return [[(0, num_tokens)]], 0
    num_slices = 2 * degree
    size, left = divmod(num_tokens, num_slices)
    sizes = [size] * num_slices
    for turn in range(first, first + left):
        at = turn % num_slices
        sizes[at if at < degree else 3 * degree - 1 - at] += 1
    bounds = [0]
    for each in sizes:
        bounds.append(bounds[-1] + each)
    ranges = []
    for early in range(degree):
        late = num_slices - 1 - early
        ranges.append(_joined((bounds[early], bounds[early + 1]), (bounds[late], bounds[late + 1])))
    return ranges, (first + left) % num_slices


def _joined(early: tuple[int, int], late: tuple[int, int]) -> list[tuple[int, int]]:
    held = [(early[0], late[1])] if early[1] == late[0] else [early, late]
    return [(start, stop) for start, stop in held if stop > start]
