"""Masks with windows and mutual pictures, drawn at random, and what they are, cell by cell."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rayfcp.values import BatchPlan, Mask, Pictures, SequenceSpec


def sees(sequence: SequenceSpec, query: int, key: int, *, window: int = 0) -> bool:
    """Whether a cell is computed, in layers with this window (0: none)."""
    if key > query and any(run.mutual and _together(run, query, key) for run in sequence.pictures):
        return True
    return (key <= query or sequence.mask is Mask.FULL) and (not window or abs(query - key) < window)


def _together(run: Pictures, *tokens: int) -> bool:
    """Whether all tokens are in one picture of the run."""
    firsts = [run.start + at * run.stride for at in range(run.count)]
    return any(all(first <= token < first + run.num_tokens for token in tokens) for first in firsts)


def specs(lengths: Sequence[int], masks: Sequence[Mask] = (Mask.CAUSAL,)) -> list[SequenceSpec]:
    """Sequences of these lengths; masks repeat."""
    return [
        SequenceSpec(id=at, num_tokens=each, num_targets=each - 1, mask=masks[at % len(masks)])
        for at, each in enumerate(lengths)
    ]


def pictured(sequences: Sequence[SequenceSpec], *, seed: int) -> list[SequenceSpec]:
    """The sequences, most of them with runs of pictures anywhere, most of these mutual."""
    rng = random.Random(seed)
    return [replace(each, pictures=_runs(each.num_tokens, rng)) for each in sequences]


def with_windows(sequences: Sequence[SequenceSpec], windows: Sequence[int]) -> list[SequenceSpec]:
    """As of a model with two layers of each window."""
    return [replace(each, windows=tuple((window, 2) for window in windows)) for each in sequences]


def uncut(plan: BatchPlan, sequences: Sequence[SequenceSpec]) -> list[SequenceSpec]:
    """Without the mutual runs that slices of the plan cut."""
    ends = {(each.sequence, each.stop) for microbatch in plan.microbatches for each in microbatch.slices}
    found = []
    for sequence in sequences:
        cut = {end for number, end in ends if number == sequence.id}
        runs = [
            replace(run, mutual=run.mutual and not any(run.start < end < run.stop for end in cut))
            for run in sequence.pictures
        ]
        found.append(replace(sequence, pictures=tuple(runs)))
    return found


def _runs(num_tokens: int, rng: random.Random) -> tuple[Pictures, ...]:
    runs: list[Pictures] = []
    at = rng.randrange(num_tokens + 2)
    while at < num_tokens and len(runs) < 5:
        size = rng.randint(1, max(min(num_tokens - at, 2 + num_tokens // rng.randint(1, 6)), 1))
        size = min(size, num_tokens - at)
        stride = size + rng.randrange(4)
        count = rng.randint(1, 1 + (num_tokens - at - size) // stride)
        run = Pictures(start=at, num_tokens=size, num_patches=4, count=count, stride=stride, mutual=rng.random() < 0.8)
        runs.append(run)
        at = run.stop + rng.choice([0, 0, 1, rng.randrange(9)])
    return tuple(runs)


def seen(sequence: SequenceSpec, *, window: int = 0) -> npt.NDArray[np.bool_]:
    """`sees` of all queries and keys, `[queries, keys]`."""
    at = np.arange(sequence.num_tokens)
    picture = np.full(sequence.num_tokens, -1)
    for number, run in enumerate(each for each in sequence.pictures if each.mutual):
        for turn in range(run.count):
            picture[run.start + turn * run.stride :][: run.num_tokens] = 1000 * number + turn
    distance = at[:, None] - at
    plain = (distance >= 0) | (sequence.mask is Mask.FULL)
    near = np.abs(distance) < (window or sequence.num_tokens)
    later = (picture[:, None] == picture) & (picture >= 0) & (distance < 0)
    return np.asarray((plain & near) | later)
