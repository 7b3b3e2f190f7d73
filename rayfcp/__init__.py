"""Elastic long-context training on Ray with flexible context parallelism.

`FlexTrainer(config).fit()` trains; `log_probs` returns log-probabilities of given sequences; `plan_lengths` plans a
batch by names of model and hardware; `plan_batch`, `PlannerPool`, `simulate` and `attention` serve other training
loops. Names are imported on first use: `import rayfcp` loads neither torch nor ray.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Config": "rayfcp.config",
    "PlanConfig": "rayfcp.config.models",
    "load_config": "rayfcp.config",
    "plan_batch": "rayfcp.plan",
    "plan_lengths": "rayfcp.compare.plan_lengths",
    "check_plan": "rayfcp.verify",
    "lower": "rayfcp.program",
    "lower_reshuffle": "rayfcp.program",
    "simulate": "rayfcp.simulate",
    "attention": "rayfcp.execute.attention.function",
    "FlexTrainer": "rayfcp.cluster",
    "log_probs": "rayfcp.cluster.evaluation",
    "PlannerPool": "rayfcp.cluster.actors.planner_pool",
}

__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayfcp' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if name == "simulate" else getattr(home, name)  # the module itself, which can be called
