"""Layers and parameters of pipeline stages."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from rayfcp.values import LayerProfile, ModelProfile

TYPICAL_TOKENS = 8192
"""Tokens of a sequence whose attention counts where layers are weighed against each other: some attend, some do not."""


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as possible; the first stages get one more where they do not divide.

    >>> split_layers(10, 4)
    (3, 3, 2, 2)

    Raises:
        ValueError: fewer layers than stages.
    """
    _check_stages(num_layers, num_stages)
    each, left = divmod(num_layers, num_stages)
    return tuple(each + (stage < left) for stage in range(num_stages))


def split_by_cost(model: ModelProfile, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage so that the slowest stage has the least work: the head counts as the layers whose products
    take as long, so that the last stage may get fewer. Layers that differ are weighed by `layer_work`.

    Raises:
        ValueError: fewer layers than stages.
    """
    _check_stages(model.num_layers, num_stages)
    if num_stages == 1:
        return (model.num_layers,)
    if model.layers:
        return _split(layer_work(model), num_stages, last=2.0 * model.head_parameters)
    head = model.head_parameters / model.layer_matmul_parameters
    splits = [
        (*split_layers(model.num_layers - last, num_stages - 1), last)
        for last in range(1, model.num_layers - num_stages + 2)
    ]
    return min(splits, key=lambda split: (max(split[0], split[-1] + head), -split[-1]))


def layer_work(model: ModelProfile) -> list[float]:
    """Forward FLOPs per token of each layer in a sequence of `TYPICAL_TOKENS`."""

    def work(layer: LayerProfile) -> float:
        pairs = sum(each.pair_flops * each.kind.visible_pairs(TYPICAL_TOKENS, TYPICAL_TOKENS) for each in layer.mixers)
        return model.linear_flops_of([layer]) + pairs / TYPICAL_TOKENS

    return [work(layer) for layer in model.every_layer]


Split = tuple[float, tuple[int, ...]]
"""Work of stages, and their layers."""


def _split(work: Sequence[float], num_stages: int, *, last: float) -> tuple[int, ...]:
    """Layers of each stage, at least one, with the least of the slowest stage's work, then the least sum of squares;
    `last`: work of the last stage beside its layers."""
    slowest, _ = _best(work, num_stages, last=last, add=max)

    def squared(total: float, own: float) -> float:
        return total + own * own if own <= slowest else math.inf

    return _best(work, num_stages, last=last, add=squared)[1]


def _best(work: Sequence[float], num_stages: int, *, last: float, add: Callable[[float, float], float]) -> Split:
    """The least total of the stages' work, which `add` adds to that of the stages before, and its layers."""
    before = [0.0, *accumulate(work)]
    best: list[Split] = [(0.0, ()), *[(math.inf, ())] * len(work)]
    for stage in range(num_stages):
        more = last if stage == num_stages - 1 else 0.0
        found: list[Split] = [(math.inf, ())]
        for stop in range(1, len(before)):
            total, start = min(
                (add(best[start][0], before[stop] - before[start] + more), start) for start in range(stop)
            )
            found.append((total, (*best[start][1], stop - start)))
        best = found
    return best[-1]


def outer_parameters(model: ModelProfile, *, num_stages: int) -> tuple[int, ...]:
    """Parameters of each stage beside its layers: the embedding on the first, the head on the last; tied, both hold the
    one matrix."""
    first, last = model.embedding_parameters, model.head_parameters
    if num_stages == 1:
        return (first if model.tied_embeddings else first + last,)
    return (first, *[0] * (num_stages - 2), last)


def check_layers(model: ModelProfile, layers_of_stage: Sequence[int]) -> None:
    """Check that every stage has a layer and every layer a stage.

    Raises:
        ValueError: names the layers.
    """
    if min(layers_of_stage, default=0) < 1 or sum(layers_of_stage) != model.num_layers:
        raise ValueError(
            f"layers_of_stage is {tuple(layers_of_stage)}, must be at least 1 each and {model.num_layers} together, "
            f"the layers of {model.name}; split them anew (split_layers)"
        )


def _check_stages(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"cluster.pipeline_stages is {num_stages}, must be between 1 and the model's {num_layers} layers; lower it"
        )
