"""What microbatches of a pipeline hold, as columns, and what their passes take (InfiniPipe, section 3.1).

What each microbatch of a pipeline keeps on a rank of each stage (InfiniPipe, Eqs. 5-10, corrected).

What each pass of each microbatch takes each stage of a pipeline.

What microbatches of whole sequences, in groups or in layouts of their own, take and hold on each pipeline stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.cost.analytic import LINEAR_BACKWARD
from rayfcp.cost.layout import layout_passes
from rayfcp.cost.model import CostModel, group_speeds, slowed, speeds_of
from rayfcp.cost.pipeline import PipelineCost
from rayfcp.cost.placement import node_of_ranks
from rayfcp.values import ClusterSpec, Layout, MicrobatchPlan, Primitive, SequenceSpec
from rayfcp.values.arrays import Floats, Ints


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


Flags = npt.NDArray[np.bool_]
"""By microbatch."""


class StageTimes(NamedTuple):
    """`forward_s[stage, microbatch]` and `backward_s`, without recomputation; `layer_s[microbatch]`: seconds by which
    each recomputed layer makes a backward pass longer; `transfer_s[microbatch]`: from one stage to the next."""

    forward_s: Floats
    backward_s: Floats
    layer_s: Floats
    transfer_s: Floats

    def part(self, start: int, stop: int) -> "StageTimes":
        """Microbatches `[start, stop)`."""
        return StageTimes(*(column[..., start:stop] for column in self))

    def recomputing(self, layers: Floats) -> Floats:
        """Backward passes of which each recomputes `layers[stage, microbatch]`."""
        return self.backward_s + layers * self.layer_s


def stage_times(
    passes: Passes, *, cost: CostModel, gathers: int | None = None, reduces: int | None = None
) -> StageTimes:
    """What is computed (`computed_times`) beside traffic of parameters and gradients: of every microbatch, or, once a
    step, of the forward pass of microbatch `gathers` and the backward pass of `reduces` (None: of another pipeline of
    the step)."""
    count = np.arange(len(passes.rank_tokens))
    return beside_traffic(
        computed_times(passes, cost=cost),
        cost=cost,
        gathered=np.equal(count, -1 if gathers is None else gathers),
        reduced=np.equal(count, -1 if reduces is None else reduces),
    )


def computed_times(passes: Passes, *, cost: CostModel) -> StageTimes:
    """Stage p has its share of the layers, the last one the head beside them."""
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    head_forward_s, head_backward_s = head_s(passes.rank_tokens, cost=cost)
    share = np.array(pipeline.layers_of_stage)[:, None] / pipeline.num_layers
    last = np.zeros((pipeline.num_stages, 1))
    last[-1] = 1.0
    return StageTimes(
        forward_s=share * (passes.forward_s - head_forward_s) + last * head_forward_s,
        backward_s=share * (passes.backward_s - head_backward_s) + last * head_backward_s,
        layer_s=layer_s(passes.forward_s, passes.rank_tokens, cost=cost),
        transfer_s=pipeline.transfer_s + pipeline.transfer_s_per_token * passes.rank_tokens,
    )


def beside_traffic(times: StageTimes, *, cost: CostModel, gathered: Flags, reduced: Flags) -> StageTimes:
    """Traffic of parameters and gradients hides behind its pass, save the first gathers and last reductions.

    Once a step, only `gathered` microbatches gather for forward, and only `reduced` ones reduce.
    """
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    again = pipeline.gather_every == "microbatch"
    gathered = gathered | again
    reduced = reduced | (pipeline.reduce_every == "microbatch")
    gather_s, back_s, reduce_s, shown_s, back_shown_s, reduce_shown_s = _traffic(pipeline)
    return times._replace(
        forward_s=_beside(times.forward_s, gathered * gather_s, gathered * shown_s, overlap=cost.overlap),
        backward_s=_beside(
            times.backward_s,
            again * back_s + reduced * reduce_s,
            again * back_shown_s + reduced * reduce_shown_s,
            overlap=cost.overlap,
        ),
    )


def _traffic(pipeline: PipelineCost) -> Floats:
    """[kind, stage, 1]: gathers of forward and backward and the reduction, then what of each is exposed."""
    seconds = [
        (a.forward_s, a.backward_s, a.reduced_s, a.exposed_s, a.backward_exposed_s, a.reduced_exposed_s)
        for a in pipeline.traffic
    ]
    return np.array(seconds).T[:, :, None]


def _beside(computed_s: Floats, traffic_s: Floats, exposed_s: Floats, *, overlap: float) -> Floats:
    """As `CostModel.microbatch_s`: all but `exposed_s` of the traffic may hide behind what is computed."""
    hidden_s = np.maximum(traffic_s - exposed_s, 0.0)
    return np.asarray(computed_s + exposed_s + hidden_s - overlap * np.minimum(hidden_s, computed_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCosts:
    """`groups`: computed seconds by group, those of microbatch m from number `first[m]` on; a layout counts as one.
    `times`: by microbatch, whose ranks meet in every layer, so that its slowest group decides; `held`: bytes by
    microbatch, on a rank that has the most of any of its groups."""

    groups: StageTimes
    first: Ints
    times: StageTimes
    held: StageBytes


class _Loads(NamedTuple):
    """By group: seconds of all layers; tokens of its fullest rank, those whose keys and values the rank has while it
    computes (in shares of all heads), and those whose keys and values come to it at a time; the speed of its slowest
    rank."""

    forward_s: Floats
    backward_s: Floats
    tokens: Floats
    attended: Floats
    brought: Floats
    speed: Floats


def whole_costs(
    microbatches: Sequence[MicrobatchPlan],
    *,
    by_id: Mapping[int, SequenceSpec],
    cluster: ClusterSpec,
    cost: CostModel,
) -> WholeCosts:
    """Without recomputation and without traffic of parameters; groups are priced where their ranks lie."""
    counts = np.array([1 if each.layout else len(each.groups) for each in microbatches])
    if any(each.layout for each in microbatches):
        rows = [
            _of_layout(each.layout, by_id=by_id, cluster=cluster, cost=cost)
            if each.layout
            else _of_groups([each], by_id=by_id, cluster=cluster, cost=cost)
            for each in microbatches
        ]
        loads = _Loads(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
    else:
        loads = _of_groups(microbatches, by_id=by_id, cluster=cluster, cost=cost)
    first = np.cumsum(counts) - counts
    groups = _computed(loads, cost=cost)
    return WholeCosts(
        groups=groups,
        first=first,
        times=StageTimes(*(np.maximum.reduceat(each, first, axis=-1) for each in groups)),
        held=_bytes(loads, first=first, cost=cost),
    )


def _computed(loads: _Loads, *, cost: CostModel) -> StageTimes:
    """By group; a slow rank is slow at the head too."""
    found: StageTimes | None = None
    for speed in np.unique(loads.speed).tolist():
        here = loads.speed == speed
        forward_s, backward_s, tokens = (column[here] for column in loads[:3])
        priced = slowed(cost, speed=speed)
        again_s = cost.recomputed_layers * layer_s(forward_s, tokens, cost=priced)
        passes = Passes(forward_s, np.maximum(backward_s - again_s, 0.0), tokens)
        times = computed_times(passes, cost=priced)
        if found is None:
            found = StageTimes(*(np.zeros((*column.shape[:-1], len(here))) for column in times))
        for column, part in zip(found, times, strict=True):
            column[..., here] = part
    assert found is not None, "a microbatch has a group"
    return found


def _of_groups(
    microbatches: Sequence[MicrobatchPlan], *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel
) -> _Loads:
    """Under Ulysses a rank has all of the group's tokens, and of their heads its share."""
    groups = [group for microbatch in microbatches for group in microbatch.groups]
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    cells = np.array([sum([by_id[each].attention_cells for each in group.sequences]) for group in groups], np.float64)
    tokens = np.array([sum([by_id[each].num_tokens for each in group.sequences]) for group in groups], np.float64)
    degrees = np.array([group.degree for group in groups], np.float64)
    crosses = np.array([len({nodes[rank] for rank in group.ranks}) > 1 for group in groups])
    speeds = group_speeds([group.ranks for group in groups], cluster=cluster)
    by_heads = np.array([group.primitive is Primitive.ULYSSES and group.degree > 1 for group in groups])
    passes_s = np.empty((2, len(groups)))
    for primitive, at in ((Primitive.RING, ~by_heads), (Primitive.ULYSSES, by_heads)):
        if at.any():
            passes_s[:, at] = cost.passes_s(
                cells[at], tokens[at], degree=degrees[at], primitive=primitive, crosses=crosses[at], speed=speeds[at]
            )
    held = np.ceil(tokens / degrees)
    shared = np.where(by_heads, np.maximum(1 / degrees, 1 / cost.num_kv_heads), 1 / degrees)
    attended = np.maximum(np.ceil(tokens * shared), held)
    return _Loads(passes_s[0], passes_s[1], held, attended, attended, speeds)


def _of_layout(layout: Layout, *, by_id: Mapping[int, SequenceSpec], cluster: ClusterSpec, cost: CostModel) -> _Loads:
    """One row: of runs of ranks that share heads each rank has its share of the run's tokens, and of what comes to it.
    Rounds that run as one come at a time."""
    forward_s, backward_s = layout_passes(layout, by_id=by_id, cluster=cluster, cost=cost)
    sizes = np.array([block.num_tokens for block in layout.blocks], np.float64)
    owners = np.array([block.rank for block in layout.blocks], np.int64)
    tokens = np.bincount(owners, sizes, minlength=cluster.num_ranks)
    share = cost.kv_share(layout.heads) if layout.heads > 1 else 1.0
    attended = np.ceil(share * tokens.reshape(-1, layout.heads).sum(axis=1)).max()
    rows = (
        forward_s,
        backward_s,
        tokens.max(),
        max(attended, tokens.max()),
        np.ceil(share * _brought(layout, sizes, num_ranks=cluster.num_ranks)),
        speeds_of(cluster).min(),
    )
    return _Loads(*(np.array([each], np.float64) for each in rows))


def _brought(layout: Layout, sizes: Floats, *, num_ranks: int) -> float:
    """Most tokens that come to one run of ranks in rounds that run as one."""
    coalesce = layout.pacing.coalesce if layout.pacing else 1
    moved = [
        ((number // coalesce) * num_ranks + transfer.target, transfer.blocks)
        for number, step in enumerate(layout.rounds)
        for transfer in step.transfers
    ]
    if not moved:
        return 0.0
    places = np.repeat([place for place, _ in moved], [len(blocks) for _, blocks in moved])
    blocks = np.fromiter(chain.from_iterable(blocks for _, blocks in moved), np.int64)
    return float(np.bincount(places, sizes[blocks]).max())


def _bytes(loads: _Loads, *, first: Ints, cost: CostModel) -> StageBytes:
    """No slices: nothing is kept for later ones."""
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    each = pipeline.layer_bytes
    tokens, attended, brought = (np.maximum.reduceat(column, first) for column in loads[2:5])
    whole = each.whole * tokens + each.kv * (attended - tokens)
    layers = np.array(pipeline.layers_of_stage, np.float64)
    kept = layers[:, None] * whole
    kept[-1] += each.head * tokens
    none = np.zeros_like(tokens)
    return StageBytes(
        kept=kept,
        freed=whole - each.kept * tokens,
        working=each.working * tokens + each.buffers * np.maximum(attended, brought),
        again=whole,
        summed=none,
        begun=none,
        layers=layers,
        room=np.array(pipeline.room_bytes, np.float64),
    )
