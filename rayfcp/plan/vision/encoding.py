"""Images as work items that are balanced over ranks, and their seconds and memory there.

The step after planning: whatever strategy planned the microbatches, each rank encodes images of each of them before
the language model runs, and the features then go to the ranks of their tokens. Only batches with images come here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.cost.encoder import EncoderCost, check_one_stage
from rayfcp.cost.images import Homes, ImageColumns, homes_of
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.layout import lay_out
from rayfcp.plan.strategies.registry import Proposal, Propose
from rayfcp.plan.vision.kernels.longest_first import ImageItems, longest_first
from rayfcp.values import BatchPlan, ClusterSpec, Group, InfeasiblePlanError, MicrobatchPlan, SequenceSpec
from rayfcp.values.arrays import Floats, Ints

TRIES = 12
"""Token budgets with which a strategy plans, each smaller, until activations of images fit beside the tokens."""

SMALLER = 0.9
"""Largest ratio of one budget to the one before: memory is left unused, but few tries suffice."""


class _MemoryError(Exception):
    """Images of a microbatch do not fit; with `share` of its tokens they might."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share


def with_images(base: Propose, *, spread: bool) -> Propose:
    """`base` with the images of its microbatches assigned to ranks: `spread` over all of them by work, else over those
    of the group that has their tokens, which is the most that systems do that do not plan for the encoder."""

    def propose(
        sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> Proposal:
        if cost.encoder is None or not any(sequence.images for sequence in sequences):
            return base(sequences, cluster=cluster, cost=cost, options=options)
        check_one_stage("this model", num_stages=cluster.num_stages)
        check_images_fit(sequences, encoder=cost.encoder, cluster=cluster)
        least = -(-max(sequence.num_tokens for sequence in sequences) // cluster.num_ranks)
        budget = cluster.max_tokens_per_rank
        for at in range(TRIES):
            found = base(sequences, cluster=replace(cluster, max_tokens_per_rank=budget), cost=cost, options=options)
            try:
                microbatches = _assigned(found.microbatches, sequences, spread=spread, cluster=cluster, cost=cost)
            except _MemoryError as error:
                if budget == least:
                    break
                share = min(error.share, SMALLER)
                budget = least if at == TRIES - 2 else max(int(share * budget), least)
            else:
                return replace(found, microbatches=microbatches, reason=f"{found.reason}; {_reason(microbatches)}")
        raise InfeasiblePlanError(
            f"activations of images do not fit beside {budget} tokens on each rank, of which a sequence of "
            f"{least * cluster.num_ranks} tokens needs as many; freeze the encoder, take smaller images or shorter "
            "sequences, or add ranks or memory"
        )

    return propose


def check_images_fit(sequences: Sequence[SequenceSpec], *, encoder: EncoderCost, cluster: ClusterSpec) -> None:
    """A rank can encode the largest image, and all ranks the images of any sequence beside its tokens.

    Raises:
        InfeasiblePlanError: names the sequence, its largest image or its patches, and the bound.
    """
    most = float(_max_patches(np.zeros(1), encoder=encoder, cluster=cluster)[0])
    max_tokens = cluster.num_ranks * cluster.max_tokens_per_rank
    remedy = "freeze the encoder, take smaller images, or add memory"
    for sequence in sequences:
        largest = max((run.num_patches for run in sequence.images), default=0)
        if largest > most:
            raise InfeasiblePlanError(
                f"sequence {sequence.id} has an image of {largest} patches, a rank has memory for the activations of "
                f"{most:.0f}; {remedy}"
            )
        patches = sum(run.count * run.num_patches for run in sequence.images)
        needed = sequence.num_tokens + encoder.kept_tokens * patches
        if needed > max_tokens:
            raise InfeasiblePlanError(
                f"sequence {sequence.id} has {sequence.num_tokens} tokens and {patches} patches, whose activations "
                f"take as much memory as {needed:.0f} tokens, {cluster.num_ranks} ranks have it for {max_tokens}; "
                f"{remedy}"
            )


def _max_patches(held: Floats, *, encoder: EncoderCost, cluster: ClusterSpec) -> Floats:
    """Patches that fit on each rank beside `held` tokens, which come when the encoder has computed."""
    max_tokens = float(cluster.max_tokens_per_rank)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(encoder.kept_tokens > 0, (max_tokens - held) / encoder.kept_tokens, np.inf)
        alone = encoder.kept_tokens + encoder.working_tokens
        return np.minimum(kept, max_tokens / alone if alone > 0 else np.inf)


def _assigned(
    microbatches: Sequence[MicrobatchPlan],
    sequences: Sequence[SequenceSpec],
    *,
    spread: bool,
    cluster: ClusterSpec,
    cost: CostModel,
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches, `predicted_s` of the language model alone, with their images assigned and priced."""
    images = ImageColumns.of(sequences)
    found = []
    for each in microbatches:
        own = _images_of(each, images)
        if len(own):
            layout = lay_out(each, sequences)
            held = np.zeros(cluster.num_ranks)
            np.add.at(held, [block.rank for block in layout.blocks], [block.num_tokens for block in layout.blocks])
            homes = homes_of(own, layout.blocks)
            rank = _assign(own, homes, held=held, groups=each.groups, spread=spread, cluster=cluster, cost=cost)
            found.append(replace(each, encoding=own.shares(rank)))
        else:
            found.append(each)
    return reprice_images(found, sequences, cluster=cluster, cost=cost)


def reprice_images(
    microbatches: Sequence[MicrobatchPlan], sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches, `predicted_s` of the language model alone, with the seconds by `cost` of what they encode added.

    Where any microbatch has images, the last one gathers the encoder's shards too (`lower_encoding`).
    """
    if cost.encoder is None:
        return tuple(replace(each, encoder_s=0.0) for each in microbatches)
    images = ImageColumns.of(sequences)
    any_images = any(each.encoding for each in microbatches)
    found = []
    for at, each in enumerate(microbatches):
        last, encoder_s = at == len(microbatches) - 1, 0.0
        if each.encoding or (last and any_images):
            own = _images_of(each, images)
            homes = homes_of(own, lay_out(each, sequences).blocks) if len(own) else None
            priced = _price(own, own.encoders(each.encoding), homes=homes, cluster=cluster, cost=cost)
            encoder_s = cost.encoder.microbatch_s(
                priced.computed_s, moved_s=priced.moved_s, overlap=cost.overlap, last=last
            )
        found.append(replace(each, encoder_s=encoder_s, predicted_s=each.predicted_s + encoder_s))
    return tuple(found)


def encoded_seconds(plan: BatchPlan, images: ImageColumns, *, encoder: EncoderCost) -> Floats:
    """`[microbatch, rank]`: seconds of what each rank encodes, forward and backward, at speed 1."""
    found = np.zeros((len(plan.microbatches), plan.num_ranks))
    seconds = np.add(*encoder.passes_s(images.patches))
    for at, microbatch in enumerate(plan.microbatches):
        rank = images.encoders(microbatch.encoding)
        own = rank >= 0
        found[at] = np.bincount(rank[own], seconds[own], minlength=plan.num_ranks)
    return found


def _images_of(microbatch: MicrobatchPlan, images: ImageColumns) -> ImageColumns:
    return images.among({each for group in microbatch.groups for each in group.sequences})


def _assign(
    images: ImageColumns,
    homes: Homes,
    *,
    held: Floats,
    groups: Sequence[Group],
    spread: bool,
    cluster: ClusterSpec,
    cost: CostModel,
) -> Ints:
    """The rank that encodes each image; `held`: tokens of each rank.

    Longest first to the rank that is done first: among all ranks where images are `spread`, else among those of the
    group that has the image's sequence. Or, if features then travel for longer than that gains: each on the rank of
    its first token.

    Raises:
        _MemoryError: memory permits neither.
    """
    encoder = cost.encoder
    assert encoder is not None, "images have a cost"
    most = _max_patches(held, encoder=encoder, cluster=cluster)
    among = [np.arange(cluster.num_ranks)] if spread else [np.array(group.ranks) for group in groups]
    best, best_s = None, np.inf
    for rank in (_balanced(images, homes, among=among, most=most, encoder=encoder, cluster=cluster), homes.holder):
        patches = np.bincount(rank[rank >= 0], images.patches[rank >= 0], minlength=cluster.num_ranks)
        if (rank < 0).any() or (patches > most).any():
            continue
        priced = _price(images, rank, homes=homes, cluster=cluster, cost=cost)
        if priced.computed_s + priced.moved_s < best_s:
            best, best_s = rank, priced.computed_s + priced.moved_s
    if best is None:
        needed = float(held.sum()) + encoder.kept_tokens * images.patches.sum()
        raise _MemoryError(cluster.num_ranks * cluster.max_tokens_per_rank / needed)
    return best


def _balanced(
    images: ImageColumns,
    homes: Homes,
    *,
    among: Sequence[Ints],
    most: Floats,
    encoder: EncoderCost,
    cluster: ClusterSpec,
) -> Ints:
    """Images whose first token is on one of the ranks of an entry of `among` are encoded by these, each rank at most
    `most` patches; -1 for images that fit on none."""
    order = np.argsort(-images.patches, kind="stable")
    _, kind = np.unique(-images.patches[order], return_inverse=True)
    seconds, patches = np.add(*encoder.passes_s(images.patches))[order], images.patches[order].astype(np.float64)
    rank, holder, speed = np.full(len(images), -1), homes.holder[order], speeds_of(cluster)
    for ranks in among:
        own = np.isin(holder, ranks)
        left = np.full(cluster.num_ranks, -1.0)
        left[ranks] = most[ranks]
        items = ImageItems(seconds[own], patches[own], holder[own], kind[own].astype(np.int64))
        rank[order[own]] = longest_first(items, speed, left)
    return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodingSeconds:
    """Seconds of the slowest rank's passes, with the fixed ones, and of the exchange of features."""

    computed_s: float
    moved_s: float


def _price(
    images: ImageColumns, rank: Ints, *, homes: Homes | None, cluster: ClusterSpec, cost: CostModel
) -> _EncodingSeconds:
    """`rank[k]` encodes image k; `homes` is None where there are no images."""
    encoder, num_ranks = cost.encoder, cluster.num_ranks
    assert encoder is not None, "images have a cost"
    passes_s = np.stack(
        [np.bincount(rank, each, minlength=num_ranks).astype(np.float64) for each in encoder.passes_s(images.patches)]
    )
    spent_s = (passes_s + np.array(encoder.fixed_passes_s)[:, None]) / speeds_of(cluster)
    moved_s = _moved_s(homes, rank, encoder=encoder, cluster=cluster, cost=cost) if homes else 0.0
    return _EncodingSeconds(computed_s=float(spent_s.max(axis=1).sum()), moved_s=moved_s)


def _moved_s(homes: Homes, rank: Ints, *, encoder: EncoderCost, cluster: ClusterSpec, cost: CostModel) -> float:
    """The most that a rank sends or receives, and a latency for each of as many rounds as a rank has peers at most."""
    num_ranks = cluster.num_ranks
    keys = rank[homes.image] * num_ranks + homes.rank
    rows = np.bincount(keys, homes.rows, minlength=num_ranks**2).reshape(num_ranks, -1)
    np.fill_diagonal(rows, 0)
    if not rows.any():
        return 0.0
    nodes = np.array(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node))
    seconds = rows * np.where(nodes[:, None] == nodes, encoder.row_intra_s, encoder.row_inter_s)
    rounds = max(int((rows > 0).sum(axis=axis).max()) for axis in (0, 1))
    return float(max(seconds.sum(axis=axis).max() for axis in (0, 1))) + rounds * encoder.round_s


def _reason(microbatches: Sequence[MicrobatchPlan]) -> str:
    """Half a sentence."""
    num_ranks = len({(at, share.rank) for at, each in enumerate(microbatches) for share in each.encoding})
    busy = sum(bool(each.encoding) for each in microbatches)
    encoder_s = sum(each.encoder_s for each in microbatches)
    return f"images on {num_ranks / max(busy, 1):.3g} ranks a microbatch, {encoder_s:.3g} s of it"
