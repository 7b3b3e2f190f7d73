"""The error of a configuration that cannot be used."""


class ConfigError(ValueError):
    """One clear line: the field, the value given, the bound, the remedy."""
