"""`python -m rayfcp`: the command, also where it is not installed."""

import sys

from rayfcp.cli import main

if __name__ == "__main__":
    sys.exit(main())
