"""What pictures add at least to the seconds of any plan."""

from collections.abc import Sequence

from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.speeds import speeds_of
from rayfcp.plan.encoding.pictures import PictureColumns
from rayfcp.values import ClusterSpec, SequenceSpec


def encoder_bound(sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel) -> tuple[float, float]:
    """Beside the terms of `lower_bound` for what all ranks share and for what one does alone; (0, 0) without pictures.

    The pictures of a batch take their seconds on ranks that encode; the mean over ranks, weighted by speed, is the
    first term, the largest picture on the fastest rank the second. A picture has its tokens in its microbatch, so that
    at least ceil(tokens of pictures / (N x max_tokens_per_rank)) microbatches encode. In each every rank pays the
    encoder's fixed seconds and its first gathers, and once its last reductions.
    """
    encoder, speeds = cost.encoder, speeds_of(cluster)
    pictures = PictureColumns.of(sequences)
    if encoder is None or not len(pictures):
        return 0.0, 0.0
    forward_s, backward_s = encoder.passes_s(pictures.patches)
    seconds = forward_s + backward_s
    fewest = -(-int(pictures.tokens.sum()) // (cluster.num_ranks * cluster.max_tokens_per_rank))
    shown_s = fewest * encoder.exposed_s + encoder.reduce_exposed_s
    fixed_s = fewest * encoder.fixed_s
    shared_s = (float(seconds.sum()) + cluster.num_ranks * fixed_s) / float(speeds.sum())
    alone_s = (float(seconds.max()) + fixed_s) / float(speeds.max())
    return shared_s + shown_s, alone_s + shown_s
