"""Simulation: programs of all ranks replayed on a model and hardware profile, event by event.

This package and the public function `rayfcp.simulate(plan, sequences, ...)` share a name, so the package is callable.
"""

import sys
from types import ModuleType
from typing import Any

from rayfcp.simulate.simulate import simulate, simulate_plan
from rayfcp.simulate.timeline import Breakdown, Loads, Timeline

__all__ = ["Breakdown", "Loads", "Timeline", "simulate", "simulate_plan"]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **keywords: Any) -> Timeline:
        """`simulate_plan`."""
        return simulate_plan(*args, **keywords)


sys.modules[__name__].__class__ = _CallablePackage
