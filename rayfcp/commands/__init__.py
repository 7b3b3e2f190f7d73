"""Commands that need more than a few lines, one module each, and what they share. Nothing heavy is imported early."""

import argparse

DONE, FAILED, WRONG_INPUT = 0, 1, 2
"""Exit codes."""


class CommandFailedError(Exception):
    """A command failed; the message is complete, no traceback is needed."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare a configuration that may be absent: `overrides` holds the file, if given, and then the overrides."""
    parser.add_argument("overrides", metavar="CONFIG key=value", nargs="*", help="YAML file, and overrides of its keys")
