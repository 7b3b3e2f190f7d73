"""What microbatches of a pipeline hold, as columns, and what their passes take (InfiniPipe, section 3.1)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.analytic import LINEAR_BACKWARD
from rayfcp.plan.costs.model import CostModel
from rayfcp.values import MicrobatchPlan, Primitive, SequenceSpec

Floats = npt.NDArray[np.float64]


class Chunks(NamedTuple):
    """Microbatches of one group each, a chunk {context, slices}, by number.

    `tokens`; `cells`: (query, key) cells, those with context included: a slice [a, b) has (b (b + 1) - a (a + 1)) / 2,
    in the mean over layers fewer where these have windows (all other columns count context whole, and bound it then);
    `sides`: the longer side, in tokens, of each meeting of a slice with an earlier one of its sequence, summed;
    `context`: tokens of those earlier ones, `longest`: of the longest of them; `kept`: tokens of slices that have later
    ones; `finished`: tokens of all earlier slices of sequences that end here, whose gradients begin to be summed in
    this chunk's backward pass. `earlier`: how many slices the context is in.
    """

    tokens: Floats
    cells: Floats
    sides: Floats
    context: Floats
    longest: Floats
    kept: Floats
    finished: Floats
    earlier: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "Chunks":
        """Chunks `[start, stop)`."""
        return Chunks(*(column[start:stop] for column in self))


class Passes(NamedTuple):
    """Seconds of a forward and of a backward pass of all layers on one stage, without recomputation, and tokens of the
    fullest rank, by microbatch."""

    forward_s: Floats
    backward_s: Floats
    rank_tokens: Floats


def chunks_of(microbatches: Sequence[MicrobatchPlan], *, by_id: Mapping[int, SequenceSpec]) -> Chunks:
    """Columns of the microbatches of one pipeline, all their groups taken together."""
    columns = np.zeros((len(Chunks._fields), len(microbatches)))
    chunks = Chunks(*columns)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for at, microbatch in enumerate(microbatches):
        spans = {each.sequence: (each.start, each.stop) for each in microbatch.slices}
        for sequence in (by_id[each] for group in microbatch.groups for each in group.sequences):
            start, stop = spans.get(sequence.id, (0, sequence.num_tokens))
            earlier = pieces.setdefault(sequence.id, [])
            _add(chunks, at, sequence, start=start, stop=stop, earlier=[size for _, size in earlier])
            if stop < sequence.num_tokens:
                chunks.kept[at] += stop - start
            else:
                chunks.finished[at] += start
            earlier.append((at, stop - start))
    return chunks


def _add(chunks: Chunks, at: int, sequence: SequenceSpec, *, start: int, stop: int, earlier: Sequence[int]) -> None:
    size = stop - start
    chunks.tokens[at] += size
    chunks.cells[at] += sequence.block_cells(start, stop)
    chunks.sides[at] += sum(max(size, each) for each in earlier)
    chunks.context[at] += start
    chunks.longest[at] = max(chunks.longest[at], *earlier, 0)
    chunks.earlier[at] += len(earlier)


def chunk_passes(
    chunks: Chunks, *, cost: CostModel, degree: int, primitive: Primitive, crosses: bool | None = None
) -> Passes:
    """Of a group of `degree` ranks a chunk (Eqs. 1-4, over rings too).

    Queries meet the context in further pieces: over a ring the keys and values of the context travel with the
    chunk's own, under Ulysses each rank has them for its heads. `crosses`: the group spans nodes.
    """
    ring = primitive is Primitive.RING
    extra = cost.attention_half_tokens * chunks.sides * (degree if ring else 1)
    moved = chunks.tokens + chunks.context if ring else chunks.tokens
    forward_s, backward_s = (
        terms.seconds(chunks.cells + extra, chunks.tokens, moved_tokens=moved)
        for terms in cost.terms(degree, primitive=primitive, crosses=crosses)
    )
    rank_tokens = np.ceil(chunks.tokens / degree)
    return Passes(forward_s, _plain(forward_s, backward_s, rank_tokens, cost=cost), rank_tokens)


def _plain(forward_s: Floats, backward_s: Floats, rank_tokens: Floats, *, cost: CostModel) -> Floats:
    """Backward without what `cost` says that every microbatch recomputes."""
    if not (cost.recomputed_layers and cost.pipeline):
        return backward_s
    again_s = cost.recomputed_layers * layer_s(forward_s, rank_tokens, cost=cost)
    return np.asarray(np.maximum(backward_s - again_s, 0.0))


def layer_s(forward_s: Floats, rank_tokens: Floats, *, cost: CostModel) -> Floats:
    """Seconds in which one layer is recomputed, which is its forward pass: of `forward_s` without the head."""
    assert cost.pipeline is not None
    return (forward_s - head_s(rank_tokens, cost=cost)[0]) / cost.pipeline.num_layers


def head_s(rank_tokens: Floats, *, cost: CostModel) -> tuple[Floats, Floats]:
    """Seconds of the head's forward and backward."""
    assert cost.pipeline is not None
    both = cost.pipeline.head_s_per_token * rank_tokens
    forward_s = both / (1 + LINEAR_BACKWARD)
    return forward_s, both - forward_s
