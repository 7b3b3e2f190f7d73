"""Training time that a run is expected to lose an hour, by the way in which it survives losses: an estimate.

The ways: copies of the state in the memory of nodes, at any intervals; checkpoints and restarts; and replica groups, of
which the others go on when one is lost (torchft, https://github.com/pytorch/torchft). Losses are independent and
rare: none happens during a recovery, and rates are those of `intervals`.
"""

import math
from dataclasses import dataclass

from rayfcp.elastic.intervals import CopyCosts, Intervals, Loses, LossRates, copies_share, repeated_share

TO_HOST_BYTES_PER_S = 55e9
"""From one device to pinned memory. Published: 54.9 GB/s on an H200 (https://github.com/deepspeedai/DeepSpeed/pull/8283);
PCIe 5 with 16 lanes has 63."""

TO_FILE_BYTES_PER_S = 12e9
"""From pinned memory to a file in shared memory whose pages exist, by one thread. Measured: 12 to 18 GB/s on two shared
x86 cores; the threads of a node's devices share its memory, which is not counted."""

NETWORK_BYTES_PER_S = 25e9
"""Of a node's way to another. Assumed: a port of 200 Gb/s that copies have for themselves. One connection over the
loopback of two shared cores reached 3.2 GB/s (`jobs/bench/transfer.py`)."""

LAUNCH_S = 0.005
"""Of a step that starts a copy on an accelerator. Assumed: some hundred launches; nothing measured it there."""

PROCESS_S, NODE_S = 10.0, 30.0
"""From a loss to the next step: aborted communicators, new process groups, the state read from shared memory; with a
node also the time until its loss is noticed. Assumed for accelerators. Measured on CPUs: 0.6 and 5.8 s."""

RESTART_S = 600.0
"""From a loss to the next step of a run that is started again. Assumed: scheduling, imports, communicators, loading."""

CHECKPOINT_S = 3.0
"""That steps wait for a checkpoint, which is written while they go on. Assumed."""

BOTH_SHARE = 0.01
"""Of losses of nodes, those that take the node with the copies too: only a checkpoint is left. Assumed."""

REPLACED_S = 300.0
"""Until a replacement for lost devices trains along, or a replica group is back; the others go on. Assumed."""

QUORUM_S = 5.0
"""In which replica groups agree on those that are left. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTime:
    """Expected seconds lost an hour: to copies that are made, steps that run again, and recoveries, with the work of
    devices that are away. `checkpoints_s`: all that losses cost from which only a checkpoint helps, and checkpoints for
    them as often as that costs least."""

    copies_s: float = 0.0
    repeated_s: float = 0.0
    recoveries_s: float = 0.0
    checkpoints_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.copies_s + self.repeated_s + self.recoveries_s + self.checkpoints_s


def estimated_costs(
    *,
    device_bytes: float,
    step_s: float,
    num_devices: int,
    devices_per_node: int,
    is_host: bool = False,
    network_bytes_per_s: float = NETWORK_BYTES_PER_S,
) -> CopyCosts:
    """Return costs of copies that nothing measured, of `device_bytes` each. An accelerator copies during the next step,
    whose update waits for it; with `is_host` steps wait for the whole copy."""
    copy_s = device_bytes / (TO_FILE_BYTES_PER_S if is_host else min(TO_HOST_BYTES_PER_S, TO_FILE_BYTES_PER_S))
    return CopyCosts(
        step_s=step_s,
        here_s=copy_s if is_host else LAUNCH_S + max(0.0, copy_s - step_s),
        away_s=devices_per_node * device_bytes / network_bytes_per_s if num_devices > devices_per_node else None,
    )


def lost_with_copies(
    costs: CopyCosts, rates: LossRates, *, intervals: Intervals, num_devices: int, devices_per_node: int
) -> LostTime:
    """Return the time lost with copies of the state. Each loss also takes half a step that was under way."""
    process, node = (rates.per_second(kind, num_devices=num_devices) for kind in (Loses.PROCESS, Loses.NODE))
    covered = 0.0 if costs.away_s is None else (1 - BOTH_SHARE) * node
    again = repeated_share(costs, rates, intervals=intervals, num_devices=num_devices)
    node_share = min(1.0, devices_per_node / num_devices)
    return LostTime(
        copies_s=3600 * copies_share(costs, intervals),
        repeated_s=3600 * (again + (process + covered) * costs.step_s / 2),
        recoveries_s=3600
        * (process * (PROCESS_S + REPLACED_S / num_devices) + covered * (NODE_S + REPLACED_S * node_share)),
        checkpoints_s=3600 * _checkpoints_share(node - covered),
    )


def lost_with_restarts(rates: LossRates, *, num_devices: int) -> LostTime:
    """Return the time lost by a run that restarts from its last checkpoint after any loss."""
    return LostTime(checkpoints_s=3600 * _checkpoints_share(_all_losses(rates, num_devices)))


def lost_with_replicas(rates: LossRates, *, step_s: float, num_devices: int, group_devices: int) -> LostTime:
    """Return the time lost by replica groups, each with the whole state. The step under way is lost to all, and a lost
    group is away for a while. Left out: the memory for whole states, samples of groups that are away, and the loss of
    all groups.

    Raises:
        ValueError: there is no second group.
    """
    if 2 * group_devices > num_devices:
        raise ValueError(f"group_devices is {group_devices}, must be at most half of {num_devices} devices")
    rate = _all_losses(rates, num_devices)
    return LostTime(
        repeated_s=3600 * rate * step_s / 2,
        recoveries_s=3600 * rate * (QUORUM_S + REPLACED_S * group_devices / num_devices),
    )


def _all_losses(rates: LossRates, num_devices: int) -> float:
    return sum(rates.per_second(kind, num_devices=num_devices) for kind in Loses)


def _checkpoints_share(rate: float) -> float:
    """Share of the time that losses cost which only a checkpoint survives, with checkpoints by Young's interval: both
    these and the repeated steps cost half of the root."""
    return math.sqrt(2 * CHECKPOINT_S * rate) + rate * RESTART_S
