"""What happens once before the first step: the devices' meeting, peaks, what was left out."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rayfcp.cluster.crew import Crew
from rayfcp.cluster.runtime import RendezvousServer
from rayfcp.config import Config, ConfigError
from rayfcp.data import BadRow
from rayfcp.execute.reports import Joined
from rayfcp.values import ClusterSpec

NAMED_AT_START = 3


def join_devices(crew: Crew, cluster: ClusterSpec, *, empty: bool = False) -> tuple[RendezvousServer, list[Joined]]:
    """All workers become devices of the cluster, in order, `empty`: with weights that will be filled. The store must
    live as long as the generation."""
    here = crew.runtime.here()
    store = crew.runtime.rendezvous(alone=all(fact.node_id == here for fact in crew.facts))
    meeting = store.meeting(cluster)
    return store, crew.each(lambda number, worker: worker.join.remote(number, meeting, empty=empty))


def device_peak_flops(config: Config, crew: Crew) -> float:
    """Peak of one device: configured, from the table, or, for CPUs, measured by all workers at once.

    Raises:
        ConfigError: an accelerator that no table knows.
    """
    peak = config.metrics.peak_flops or crew.facts[0].peak_flops
    if peak is not None:
        return peak
    if crew.facts[0].device != "cpu":
        raise ConfigError(
            f"metrics.peak_flops is not set and no table knows this {crew.facts[0].device} device; set it to the "
            "device's dense FLOP/s in model.dtype"
        )
    return statistics.fmean(crew.each(lambda _, worker: worker.measure_flops.remote()))


def write_skipped(path: Path, rows: Sequence[BadRow]) -> str:
    """Name the rows that were left out, one JSON object a line; a sentence with the first of them."""
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    shown = "; ".join(str(row) for row in rows[:NAMED_AT_START])
    return f"left out: {shown}{f' and more, see {path}' if len(rows) > NAMED_AT_START else ''}"
