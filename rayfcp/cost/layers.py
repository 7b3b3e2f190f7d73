"""Layers that differ, in files of model profiles: their shapes by name, and the pattern in which they follow."""

import re
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayfcp.config import ConfigError
from rayfcp.config.loading import describe
from rayfcp.values import AttentionProfile, LayerKind, LayerProfile, MixerProfile, RecurrenceProfile, RecurrentKind

Positive = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(ge=0)]

_TOKEN = re.compile(r"[\w-]+|[()*]")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class AttentionShape(_Section):
    """Softmax attention, fields as of `AttentionProfile`. Without `num_kv_heads` there are as many as `num_heads`, 1
    with a `latent_size`; without `value_dim` it is `head_dim`; without `parameters` they are counted."""

    num_heads: Positive
    num_kv_heads: Positive | None = None
    head_dim: Positive
    value_dim: Positive | None = None
    window: Size = 0
    chunk: Size = 0
    latent_size: Size = 0
    query_latent_size: Size = 0
    rope_size: Size = 0
    head_norms: bool = False
    gated: bool = False
    key_matrices: Literal[0, 1, 2] = 2
    lends_keys: bool = False
    parameters: Positive | None = None

    def profile(self, hidden_size: int) -> AttentionProfile:
        fields = self.model_dump(exclude={"window", "chunk", "num_kv_heads", "value_dim", "parameters"})
        found = AttentionProfile(
            kind=LayerKind(window=self.window, chunk=self.chunk),
            num_kv_heads=1 if self.latent_size else self.num_kv_heads or self.num_heads,
            value_dim=self.value_dim or self.head_dim,
            parameters=self.parameters or 0,
            **fields,
        )
        return found if self.parameters else found.with_parameters(hidden_size)


class RecurrenceShape(_Section):
    """A recurrence, fields as of `RecurrenceProfile`. `transition`: what a state is multiplied by, a `matrix` (gated
    delta rules), a `diagonal` one, a `scalar` (Mamba-2), or a `constant`. `conv_width`: of its causal convolution."""

    num_heads: Positive
    key_dim: Positive
    value_dim: Positive
    transition: Literal["matrix", "diagonal", "scalar", "constant"]
    conv_channels: Size = 0
    conv_width: Size = 0
    gated: bool = True
    parameters: Positive

    def profile(self) -> RecurrenceProfile:
        sizes = {"matrix": self.key_dim**2, "diagonal": self.key_dim, "scalar": 1, "constant": 0}
        return RecurrenceProfile(
            kind=RecurrentKind(halo=max(self.conv_width - 1, 0)),
            transition_size=sizes[self.transition],
            **self.model_dump(exclude={"conv_width", "transition"}),
        )


class LayerShape(_Section):
    """A layer: attention, a recurrence, both side by side, or none; and an MLP, experts, or none. Fields as of
    `LayerProfile`."""

    attention: AttentionShape | None = None
    recurrence: RecurrenceShape | None = None
    ffn_size: Size = 0
    num_experts: Positive = 1
    experts_per_token: Positive = 1
    shared_ffn_size: Size = 0
    mlp_matrices: Literal[2, 3] = 3
    extra_norms: Size = 0
    input_size: Size = 0

    def profile(self, hidden_size: int) -> LayerProfile:
        mixers: list[MixerProfile] = []
        if self.attention:
            mixers.append(self.attention.profile(hidden_size))
        if self.recurrence:
            mixers.append(self.recurrence.profile())
        others = self.model_dump(exclude={"attention", "recurrence"})
        return LayerProfile(mixers=tuple(mixers), hidden_size=hidden_size, **others)


class Layers(_Section):
    """`shapes` by name; `pattern`: their names in the order of layers, `*` repeats a name or what stands in
    parentheses."""

    shapes: dict[str, LayerShape]
    pattern: str


def layers_of_file(raw: object, *, hidden_size: int, where: str) -> tuple[LayerProfile, ...]:
    """The layers that a file's `layers` describe.

    Raises:
        ConfigError: names the field, its value and the bound in one line.
    """
    try:
        given = Layers.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: layers.{_line(error)}") from None
    names = names_of(given.pattern, where=where)
    unknown = [name for name in names if name not in given.shapes]
    if unknown:
        raise ConfigError(
            f"{where}: layers.pattern names {unknown[0]!r}, must be one of {', '.join(given.shapes)}; add it to shapes"
        )
    found = {name: shape.profile(hidden_size) for name, shape in given.shapes.items()}
    for name, shape in given.shapes.items():
        _check(shape, where=f"{where}: layers.shapes.{name}")
    return tuple(found[name] for name in names)


_SECTIONS: dict[str, type[BaseModel]] = {"attention": AttentionShape, "recurrence": RecurrenceShape}


def _line(error: ValidationError) -> str:
    """One line for the first problem, unknown keys first."""
    problem = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    *path, key = map(str, problem["loc"]) if problem["loc"] else [""]
    dotted = ".".join([*path, key])
    default: type[BaseModel] = LayerShape if path else Layers
    section = next((_SECTIONS[each] for each in path[2:] if each in _SECTIONS), default)
    if problem["type"] == "extra_forbidden":
        return f"{dotted} is no field; did you mean {get_close_matches(key, section.model_fields, n=1, cutoff=0.0)[0]}?"
    if problem["type"] == "missing":
        return f"{dotted} is missing; give it"
    return describe(error)


def _check(shape: LayerShape, *, where: str) -> None:
    """
    Raises:
        ConfigError: numbers that do not fit each other.
    """
    if shape.experts_per_token > shape.num_experts:
        raise ConfigError(
            f"{where}: experts_per_token is {shape.experts_per_token}, must be at most num_experts "
            f"({shape.num_experts}); change one"
        )
    own = shape.attention
    if own and own.num_heads % (own.num_kv_heads or own.num_heads):
        raise ConfigError(
            f"{where}: num_heads is {own.num_heads}, must be a multiple of num_kv_heads "
            f"({own.num_kv_heads}); change one"
        )
    if own and own.window and own.chunk:
        raise ConfigError(f"{where}: window is {own.window} and chunk {own.chunk}, one must be 0; correct it")
    if own and own.rope_size > own.head_dim:
        raise ConfigError(
            f"{where}: rope_size is {own.rope_size}, must be at most head_dim ({own.head_dim}); change one"
        )


def names_of(pattern: str, *, where: str = "pattern") -> tuple[str, ...]:
    """Names in the order of layers.

    >>> names_of("dense*2 (delta*3 full)*2")
    ('dense', 'dense', 'delta', 'delta', 'delta', 'full', 'delta', 'delta', 'delta', 'full')

    Raises:
        ConfigError: parentheses do not match, or a `*` does not stand between what it repeats and a number.
    """
    wrong = ConfigError(
        f"{where}: layers.pattern is {pattern!r}, must hold names, of which * and a number repeats one or some in "
        "parentheses; e.g. dense*3 (delta*3 full)*12"
    )
    tokens, stack = _TOKEN.findall(pattern), [list[list[str]]()]
    if "".join(tokens) != "".join(pattern.split()):
        raise wrong
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) < 2:
                raise wrong
            group = [name for part in stack.pop() for name in part]
            stack[-1].append(group)
        elif token == "*":
            count = tokens[at + 1] if at + 1 < len(tokens) else ""
            if not (count.isdecimal() and stack[-1]):
                raise wrong
            stack[-1][-1] = stack[-1][-1] * int(count)
            at += 1
        else:
            stack[-1].append([token])
        at += 1
    if len(stack) != 1 or not (names := tuple(name for part in stack[0] for name in part)):
        raise wrong
    return names
