"""Speed of each device from measured steps: slow devices get less work, and are reported."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

WINDOW = 13
"""Steps whose median is a device's speed: robust against 6 outliers, adapts within 7 steps."""

FIRST = 7
"""Steps before which a device is assumed to have the usual speed."""

PERSISTENT = 5
"""Consecutive steps below `slow_ratio` after which a device is reported as slow."""

SLOWEST, FASTEST = 0.1, 1.5
"""Bounds of a speed, so that every device keeps some work and none gets all of it."""

USUAL = 0.1
"""Deviation up to which a speed counts as 1: devices of one kind differ by as much."""

LEVEL = 0.05
"""Distance of speeds that plans distinguish; hysteresis, so that plans do not change with noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTrack:
    """Recent speed of one device.

    `recent`: predicted over measured seconds of the last steps, the oldest first, relative to the median of all
    devices; `speed`: relative to the usual device; `level`: rounded speed that plans use;
    `steps_below`: consecutive steps below `slow_ratio`.
    """

    id: str
    recent: tuple[float, ...] = ()
    speed: float = 1.0
    level: float = 1.0
    steps_below: int = 0

    @property
    def is_slow(self) -> bool:
        return self.steps_below >= PERSISTENT

    def at(self, speed: float, *, slow_ratio: float) -> "SpeedTrack":
        """Return the track after one more step at this speed."""
        bounded = min(max(speed, SLOWEST), FASTEST)
        return replace(
            self,
            speed=bounded,
            level=_level(bounded, before=self.level),
            steps_below=self.steps_below + 1 if bounded < slow_ratio else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speed of each device relative to a usual one; immutable, `after` returns the next value.

    A device's speed is the median over steps of predicted over measured seconds, relative to the (upper) median of all.
    Predictions assume usual speed, so speeds stay correct once plans give slow devices less work. Speeds belong
    to devices, not to their numbers: they outlive a generation.
    """

    slow_ratio: float
    tracks: tuple[SpeedTrack, ...] = ()

    def after(self, seconds: Mapping[str, tuple[float, float]]) -> "Speeds":
        """Add a step: predicted seconds at usual speed and measured ones, without waiting, of each device. Devices
        without positive finite seconds, as on accelerators, are ignored."""
        ratios = {
            id: predicted_s / own_s
            for id, (predicted_s, own_s) in seconds.items()
            if all(math.isfinite(each) and each > 0 for each in (predicted_s, own_s))
        }
        if not ratios:
            return self
        tracks = {track.id: track for track in self.tracks}
        usual = statistics.median(ratios.values())
        for id, ratio in ratios.items():
            track = tracks.get(id, SpeedTrack(id=id))
            tracks[id] = replace(track, recent=(*track.recent, ratio / usual)[-WINDOW:])
        medians = {id: statistics.median(tracks[id].recent) for id in ratios if len(tracks[id].recent) >= FIRST}
        if medians:
            usual = statistics.median_high(medians.values())
        for id, median in medians.items():
            tracks[id] = tracks[id].at(median / usual, slow_ratio=self.slow_ratio)
        return replace(self, tracks=tuple(tracks.values()))

    def of(self, device: str) -> float:
        """Return the speed that plans use: 1 for a usual device and one without enough measurements."""
        return next((track.level for track in self.tracks if track.id == device), 1.0)

    def of_ranks(self, devices: Sequence[str], *, num_stages: int, tensor_parallel: int) -> tuple[float, ...]:
        """Return the speed of each rank's slowest device, `devices` by number; empty if all have the usual speed."""
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
        """Return the speeds of these devices only."""
        return replace(self, tracks=tuple(track for track in self.tracks if track.id in devices))

    def news(self, before: "Speeds") -> tuple[str, ...]:
        """Return a sentence for each device that became slow or is no longer slow since `before`."""
        sentences = []
        for track in self.tracks:
            if track.is_slow == (track.id in before.slow):
                continue
            state = "is slow" if track.is_slow else "is no longer slow"
            sentence = f"device {track.id} {state}: {track.speed:.2f} of the usual speed over {len(track.recent)} steps"
            below = f", below elastic.slow_ratio {self.slow_ratio:g} for {track.steps_below} of them"
            sentences.append(sentence + below * track.is_slow)
        return tuple(sentences)


def _level(speed: float, *, before: float) -> float:
    """Round a speed to steps of `LEVEL`, with hysteresis."""
    if abs(speed - before) < LEVEL or (before == 1.0 and abs(speed - 1.0) < USUAL):
        return before
    if abs(speed - 1.0) < USUAL:
        return 1.0
    return round(round(speed / LEVEL) * LEVEL, 2)
