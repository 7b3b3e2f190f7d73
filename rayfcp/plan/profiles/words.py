"""Names that users give: found, or refused with the nearest known one."""

from collections.abc import Iterable
from difflib import get_close_matches


def pick(name: str, known: Iterable[str], *, what: str) -> str:
    """`name` if it is known.

    Raises:
        ValueError: it is not; the message names the nearest known one and all others.
    """
    names = list(known)
    if name in names:
        return name
    near = get_close_matches(name, names, n=1, cutoff=0.0)
    raise ValueError(f"{what} is {name!r}, must be one of {', '.join(names)}; did you mean {near[0]!r}?")
