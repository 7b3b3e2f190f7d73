"""How many moves the joint search makes for a batch."""

from rayfcp.config.models import AUTO_MOVES, PlanConfig

FIRST = 300_000
"""Search of the whole space of plans alone: 3 ms, beside 6 ms for its starts."""
USUAL = 3_000_000
"""For `USUAL_WORK`, where nobody knows how much time there is: 0.2 s. Ten times as many gain another 0.05 %."""
USUAL_WORK = 512 * 64
"""Sequences x ranks. The fewer, the less is left to gain: 0.3 % for 16 ranks, nothing for 8."""
LEVELS = (FIRST, 1_000_000, USUAL, 10_000_000, 30_000_000)
"""Moves that a run may ask for; each takes about twice as long as the one before. More than the last gain nothing."""
SLACK_SHARE = 0.5
"""Of the time that there is for a plan: planners' CPUs do other things, and batches differ."""


def moves_of(options: PlanConfig, *, num_ranks: int, num_sequences: int) -> int:
    """The configured number, or what suits so many ranks and sequences."""
    if options.search_moves != AUTO_MOVES:
        return int(options.search_moves)
    share = min(num_ranks * num_sequences / USUAL_WORK, 1.0) ** 0.5
    return max(int(USUAL * share), FIRST)


def with_share(options: PlanConfig, *, parts: int, of: int) -> PlanConfig:
    """Options for planning one of several candidates or parts of a batch; of `auto`, each has the first search."""
    moves = FIRST if options.search_moves == AUTO_MOVES else max(options.search_moves * parts // of, 1)
    return options.model_copy(update={"search_moves": moves})


def next_moves(moves: int, *, prepare_s: float, slack_s: float) -> int:
    """The level for the next plans, given what a plan with `moves` takes and the time there is for each: one up if that
    leaves room for several times as long, one down, the least at last, where there is too little time."""
    at = max((number for number, each in enumerate(LEVELS) if each <= moves), default=0)
    if prepare_s > SLACK_SHARE * slack_s:
        return LEVELS[max(at - 1, 0)]
    if ROOM * prepare_s < SLACK_SHARE * slack_s:
        return LEVELS[min(at + 1, len(LEVELS) - 1)]
    return LEVELS[at]


ROOM = 10.0
"""Times as long as a plan takes there must be for the next level: from the first to the second, with narrower spaces,
CPU time grows tenfold, later twofold."""
