"""Cost model of a run's first plans: a guess, or fitted to passes that the workers time."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rayfcp.cluster.capacity import device_memory
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.measured import (
    COMMAND,
    Measured,
    about_run,
    analytic_cost,
    combine,
    measure_cost,
    profiled_cost,
    ranks_per_node,
    write_measured,
)
from rayfcp.cluster.profiled import Rounds, Say
from rayfcp.config import Config
from rayfcp.plan import CostModel
from rayfcp.plan.primitives import exchange_degrees
from rayfcp.plan.profiles.pictures import picture_shapes
from rayfcp.plan.profiles.shapes import PassShape, exchange_shapes, few_shapes
from rayfcp.values import ClusterSpec, ModelProfile, VisionProfile

START_TOKENS = {"cpu": 1024, "cuda": 16384, "npu": 16384}
"""Tokens of the largest pass of one rank that is timed before a run starts."""
START_ROUNDS = 3


def timed_rounds(crew: Crew, shapes: Sequence[PassShape], *, rounds: int, say: Say) -> Rounds:
    """`rounds` passes of each shape, and one more before them that is thrown away; all ranks at once."""
    found: Rounds = []
    for number in range(rounds + 1):
        say(f"passes of {len(shapes)} shapes: {f'round {number} of {rounds}' if number else 'warming up'}")
        found.append(crew.each(lambda _, worker: worker.time_passes.remote(shapes)))
    return found[1:]


def start_cost(
    crew: Crew,
    guess: CostModel,
    *,
    cluster: ClusterSpec,
    max_seqlen: int,
    primitives: Collection[str],
    vision: VisionProfile | None = None,
) -> Measured:
    """A cost model from few short passes of the primitives that plans may use: what a run that was not profiled starts
    with."""
    exchanges = exchange_degrees(guess, num_ranks=cluster.num_ranks, primitives=primitives)
    tokens = min(START_TOKENS[crew.facts[0].device], max_seqlen, cluster.max_tokens_per_rank)
    if guess.pipeline:  # whose bound knows that plans recompute; these passes do not
        tokens = max(min(tokens, guess.pipeline.tokens_alone), 1)
    shapes = few_shapes(cluster.num_ranks, max_tokens=tokens) + exchange_shapes(exchanges, max_tokens=tokens)
    shapes += picture_shapes(vision, max_tokens=tokens) if vision else []
    shapes = [dataclasses.replace(each, windows=guess.windows) for each in shapes]
    return measure_cost(guess, combine(timed_rounds(crew, shapes, rounds=START_ROUNDS - 1, say=lambda _: None)))


class StartCosts:
    """A guess from profiles for any generation, and coefficients measured on one whose devices have met."""

    def __init__(
        self, config: Config, model: ModelProfile, *, device: str, profile_path: Path, say: Callable[[str], None]
    ) -> None:
        self._config, self._model, self._device, self._path, self._say = config, model, device, profile_path, say

    def guess(self, crew: Crew, cluster: ClusterSpec) -> CostModel:
        """Nothing is measured."""
        cost = analytic_cost(
            self._config,
            self._model,
            device=self._device,
            cluster=cluster,
            memory_bytes=device_memory(self._config, crew.facts),
        )
        return dataclasses.replace(cost, ranks_per_node=ranks_per_node(cluster))

    def measure(self, crew: Crew, cluster: ClusterSpec) -> CostModel:
        """Coefficients of `rayfcp profile` for the same model and ranks, or measured now: after a resume too, since
        the ranks may be others. Steps refit them from there.

        Raises:
            RanksLostError: a device was lost meanwhile.
        """
        self._say("measuring devices")
        config = self._config
        about = about_run(config, self._model, device=self._device, cluster=cluster)
        cost = profiled_cost(self._path, about=about)
        if cost is not None:
            self._say(f"cost model of {COMMAND} in {self._path}")
            return cost
        measured = start_cost(
            crew,
            self.guess(crew, cluster),
            cluster=cluster,
            max_seqlen=config.data.max_seqlen,
            primitives=config.plan.primitives,
            vision=self._model.vision,
        )
        write_measured(self._path, measured, about=about)
        return measured.fit.cost
