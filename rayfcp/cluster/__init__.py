"""Ray: controller, planner actors, workers, placement; `FlexTrainer` for users.

Names are imported when they are first used, so that a planner actor loads neither torch nor transformers.
"""

import importlib
from typing import Any

_HOMES = {
    "FlexTrainer": "rayfcp.cluster.trainer",
    "RunFailedError": "rayfcp.cluster.errors",
    "export_run": "rayfcp.cluster.tools.exporting",
    "plan_step": "rayfcp.cluster.tools.preview",
    "prepare_data": "rayfcp.cluster.driver.preparing",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayfcp.cluster' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
