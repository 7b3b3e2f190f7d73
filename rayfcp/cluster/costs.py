"""The cost model that a run's first plans are made with."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from rayfcp.cluster.capacity import device_memory
from rayfcp.cluster.crew import Crew
from rayfcp.cluster.measured import COMMAND, about_run, analytic_cost, profiled_cost, ranks_per_node, write_measured
from rayfcp.cluster.profiling import start_cost
from rayfcp.config import Config
from rayfcp.plan import CostModel
from rayfcp.values import ClusterSpec, ModelProfile


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
