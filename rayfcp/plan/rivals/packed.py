"""The next microbatch of Megatron-LM's `next_hdp_group_packing_aware` (core/datasets/data_schedule_utils.py)."""

from collections.abc import Iterator, Sequence

from rayfcp.plan.rivals.opened import Opened, OpenGroup

WORK_SLACK = 0.05
"""How much more than the longest sequence, times what a rank holds, a rank may work."""


def packed(sequences: Sequence[int], *, opened: Opened) -> list[int]:
    """Fill `opened` with some of `sequences`, longest first; returns those left over, longest first.

    The longest gets its least degree. Each of the others goes where the most work of any rank grows least, and not
    beyond the cap: into a group of any degree that suffices and has room, or a new one; among equals into the
    lower degree, and into the group that was there first. Then groups grow into idle ranks. Where ranks idle that no
    growth can use, all ranks become one group and take what they hold, longest first.
    """
    longest = sequences[0]
    cap = opened.num_tokens[longest] * opened.limit_tokens * (1 + WORK_SLACK)
    opened.add(opened.open(degree=opened.least_degree(longest)), longest)
    left = []
    for at in sequences[1:]:
        offers = [offer for offer in _offers(at, opened=opened) if offer[0] <= cap]
        if not offers:
            left.append(at)
            continue
        _, degree, group = min(offers, key=lambda offer: offer[0])
        opened.add(group or opened.open(degree=degree), at)
    opened.grow()
    return _on_all_ranks(sequences, opened=opened) if opened.idle else left


def _offers(at: int, *, opened: Opened) -> Iterator[tuple[float, int, OpenGroup | None]]:
    """The most work of any rank with the sequence in each place that has room, by degree, groups before new ones."""
    most = opened.most_work()
    least = opened.least_degree(at)
    for degree in opened.sizes[opened.sizes.index(least) :]:
        work = opened.work(at, degree=degree)
        for group in opened.groups:
            if group.degree == degree and opened.holds(group, at):
                yield max(most, group.work + work), degree, group
        if degree <= opened.idle:
            yield max(most, work), degree, None


def _on_all_ranks(sequences: Sequence[int], *, opened: Opened) -> list[int]:
    opened.groups.clear()
    opened.idle = opened.sizes[-1]
    group = opened.open(degree=opened.sizes[-1])
    left = []
    for at in sequences:
        if group.members and not opened.holds(group, at):
            left.append(at)
        else:
            opened.add(group, at)
    return left
