"""What all sections of a configuration share."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rayfcp.config.words import as_list

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Words = Annotated[tuple[str, ...], BeforeValidator(as_list)]


class Section(BaseModel):
    """A frozen section; a key that is not declared is an error.

    A message raised by a validator of a section starts with the section's own key; one raised by a
    validator of a field starts with `must`. `rayfcp.config.problems` puts the rest in front.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, coerce_numbers_to_str=True
    )
