"""Profiles of hardware and models: named ones shipped as YAML (`data/`, with all sources), or files of users."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from rayfcp.config import ConfigError
from rayfcp.config.loading import read_mapping, read_yaml
from rayfcp.cost.configurations import read_configuration
from rayfcp.cost.layers import layers_of_file
from rayfcp.values import HardwareProfile, LayerKind, ModelProfile, VisionProfile


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


P = TypeVar("P", bound=ModelProfile | HardwareProfile)

MAY_BE_ZERO = {"latency_s", "microbatch_overhead_s", "overlap", "node_uplink_bandwidth"}
MAY_BE_ZERO |= {
    "collective_intra_s",
    "collective_inter_s",
    "host_layer_s",
    "host_round_s",
    "attention_half_tokens",
    "linear_half_tokens",
    "shared_ffn_size",
}
SHARES = {"linear_efficiency", "attention_efficiency", "overlap"}
TEXTS = {"name", "source"}
WINDOWS = "layer_windows"
"""Key of files for the field `kind_of_layer`: keys that a query sees in each layer, itself included; 0 for all."""
LAYERS = "layers"
"""Key of files for layers that differ (`rayfcp.cost.layers`), in place of the fields of `EQUAL`."""
EQUAL: tuple[str, ...] = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "head_norms", WINDOWS)
EQUAL += ("num_experts", "experts_per_token", "shared_ffn_size")
SECTIONS = {"vision": VisionProfile}


class Shipped(Mapping[str, P], Generic[P]):
    """The profiles of one data file of this package, by name, in the order of the file; read when first used."""

    def __init__(self, kind: type[P], *, file: str, what: str) -> None:
        self._kind, self._file, self._what = kind, file, what

    def __getitem__(self, name: str) -> P:
        return self._profiles[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._profiles)

    def __len__(self) -> int:
        return len(self._profiles)

    def sources(self, name: str) -> Mapping[str, str]:
        """Source of each field's figure."""
        return self._profiles[name][1]

    def find(self, name_or_path: str) -> P:
        """The profile of that name in any case, or the one in that YAML file (a path has a slash or ends in `.yaml`,
        `.yml`).

        Raises:
            ConfigError: unknown name, or a file that holds no such profile; one line that names the field, the
                value, the bound, and the nearest known word.
        """
        if not ("/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))):
            try:
                return self[pick(name_or_path.lower(), self, what=self._what)]
            except ValueError as error:
                raise ConfigError(f"{error} (a YAML file is given by its path)") from None
        path = Path(name_or_path)
        where = f"{self._what} file {name_or_path!r}"
        raw = read_mapping(
            name_or_path, what=self._what, content="fields of a profile, one `key: value` a line; e.g. name: mine"
        )
        return self._profile({"name": path.stem, **raw}, where=where)[0]

    @cached_property
    def _profiles(self) -> dict[str, tuple[P, dict[str, str]]]:
        text = (files("rayfcp.cost") / "data" / self._file).read_text(encoding="utf-8")
        entries: dict[str, dict[str, Any]] = read_yaml(text, source=self._file)
        return {
            name: self._profile({"name": name, **fields}, where=f"{self._file}: {name}")
            for name, fields in entries.items()
        }

    def _profile(self, raw: Mapping[str, Any], *, where: str) -> tuple[P, dict[str, str]]:
        values, sources = _fields(self._kind, raw, where=where)
        if self._kind is HardwareProfile and sources:
            values["source"] = "; ".join(f"{name}: {text}" for name, text in sources.items())
        _check(values, where=where)
        if LAYERS in values:
            layers = layers_of_file(values.pop(LAYERS), hidden_size=values.pop("hidden_size"), where=where)
            return cast(P, ModelProfile.of_layers(layers, **values)), sources
        if WINDOWS in values:
            values["kind_of_layer"] = tuple(LayerKind(window=each) for each in values.pop(WINDOWS))
        return self._kind(**values), sources


def _fields(kind: type[Any], raw: Mapping[str, Any], *, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of fields, those of sections as profiles, and sources by field (`vision.num_layers`)."""
    fields = {WINDOWS if field.name == "kind_of_layer" else field.name: field for field in dataclasses.fields(kind)}
    for own in ("adapter", "num_outputs"):  # those of a run, not of a model
        fields.pop(own, None)
    given = dict(raw)
    if kind is ModelProfile:
        _drop(fields, EQUAL if LAYERS in given else (LAYERS,), given=given, where=where)
    sources = _sources(given.pop("sources", {}), fields, where=where)
    for key in given:
        if key not in fields:
            raise ConfigError(f"{where}: {key} is no field; did you mean {_nearest(str(key), [*fields, 'sources'])}?")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing; give all of {', '.join(missing)}")
    values = {key: _value(key, given[key], field=fields[key], where=where) for key in given if key not in SECTIONS}
    for key in (key for key in given if key in SECTIONS):
        values[key], texts = _section(key, given[key], where=where)
        sources |= {f"{key}.{name}": text for name, text in texts.items()}
    return values, sources


def _drop(fields: dict[str, Any], names: Iterable[str], *, given: Mapping[str, Any], where: str) -> None:
    """Drop fields of files that say the same in another way.

    Raises:
        ConfigError: one of them is given beside `layers`.
    """
    for name in names:
        if name in given:
            raise ConfigError(f"{where}: {name} is given beside layers, whose shapes say it; give one of the two")
        fields.pop(name)


def _section(key: str, raw: object, *, where: str) -> tuple[Any, dict[str, str]]:
    """A profile inside a profile and its sources; None for null."""
    if raw is None:
        return None, {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: {key} is {raw!r}, must hold fields of its own; e.g. num_layers: 24")
    values, sources = _fields(SECTIONS[key], raw, where=f"{where}: {key}")
    if values["hidden_size"] % values["num_heads"]:
        raise ConfigError(
            f"{where}: {key}: hidden_size is {values['hidden_size']}, must be a multiple of num_heads "
            f"({values['num_heads']}); change one"
        )
    return SECTIONS[key](**values), sources


def _check(values: Mapping[str, Any], *, where: str) -> None:
    heads, kv_heads = values.get("num_heads"), values.get("num_kv_heads")
    if heads is not None and heads % kv_heads:
        raise ConfigError(f"{where}: num_heads is {heads}, must be a multiple of num_kv_heads ({kv_heads}); change one")
    experts, each = values.get("num_experts", 1), values.get("experts_per_token", 1)
    if each > experts:
        raise ConfigError(f"{where}: experts_per_token is {each}, must be at most num_experts ({experts}); change one")
    windows, layers = values.get(WINDOWS) or (), values.get("num_layers")
    if windows and len(windows) != layers:
        raise ConfigError(f"{where}: {WINDOWS} has {len(windows)} entries, must have num_layers ({layers}); correct it")


def _sources(raw: object, fields: Mapping[str, Any], *, where: str) -> dict[str, str]:
    """One text per field from keys that name one or several fields."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: sources must map names of fields to texts; e.g. peak_flops: data sheet")
    texts: dict[str, str] = {}
    for keys, text in raw.items():
        for name in (part.strip() for part in str(keys).split(",")):
            if name not in fields:
                raise ConfigError(f"{where}: sources has {name}, no field; did you mean {_nearest(name, [*fields])}?")
            texts[name] = str(text)
    return texts


def _value(key: str, value: object, *, field: Any, where: str) -> object:
    """The value as the field's type; refused if it is of another type or beyond the field's bounds."""
    kind: Callable[[Any], object] = field.type
    if key in TEXTS:
        return str(value)
    if key == LAYERS:
        return value
    if key == WINDOWS:
        if not isinstance(value, list) or not all(isinstance(each, int) and each >= 0 for each in value):
            raise ConfigError(f"{where}: {key} is {value!r}, must be a list of whole numbers of at least 0; correct it")
        return tuple(value)
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {key} is {value!r}, must be true or false; write one of the two")
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (kind is int and value != int(value)):  # type: ignore[call-overload]
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{where}: {key} is {value!r}, must be {wanted}; write digits such as 128 or 2e9")
    assert isinstance(value, (int, float))
    if value < 0 or (value == 0 and key not in MAY_BE_ZERO):
        raise ConfigError(
            f"{where}: {key} is {value}, must be {'at least' if key in MAY_BE_ZERO else 'above'} 0; raise it"
        )
    if key in SHARES and value > 1:
        raise ConfigError(f"{where}: {key} is {value}, must be at most 1; it is a share")
    return kind(value)


def _nearest(name: str, known: list[str]) -> str:
    return get_close_matches(name, known, n=1, cutoff=0.0)[0]


HARDWARE: Shipped[HardwareProfile] = Shipped(HardwareProfile, file="hardware.yaml", what="hardware")
MODELS: Shipped[ModelProfile] = Shipped(ModelProfile, file="models.yaml", what="model")


def hardware_profile(name_or_path: str) -> HardwareProfile:
    """The hardware profile of that name, or of that YAML file; see `Shipped.find`."""
    return HARDWARE.find(name_or_path)


def model_profile(name_or_path: str) -> ModelProfile:
    """The model profile of that name, or of that YAML file (`Shipped.find`); or the one of a Hugging Face `config.json`
    or the folder that it is in."""
    path = Path(name_or_path)
    if path.suffix == ".json" or path.is_dir():
        return read_configuration(path)
    return MODELS.find(name_or_path)
