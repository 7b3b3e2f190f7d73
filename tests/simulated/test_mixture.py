"""A mixture on a cluster that shrinks and grows, and whose controller dies: each step has the same of each source."""

from typing import Any

import numpy as np
import pytest

from rayfcp.config.data import DataConfig
from rayfcp.data.mixture import MixtureSampler
from rayfcp.telemetry.events import EventKind
from rayfcp.values import Sample
from tests.simulated import run
from tests.simulated.scenario import ended_well, fault, of, ran
from tests.simulated.schedule import Kind

SIZES = {"code": 500, "web": 300, "math": 30}
LENGTHS = np.concatenate([20 + 3 * np.arange(size) % 90 for size in SIZES.values()])
STEPS = 40


class MixedIndex(run.Index):
    """Samples of three sources, of lengths that differ."""

    lengths, num_tokens = LENGTHS, int(LENGTHS.sum())

    def __len__(self) -> int:
        return len(LENGTHS)

    @property
    def sources(self) -> dict[str, tuple[int, int]]:
        stops = np.cumsum([0, *SIZES.values()]).tolist()
        return {name: (stops[at], stops[at + 1]) for at, name in enumerate(SIZES)}

    def samples(self, positions: Any) -> tuple[Sample, ...]:
        lengths = LENGTHS[positions]
        return tuple(
            Sample(id=int(at), shard=0, row=int(at), start=0, stop=int(stop), num_targets=int(stop) - 1)
            for at, stop in zip(positions, lengths, strict=True)
        )


def mixture() -> MixtureSampler:
    sources = {
        "code": {"paths": "c", "weight": 5},
        "web": {"paths": "w", "weight": 3},
        "math": {"paths": "m", "weight": 1, "epochs": 1},
    }
    data = DataConfig(
        sources=sources,  # type: ignore[arg-type]
        schedule=[{"from_step": 21, "weights": {"web": 1, "math": 1}}],  # type: ignore[arg-type]
        global_batch_sequences=run.GLOBAL_BATCH,
    )
    return MixtureSampler(MixedIndex(), data, seed=3)  # type: ignore[arg-type]


def given(report: Any) -> dict[str, tuple[int, int, int]]:
    return {name: (each.num_sequences, each.num_tokens, each.num_targets) for name, each in report.sources.items()}


@pytest.mark.parametrize("controller", [False, True])
def test_tokens_of_sources_are_exact_over_resizes_and_restarts(
    monkeypatch: pytest.MonkeyPatch, controller: bool
) -> None:
    """4 devices, then 3, then 5."""
    monkeypatch.setattr(run, "SAMPLER", mixture())
    monkeypatch.setattr(run, "Index", MixedIndex)
    faults = [fault(Kind.NODE_DIES, 10), fault(Kind.NODE_COMES, 25)]
    faults += [fault(Kind.CONTROLLER_DIES, 17)] if controller else []
    result = ran(*faults, steps=STEPS, workers=(1, 5), nodes=(2, 1, 1), elastic={"wait_s": 600.0})
    ended_well(result, steps=STEPS)
    worlds = [report.world_size for report in result.reports]
    assert (worlds[0], worlds[-1]) == (4, 5) and 3 in worlds
    assert len(of(result, EventKind.RECOVERY)) == 1
    fresh = mixture()
    assert [given(report) for report in result.reports] == [fresh.batch(step).by_source for step in range(1, STEPS + 1)]
    total = {name: sum(report.sources[name].num_sequences for report in result.reports) for name in SIZES}
    assert total["math"] == SIZES["math"], "its only epoch, whole"
    assert sum(total.values()) == STEPS * run.GLOBAL_BATCH
