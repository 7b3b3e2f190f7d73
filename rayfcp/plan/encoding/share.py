"""Pictures of a microbatch given out to ranks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.encoder import EncoderCost
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import speeds_of
from rayfcp.plan.encoding.pictures import Homes, PictureColumns
from rayfcp.plan.encoding.price import Priced, price
from rayfcp.values import ClusterSpec, Group

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
    from rayfcp.plan.encoding.kernels.longest_first import Pictures, Ranks, longest_first  # compiled: loaded on use

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
