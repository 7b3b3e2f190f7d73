"""Training steps of a whole model on one device, as a run does them: tokens per second, MFU and peak memory."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rayfcp.bench.alone import Alone
from rayfcp.bench.asked import BYTES
from rayfcp.bench.profile import device_clock
from rayfcp.plan import model_flops
from rayfcp.plan.costs.memory import state_bytes, token_bytes
from rayfcp.plan.profiles.shapes import PassShape, pass_plan
from rayfcp.program import RankProgram, lower
from rayfcp.values import InfeasiblePlanError, ModelProfile, SequenceSpec

MEMORY_SHARE = 0.9
"""Of a device's memory that a step may take, as in a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Some steps of one batch. `losses`: of each step, the untimed first included. `peak_bytes`: that the allocator
    gave out; None on CPUs, which do not tell."""

    step_s: float
    num_tokens: int
    losses: tuple[float, ...]
    peak_bytes: int | None

    def as_json(self, flops: float, *, peak_flops: float | None) -> dict[str, Any]:
        """With rates: `flops` are the model's for the batch."""
        return {
            **asdict(self),
            "tokens_per_s": self.num_tokens / self.step_s,
            "mfu": None if peak_flops is None else flops / self.step_s / peak_flops,
        }


def train_steps(rank: Alone, rows: Sequence[int], *, recomputed_layers: int, steps: int) -> Steps:
    """One step on these samples that is not timed, then `steps` that are; their median counts."""
    lengths = [rank.lengths[row] for row in rows]
    program = one_microbatch(lengths, recomputed_layers=recomputed_layers)
    clock, seconds, losses = device_clock(rank.engine.device), [], []
    forget_peak(rank.engine.device)
    for number in range(1, steps + 2):
        start_s = clock()
        report = rank.engine.run_step(program, rank.batch(number, rows), plan_hash=program.plan_hash)
        seconds.append(clock() - start_s)
        losses.append(report.loss)
    return Steps(
        step_s=statistics.median(seconds[1:]),
        num_tokens=sum(lengths),
        losses=tuple(losses),
        peak_bytes=peak_bytes(rank.engine.device),
    )


def one_microbatch(lengths: Sequence[int], *, recomputed_layers: int) -> RankProgram:
    """All sequences at once on one rank."""
    shape = PassShape(degree=1, lengths=tuple(lengths))
    plan, sequences = pass_plan(shape, num_ranks=1, recomputed_layers=recomputed_layers)
    (program,) = lower(plan, sequences)
    return program


def flops_of(model: ModelProfile, lengths: Sequence[int]) -> float:
    """Forward and backward, nothing computed twice."""
    return model_flops(model, [SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(lengths)])


def predicted_bytes(model: ModelProfile, *, num_tokens: int, recomputed_layers: int, dtype: str) -> int:
    """What the memory model says of such a step on one device."""
    element = BYTES[dtype]
    fixed = state_bytes(model, num_devices=1, bytes_per_element=element, reduce_every="step")
    return fixed + num_tokens * token_bytes(model, recomputed_layers=recomputed_layers, bytes_per_element=element)


def fewest_recomputed(model: ModelProfile, *, num_tokens: int, memory_bytes: int, dtype: str) -> int:
    """Layers that must be recomputed for the tokens to fit.

    Raises:
        InfeasiblePlanError: they do not even with all.
    """
    for layers in range(model.num_layers + 1):
        needed = predicted_bytes(model, num_tokens=num_tokens, recomputed_layers=layers, dtype=dtype)
        if needed <= MEMORY_SHARE * memory_bytes:
            return layers
    raise InfeasiblePlanError(
        f"{num_tokens} tokens of {model.name} need {needed / 2**30:.3g} GiB with all layers recomputed, the device has "
        f"{memory_bytes / 2**30:.3g} GiB; take fewer"
    )


def forget_peak(device: torch.device) -> None:
    """Count the most memory from here on."""
    if device.type != "cpu":
        getattr(torch, device.type).reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Most that was allocated since."""
    return None if device.type == "cpu" else int(getattr(torch, device.type).max_memory_allocated(device))
