"""The step after planning: pictures of each microbatch are given out to ranks, whatever strategy planned the rest."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rayfcp.config.plan import PlanConfig
from rayfcp.plan.costs.encoder import EncoderCost, check_one_stage
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.encoding.pictures import PictureColumns, homes_of
from rayfcp.plan.encoding.price import price
from rayfcp.plan.encoding.share import patches_beside, share_out
from rayfcp.plan.layout import lay_out
from rayfcp.plan.strategies.interface import Proposal, Strategy
from rayfcp.values import ClusterSpec, InfeasiblePlanError, MicrobatchPlan, SequenceSpec

Floats = npt.NDArray[np.float64]

TRIES = 12
"""Rooms for tokens with which a strategy is asked, each smaller, until activations of pictures fit beside."""
SMALLER = 0.9


class _NoRoomError(Exception):
    """Pictures of a microbatch do not fit; with `share` of the room for tokens they might."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share


def with_pictures(base: Strategy, *, spread: bool) -> Strategy:
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
