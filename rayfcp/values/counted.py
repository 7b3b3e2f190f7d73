"""Numbers with their nouns, in messages and tables."""


def counted(count: int, noun: str, *, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(1200, "step"), counted(2, "recovery", plural="recoveries")
    ('1 step', '1,200 steps', '2 recoveries')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
