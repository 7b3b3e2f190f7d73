"""How well the cost model and the simulator predict real steps: two processes over gloo, one thread each.

    python jobs/bench/predict.py --batches 10

Both processes profile themselves as `rayfcp profile` does, plan each batch with each strategy, and run all plans
for real, in turn, as often as `--repeats` says (after one round that does not count): from the first load to
the last gradient reduction, without optimizer. The median is compared with the plan's own prediction and with the
simulator on the measured hardware profile. Strategies that really differ by more than 10 % on a batch must be
predicted in the same order. The passes of the profile are timed between the rounds of steps too and enter the
figures that are compared, so that a drift of the machine touches both alike; it is printed, with the spread of equal
steps, which no prediction can be better than. `--clock cpu` counts the busier process's CPU seconds, for machines
that others use too; waiting is not in it.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import pickle
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rayfcp.config import Config, load_config

APART = 0.10  # strategies that differ by more must be ranked right
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Start the processes, print what rank 0 found."""
    args = _parser().parse_args()
    config = _config(args)
    from rayfcp.cluster.files import prepared_data

    data_dir = prepared_data(config, say=lambda text: print(text, file=sys.stderr))  # noqa: T201
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.pkl"
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
    _print(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _rank(rank: int, port: int, args: argparse.Namespace, config: Config, data_dir: str, out: str) -> None:
    import torch
    import torch.distributed as dist

    from rayfcp.cluster.dataset import open_dataset
    from rayfcp.execute.engine import RankEngine
    from rayfcp.models.build import sharded_model

    torch.set_num_threads(1)
    device = torch.device("cpu")
    data = open_dataset(config, data_dir=data_dir)
    engine = RankEngine(config, device=device, data_dir=data_dir)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    engine.join(
        rank,
        num_ranks=args.ranks,
        store=lambda: store,
        make_model=lambda group: sharded_model(data.library, run=config.model, seed=0, group=group, device=device),
    )
    found = _Bench(args, config, engine=engine, data=data, data_dir=data_dir).run()
    if rank == 0:
        Path(out).write_bytes(pickle.dumps(found))
    dist.barrier()
    engine.close()


class _Tokens:
    """Tokens of one global batch; see `TokenSource`."""

    def __init__(self, reader: Any, batch: Any) -> None:
        self._reader, self._batch = reader, batch

    def read(self, sequence: int, *, start: int, stop: int) -> Any:
        return self._reader.read(self._batch.samples[sequence], start=start, stop=stop)


class _Bench:
    """One rank's part; all ranks do the same and know the same."""

    def __init__(self, args: argparse.Namespace, config: Config, *, engine: Any, data: Any, data_dir: str) -> None:
        from rayfcp.data import TokenReader
        from rayfcp.values import ClusterSpec

        self._args, self._config, self._engine, self._data = args, config, engine, data
        self._reader, self._clock = TokenReader.open(data_dir), CLOCKS[args.clock]
        self._cluster = ClusterSpec(num_ranks=args.ranks, max_tokens_per_rank=args.max_tokens_per_rank)

    def run(self) -> dict[str, Any]:
        from rayfcp.plan.reprice import reprice
        from rayfcp.simulate import simulate

        self._parts = self._timed_parts()
        before = [self._passes() for _ in range(self._args.rounds + 1)][1:]
        plans = self._plans(self._fitted(before)[0])
        taken, between = self._measured(plans)
        cost, hardware, about = self._fitted([*before, *between])
        steps = []
        for (number, name), (plan, programs, sequences, _) in plans.items():
            seconds = taken[number, name]
            steps.append(
                {
                    "batch": number,
                    "strategy": name,
                    "degrees": plan.degrees,
                    "microbatches": len(plan.microbatches),
                    "measured_s": statistics.median(seconds),
                    "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
                    "cost_s": reprice(plan, sequences, cluster=self._cluster, cost=cost).predicted_s,
                    "simulated_s": simulate(programs, model=self._data.model, hardware=hardware).iteration_s,
                }
            )
        return about | {"drift": self._drift(before, between), "steps": steps}

    def _timed_parts(self) -> Any:
        from rayfcp.plan.profiles.parts import slowest

        return slowest(self._all(self._engine.time_parts(self._data.model, max_tokens=self._args.max_tokens_per_rank)))

    def _passes(self) -> list[Any]:
        """One round of the profile's passes, of all ranks."""
        from rayfcp.execute.calibrate import time_passes
        from rayfcp.plan.profiles.shapes import many_shapes

        shapes = many_shapes(self._args.ranks, max_tokens=self._args.max_tokens_per_rank)
        return self._all(time_passes(self._engine, shapes, clock=self._clock))

    def _fitted(self, rounds: list[list[Any]]) -> tuple[Any, Any, dict[str, Any]]:
        """Cost model and hardware profile as `rayfcp profile` makes them."""
        from rayfcp.cluster.measured import analytic_cost, combine, measure_cost
        from rayfcp.cluster.simulated import without_shards
        from rayfcp.plan import hardware_profile
        from rayfcp.plan.profiles.device import measured_hardware
        from rayfcp.plan.profiles.parts import attention_half_tokens, half_tokens

        args, model, alone = self._args, self._data.model, self._args.clock == "wall"
        guess = dataclasses.replace(
            analytic_cost(self._config, model, device="cpu", num_ranks=args.ranks),
            ranks_per_node=args.ranks,
            attention_half_tokens=attention_half_tokens(self._parts.attention_s) if alone else 0.0,
        )
        found = measure_cost(guess, combine(rounds), hold_out_every=4)
        cost = found.fit.cost
        hardware = measured_hardware(
            hardware_profile("cpu"),
            cost,
            model=model,
            name="measured",
            peak_flops=1e9,
            memory_bytes=1 << 32,
            bytes_per_element=4,
            linear_half_tokens=half_tokens(self._parts.linear_s) if alone else 0.0,
        )
        hardware = without_shards(hardware, cost, cluster=self._cluster, model=model)
        about = {"fit_error": found.fit.mean_error, "held_out_error": found.held_out_error}
        about |= {"cost": dataclasses.asdict(cost), "hardware": dataclasses.asdict(hardware)}
        return cost, hardware, about | {"passes": [dataclasses.asdict(each) for each in found.passes]}

    def _drift(self, before: list[list[Any]], between: list[list[Any]]) -> float:
        """How much longer the same passes took between the steps than before them, median over shapes."""
        from rayfcp.cluster.measured import combine

        pairs = zip(combine(between), combine(before), strict=True)
        return statistics.median(one.seconds / other.seconds for one, other in pairs) - 1

    def _plans(self, cost: Any) -> dict[tuple[int, str], tuple[Any, Any, Any, Any]]:
        """(batch, strategy) -> plan, programs of all ranks, sequences, tokens."""
        from rayfcp.cluster.planner import sequences_of
        from rayfcp.plan import plan_batch
        from rayfcp.program import lower

        found = {}
        for number in range(1, self._args.batches + 1):
            batch = self._data.sampler.batch(number)
            sequences = sequences_of(batch, windows=cost.windows)
            for name in self._args.strategies:
                plan = plan_batch(sequences, cluster=self._cluster, cost=cost, strategy=name, options=self._config.plan)
                found[number, name] = (plan, lower(plan, sequences), sequences, _Tokens(self._reader, batch))
        return found

    def _measured(self, plans: dict[tuple[int, str], tuple[Any, Any, Any, Any]]) -> tuple[Any, list[list[Any]]]:
        """Seconds of the slower rank, each repeat; all plans in turn, the profile's passes after each turn."""
        taken: dict[tuple[int, str], list[float]] = {key: [] for key in plans}
        between = []
        for repeat in range(self._args.repeats + 1):
            for key, (_, programs, _, tokens) in plans.items():
                start_s = self._clock()
                self._engine.rehearse(programs[self._engine.rank], tokens)
                if repeat:
                    taken[key].append(self._clock() - start_s)
            between.append(self._passes())
        ranks = self._all(taken)
        return {key: [max(each) for each in zip(*(rank[key] for rank in ranks), strict=True)] for key in plans}, between

    def _all(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        import torch.distributed as dist

        values: list[Any] = [None] * self._args.ranks
        dist.all_gather_object(values, value)
        return values


def _print(found: dict[str, Any]) -> None:
    steps = found["steps"]
    write = sys.stdout.write
    write(f"fit {found['fit_error']:.1%}, held out {found['held_out_error']:.1%}, drift {found['drift']:+.1%}, ")
    write(f"spread of equal steps {statistics.median(each['spread'] for each in steps):.1%}\n")
    write("batch strategy     microbatches degrees           measured   cost model      simulator\n")
    for each in steps:
        ends = [f"{each[key]:8.4f} {each[key] / each['measured_s'] - 1:+6.1%}" for key in ("cost_s", "simulated_s")]
        write(
            f"{each['batch']:5d} {each['strategy']:12s} {each['microbatches']:12d} {each['degrees']!s:16s} "
            f"{each['measured_s']:9.4f}  {'  '.join(ends)}\n"
        )
    for key, label in (("cost_s", "cost model"), ("simulated_s", "simulator")):
        errors = [abs(each[key] / each["measured_s"] - 1) for each in steps]
        right, pairs = _ranked(steps, key)
        write(
            f"{label}: mean absolute error {np.mean(errors):.1%}, largest {max(errors):.1%}; {right} of {pairs} pairs "
            f"of strategies more than {APART:.0%} apart are in the right order\n"
        )


def _ranked(steps: list[dict[str, Any]], key: str) -> tuple[int, int]:
    """Pairs of one batch that really differ, and how many of them are predicted in that order."""
    right = pairs = 0
    for one, other in itertools.combinations(steps, 2):
        slow, fast = sorted((one, other), key=lambda each: -each["measured_s"])
        if one["batch"] == other["batch"] and slow["measured_s"] > (1 + APART) * fast["measured_s"]:
            pairs += 1
            right += slow[key] > fast[key]
    return right, pairs


def _config(args: argparse.Namespace) -> Config:
    overrides = [f"cluster.num_workers={args.ranks}", "cluster.device=cpu", f"data.max_seqlen={args.max_seqlen}"]
    overrides += [f"data.global_batch_sequences={args.sequences}", "data.long_sequences=drop"]
    return load_config(args.config, overrides=overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="jobs/quickstart.yaml", help="model and data")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=8, help="in a global batch")
    parser.add_argument("--max-seqlen", type=int, default=4096)
    parser.add_argument("--max-tokens-per-rank", type=int, default=4096)
    parser.add_argument("--strategies", nargs="+", default=["flex-ring", "static-cp", "ring", "bytescale"])
    parser.add_argument("--rounds", type=int, default=3, help="of timed passes in the profile")
    parser.add_argument("--repeats", type=int, default=3, help="of each real step")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser


if __name__ == "__main__":
    main()
