"""The configuration of a run: pydantic models, YAML with `section.key=value` overrides, clear errors."""

from rayfcp.config.loading import ConfigError, check_paths, config_of_keys, dump_config, load_config, parse_config
from rayfcp.config.models import Config

__all__ = ["Config", "ConfigError", "check_paths", "config_of_keys", "dump_config", "load_config", "parse_config"]
