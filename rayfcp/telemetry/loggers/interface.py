"""What a logger is, and what it is told."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayfcp.values import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The run that a logger tells of. `config`: dotted key to value. `resume_step`: steps that were logged before, 0
    for a run from its beginning."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    resume_step: int = 0


class StepLogger(Protocol):
    """Told of each step once, in order, from one thread of its own. It may raise: then it is told no more."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The values of a committed step, all finite."""

    def close(self) -> None:
        """Nothing comes after this; what was told is to be kept."""


def values_of(report: StepReport) -> dict[str, float]:
    """All numbers of a step by the name `group/key`; what is not finite is left out.

    `train/`: the optimisation; `speed/`, `plan/`, `imbalance/`: seconds and ratios of `StepReport`.
    """
    groups = {
        "train": ("loss", "grad_norm", "learning_rate", "num_tokens", "num_sequences"),
        "speed": ("step_s", "mfu", "attention_mfu", "bubble", "world_size"),
        "plan": ("predicted_s", "plan_s", "plan_wait_s", "gap", "num_microbatches"),
    }
    values = {f"{group}/{key}": float(getattr(report, key)) for group, keys in groups.items() for key in keys}
    values |= {f"imbalance/{key}": value for key, value in report.imbalance.by_resource.items()}
    if report.step_s > 0:
        values["speed/tokens_per_s"] = report.num_tokens / report.step_s
    return {name: value for name, value in values.items() if math.isfinite(value)}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections opened up.

    >>> flat({"train": {"steps": 3}, "x": (1, 2)})
    {'train.steps': 3, 'x': '(1, 2)'}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) or value is None else str(value)
    return found
