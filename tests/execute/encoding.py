"""Plans whose images are encoded anywhere."""

import random
from collections.abc import Sequence
from dataclasses import replace

from rayfcp.values import BatchPlan, EncoderShare, SequenceSpec


def encoded_anywhere(plan: BatchPlan, sequences: Sequence[SequenceSpec], *, seed: int) -> BatchPlan:
    """Images of each microbatch, some at a time, on any ranks in any order."""
    generator = random.Random(seed)
    microbatches = []
    for microbatch in plan.microbatches:
        shares = []
        for sequence in (each for group in microbatch.groups for each in group.sequences):
            at, count = 0, num_images(sequences[sequence])
            while at < count:
                last = min(at + generator.randint(1, 3), count)
                rank = generator.randrange(plan.num_ranks)
                shares.append(EncoderShare(rank=rank, sequence=sequence, first=at, last=last))
                at = last
        generator.shuffle(shares)
        microbatches.append(replace(microbatch, encoding=tuple(shares)))
    return replace(plan, microbatches=tuple(microbatches))


def encoded_on(rank: int, plan: BatchPlan, sequences: Sequence[SequenceSpec]) -> BatchPlan:
    """All images of a plan on one rank."""
    microbatches = []
    for microbatch in plan.microbatches:
        held = [each for group in microbatch.groups for each in group.sequences if sequences[each].images]
        shares = (EncoderShare(rank=rank, sequence=at, first=0, last=num_images(sequences[at])) for at in held)
        microbatches.append(replace(microbatch, encoding=tuple(shares)))
    return replace(plan, microbatches=tuple(microbatches))


def num_images(sequence: SequenceSpec) -> int:
    return sum(run.count for run in sequence.images)
