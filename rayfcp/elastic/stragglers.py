"""How fast each device is, from what steps measured: those that are slow get less work, and are reported."""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

WINDOW = 9
"""Steps whose median is a device's speed; up to 4 outliers among them change little."""

FIRST = 5
"""Steps before which a device counts as usual."""

PERSISTENT = 5
"""Steps, one after the other, that the speed has to stay below `slow_ratio` for a device to be slow."""

SLOWEST, FASTEST = 0.1, 1.5
"""Bounds of a speed: no device is left without work, none gets all of it."""

USUAL = 0.1
"""As far from 1 a speed counts as 1: devices of one kind differ by as much."""

LEVEL = 0.05
"""Between two speeds that plans can tell apart. A device keeps its level until it is `LEVEL` away from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of a device in one step: `own_s`, seconds without waiting for others; `predicted_s`, seconds of the same work
    on a usual device, whatever speed the plan took it to have."""

    id: str
    own_s: float
    predicted_s: float
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What is known of one device: its speeds of the last steps, the oldest first, the level that plans
    go by, for how many steps in a row it was below `slow_ratio`."""

    id: str
    recent: tuple[float, ...] = ()
    level: float = 1.0
    steps_below: int = 0

    @property
    def is_slow(self) -> bool:
        return self.steps_below >= PERSISTENT

    def after(self, speed: float, *, slow_ratio: float) -> "Track":
        """One more step."""
        recent = (*self.recent, min(max(speed, SLOWEST), FASTEST))[-WINDOW:]
        if len(recent) < FIRST:
            return replace(self, recent=recent)
        usual = statistics.median(recent)
        return Track(
            id=self.id,
            recent=recent,
            level=_level(usual, before=self.level),
            steps_below=self.steps_below + 1 if usual < slow_ratio else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speed of each device over that of a usual one: a value, `after` gives the next one.

    A device's speed in a step is predicted over measured seconds, relative to the same of the usual device of its
    stage: the median, the faster of the two in the middle. Predictions are for devices of usual speed, so it stays
    right once plans give slow devices less. Speeds belong to devices, not to numbers: they outlive a generation.
    """

    slow_ratio: float
    tracks: tuple[Track, ...] = ()

    def after(self, measured: Sequence[Measured]) -> "Speeds":
        """One more step. Devices without positive finite seconds, as where hosts do not wait, are left out."""
        speed_of = _relative(measured)
        tracks = {track.id: track for track in self.tracks}
        for each, speed in speed_of.items():
            tracks[each] = tracks.get(each, Track(id=each)).after(speed, slow_ratio=self.slow_ratio)
        return replace(self, tracks=tuple(tracks.values()))

    def of(self, device: str) -> float:
        """That plans should go by: 1 for a usual device and one that little is known of."""
        return next((track.level for track in self.tracks if track.id == device), 1.0)

    def of_ranks(self, devices: Sequence[str], *, num_stages: int, tensor_parallel: int) -> tuple[float, ...]:
        """For each rank the speed of its slowest device, `devices` in the order of their numbers; none if all are
        usual."""
        num_ranks = len(devices) // (num_stages * tensor_parallel)
        level = {track.id: track.level for track in self.tracks}
        speeds = [math.inf] * num_ranks
        for number, device in enumerate(devices[: num_ranks * num_stages * tensor_parallel]):
            rank = number // tensor_parallel % num_ranks
            speeds[rank] = min(speeds[rank], level.get(device, 1.0))
        return tuple(speeds) if any(speed != 1.0 for speed in speeds) else ()

    @property
    def slow(self) -> tuple[str, ...]:
        """Devices that are persistently slow."""
        return tuple(track.id for track in self.tracks if track.is_slow)

    def only(self, devices: Collection[str]) -> "Speeds":
        """Without what is known of others."""
        return replace(self, tracks=tuple(track for track in self.tracks if track.id in devices))

    def news(self, before: "Speeds") -> tuple[str, ...]:
        """A sentence for each device that became slow since, or is slow no longer."""
        was = set(before.slow)
        said = []
        for track in self.tracks:
            speed = f"{statistics.median(track.recent):.2f} of the usual speed" if track.recent else "not measured"
            if track.is_slow and track.id not in was:
                said.append(
                    f"device {track.id} is slow: {speed} over {len(track.recent)} steps, below elastic.slow_ratio "
                    f"{self.slow_ratio:g} for {track.steps_below} of them"
                )
            elif not track.is_slow and track.id in was:
                said.append(f"device {track.id} is slow no longer: {speed} over {len(track.recent)} steps")
        return tuple(said)


def _relative(measured: Sequence[Measured]) -> dict[str, float]:
    """Speed of each device in one step over the usual of its stage, of all stages where it has no peer."""
    ratios = {
        each.id: (each.stage, each.predicted_s / each.own_s)
        for each in measured
        if all(math.isfinite(seconds) and seconds > 0 for seconds in (each.own_s, each.predicted_s))
    }
    by_stage: dict[int, list[float]] = {}
    for stage, ratio in ratios.values():
        by_stage.setdefault(stage, []).append(ratio)
    everyone = [ratio for _, ratio in ratios.values()]
    return {
        each: ratio / statistics.median_high(by_stage[stage] if len(by_stage[stage]) > 1 else everyone)
        for each, (stage, ratio) in ratios.items()
    }


def _level(speed: float, *, before: float) -> float:
    """The speed in steps of `LEVEL`, as before where it is near enough."""
    if abs(speed - before) < LEVEL or (before == 1.0 and abs(speed - 1.0) < USUAL):
        return before
    if abs(speed - 1.0) < USUAL:
        return 1.0
    return round(round(speed / LEVEL) * LEVEL, 2)
