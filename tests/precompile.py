"""Compile the kernels of planners and simulator ahead of the tests: `python -m tests.precompile`.

They are kept beside their sources. Without it the first tests to plan would compile them, in each process that runs
tests, and on a busy machine take longer than a test may.
"""

import sys

from rayfcp.cli import compile_kernels

if __name__ == "__main__":
    compile_kernels(lambda text: print(text, file=sys.stderr))  # noqa: T201
