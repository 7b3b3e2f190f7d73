"""Errors that end a run or a command."""

from rayfcp.config import ConfigError


class CapacityError(ConfigError):
    """The cluster has too few devices or CPUs; names what was requested and what exists."""


class RunAbortedError(RuntimeError):
    """The run has to end: storage, numbers or the cluster do not permit it to continue. One clear line."""


class RunFailedError(RuntimeError):
    """The run failed, but not because of its configuration; holds the worker's traceback."""


class StoppedError(Exception):
    """The user stopped the run while no generation could run a step."""
