"""How often the state is copied, on its nodes and to other nodes.

Young's interval (1974): copies that each cost s seconds of training, against losses at a rate of r per second, cost
least with sqrt(2 s / r) seconds between them.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum

STALL_BUDGET, STALL_S = 0.02, 0.005
"""Share of a step that copies on the nodes may cost on average: they are made as often as it permits. They are made
after every step if one takes no more than `STALL_S`: the budget is not for steps of a few milliseconds."""

NETWORK_BUDGET = 0.1
"""Share of the time in which copies may be on their way to other nodes."""

REPLAY_S = 120.0
"""Training time that a loss may cost at most, where the budgets permit."""

AWAY_STALL = 0.1
"""Assumed share of the time on the network by which training is slower meanwhile; nothing measured it on a network."""


class Loses(StrEnum):
    """What a loss takes with it."""

    PROCESS = "process"
    NODE = "node"


PRIOR_PER_DEVICE_HOUR = {Loses.PROCESS: 1.39e-5, Loses.NODE: 5.85e-6}
"""Interruptions of Llama 3's pre-training: 419 in 21.2 million GPU-hours (The Llama 3 Herd of Models, 2024, Table 5).
The memory of the node counts as lost with all faults of hosts, and with a quarter of those of devices and networks,
which is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRates:
    """Losses seen in `device_hours`; immutable, methods return the next value."""

    device_hours: float = 0.0
    losses: Counter[Loses] = field(default_factory=Counter)

    def after(self, *, device_hours: float = 0.0, lost: Loses | None = None) -> "LossRates":
        seen = self.losses + Counter([lost] if lost is not None else [])
        return replace(self, device_hours=self.device_hours + device_hours, losses=seen)

    def per_second(self, kind: Loses, *, num_devices: int) -> float:
        """Expected losses of this kind a second. The prior counts as one loss in the hours that it takes one."""
        per_hour = (1 + self.losses[kind]) / (1 / PRIOR_PER_DEVICE_HOUR[kind] + self.device_hours)
        return per_hour * num_devices / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCosts:
    """Measured seconds: `step_s`, a step; `here_s`, what a step waits for a copy on its node; `away_s`, copies' way to
    another node, None if there is none or it was not measured yet."""

    step_s: float
    here_s: float
    away_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Steps between copies: on the nodes (`here`), and at most finished steps that the loss of a node takes (`away`).
    `send`: steps after which the next copies are sent, so that they arrive in time."""

    here: int
    away: int
    send: int
    reason: str = ""

    @classmethod
    def fixed(cls, every: int, *, away_s: float = 0.0, step_s: float = 1.0, is_host: bool = False) -> "Intervals":
        """Return the interval that a user asks for. Copies are sent as seldom as they can be while no step waits for
        them; or as seldom as permitted, if steps wait anyway. `away_s`: time on their way, taken for that of a step if
        it is 0. Hosts copy their state before a step ends, accelerators (not `is_host`) during the next one."""
        late_steps = (away_s / step_s if away_s else 1.0) - is_host
        early = min(every - 1, max(0, math.ceil(late_steps))) if late_steps < every else 0
        return cls(here=1, away=every, send=every - early, reason="elastic.snapshot_every_steps")


def choose(costs: CopyCosts, rates: LossRates, *, num_devices: int) -> Intervals:
    """Return how often the state is copied: on the nodes as often as the budget permits, to other nodes as it costs
    least by Young's formula, within budgets."""
    step_s = max(costs.step_s, 1e-6)
    most = max(1, int(REPLAY_S / step_s))
    here = 1 if costs.here_s <= STALL_S else max(1, math.ceil(costs.here_s / (STALL_BUDGET * step_s)))
    away_s = costs.away_s if costs.away_s is not None else 0.0
    travels = math.ceil(away_s / step_s)
    rate = rates.per_second(Loses.NODE, num_devices=num_devices)
    least = max(here, math.ceil(away_s / (NETWORK_BUDGET * step_s)), 1)
    away = (
        most if costs.away_s is None else _within(young_s(AWAY_STALL * away_s, rate) / step_s, least=least, most=most)
    )
    away = max(away, here + travels)
    return Intervals(
        here=here,
        away=away,
        send=max(1, away - travels - here + 1),
        reason=f"a copy costs {costs.here_s:.3f} s of a step of {step_s:.2f} s"
        + (f", {away_s:.2f} s to another node" if costs.away_s is not None else ""),
    )


def lost_per_hour(costs: CopyCosts, rates: LossRates, *, intervals: Intervals, num_devices: int) -> float:
    """Return the expected seconds of training lost an hour: copies' own cost, and finished steps that run again. The
    recoveries themselves are left out, and what no copy survives: with one node, the loss of that node."""
    again_s = repeated_share(costs, rates, intervals=intervals, num_devices=num_devices)
    return 3600 * (copies_share(costs, intervals) + again_s)


def copies_share(costs: CopyCosts, intervals: Intervals) -> float:
    """Return the share of the time that copies cost.

    Copies are sent once the step after them has reported them. Steps wait for them where the loss of a node would
    otherwise take more than `away` steps: never with `choose`, which sends as many steps earlier as the copies travel,
    nor with a fixed interval that is longer than they travel.
    """
    here = costs.here_s / (intervals.here * costs.step_s)
    if costs.away_s is None:
        return here
    early_s = (intervals.away - intervals.send - intervals.here + 1) * costs.step_s
    away_s = max(AWAY_STALL * costs.away_s, costs.away_s - early_s)
    return here + away_s / (intervals.send * costs.step_s)


def repeated_share(costs: CopyCosts, rates: LossRates, *, intervals: Intervals, num_devices: int) -> float:
    """Return the expected share of the time in which finished steps run again. The newest copies on the nodes are up to
    `here` - 1 steps old; those on other nodes up to `away`, and `send` + `here` - 2 less when they have just come."""
    process = rates.per_second(Loses.PROCESS, num_devices=num_devices)
    steps = process * (intervals.here - 1) / 2
    if costs.away_s is not None:
        node = rates.per_second(Loses.NODE, num_devices=num_devices)
        steps += node * (intervals.away - (intervals.send + intervals.here - 2) / 2)
    return steps * costs.step_s


def young_s(cost_s: float, rate: float) -> float:
    """Return Young's interval in seconds between copies that cost `cost_s` each, for losses at `rate` a second."""
    return math.sqrt(2 * cost_s / rate)


def _within(steps: float, *, least: int, most: int) -> int:
    """Whole steps; where the bounds contradict each other, the budget counts."""
    return max(least, min(most, max(1, round(steps))))
