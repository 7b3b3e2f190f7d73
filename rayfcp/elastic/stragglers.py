"""How fast each device is, from what steps measured: those that are slow get less work, and are reported."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

WINDOW = 13
"""Steps whose median is a device's speed; up to 6 outliers among them change little."""

FIRST = 7
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
    """What is known of one device. `recent`: predicted over measured seconds of the last steps, the oldest first, over
    the median of all devices in that step; `speed`, over the usual device; the `level` of it that plans go by; for how
    many steps in a row it was below `slow_ratio`."""

    id: str
    recent: tuple[float, ...] = ()
    speed: float = 1.0
    level: float = 1.0
    steps_below: int = 0

    @property
    def is_slow(self) -> bool:
        return self.steps_below >= PERSISTENT

    @property
    def is_known(self) -> bool:
        return len(self.recent) >= FIRST

    @property
    def median(self) -> float:
        return statistics.median(self.recent)

    def at(self, speed: float, *, slow_ratio: float) -> "Track":
        """Found to have this speed after one more step."""
        bounded = min(max(speed, SLOWEST), FASTEST)
        return replace(
            self,
            speed=bounded,
            level=_level(bounded, before=self.level),
            steps_below=self.steps_below + 1 if bounded < slow_ratio else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speed of each device over that of a usual one: a value, `after` gives the next one.

    A device's speed is the median over steps of predicted over measured seconds, relative to the same of the usual
    device of its stage: the median again, the faster of the two in the middle. Predictions are for devices of usual
    speed, so it stays right once plans give slow devices less. Speeds belong to devices, not to numbers: they outlive
    a generation.
    """

    slow_ratio: float
    tracks: tuple[Track, ...] = ()

    def after(self, measured: Sequence[Measured]) -> "Speeds":
        """One more step. Devices without positive finite seconds, as where hosts do not wait, are left out."""
        ratios = {
            each.id: each.predicted_s / each.own_s
            for each in measured
            if all(math.isfinite(seconds) and seconds > 0 for seconds in (each.own_s, each.predicted_s))
        }
        stage_of = {each.id: each.stage for each in measured if each.id in ratios}
        tracks = {track.id: track for track in self.tracks}
        for device, usual in _of_peers(ratios, stage_of, middle=statistics.median).items():
            track = tracks.get(device, Track(id=device))
            tracks[device] = replace(track, recent=(*track.recent, ratios[device] / usual)[-WINDOW:])
        medians = {device: tracks[device].median for device in ratios if tracks[device].is_known}
        for device, usual in _of_peers(medians, stage_of, middle=statistics.median_high).items():
            tracks[device] = tracks[device].at(medians[device] / usual, slow_ratio=self.slow_ratio)
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
            speed = f"{track.speed:.2f} of the usual speed"
            if track.is_slow and track.id not in was:
                said.append(
                    f"device {track.id} is slow: {speed} over {len(track.recent)} steps, below elastic.slow_ratio "
                    f"{self.slow_ratio:g} for {track.steps_below} of them"
                )
            elif not track.is_slow and track.id in was:
                said.append(f"device {track.id} is slow no longer: {speed} over {len(track.recent)} steps")
        return tuple(said)


def _of_peers(
    values: Mapping[str, float], stage_of: Mapping[str, int], *, middle: Callable[[list[float]], float]
) -> dict[str, float]:
    """For each device the middle value of its stage, of all stages where it has no peer."""
    by_stage: dict[int, list[float]] = {}
    for device, value in values.items():
        by_stage.setdefault(stage_of[device], []).append(value)
    everyone = list(values.values())
    usual = {stage: middle(held if len(held) > 1 else everyone) for stage, held in by_stage.items()}
    return {device: usual[stage_of[device]] for device in values}


def _level(speed: float, *, before: float) -> float:
    """The speed in steps of `LEVEL`, as before where it is near enough."""
    if abs(speed - before) < LEVEL or (before == 1.0 and abs(speed - 1.0) < USUAL):
        return before
    if abs(speed - 1.0) < USUAL:
        return 1.0
    return round(round(speed / LEVEL) * LEVEL, 2)
