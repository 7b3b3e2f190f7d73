"""Check many random batches of hosts: `python -m tests.adapters.many --host megatron --batches 1000`."""

import argparse
import sys
import time

from tests.adapters.hosts import HOSTS


def main() -> int:
    """Return how many batches had no valid plan, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", choices=[*HOSTS, "all"], default="all")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for host in HOSTS if options.host == "all" else [options.host]:
        start_s, wrong = time.monotonic(), []
        for number in range(options.first, options.first + options.batches):
            try:
                HOSTS[host](number)
            except (AssertionError, ValueError) as error:
                wrong.append(f"  batch {number}: {type(error).__name__}: {error}")
        taken_s = time.monotonic() - start_s
        print(f"{host}: {options.batches - len(wrong)} of {options.batches} hold, {taken_s:.0f} s", flush=True)  # noqa: T201
        print(*wrong[:20], sep="\n", end="\n" if wrong else "")  # noqa: T201
        failed += len(wrong)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
