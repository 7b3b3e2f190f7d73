"""How fast each rank is, learnt from steps while the run goes on."""

from collections.abc import Callable, Sequence

from rayfcp.cluster.observing import rank_seconds
from rayfcp.cluster.planner import PlanRecord
from rayfcp.config.elastic import ElasticConfig
from rayfcp.elastic.stragglers import Measured, Speeds
from rayfcp.execute.reports import RankReport
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import ClusterSpec


class Paces:
    """Speeds by device. `say` is told of devices that became slow, or are slow no longer."""

    def __init__(self, elastic: ElasticConfig, *, say: Callable[[str], None]) -> None:
        self._elastic, self._say = elastic, say
        self._speeds = Speeds(slow_ratio=elastic.slow_ratio)

    def hear(
        self,
        record: PlanRecord,
        reports: Sequence[RankReport],
        *,
        ids: Sequence[str],
        cluster: ClusterSpec,
        metrics: MetricsExporter,
    ) -> None:
        """A step's reports of all devices, `ids` in the order of their numbers. What is measured of a rank counts for
        all of its devices."""
        measured = [
            Measured(id=ids[number], own_s=own_s, predicted_s=predicted_s)
            for rank, (predicted_s, own_s) in enumerate(
                rank_seconds(record.own_s, reports, num_ranks=cluster.num_ranks)
            )
            for number in _devices(cluster, rank)
        ]
        before, self._speeds = self._speeds, self._speeds.after(measured)
        for sentence in self._speeds.news(before):
            self._say(sentence)
        if measured:
            for number, each in enumerate(ids):
                metrics.set_speed(number, self._speeds.of(each))

    def of_ranks(self, ids: Sequence[str], cluster: ClusterSpec) -> tuple[float, ...]:
        """What plans for these devices go by: none if all ranks are as fast, or speeds shall not matter."""
        if not self._elastic.balance_speeds:
            return ()
        return self._speeds.of_ranks(ids, num_stages=cluster.num_stages, tensor_parallel=cluster.tensor_parallel)

    def forget_all_but(self, ids: Sequence[str]) -> None:
        self._speeds = self._speeds.only(ids)


def _devices(cluster: ClusterSpec, rank: int) -> list[int]:
    """Numbers of a rank's devices, of all stages."""
    return [
        (stage * cluster.num_ranks + rank) * cluster.tensor_parallel + each
        for stage in range(cluster.num_stages)
        for each in range(cluster.tensor_parallel)
    ]
