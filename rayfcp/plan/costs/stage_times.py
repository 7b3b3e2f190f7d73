"""What each pass of each microbatch takes each stage of a pipeline."""

from typing import NamedTuple

import numpy as np

from rayfcp.plan.costs.chunks import Floats, Passes, head_s, layer_s
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.pipeline import PipelineCost


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
    """Stage p has its share of the layers, the last one the head beside them.

    Traffic of parameters and gradients hides behind its pass, save the first gathers and last reductions: of
    every microbatch, or, once a step, of the forward pass of microbatch `gathers` and the backward pass of
    `reduces` (None: of another pipeline of the step).
    """
    pipeline = cost.pipeline
    assert pipeline is not None, "stages have a cost"
    count = len(passes.rank_tokens)
    head_forward_s, head_backward_s = head_s(passes.rank_tokens, cost=cost)
    share = np.array(pipeline.layers_of_stage)[:, None] / pipeline.num_layers
    last = np.zeros((pipeline.num_stages, 1))
    last[-1] = 1.0
    forward_s = share * (passes.forward_s - head_forward_s) + last * head_forward_s
    backward_s = share * (passes.backward_s - head_backward_s) + last * head_backward_s
    every = np.ones(count)
    gathered = every if pipeline.gather_every == "microbatch" else np.arange(count) == gathers
    reduced = every if pipeline.reduce_every == "microbatch" else np.arange(count) == reduces
    again = float(pipeline.gather_every == "microbatch")
    gather_s, back_s, reduce_s, shown_s, back_shown_s, reduce_shown_s = _traffic(pipeline)
    return StageTimes(
        forward_s=_beside(forward_s, gathered * gather_s, gathered * shown_s, overlap=cost.overlap),
        backward_s=_beside(
            backward_s,
            again * back_s + reduced * reduce_s,
            again * back_shown_s + reduced * reduce_shown_s,
            overlap=cost.overlap,
        ),
        layer_s=layer_s(passes.forward_s, passes.rank_tokens, cost=cost),
        transfer_s=pipeline.transfer_s + pipeline.transfer_s_per_token * passes.rank_tokens,
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
