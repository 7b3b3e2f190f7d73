"""Numbers with their nouns, and degrees with their numbers of groups, in messages and tables."""

from collections.abc import Mapping


def counted(count: int, noun: str, *, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(1200, "step"), counted(2, "recovery", plural="recoveries")
    ('1 step', '1,200 steps', '2 recoveries')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def degrees_text(degrees: Mapping[int, float], *, most: int | None = None) -> str:
    """Return degrees of groups, the largest first, with their numbers; `most`: without those on the fewest ranks.

    >>> degrees_text({1: 12, 8: 3, 4: 1}), degrees_text({1: 1, 2: 4, 8: 2.5}, most=2), degrees_text({})
    ('8 (x3), 4, 1 (x12)', '8 (x2.5), 2 (x4) and 1 more', 'none')
    """
    shown = sorted(degrees, key=lambda degree: (-degree * degrees[degree], -degree))[:most]
    groups = [(degree, degrees[degree]) for degree in sorted(shown, reverse=True)]
    numbers = {degree: str(int(count)) if count == int(count) else f"{count:.1f}" for degree, count in groups}
    text = ", ".join(f"{degree}" if number == "1" else f"{degree} (x{number})" for degree, number in numbers.items())
    return f"{text} and {len(degrees) - len(shown)} more" if len(shown) < len(degrees) else text or "none"
