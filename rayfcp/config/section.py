"""The base of all sections of a configuration, and types of values that several of them have."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def as_list(value: Any) -> Any:
    """One word stands for a list of one."""
    return (value,) if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Words = Annotated[tuple[str, ...], BeforeValidator(as_list)]


class Section(BaseModel):
    """A frozen section; a key that is not declared is an error.

    A message raised by a validator of a section starts with the section's own key; one raised by a
    validator of a field starts with `must`. `rayfcp.config.loading` puts the rest in front.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, coerce_numbers_to_str=True
    )
