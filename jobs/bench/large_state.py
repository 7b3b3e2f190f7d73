"""Cost of copies of a state of gigabytes: the same steps without copies, with copies of every step, and with `auto`.

    python jobs/bench/large_state.py --rounds 3 --steps 16

Four workers on two nodes (raylets on this machine) train a model whose parameters and moments of AdamW take `--gib`,
on short sequences, so that a step is short next to the state. Each round has a run of each kind, in another order each
time; all train the same samples by the same plans. A step's seconds run from its start on device 0 to the start of the
next; each is compared with the same step of the round's run without copies, after the first `--warm` steps. Bytes are
those of the machine's network interfaces, less those of the run without copies. Memory is what files in `/dev/shm`
took at most, next to the state.
"""

import argparse
import datetime
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from clusters import BenchCluster
from faults import BEGAN, read_moments
from own_trainer import MOMENTS_DIR, TimedWorker, train

from rayfcp.cluster.dataset import described_model
from rayfcp.cluster.planning.profiling import profile_run
from rayfcp.cluster.recovery.room import COPY_BYTES
from rayfcp.cluster.trainer import prepared_data
from rayfcp.cluster.workers.starting import CONTROLLER_CPUS
from rayfcp.config import Config, load_config
from rayfcp.config.models import PlanConfig

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.yaml"
KINDS: tuple[str, ...] = ("0", "1", "auto")
"""Values of `elastic.snapshot_every_steps`."""

LAYER_PARAMETERS = 12.6e6
GIB = 1 << 30
SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Seconds by step, bytes through the network, and the most bytes of copies in memory."""

    seconds: dict[int, float]
    sent_bytes: int
    copies_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.9, help="of the state, in GiB (default: 1.9, 2 GB)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--steps", type=int, default=16, help="of a run (default: 16)")
    parser.add_argument("--warm", type=int, default=4, help="first steps that are left out (default: 4)")
    arguments = parser.parse_args()
    others_cpus = CONTROLLER_CPUS + PlanConfig().planner_bounds[0]
    with (
        tempfile.TemporaryDirectory() as name,
        BenchCluster("node", workers=4, others_cpus=others_cpus, workers_per_node=2),
    ):
        folder = Path(name)
        config = _config(folder / "profiled", arguments, every="0")
        profile = profile_run(config, out_dir=None, rounds=1, max_tokens=64, log=lambda _: None)
        found: dict[str, list[Run]] = defaultdict(list)
        for number in range(arguments.rounds):
            for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                run = _run(folder / f"{kind}-{number}", arguments, every=kind, profile=profile.profile_path)
                found[kind].append(run)
                print(f"round {number}, {kind}: {run}", file=sys.stderr, flush=True)  # noqa: T201
    print(page(found, arguments, state_bytes=_state_bytes(config)))  # noqa: T201


def _config(root: Path, arguments: argparse.Namespace, *, every: str) -> Config:
    layers = max(1, round(arguments.gib * GIB / COPY_BYTES / LAYER_PARAMETERS))
    shape = {"num_layers": layers, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64}
    return load_config(
        QUICKSTART,
        overrides=[
            f"run.dir={root / 'run'}",
            f"data.cache_dir={root.parent / 'data'}",
            "data.max_seqlen=64",
            "data.long_sequences=split",
            "data.global_batch_sequences=8",
            *(f"model.architecture.{key}={value}" for key, value in (shape | {"ffn_size": 2730}).items()),
            "cluster.num_workers=4",
            f"train.steps={arguments.steps}",
            "checkpoint.every_steps=null",
            "plan.refit=false",
            "elastic.balance_speeds=false",
            f"elastic.snapshot_every_steps={every}",
        ],
    )


def _state_bytes(config: Config) -> float:
    return float(COPY_BYTES * described_model(config, vocab_size=256)[1].num_parameters)


def _run(root: Path, arguments: argparse.Namespace, *, every: str, profile: Path) -> Run:
    config = _config(root, arguments, every=every)
    (root / "run").mkdir(parents=True)
    shutil.copy(profile, root / "run" / "profile.json")
    moments_dir = root / MOMENTS_DIR
    moments_dir.mkdir()
    watch = CopiesWatch()
    before = _network_bytes()
    train(config, prepared_data(config, log=lambda _: None), moments_dir, worker=TimedWorker)
    sent = _network_bytes() - before
    starts_s = {each.step: each.at_s for each in read_moments(moments_dir) if each.what == BEGAN and each.number == 0}
    shutil.rmtree(root)
    seconds = {step: starts_s[step + 1] - at_s for step, at_s in starts_s.items() if step + 1 in starts_s}
    return Run(seconds=seconds, sent_bytes=sent, copies_bytes=watch.end())


class CopiesWatch(threading.Thread):
    """Watches the bytes that copies take in shared memory."""

    def __init__(self) -> None:
        super().__init__(name="copies", daemon=True)
        self._ended, self._most = threading.Event(), 0
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            blocks = 0
            for path in SHM.glob(f"rayfcp-{os.getuid()}/*/*/*"):
                try:
                    blocks += path.stat().st_blocks
                except FileNotFoundError:
                    continue
            self._most = max(self._most, 512 * blocks)

    def end(self) -> int:
        """Most bytes until now."""
        self._ended.set()
        self.join()
        return self._most


def _network_bytes() -> int:
    """Bytes that all interfaces of this machine have received."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


def page(found: dict[str, list[Run]], arguments: argparse.Namespace, *, state_bytes: float) -> str:
    """Report as text."""
    lines = [
        f"state of {state_bytes / 1e9:.2f} GB, 4 workers on two nodes, {arguments.rounds} rounds of {arguments.steps} "
        f"steps; {platform.machine()}, {os.cpu_count()} cores, {datetime.datetime.now(datetime.UTC).date()}",
        f"{'copies':8}{'step s':>10}{'over none':>26}{'GB a step':>12}{'memory over state':>20}",
    ]
    for kind, runs in found.items():
        values = [value for run in runs for step, value in run.seconds.items() if step > arguments.warm]
        ratios = [
            value / base.seconds[step]
            for run, base in zip(runs, found["0"], strict=True)
            for step, value in run.seconds.items()
            if step > arguments.warm and step in base.seconds
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sent = statistics.median(run.sent_bytes - base.sent_bytes for run, base in zip(runs, found["0"], strict=True))
        copies = max(run.copies_bytes for run in runs)
        lines.append(
            f"{kind:8}{statistics.median(values):>10.2f}{f'{middle:.3f} ({low:.3f}..{high:.3f})':>26}"
            f"{sent / arguments.steps / 1e9:>12.2f}{copies / state_bytes:>20.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
