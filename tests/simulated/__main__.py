"""Replay or search fault schedules: `python -m tests.simulated --seed N`, `python -m tests.simulated --count 1000`."""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulated.run import simulate
from tests.simulated.schedule import draw
from tests.simulated.world import ViolationError

CHUNK = 25


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this schedule and print its events")
    parser.add_argument("--first", type=int, default=0, help="first seed of a search (default: 0)")
    parser.add_argument("--count", type=int, default=1000, help="schedules of a search (default: 1000)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed)
    start_s = time.perf_counter()
    found = search(range(arguments.first, arguments.first + arguments.count), processes=arguments.processes)
    print(f"{arguments.count} schedules in {time.perf_counter() - start_s:.0f} s")  # noqa: T201
    for name, count in sorted(found.kinds.items()):
        print(f"{count:8d} {name}")  # noqa: T201
    for seed, text in found.failures:
        print(f"seed {seed}: {text}")  # noqa: T201
    print(f"{len(found.failures)} of {arguments.count} schedules failed; replay one with --seed")  # noqa: T201
    return 1 if found.failures else 0


def replay(seed: int) -> int:
    trace: list[str] = []
    print(draw(seed))  # noqa: T201
    try:
        result = simulate(draw(seed), trace=trace)
    except ViolationError as error:
        print("\n".join(trace))  # noqa: T201
        print(f"FAILED: {error}")  # noqa: T201
        return 1
    print("\n".join(trace))  # noqa: T201
    print(f"{result.outcome}\n{result.num_events} events, digest {result.digest:08x}")  # noqa: T201
    return 0


class Found:
    """Failures of a search by seed, and how often each kind of fault came about."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, str]] = []
        self.kinds: Counter[str] = Counter()


def search(seeds: range, *, processes: int | None) -> Found:
    """Run the schedules of these seeds."""
    found = Found()
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(processes) as pool:
        for failures, kinds in pool.map(run_many, chunks):
            found.failures += failures
            found.kinds.update(kinds)
    return found


def run_many(seeds: range) -> tuple[list[tuple[int, str]], Counter[str]]:
    failures, kinds = [], Counter[str]()
    for seed in seeds:
        try:
            kinds.update(kind.value for kind in simulate(draw(seed)).kinds)
        except ViolationError as error:
            failures.append((seed, str(error)))
        except Exception as error:
            failures.append((seed, f"{type(error).__name__}: {error}"))
    return failures, kinds


if __name__ == "__main__":
    sys.exit(main())
