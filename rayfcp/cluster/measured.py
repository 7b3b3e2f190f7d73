"""The cost model of a run: analytic from profiles, its coefficients replaced by what the workers measured."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rayfcp.config import Config
from rayfcp.plan import CostModel, hardware_profile
from rayfcp.plan.fit import OVERLAPS, Fit, Timing, fit_cost, predicted_s
from rayfcp.values import ModelProfile

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
BASE_HARDWARE = {"cpu": "cpu", "cuda": "h100", "npu": "ascend-910c"}


def analytic_cost(config: Config, model: ModelProfile, *, device: str, num_ranks: int) -> CostModel:
    """From the device's named profile: a first guess, and what an unmeasured plan is made with."""
    return CostModel.from_profiles(
        model,
        hardware_profile(BASE_HARDWARE[device]),
        num_ranks=num_ranks,
        recomputed_layers=config.train.recompute_layers,
        bytes_per_element=BYTES[config.model.dtype],
        reduce_every=config.train.reduce_every,
    )


def measured_cost(
    guess: CostModel, *, ranks_per_node: int, timings: Sequence[Sequence[Timing]], profile_path: Path
) -> CostModel:
    """Fit what all ranks timed at once (`timings[rank]`) and write it to `profile_path`.

    A pass counts with the slowest rank's time. A ring over all ranks crosses the slowest link, so one
    link speed stands for all. Where the guess says that nothing overlaps, that stays.
    """
    slowest = [max(each, key=lambda timing: timing.seconds) for each in zip(*timings, strict=True)]
    start = dataclasses.replace(guess, ranks_per_node=ranks_per_node)
    fit = fit_cost(start, slowest, overlaps=OVERLAPS if guess.overlap > 0 else (0.0,))
    _write(profile_path, fit, slowest)
    return fit.cost


def read_cost(profile_path: Path) -> CostModel:
    """The cost model that a run measured."""
    return CostModel(**json.loads(profile_path.read_text())["cost"])


def _write(path: Path, fit: Fit, timings: Sequence[Timing]) -> None:
    profile = {
        "cost": dataclasses.asdict(fit.cost),
        "mean_error": fit.mean_error,
        "passes": [dataclasses.asdict(each) | {"predicted_s": predicted_s(fit.cost, each)} for each in timings],
    }
    path.write_text(json.dumps(profile, indent=1) + "\n")
