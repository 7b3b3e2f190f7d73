"""What each microbatch of a pipeline keeps on a rank of each stage (InfiniPipe, Eqs. 5-10, corrected)."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.costs.chunks import Chunks, Floats
from rayfcp.plan.costs.model import CostModel
from rayfcp.values import Primitive


class StageBytes(NamedTuple):
    """Bytes on the fullest rank. With r of its l layers recomputed, microbatch m keeps `kept[p, m]` - r x `freed[m]` on
    stage p from its forward pass to the end of its backward pass. While it computes, `working[m]` more, and where all
    l layers are recomputed one of them, `again[m]`, for the others are gone before the first is recomputed.
    l x `summed[m]` are the gradients of its keys and values that later slices add to, from the backward pass of the
    sequence's last slice to the end of its own; l x `begun[m]` are those that begin in the backward pass of m.
    `layers[p]`, `room[p]`: of stage p.
    """

    kept: Floats
    freed: Floats
    working: Floats
    again: Floats
    summed: Floats
    begun: Floats
    layers: Floats
    room: Floats

    def part(self, start: int, stop: int) -> "StageBytes":
        """Microbatches `[start, stop)`."""
        columns = {name: getattr(self, name)[..., start:stop] for name in self._fields[:-2]}
        return self._replace(**columns)


def chunk_bytes(chunks: Chunks, *, cost: CostModel, degree: int, primitive: Primitive) -> StageBytes:
    """Of chunks on groups of `degree` ranks.

    Under Ulysses a rank keeps its share of the heads of the group's keys and values, replicated beyond their number.
    It adds a context's gradients one slice at a time; over a ring those of one rank's context fly with its own. Of a
    slice a rank has less than a token more than its share.
    """
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    each, ring = pipeline.layer_bytes, primitive is Primitive.RING or degree == 1
    shared = 1.0 / degree if ring else cost.kv_share(degree)
    tokens = np.ceil(chunks.tokens / degree)
    gathered = chunks.tokens if ring else np.maximum(chunks.tokens, degree)  # a rank without tokens has one of padding
    grown = np.maximum(np.ceil(gathered * shared) - tokens, 0.0) * each.kv
    whole = each.whole * tokens + grown
    later = np.ceil(chunks.kept * shared)
    # what each slice adds is what its own backward pass takes away: to the last slice and back, nothing is left
    rounding = 0.0 if shared == 1.0 else 1.0
    summed = chunks.kept * shared + rounding * (chunks.kept > 0)
    beside = np.ceil(gathered * shared)
    if ring and degree > 1:
        beside += np.ceil(chunks.context * shared) + chunks.earlier
    working = each.working * tokens + each.buffers * beside
    if not ring:
        working += each.kv_gradients * np.ceil(chunks.longest * shared)
    layers = np.array(pipeline.layers_of_stage, np.float64)
    kept = layers[:, None] * whole
    kept[-1] += each.head * tokens
    return StageBytes(
        kept=kept,
        freed=np.maximum(whole - each.kept * tokens - each.kv * later, 0.0),
        working=working,
        again=whole,
        summed=each.kv_gradients * summed,
        begun=each.kv_gradients * (chunks.finished * shared + rounding * (chunks.finished > 0) * chunks.earlier),
        layers=layers,
        room=np.array(pipeline.room_bytes, np.float64),
    )
