"""What each pass of each microbatch takes each stage of a pipeline."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.chunks import Floats, Passes, head_s, layer_s
from rayfcp.plan.costs.model import CostModel
from rayfcp.plan.costs.pipeline import PipelineCost

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
