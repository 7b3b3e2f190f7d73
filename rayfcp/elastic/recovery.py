"""How the survivors of a failure go on: in their processes, or in fresh ones on the same devices."""

from enum import StrEnum

from rayfcp.elastic.facts import Setbacks
from rayfcp.values.counted import counted


class Way(StrEnum):
    """Ways to recover; values of `elastic.recovery`, beside `auto`."""

    IN_PLACE = "in_place"
    FRESH_PROCESSES = "fresh_processes"


def choose_way(mode: str, *, is_host: bool, num_stuck: int, setbacks: Setbacks) -> tuple[Way, str]:
    """Return how the survivors of a failure go on, and why.

    In place, they abort their exchanges, leave their process groups and build new ones, which takes least. That may
    fail where libraries cannot end a communicator in order: a survivor that does not leave or rebuild in time gets a
    fresh process whatever is chosen here. All survivors get one after communication failed again without a finished
    step, since what they kept may be the cause; and on accelerators as soon as survivors once were stuck, since that
    is a property of drivers and libraries, which stays.

    Args:
        mode: `elastic.recovery`.
        is_host: the devices are CPUs.
        num_stuck: recoveries of this run in which survivors did not leave or rebuild their process groups in time.
        setbacks: recoveries since the last finished step.
    """
    if mode != "auto":
        return Way(mode), f"elastic.recovery is {mode}"
    if setbacks.collectives:
        times = counted(setbacks.collectives + 1, "time")
        return Way.FRESH_PROCESSES, f"communication among healthy devices failed {times} without a finished step"
    if num_stuck and not is_host:
        times = counted(num_stuck, "time")
        return Way.FRESH_PROCESSES, f"survivors could not leave or rebuild their process groups {times} in this run"
    return Way.IN_PLACE, "nothing speaks against the survivors' processes"
