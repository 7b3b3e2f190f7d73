"""From a YAML file and the command line to a checked Config, and back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayfcp.config.errors import ConfigError
from rayfcp.config.models import STDLIB_PLACEHOLDER, Config
from rayfcp.config.problems import describe, shown, unknown_key
from rayfcp.config.yaml_text import read_yaml, write_yaml


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, changed by `section.key=value` overrides, later ones last.

    A value is read as YAML: `train.learning_rate=1e-4`, `cluster.num_workers=[2, 4]`, `run.dir=null`.

    Raises:
        ConfigError: One line that names the file or the dotted key, the value, the bound and the remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"config file {str(path)!r} does not exist; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}; give a YAML text file") from error
    raw = read_yaml(text, source=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config file {str(path)!r} holds {shown(raw)}, must hold sections of keys; see jobs/quickstart.yaml"
        )
    for override in overrides:
        _override(raw, override)
    return parse_config(raw)


def config_of_keys(overrides: Sequence[str]) -> Config:
    """The configuration of `section.key=value` words alone, for what reads no data: `data.paths` may be missing.

    Raises:
        ConfigError: One line, as of `load_config`.

    >>> config_of_keys(["model.name=qwen3-1.7b", "train.steps=3"]).train.steps
    3
    """
    raw: dict[str, Any] = {"data": {"paths": [STDLIB_PLACEHOLDER]}}
    for override in overrides:
        _override(raw, override)
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> Config:
    """The checked configuration of plain data, e.g. of a YAML file. An empty section takes its defaults.

    Raises:
        ConfigError: One line for the first problem.
    """
    given = {section: {} if keys is None else keys for section, keys in raw.items()}
    # A misspelt `data` would otherwise only be told as a missing one; so would a file without it.
    try:
        return Config.model_validate({"data": {}, **given})
    except ValidationError as error:
        raise ConfigError(describe(error)) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML. `parse_config` of it gives an equal Config."""
    return write_yaml(config.model_dump(mode="json"))


def check_paths(config: Config) -> None:
    """Whether the local files and folders that the configuration names are there. URLs are left to their readers.

    Raises:
        ConfigError: One line for the first that is missing.
    """
    named = [("data.paths", path) for path in config.data.paths]
    if config.checkpoint.resume not in ("auto", "never"):
        named.append(("checkpoint.resume", config.checkpoint.resume))
    for field, path in named:
        is_pattern = field == "data.paths" and any(sign in path for sign in "*?[")
        if "://" not in path and not is_pattern and not Path(path).expanduser().exists():
            raise ConfigError(f"{field} has {path!r}, which does not exist; give a file or folder that does")


def _override(raw: dict[str, Any], text: str) -> None:
    """Sets one `section.key=value` in `raw`."""
    dotted, equals, value = text.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r} must have the form section.key=value; e.g. train.steps=100")
    section = raw
    for part in parts[:-1]:
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(unknown_key(dotted))
    section[parts[-1]] = read_yaml(value, source=f"override {text!r}")
