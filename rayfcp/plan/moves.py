"""How many moves the joint search makes for a batch: as configured, or by ranks, sequences and spare time."""

from rayfcp.config.models import AUTO_MOVES, PlanConfig

FIRST = 300_000
"""Search of the whole space of plans alone: 3 ms, beside 6 ms for its starts."""
USUAL = 3_000_000
"""For `USUAL_WORK`, where nobody knows how much time there is: 0.15 s. Ten times as many gain 0.1 % more."""
USUAL_WORK = 512 * 64
"""Sequences x ranks. Fewer leave less to gain: 0.2 % on 16 ranks, 0.1 % on 8."""
FACTORS = (0.0, 1.0, 3.0, 10.0)
"""Of the usual moves, by level; `FIRST` at least. With more, rounds end since they gain nothing."""
USUAL_LEVEL = 1
TAKES = (1.0, 15.0, 25.0, 40.0)
"""Time of a plan by level, as multiples of the least; measured on 512 sequences and 64 ranks."""
SLACK_SHARE = 0.5
"""Of the time that there is for a plan: batches differ, and a planner also lowers and checks it."""


def moves_of(options: PlanConfig, *, num_ranks: int, num_sequences: int, level: int = USUAL_LEVEL) -> int:
    """The configured number, or what suits so many ranks and sequences at a level: the least for a batch so small that
    more gain next to nothing, where CPUs may be those of workers."""
    if options.search_moves != AUTO_MOVES:
        return int(options.search_moves)
    share = min(num_ranks * num_sequences / USUAL_WORK, 1.0) ** 0.5
    usual = USUAL * share
    return max(int(FACTORS[level] * usual), FIRST) if usual >= FIRST else FIRST


def with_share(options: PlanConfig, *, parts: int, of: int) -> PlanConfig:
    """Options for planning one of several candidates or parts of a batch; of `auto`, each has the first search."""
    moves = FIRST if options.search_moves == AUTO_MOVES else max(options.search_moves * parts // of, 1)
    return options.model_copy(update={"search_moves": moves})


def next_level(level: int, *, plan_s: float, slack_s: float) -> int:
    """The highest level at which plans are expected to take their share of `slack_s`, the time that there is for each,
    where one of this level took `plan_s`; the least if none is."""
    least_s = plan_s / TAKES[level]
    return max((each for each, takes in enumerate(TAKES) if takes * least_s <= SLACK_SHARE * slack_s), default=0)
