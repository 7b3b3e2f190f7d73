"""Small runs for the tests of the cluster room."""

import json
import random
from pathlib import Path
from typing import Any

from rayfcp.config import Config
from rayfcp.telemetry.steps import read_steps
from rayfcp.values import StepReport
from tests.waiting import PATIENCE_S


def write_texts(folder: Path, *, count: int = 60) -> Path:
    """Long-tailed texts, a JSONL line each; a few are empty or broken."""
    rng = random.Random(0)
    words = ["ring", "block", "rank", "token", "plan", "gather", "reduce"]
    lines = [
        json.dumps({"text": " ".join(rng.choice(words) for _ in range(1 + int(rng.lognormvariate(2.5, 1))))})
        for _ in range(count)
    ]
    lines[7:7] = ["{broken", json.dumps({"text": ""})]
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_config(folder: Path, *, name: str, **sections: dict[str, Any]) -> Config:
    """A model of two layers on the texts above; sections are merged over the defaults."""
    raw: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": str(folder / name)},
        "model": {
            "architecture": {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
            | {"ffn_size": 96}
        },
        "data": {
            "paths": [str(folder / "texts.jsonl")],
            "max_seqlen": 256,
            "global_batch_sequences": 6,
            "max_bad_fraction": 0.1,
        },
        "cluster": {"device": "cpu", "num_workers": 2},
        "train": {"steps": 10, "lr_schedule": "constant"},
        "metrics": {"peak_flops": 1e11},  # or each worker works for a second to measure it
        "elastic": {
            "start_timeout_s": PATIENCE_S,
            "collective_timeout_s": PATIENCE_S,
            "snapshot_dir": str(folder),
        },
    }
    if sections.get("model", {}).get("path") is not None:
        del raw["model"]["architecture"]
    for section, values in sections.items():
        raw.setdefault(section, {}).update(values)
    return Config.model_validate(raw)


def steps_of(config: Config) -> tuple[StepReport, ...]:
    return read_steps(Path(config.run_dir) / "steps.jsonl")
