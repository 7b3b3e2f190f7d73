"""Prediction errors of the cost model and the simulator on real steps: two processes over gloo, one thread each.

    python jobs/bench/predict.py --batches 10
    python jobs/bench/predict.py --sees qwen3_vl
    python jobs/bench/predict.py --sees internvl --freeze

Both processes profile themselves as `rayfcp profile` does, plan each batch with each strategy, and run all plans
for real, in turn, as often as `--repeats` says (after one round that does not count): from the first load to
the last gradient reduction, without optimizer. The median is compared with the plan's own prediction and with the
simulator on the measured hardware profile. Strategies that really differ by more than 10 % on a batch must be
predicted in the same order. The passes of the profile are timed between the rounds of steps too and enter the
figures that are compared, so that a drift of the machine touches both alike; it is printed, with the spread of equal
steps, which no prediction can be better than. `--clock cpu` counts the busier process's CPU seconds, for machines
that others use too; waiting is not in it.

With `--sees` the model has a vision encoder, and batches are drawn: texts, images between texts, and videos frame by
frame. Each plan then runs with its images and, right after it, without, on the same tokens: that is the step's
language part, and what images add is its encoder part.
"""

import argparse
import itertools
import json
import multiprocessing
import pickle
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.config import Config, load_config

APART = 0.10  # strategies that differ by more must be ranked right
PARTS = ("", "language_", "encoder_")
ENDS = (("cost", "cost model"), ("simulated", "simulator"))


def main(argv: list[str] | None = None) -> None:
    """Start the processes, print what rank 0 found."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.sees and args.sequences < 2:
        parser.error(f"--sequences is {args.sequences}, must be at least 2 with --sees: the first is text alone")
    with tempfile.TemporaryDirectory() as folder:
        config, data_dir = _seeing(args, Path(folder)) if args.sees else _reading(args)
        out = Path(folder) / "found.pkl"
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, port, args, config, data_dir, str(out)))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        found = pickle.loads(out.read_bytes())
    _print(found, seen=bool(args.sees))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _rank(rank: int, port: int, args: argparse.Namespace, config: Config, data_dir: str, out: str) -> None:
    import torch
    import torch.distributed as dist
    from predict_batches import EYES, SMALL, image_batches, text_batches
    from predict_steps import Bench

    from rayfcp.cluster.dataset import open_dataset
    from rayfcp.execute.engine import RankEngine
    from rayfcp.execute.parallel.groups import MeshPosition
    from rayfcp.models.build import sharded_model
    from rayfcp.models.library import text_of

    torch.set_num_threads(1)
    data = open_dataset(config, data_dir=data_dir)
    engine = RankEngine(config, device=torch.device("cpu"), data_dir=data_dir)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    engine.join(
        MeshPosition(rank=rank, num_ranks=args.ranks),
        store=lambda: store,
        make_model=lambda world: sharded_model(data.library, run=config.model, seed=0, world=world),
        hidden_size=text_of(data.library).hidden_size,
        layers_of_stage=(text_of(data.library).num_hidden_layers,),
    )
    if data.model.vision is None:
        batches = text_batches(data, data_dir=data_dir, count=args.batches)
    else:
        _, rows = (SMALL if args.small else EYES)[args.sees]
        sizes = {"size": args.sequences, "count": args.batches, "vocab_size": data.vocab_size}
        batches = image_batches(engine, data.model.vision, rows, **sizes)
    found = Bench(args, config, engine=engine, model=data.model, batches=batches).run()
    if rank == 0:
        Path(out).write_bytes(pickle.dumps(found))
    dist.barrier()
    engine.close()


def _reading(args: argparse.Namespace) -> tuple[Config, str]:
    """A configuration's model, and its data prepared."""
    from rayfcp.cluster.driver.preparing import prepared_data

    overrides = [f"cluster.num_workers={args.ranks}", "cluster.device=cpu", f"data.max_seqlen={args.max_seqlen}"]
    overrides += [f"data.global_batch_sequences={args.sequences}", "data.long_sequences=drop"]
    config = load_config(args.config, overrides=overrides)
    return config, prepared_data(config, log=lambda text: print(text, file=sys.stderr))  # noqa: T201


def _seeing(args: argparse.Namespace, folder: Path) -> tuple[Config, str]:
    """A model that sees, beside data that nobody reads."""
    from predict_batches import EYES, SMALL

    from rayfcp.bench.alone import random_shards

    shape, _ = (SMALL if args.small else EYES)[args.sees]
    random_shards(folder, [2], vocab_size=2, seed=0)
    architecture = {"model_type": args.sees, "vocab_size": 512, "vision": shape}
    config = Config.model_validate(
        {
            "data": {"paths": [str(folder)]},
            "model": {"architecture": architecture, "freeze_vision": args.freeze},
            "cluster": {"device": "cpu", "num_workers": args.ranks},
        }
    )
    return config, str(folder / "shards")


def _print(found: dict[str, Any], *, seen: bool) -> None:
    steps, parts = found["steps"], PARTS if seen else PARTS[:1]
    write = sys.stdout.write
    write(f"fit {found['fit_error']:.1%}, held out {found['held_out_error']:.1%}, drift {found['drift']:+.1%}, ")
    write(f"spread of equal steps {statistics.median(each['spread'] for each in steps):.1%}\n")
    heads = "".join(f"   {part.rstrip('_') or 'measured':>8s} {'cost':>6s} {'simul.':>6s}" for part in parts)
    write(f"batch strategy     microbatches degrees       {heads}\n")
    for each in steps:
        figures = "".join(_figures(each, part) for part in parts)
        head = f"{each['batch']:5d} {each['strategy']:12s} {each['microbatches']:12d} {each['degrees']!s:14s}"
        write(f"{head}{figures}\n")
    for who, label in ENDS:
        right, pairs = _ranked(steps, who)
        errors = ", ".join(_errors(steps, who, part) for part in parts)
        write(f"{label}: mean absolute error {errors}; {right} of {pairs} pairs of strategies more than {APART:.0%} ")
        write("apart are in the right order\n")


def _figures(step: dict[str, Any], part: str) -> str:
    return f"   {step[f'measured_{part}s']:8.4f} {_off(step, 'cost', part):+6.1%} {_off(step, 'simulated', part):+6.1%}"


def _off(step: dict[str, Any], who: str, part: str) -> float:
    """Relative excess of a part's predicted time."""
    return float(step[f"{who}_{part}s"] / step[f"measured_{part}s"] - 1)


def _errors(steps: list[dict[str, Any]], who: str, part: str) -> str:
    errors = [abs(_off(each, who, part)) for each in steps]
    return f"{part.replace('_', ' ')}{np.mean(errors):.1%} (largest {max(errors):.1%})"


def _ranked(steps: list[dict[str, Any]], who: str) -> tuple[int, int]:
    """Pairs of one batch that really differ, and how many of them are predicted in that order."""
    right = pairs = 0
    for one, other in itertools.combinations(steps, 2):
        slow, fast = sorted((one, other), key=lambda each: -each["measured_s"])
        if one["batch"] == other["batch"] and slow["measured_s"] > (1 + APART) * fast["measured_s"]:
            pairs += 1
            right += slow[f"{who}_s"] > fast[f"{who}_s"]
    return right, pairs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="jobs/quickstart.yaml", help="model and data")
    parser.add_argument("--sees", choices=("qwen3_vl", "internvl"), help="a model that sees instead, on drawn batches")
    parser.add_argument("--freeze", action="store_true", help="its encoder is not trained")
    parser.add_argument("--small", action="store_true", help="its images and texts are tiny: to see that all works")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=8, help="in a global batch")
    parser.add_argument("--max-seqlen", type=int, default=4096)
    parser.add_argument("--max-tokens-per-rank", type=int, default=4096, help="for which it has memory")
    parser.add_argument("--max-tokens", type=int, help="of a rank in the profile's largest pass; default: the same")
    parser.add_argument("--strategies", nargs="+", default=["flex-ring", "static-cp", "ring", "bytescale"])
    parser.add_argument("--rounds", type=int, default=3, help="of timed passes in the profile")
    parser.add_argument("--repeats", type=int, default=3, help="of each real step")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="wall")
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser


if __name__ == "__main__":
    main()
