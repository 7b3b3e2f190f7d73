"""Chunks of a finished plan, which the planner's own are compared with."""

from collections.abc import Mapping, Sequence

import numpy as np

from rayfcp.cost.microbatches import Chunks
from rayfcp.values import MicrobatchPlan, SequenceSpec


def chunks_of(microbatches: Sequence[MicrobatchPlan], *, by_id: Mapping[int, SequenceSpec]) -> Chunks:
    """Columns of the microbatches of one pipeline, all their groups taken together."""
    chunks = Chunks(*np.zeros((len(Chunks._fields), len(microbatches))))
    pieces: dict[int, list[int]] = {}
    for at, microbatch in enumerate(microbatches):
        spans = {each.sequence: (each.start, each.stop) for each in microbatch.slices}
        for sequence in (by_id[each] for group in microbatch.groups for each in group.sequences):
            start, stop = spans.get(sequence.id, (0, sequence.num_tokens))
            size, earlier = stop - start, pieces.setdefault(sequence.id, [])
            chunks.tokens[at] += size
            chunks.pairs[at] += sequence.block_pairs(start, stop)
            chunks.sides[at] += sum(max(size, each) for each in earlier)
            chunks.context[at] += start
            chunks.longest[at] = max(chunks.longest[at], *earlier, 0)
            chunks.earlier[at] += len(earlier)
            if stop < sequence.num_tokens:
                chunks.kept[at] += size
            else:
                chunks.finished[at] += start
            earlier.append(size)
    return chunks
