"""The base of sections, and types of keys that several sections share."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rayfcp.values.devices import AUTO, DEVICES


def as_list(value: Any) -> Any:
    """One word stands for a list of one."""
    return (value,) if isinstance(value, str) else value


def as_primitives(value: Any) -> Any:
    """All primitives for `auto`: groups that cannot be of one, as heads do not divide, are of the other."""
    return ("ring", "ulysses") if value == "auto" else as_list(value)


def as_numbers(value: Any) -> Any:
    """One number stands for a list of one."""
    return (value,) if isinstance(value, int) else value


def count_or_range(value: Any) -> Any:
    """A count or a range `[min, max]` of counts, checked as a whole so that one message covers both."""
    is_range = isinstance(value, list | tuple)
    numbers = tuple(value) if is_range else (value,)
    if len(numbers) != 1 + is_range or any(type(number) is not int for number in numbers):
        raise ValueError("must be a whole number or [min, max]; write 4 or [2, 4]")
    if min(numbers) < 1:
        raise ValueError("must be at least 1; raise it")
    if numbers[0] > numbers[-1]:
        raise ValueError("must have min no greater than max; swap them")
    return numbers if is_range else numbers[0]


def auto_or_range(value: Any) -> Any:
    """`auto`, or as `count_or_range`."""
    return value if value == AUTO else count_or_range(value)


def known_device(name: str) -> str:
    """A name of `DEVICES`, or `auto`."""
    if name not in (AUTO, *DEVICES):
        raise ValueError(f"must be one of {', '.join(map(repr, (AUTO, *DEVICES)))}; write one of them")
    return name


Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Bounds = Annotated[Literal["auto"] | Count | tuple[Count, Count], BeforeValidator(auto_or_range)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Of a run, a source or an evaluation set, in paths and labels."""
Words = Annotated[tuple[str, ...], BeforeValidator(as_list)]


class Section(BaseModel):
    """A frozen section; a key that is not declared is an error.

    A message raised by a validator of a section starts with the section's own key; one raised by a
    validator of a field starts with `must`. `rayfcp.config.loading` puts the rest in front.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, coerce_numbers_to_str=True
    )
