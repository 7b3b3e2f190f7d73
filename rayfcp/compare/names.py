"""Which strategies a comparison knows, and what those are that cannot take part yet."""

from collections.abc import Sequence

from rayfcp.config import ConfigError
from rayfcp.plan import strategy_names
from rayfcp.plan.profiles.words import pick

OURS = ("flex-ring", "flex-block", "elastic-pipeline", "auto")
"""What rayfcp itself runs by; all others are baselines."""

PIPELINES = ("elastic-pipeline", "seq1f1b", "dapple")
"""Strategies that split the layers over stages."""

IN_ORDER = (
    *("flex-ring", "flex-block", "elastic-pipeline", "auto", "static-cp", "dynamic-cp", "ulysses", "ring"),
    *("bytescale", "wlb", "flexsp", "magi", "seq1f1b", "dapple"),
)
"""All strategies in the order in which a comparison shows them."""


def chosen(asked: Sequence[str]) -> tuple[str, ...]:
    """The strategies asked for, each once, `all` spelt out.

    Raises:
        ConfigError: a name that is not known; the message has the nearest.
    """
    known = [*IN_ORDER, *(name for name in strategy_names() if name not in IN_ORDER)]
    names: list[str] = []
    for name in asked:
        try:
            names += known if name == "all" else [pick(name, known, what="--strategies")]
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if not names:
        raise ConfigError("--strategies names none, must name at least one; e.g. flex-ring,static-cp or all")
    return tuple(dict.fromkeys(names))


def missing(name: str, *, num_stages: int) -> str | None:
    """Why the strategy cannot be planned at all, if so."""
    if name in PIPELINES and num_stages == 1:
        return f"{name} splits the layers over pipeline stages and --stages is 1; give it 2 or more"
    if name not in strategy_names():
        return f"this version has no planner for {name}"
    return None
