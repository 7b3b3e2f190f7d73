"""Plans with stages by hand: long sequences in slices, the rest beside the last of them."""

from collections.abc import Sequence

from rayfcp.plan.pipeline.schedule import one_forward_one_backward
from rayfcp.values import Action, BatchPlan, Group, MicrobatchPlan, PipelinePlan, SequenceSpec, Slice
from tests.plan.pipeline.runs import run_lengths

MOST_TOKENS = 48
"""Of a slice."""


def pipelined(
    sequences: Sequence[SequenceSpec], *, num_stages: int, num_ranks: int, recomputed: tuple[int, ...]
) -> BatchPlan:
    """One pipeline on rings of all ranks; stage p recomputes `recomputed[p]` layers of every other microbatch."""
    held = _microbatches(sequences)
    ranks = tuple(range(num_ranks))
    microbatches = tuple(
        MicrobatchPlan(
            groups=(Group(ranks=ranks, sequences=tuple(each)),), group_s=(1.0,), predicted_s=1.0, slices=slices
        )
        for each, slices in held
    )
    order = one_forward_one_backward(run_lengths(microbatches), num_stages=num_stages).tolist()
    pipeline = PipelinePlan(
        start=0,
        stop=len(microbatches),
        actions=tuple(
            tuple(Action(microbatch=at if at >= 0 else ~at, backward=at < 0) for at in stage) for stage in order
        ),
        recomputed_layers=tuple(tuple(layers * (at % 2) for at in range(len(microbatches))) for layers in recomputed),
        predicted_s=1.0,
    )
    return BatchPlan(
        strategy="by hand",
        num_ranks=num_ranks,
        generation=0,
        microbatches=microbatches,
        recomputed_layers=0,
        predicted_s=1.0,
        lower_bound_s=1.0,
        reason="a test",
        pipelines=(pipeline,),
    )


def _microbatches(sequences: Sequence[SequenceSpec]) -> list[tuple[list[int], tuple[Slice, ...]]]:
    """Sequences of each microbatch and the slices among them, the longest sequence first."""
    longest = sorted(sequences, key=lambda each: -each.num_tokens)
    found: list[tuple[list[int], tuple[Slice, ...]]] = []
    for each in longest:
        starts = range(0, each.num_tokens, MOST_TOKENS)
        if len(starts) > 1:
            found += [
                ([each.id], (Slice(sequence=each.id, start=at, stop=min(at + MOST_TOKENS, each.num_tokens)),))
                for at in starts
            ]
        elif found and not found[-1][1] and len(found[-1][0]) < 2:
            found[-1][0].append(each.id)
        else:
            found.append(([each.id], ()))
    return found
