"""Fault schedules of the real controller, and that the simulation finds what is wrong."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulated import test_memory, test_scenarios
from tests.simulated.planted import BY_SCENARIO, PLANTED, RARE, Plant, first_catch
from tests.simulated.run import simulate
from tests.simulated.schedule import WEIGHT, Kind, draw
from tests.simulated.world import ViolationError

ROOT = Path(__file__).resolve().parents[2]
CHUNKS, EACH = 8, 150
"""Enough for every planted fault; `make explore` runs 100,000 others."""

ENOUGH = 150
"""Schedules within which a planted fault has to be found; see `python -m tests.simulated.planted` for how many it
took."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_breaks_an_invariant(chunk: int) -> None:
    happened: Counter[Kind] = Counter()
    for seed in range(chunk * EACH, (chunk + 1) * EACH):
        try:
            happened.update(simulate(draw(seed)).kinds)
        except ViolationError as error:
            pytest.fail(f"python -m tests.simulated --seed {seed}\n{error}", pytrace=False)
    assert set(happened) | set(WEIGHT) == set(Kind), "some kind of fault that is not rare never came about"


def test_a_seed_gives_the_same_events_in_every_process() -> None:
    """Whatever the order in which Python's sets give their elements."""
    program = (
        "from tests.simulated.run import simulate; from tests.simulated.schedule import draw\n"
        "print([(simulate(draw(seed)).digest, simulate(draw(seed)).num_events) for seed in (3, 8, 21, 79, 548)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1, told


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "plant", [each for each in PLANTED if each not in (*RARE, *BY_SCENARIO)], ids=lambda plant: plant.__name__[1:]
)
def test_a_planted_fault_is_found(plant: Plant) -> None:
    assert first_catch(plant, most=ENOUGH) is not None


@pytest.mark.parametrize(("plant", "scenario"), BY_SCENARIO.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_fault_fails_its_scenario(plant: Plant, scenario: str) -> None:
    with plant(), pytest.raises((ViolationError, AssertionError)):
        getattr(test_scenarios if hasattr(test_scenarios, scenario) else test_memory, scenario)()
