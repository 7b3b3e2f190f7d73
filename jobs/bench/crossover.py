"""Two runs in which steps with something and without it come in turns, in opposite order: what it costs."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping

BLOCK = 4
"""Steps of a turn. The first counts for none: what the turn before has left to do falls into it."""

Seconds = Mapping[int, float]
"""Seconds of each step, counted from 1."""


def has_it(step: int, *, first: int) -> bool:
    """True if a step's turn has it: even turns in runs of `first` 0, odd ones in those of 1; turns count from 0."""
    return (step - 1) // BLOCK % 2 == first


def ratios(even_s: Seconds, odd_s: Seconds) -> list[float]:
    """Ratios of time with to time without, of each two neighbouring turns: that one run was faster cancels between
    them. The first turn, in which runs warm up, is left out."""
    logs: dict[int, list[float]] = defaultdict(list)
    for step in even_s.keys() & odd_s.keys():
        turn, place = divmod(step - 1, BLOCK)
        if turn > 0 and place > 0:
            log = math.log(even_s[step] / odd_s[step])
            logs[turn].append(log if has_it(step, first=0) else -log)
    medians = {turn: statistics.median(each) for turn, each in logs.items()}
    return [math.exp((medians[turn] + medians[turn + 1]) / 2) for turn in sorted(medians) if turn + 1 in medians]
