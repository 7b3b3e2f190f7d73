"""Before a value is checked: the short forms that a user may write."""

from typing import Any


def as_list(value: Any) -> Any:
    """One word stands for a list of one."""
    return (value,) if isinstance(value, str) else value


def workers_or_range(value: Any) -> Any:
    """A count `D` or a range `[min, max]` of devices, checked as a whole so that one message covers both.

    Raises:
        ValueError: Neither form, a number below 1, or min above max.
    """
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers) or len(numbers) > 2:
        raise ValueError("must be a whole number or [min, max]; write 4 or [2, 4]")
    if isinstance(value, list | tuple) and len(numbers) != 2:
        raise ValueError("must be a whole number or [min, max]; write 4 or [2, 4]")
    if min(numbers) < 1:
        raise ValueError("must be at least 1; add a worker")
    if numbers[0] > numbers[-1]:
        raise ValueError("must have min no greater than max; swap them")
    return tuple(numbers) if len(numbers) == 2 else numbers[0]
