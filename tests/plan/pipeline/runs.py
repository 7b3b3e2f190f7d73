"""Runs of microbatches, found from a plan alone: an oracle for what planners say of them."""

from collections.abc import Sequence

from rayfcp.values import MicrobatchPlan


def run_lengths(microbatches: Sequence[MicrobatchPlan]) -> tuple[int, ...]:
    """Lengths of the runs of microbatches, in order: the shortest stretches that no sequence leaves."""
    last: dict[int, int] = {}
    for at, microbatch in enumerate(microbatches):
        last |= {each.sequence: at for each in microbatch.slices}
    lengths, start, reach = [], 0, 0
    for at, microbatch in enumerate(microbatches):
        reach = max([at, reach, *(last[each.sequence] for each in microbatch.slices)])
        if reach == at:
            lengths.append(at + 1 - start)
            start = at + 1
    return tuple(lengths)
