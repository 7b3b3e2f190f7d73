"""Seconds and memory of pictures on the ranks that encode them.

Pictures of a microbatch given out to ranks.

The step after planning: pictures of each microbatch are given out to ranks, whatever strategy planned the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfcp.config.models import PlanConfig
from rayfcp.cost.encoder import EncoderCost, check_one_stage
from rayfcp.cost.images import Homes, PictureColumns, homes_of
from rayfcp.cost.model import CostModel, speeds_of
from rayfcp.cost.placement import node_of_ranks
from rayfcp.plan.layout import lay_out
from rayfcp.plan.strategies.registry import Proposal, Propose
from rayfcp.values import BatchPlan, ClusterSpec, Group, InfeasiblePlanError, MicrobatchPlan, SequenceSpec
from rayfcp.values.arrays import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A rank for each picture of a microbatch: the slowest rank's seconds of encoding, forward and backward with the
    fixed ones, seconds of the features' way, and of each rank the seconds at speed 1, and the patches."""

    computed_s: float
    moved_s: float
    rank_s: Floats
    rank_patches: Floats

    def microbatch_s(self, cost: CostModel, *, last: bool) -> float:
        """What it adds to the microbatch."""
        assert cost.encoder is not None, "the model sees"
        return cost.encoder.microbatch_s(self.computed_s, moved_s=self.moved_s, overlap=cost.overlap, last=last)


def price(
    pictures: PictureColumns, rank: Ints, *, homes: Homes | None, cluster: ClusterSpec, cost: CostModel
) -> Priced:
    """`rank[k]` encodes picture k; None where there are no pictures."""
    encoder, num_ranks = cost.encoder, cluster.num_ranks
    assert encoder is not None, "the model sees"
    passes_s = np.stack(
        [np.bincount(rank, each, minlength=num_ranks).astype(np.float64) for each in encoder.passes_s(pictures.patches)]
    )
    patches = np.bincount(rank, pictures.patches, minlength=num_ranks).astype(np.float64)
    spent_s = (passes_s + np.array(encoder.fixed_passes_s)[:, None]) / speeds_of(cluster)
    moved_s = _moved_s(homes, rank, encoder=encoder, cluster=cluster, cost=cost) if homes else 0.0
    return Priced(
        computed_s=float(spent_s.max(axis=1).sum()),
        moved_s=moved_s,
        rank_s=passes_s.sum(axis=0),
        rank_patches=patches,
    )


def encoded_seconds(plan: BatchPlan, pictures: PictureColumns, *, encoder: EncoderCost) -> Floats:
    """`[microbatch, rank]`: seconds of what each rank encodes, forward and backward, at speed 1."""
    found = np.zeros((len(plan.microbatches), plan.num_ranks))
    seconds = np.add(*encoder.passes_s(pictures.patches))
    for at, microbatch in enumerate(plan.microbatches):
        rank = pictures.encoders(microbatch.encoding)
        mine = rank >= 0
        found[at] = np.bincount(rank[mine], seconds[mine], minlength=plan.num_ranks)
    return found


def moved_rows(homes: Homes, rank: Ints, *, num_ranks: int) -> Ints:
    """`[source, target]`: rows of features that travel."""
    source = rank[homes.picture]
    rows = np.bincount(source * num_ranks + homes.rank, homes.rows, minlength=num_ranks**2).reshape(num_ranks, -1)
    np.fill_diagonal(rows, 0)
    return rows.astype(np.int64)


def _moved_s(homes: Homes, rank: Ints, *, encoder: EncoderCost, cluster: ClusterSpec, cost: CostModel) -> float:
    """The most that a rank sends or receives, round after round, as many rounds as most ranks that one deals with."""
    rows = moved_rows(homes, rank, num_ranks=cluster.num_ranks)
    if not rows.any():
        return 0.0
    nodes = np.array(node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node))
    seconds = rows * np.where(nodes[:, None] == nodes, encoder.row_intra_s, encoder.row_inter_s)
    rounds = max(int((rows > 0).sum(axis=axis).max()) for axis in (0, 1))
    return float(max(seconds.sum(axis=axis).max() for axis in (0, 1))) + rounds * encoder.round_s


def share_out(
    pictures: PictureColumns,
    homes: Homes,
    *,
    held: Floats,
    groups: Sequence[Group],
    spread: bool,
    cluster: ClusterSpec,
    cost: CostModel,
) -> tuple[Ints, Priced] | None:
    """The rank that encodes each picture, and what it takes; None where memory does not permit it.

    Longest first to the rank that is done first, of equal ones each rank those whose tokens it holds: among all ranks
    where pictures are `spread`, else among those of the group that has the picture's sequence. Or, if features then
    travel for longer than that gains: each on the rank of its first token. `held`: tokens of each rank.
    """
    encoder = cost.encoder
    assert encoder is not None, "the model sees"
    room = patches_beside(held, encoder=encoder, cluster=cluster)
    among = [np.arange(cluster.num_ranks)] if spread else [np.array(group.ranks) for group in groups]
    ways = [_spread(pictures, homes, among=among, room=room, encoder=encoder, cluster=cluster), homes.holder]
    best: tuple[Ints, Priced] | None = None
    for rank in ways:
        if (rank < 0).any():
            continue
        priced = price(pictures, rank, homes=homes, cluster=cluster, cost=cost)
        fits = bool((priced.rank_patches <= room).all())
        if fits and (best is None or _seconds(priced) < _seconds(best[1])):
            best = rank, priced
    return best


def patches_beside(held: Floats, *, encoder: EncoderCost, cluster: ClusterSpec) -> Floats:
    """Patches for which each rank has memory beside `held` tokens, which come when the encoder has computed."""
    room = float(cluster.max_tokens_per_rank)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(encoder.kept_tokens > 0, (room - held) / encoder.kept_tokens, np.inf)
        alone = encoder.kept_tokens + encoder.working_tokens
        return np.minimum(kept, room / alone if alone > 0 else np.inf)


def _seconds(priced: Priced) -> float:
    return priced.computed_s + priced.moved_s


def _spread(
    pictures: PictureColumns,
    homes: Homes,
    *,
    among: Sequence[Ints],
    room: Floats,
    encoder: EncoderCost,
    cluster: ClusterSpec,
) -> Ints:
    """Pictures whose first token is on one of some ranks are encoded by these."""
    from rayfcp.plan.vision.kernels.longest_first import Pictures, Ranks, longest_first

    forward_s, backward_s = encoder.passes_s(pictures.patches)
    order = np.argsort(-pictures.patches, kind="stable")
    _, kind = np.unique(-pictures.patches[order], return_inverse=True)
    seconds, patches = (forward_s + backward_s)[order], pictures.patches[order].astype(np.float64)
    rank, holder, speed = np.full(len(pictures), -1), homes.holder[order], speeds_of(cluster)
    for ranks in among:
        mine = np.isin(holder, ranks)
        theirs = np.full(cluster.num_ranks, -1.0)
        theirs[ranks] = room[ranks]
        of = Pictures(seconds[mine], patches[mine], holder[mine], kind[mine].astype(np.int64))
        rank[order[mine]] = longest_first(of, Ranks(speed, theirs))
    return rank


TRIES = 12
"""Rooms for tokens with which a strategy is asked, each smaller, until activations of pictures fit beside."""
SMALLER = 0.9


class _NoRoomError(Exception):
    """Pictures of a microbatch do not fit; with `share` of the room for tokens they might."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share


def with_pictures(base: Propose, *, spread: bool) -> Propose:
    """`base`, and who encodes the pictures of its microbatches: `spread` over all ranks by their work, else over those
    of the group that has their tokens, the most that systems do that know of no encoder."""

    def propose(
        sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> Proposal:
        if cost.encoder is None or not any(sequence.pictures for sequence in sequences):
            return base(sequences, cluster=cluster, cost=cost, options=options)
        check_one_stage("this model", num_stages=cluster.num_stages)
        check_pictures_fit(sequences, encoder=cost.encoder, cluster=cluster)
        least = -(-max(sequence.num_tokens for sequence in sequences) // cluster.num_ranks)
        room = cluster.max_tokens_per_rank
        for at in range(TRIES):
            here = replace(cluster, max_tokens_per_rank=room)
            found = base(sequences, cluster=here, cost=cost, options=options)
            try:
                microbatches = give_out(found.microbatches, sequences, spread=spread, cluster=cluster, cost=cost)
            except _NoRoomError as error:
                if room == least:
                    break
                share = min(error.share, SMALLER)
                room = least if at == TRIES - 2 else max(int(share * room), least)
            else:
                return replace(found, microbatches=microbatches, reason=f"{found.reason}; {_how(microbatches)}")
        raise InfeasiblePlanError(
            f"activations of pictures do not fit beside {room} tokens on each rank, of which a sequence of "
            f"{least * cluster.num_ranks} tokens needs as many; freeze the encoder, take smaller pictures or shorter "
            "sequences, or add ranks or memory"
        )

    return propose


def give_out(
    microbatches: Sequence[MicrobatchPlan],
    sequences: Sequence[SequenceSpec],
    *,
    spread: bool,
    cluster: ClusterSpec,
    cost: CostModel,
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches whose `predicted_s` are of the language model alone, with `encoding` and `encoder_s`, and these
    seconds added.

    Where any microbatch has pictures the last one gathers the encoder's shards too (`lower_encoding`).
    """
    if cost.encoder is None:
        return tuple(microbatches)
    pictures = PictureColumns.of(sequences)
    last = len(microbatches) - 1
    return tuple(
        _given_out(each, sequences, pictures=pictures, last=at == last, spread=spread, cluster=cluster, cost=cost)
        for at, each in enumerate(microbatches)
    )


def encoded_anew(
    microbatches: Sequence[MicrobatchPlan], sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
) -> tuple[MicrobatchPlan, ...]:
    """Microbatches whose `predicted_s` are of the language model alone, with the seconds by `cost` of what they
    encode."""
    if cost.encoder is None:
        return tuple(replace(each, encoder_s=0.0) for each in microbatches)
    pictures = PictureColumns.of(sequences)
    found = []
    for at, each in enumerate(microbatches):
        last, encoder_s = at == len(microbatches) - 1, 0.0
        if each.encoding or (last and any(other.encoding for other in microbatches)):
            mine = _pictures_of(each, pictures)
            homes = homes_of(mine, lay_out(each, sequences).blocks) if len(mine) else None
            priced = price(mine, mine.encoders(each.encoding), homes=homes, cluster=cluster, cost=cost)
            encoder_s = priced.microbatch_s(cost, last=last)
        found.append(replace(each, encoder_s=encoder_s, predicted_s=each.predicted_s + encoder_s))
    return tuple(found)


def _pictures_of(microbatch: MicrobatchPlan, pictures: PictureColumns) -> PictureColumns:
    return pictures.among({each for group in microbatch.groups for each in group.sequences})


def check_pictures_fit(sequences: Sequence[SequenceSpec], *, encoder: EncoderCost, cluster: ClusterSpec) -> None:
    """A rank can encode the largest picture, and all ranks the pictures of any sequence beside its tokens.

    Raises:
        InfeasiblePlanError: names the sequence, its largest picture or its patches, and the bound.
    """
    most = float(patches_beside(np.zeros(1), encoder=encoder, cluster=cluster)[0])
    room = cluster.num_ranks * cluster.max_tokens_per_rank
    for sequence in sequences:
        largest = max((run.num_patches for run in sequence.pictures), default=0)
        remedy = "freeze the encoder, take smaller pictures, or add memory"
        if largest > most:
            raise InfeasiblePlanError(
                f"sequence {sequence.id} has a picture of {largest} patches, a rank has memory for the activations of "
                f"{most:.0f}; {remedy}"
            )
        patches = sum(run.count * run.num_patches for run in sequence.pictures)
        needed = sequence.num_tokens + encoder.kept_tokens * patches
        if needed > room:
            raise InfeasiblePlanError(
                f"sequence {sequence.id} has {sequence.num_tokens} tokens and {patches} patches, whose activations "
                f"take as much memory as {needed:.0f} tokens, {cluster.num_ranks} ranks have it for {room}; {remedy}"
            )


def _given_out(
    microbatch: MicrobatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    pictures: PictureColumns,
    last: bool,
    spread: bool,
    cluster: ClusterSpec,
    cost: CostModel,
) -> MicrobatchPlan:
    mine = _pictures_of(microbatch, pictures)
    if len(mine):
        layout = lay_out(microbatch, sequences)
        held = np.zeros(cluster.num_ranks)
        np.add.at(held, [each.rank for each in layout.blocks], [each.num_tokens for each in layout.blocks])
        homes = homes_of(mine, layout.blocks)
        found = share_out(mine, homes, held=held, groups=microbatch.groups, spread=spread, cluster=cluster, cost=cost)
        if found is None:
            raise _NoRoomError(_share(mine.patches.sum(), held, cluster=cluster, cost=cost))
        rank, priced = found
        encoding = mine.shares(rank)
    elif last and len(pictures):
        encoding, priced = (), price(mine, np.zeros(0, np.int64), homes=None, cluster=cluster, cost=cost)
    else:
        return microbatch
    encoder_s = priced.microbatch_s(cost, last=last)
    return replace(microbatch, encoding=encoding, encoder_s=encoder_s, predicted_s=microbatch.predicted_s + encoder_s)


def _share(num_patches: int, held: Floats, *, cluster: ClusterSpec, cost: CostModel) -> float:
    """Of the microbatch that has so many tokens and patches, the part for which all ranks have memory."""
    assert cost.encoder is not None, "the model sees"
    needed = float(held.sum()) + cost.encoder.kept_tokens * num_patches
    return cluster.num_ranks * cluster.max_tokens_per_rank / needed


def _how(microbatches: Sequence[MicrobatchPlan]) -> str:
    """Half a sentence."""
    num_ranks = len({(at, share.rank) for at, each in enumerate(microbatches) for share in each.encoding})
    busy = sum(bool(each.encoding) for each in microbatches)
    encoder_s = sum(each.encoder_s for each in microbatches)
    return f"pictures on {num_ranks / max(busy, 1):.3g} ranks a microbatch, {encoder_s:.3g} s of it"
