"""One rank's part of `predict.py`: it profiles, fits, plans, measures steps, and predicts them."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from predict_batches import Batch
from reprice import reprice

from rayfcp.cluster.facts.measured import analytic_cost, combine, measure_cost, without_shards
from rayfcp.config import Config
from rayfcp.cost.fit import (
    PartTimings,
    Timing,
    attention_half_tokens,
    half_tokens,
    many_image_shapes,
    many_shapes,
    measured_hardware,
    slowest,
)
from rayfcp.execute.calibrate import time_parts, time_passes
from rayfcp.execute.engine import RankEngine
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.program import Programs, lower
from rayfcp.simulate import simulate
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, ModelProfile

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
Seconds = dict[tuple[int, str], list[tuple[float, ...]]]
"""Seconds by batch and strategy, of each repeat: the step's, and those of the same step without images, if it has
any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan of a batch and the programs of all ranks; `bare`: those of the same plan without images, whose tokens
    are there all the same. None where the batch has none."""

    batch: Batch
    plan: BatchPlan
    programs: Programs
    bare: Programs | None

    @property
    def all_programs(self) -> list[Programs]:
        return [self.programs, *([self.bare] if self.bare else [])]


class Bench:
    """One rank's part; all ranks do the same and know the same."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: Config,
        *,
        engine: RankEngine,
        model: ModelProfile,
        batches: Sequence[Batch],
    ) -> None:
        self._args, self._config, self._engine, self._model = args, config, engine, model
        self._batches, self._clock = batches, CLOCKS[args.clock]
        self._longest = args.max_tokens or args.max_tokens_per_rank
        self._cluster = ClusterSpec(num_ranks=args.ranks, max_tokens_per_rank=args.max_tokens_per_rank)

    def run(self) -> dict[str, Any]:
        """Figures of the fit and of all steps."""
        parts = time_parts(self._engine, self._model, max_tokens=self._longest)
        self._parts: PartTimings = slowest(self._all(parts))
        before = [self._passes() for _ in range(self._args.rounds + 1)][1:]
        plans = self._plans(self._fitted(before)[0])
        taken, between = self._measured(plans)
        cost, hardware, about = self._fitted([*before, *between])
        steps = [
            {"batch": number, "strategy": name}
            | _measured_figures(taken[number, name])
            | self._predicted(planned, cost=cost, hardware=hardware)
            for (number, name), planned in plans.items()
        ]
        return about | {"drift": self._drift(before, between), "steps": steps}

    def _passes(self) -> list[list[Timing]]:
        """One round of the profile's passes, of all ranks."""
        most, vision = self._longest, self._model.vision
        shapes = many_shapes(self._args.ranks, max_tokens=most)
        shapes += many_image_shapes(vision, max_tokens=most) if vision else []
        return self._all(time_passes(self._engine, shapes, clock=self._clock))

    def _fitted(self, rounds: list[list[list[Timing]]]) -> tuple[CostModel, HardwareProfile, dict[str, Any]]:
        """Cost model and hardware profile as `rayfcp profile` makes them."""
        args, model, alone = self._args, self._model, self._args.clock == "wall"
        guess = dataclasses.replace(
            analytic_cost(self._config, model, device="cpu", cluster=self._cluster),
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

    def _drift(self, before: list[list[list[Timing]]], between: list[list[list[Timing]]]) -> float:
        """Relative slowdown of the same passes between the steps against before them, median over shapes."""
        pairs = zip(combine(between), combine(before), strict=True)
        return statistics.median(one.seconds / other.seconds for one, other in pairs) - 1

    def _plans(self, cost: CostModel) -> dict[tuple[int, str], Planned]:
        """(batch, strategy) -> plan and programs."""
        found = {}
        for number, batch in enumerate(self._batches, start=1):
            for name in self._args.strategies:
                plan = plan_batch(
                    batch.sequences, cluster=self._cluster, cost=cost, strategy=name, options=self._config.plan
                )
                found[number, name] = self._lowered(plan, batch)
        return found

    def _lowered(self, plan: BatchPlan, batch: Batch) -> Planned:
        seen, every = any(each.images for each in batch.sequences), self._config.train.reduce_every
        bare = lower(_without_images(plan), _texts(batch), reduce_every=every) if seen else None
        return Planned(batch=batch, plan=plan, programs=lower(plan, batch.sequences, reduce_every=every), bare=bare)

    def _measured(self, plans: dict[tuple[int, str], Planned]) -> tuple[Seconds, list[list[list[Timing]]]]:
        """Seconds of the slower rank, each repeat; all plans in turn, the profile's passes after each turn."""
        taken: Seconds = {key: [] for key in plans}
        between = []
        for repeat in range(self._args.repeats + 1):
            for key, planned in plans.items():
                seconds = tuple(self._rehearsed(programs, planned.batch) for programs in planned.all_programs)
                if repeat:
                    taken[key].append(seconds)
            between.append(self._passes())
        ranks = self._all(taken)
        return {key: _slower([rank[key] for rank in ranks]) for key in plans}, between

    def _rehearsed(self, programs: Programs, batch: Batch) -> float:
        start_s = self._clock()
        self._engine.rehearse(programs[self._engine.position.rank], batch.tokens, images=batch.images)
        return self._clock() - start_s

    def _predicted(self, planned: Planned, *, cost: CostModel, hardware: HardwareProfile) -> dict[str, Any]:
        """Predictions of cost model and simulator for a step and its parts."""
        plan = reprice(planned.plan, planned.batch.sequences, cluster=self._cluster, cost=cost)
        encoder_s = sum(each.encoder_s for each in plan.microbatches)
        simulated = [
            simulate(programs, model=self._model, hardware=hardware).iteration_s for programs in planned.all_programs
        ]
        found = {"degrees": plan.degrees, "microbatches": len(plan.microbatches)}
        found |= _named("cost", plan.predicted_s, plan.predicted_s - encoder_s)
        return found | _named("simulated", *simulated)

    def _all(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        values: list[Any] = [None] * self._args.ranks
        dist.all_gather_object(values, value)
        return values


def _without_images(plan: BatchPlan) -> BatchPlan:
    microbatches = tuple(dataclasses.replace(each, encoding=(), encoder_s=0.0) for each in plan.microbatches)
    return dataclasses.replace(plan, microbatches=microbatches)


def _texts(batch: Batch) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(each, images=()) for each in batch.sequences)


def _slower(ranks: Sequence[Sequence[tuple[float, ...]]]) -> list[tuple[float, ...]]:
    """The slower rank's seconds of each repeat, of each program."""
    return [tuple(max(each) for each in zip(*repeat, strict=True)) for repeat in zip(*ranks, strict=True)]


def _measured_figures(repeats: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Medians over repeats; the encoder's are of what images add in each."""
    steps = [repeat[0] for repeat in repeats]
    found = _named("measured", statistics.median(steps), statistics.median(repeat[-1] for repeat in repeats))
    found["measured_encoder_s"] = statistics.median(repeat[0] - repeat[-1] for repeat in repeats)
    return {"spread": (max(steps) - min(steps)) / statistics.median(steps)} | found


def _named(who: str, step_s: float, language_s: float | None = None) -> dict[str, float]:
    """Seconds by name; a step without images is all language."""
    language_s = step_s if language_s is None else language_s
    return {f"{who}_s": step_s, f"{who}_language_s": language_s, f"{who}_encoder_s": step_s - language_s}
