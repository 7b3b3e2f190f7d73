"""The controller's own work per step: everything but waiting for plans and workers.

    python jobs/bench/controller.py --ranks 4 --steps 40

Trains a very small model, so that many steps pass; prints medians over steps, in CPU time of the
controller's thread and in wall time, and their ratios to the bound of 10 ms. Where workers and
controller share few cores, the wall time contains the workers' pressure.
"""

import argparse
import json
import tempfile
from pathlib import Path

from rayfcp.cluster import FlexTrainer
from rayfcp.config import Config

BOUND_S = 0.010


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="workers (default: 4)")
    parser.add_argument("--steps", type=int, default=40, help="steps to train (default: 40)")
    parser.add_argument("--sequences", type=int, default=64, help="sequences of a global batch (default: 64)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = FlexTrainer(_config(Path(folder), arguments)).fit()
    cpu_s, wall_s = result.metrics["controller_cpu_s"], result.metrics["controller_s"]
    figures = {
        "ranks": arguments.ranks,
        "steps": arguments.steps,
        "sequences": arguments.sequences,
        "controller_cpu_ms": round(1e3 * cpu_s, 3),
        "cpu_of_bound": round(cpu_s / BOUND_S, 3),
        "controller_wall_ms": round(1e3 * wall_s, 3),
        "wall_of_bound": round(wall_s / BOUND_S, 3),
        "step_s_last": round(result.metrics["step_s"], 3),
    }
    print(json.dumps(figures))  # noqa: T201


def _config(folder: Path, arguments: argparse.Namespace) -> Config:
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 16}
    return Config.model_validate(
        {
            "run": {"name": "controller", "dir": str(folder / "run")},
            "model": {"architecture": shape},
            "data": {
                "paths": ["{stdlib}"],
                "include": ["*.py"],
                "exclude": ["site-packages", "dist-packages", "test", "tests", "idle_test"],
                "max_seqlen": 64,
                "global_batch_sequences": arguments.sequences,
            },
            "cluster": {"device": "cpu", "num_workers": arguments.ranks},
            "train": {"steps": arguments.steps},
        }
    )


if __name__ == "__main__":
    main()
