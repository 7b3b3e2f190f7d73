"""Expected seconds lost an hour by ways to survive losses: an estimate, in which nothing is measured on a cluster.

    python jobs/bench/recovery_model.py
    python jobs/bench/recovery_model.py --network-gb-s 3.2

Two Markdown tables: the sizes and seconds of copies, and what each way loses, at the rates of losses of Llama 3's
pre-training and at seven times these, which OPT-175B's came to. The assumptions are constants of
`rayfcp/elastic/lost_time.py` and of this file, each with its source. The ways:

- every step: copies after every step on the node, and of every step to another node before the next but one begins.
- auto: intervals as the controller chooses them; "k here, k away" is in steps.
- Young alone: both intervals by Young's formula, without auto's bounds. The death of a process then takes finished
  steps, and the loss of a node may take more than two minutes of training.
- restart: checkpoints by Young's interval, and a restart after every loss.
- torchft: the smallest replica groups of whole nodes that hold the model; their memory and lost samples do not count.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayfcp.cluster.recovery.room import COPY_BYTES
from rayfcp.cost.memory import ACCELERATOR_MEMORY_SHARE, max_tokens_per_rank
from rayfcp.elastic.intervals import AWAY_STALL, CopyCosts, Intervals, Loses, LossRates, choose, copies_share, young_s
from rayfcp.elastic.lost_time import (
    CHECKPOINT_S,
    NETWORK_BYTES_PER_S,
    TO_FILE_BYTES_PER_S,
    TO_HOST_BYTES_PER_S,
    LostTime,
    estimated_costs,
    lost_with_copies,
    lost_with_replicas,
    lost_with_restarts,
)
from rayfcp.plan import hardware_profile, model_flops, model_profile
from rayfcp.values import HardwareProfile, InfeasiblePlanError, ModelProfile, SequenceSpec

TOKENS_OF_STEP = {8: 2**19, 64: 2**22, 1024: 2**24}
"""By devices. 4 and 16 million tokens are the first and the last batch of Llama 3 405B (The Llama 3 Herd of Models,
2024, section 3.4.1); eight devices get as many each as 64."""

SEQLEN = 8192
"""Tokens of every sequence, as in most of Llama 3's pre-training (the same section)."""

MFU = 0.40
"""Assumed; Llama 3 405B had 0.38 to 0.43 in bf16 on 8K to 16K H100 (the same paper, Table 4)."""

TIMES = (1.0, 7.0)
"""Of Llama 3's rates. OPT-175B's pre-training was interrupted every 7.5 hours on 992 A100, 6.8 times as often
(https://glennklockwood.com/garden/job-reliability)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on devices that it fits on. `group_devices`: of the smallest replica group; None if there would be no
    second one."""

    model: str
    num_devices: int
    devices_per_node: int
    step_s: float
    device_bytes: float
    costs: CopyCosts
    group_devices: int | None


def main() -> None:
    args = _parser().parse_args()
    hardware = hardware_profile(args.hardware)
    network = args.network_gb_s * 1e9
    cases = [
        case_of(model_profile(name), hardware, num_devices=count, mfu=args.mfu, network_bytes_per_s=network)
        or f"{name} on {count}"
        for name in args.models
        for count in args.devices
    ]
    fitting = [each for each in cases if isinstance(each, Case)]
    parts = [_table(SIZES, (size_row(each) for each in fitting)), _table(LOSSES, loss_rows(fitting))]
    if missing := [each for each in cases if isinstance(each, str)]:
        parts.append(
            f"{', '.join(missing)} {args.hardware}: does not fit, {COPY_BYTES} bytes a parameter of the state and the "
            "gradients by the memory model."
        )
    sys.stdout.write("\n\n".join(parts) + "\n")


def case_of(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    num_devices: int,
    mfu: float = MFU,
    network_bytes_per_s: float = NETWORK_BYTES_PER_S,
) -> Case | None:
    """Return the case; None if the model does not fit."""
    if not fits(model, hardware, num_devices=num_devices):
        return None
    per_node, num_tokens = hardware.devices_per_node, TOKENS_OF_STEP.get(num_devices, 2**16 * num_devices)
    one = SequenceSpec(id=0, num_tokens=SEQLEN, num_targets=SEQLEN - 1)
    flops = model_flops(model, [one]) * num_tokens / SEQLEN
    step_s, device_bytes = flops / (num_devices * hardware.peak_flops * mfu), COPY_BYTES * model.num_parameters
    device_bytes /= num_devices
    groups = range(per_node, num_devices // 2 + 1, per_node)
    can_hold = (n for n in groups if num_devices % n == 0 and fits(model, hardware, num_devices=n))
    return Case(
        model=model.name,
        num_devices=num_devices,
        devices_per_node=per_node,
        step_s=step_s,
        device_bytes=device_bytes,
        costs=estimated_costs(
            device_bytes=device_bytes,
            step_s=step_s,
            num_devices=num_devices,
            devices_per_node=per_node,
            network_bytes_per_s=network_bytes_per_s,
        ),
        group_devices=next(can_hold, None),
    )


def fits(model: ModelProfile, hardware: HardwareProfile, *, num_devices: int) -> bool:
    """Return True if the devices can hold the model's states and one token, all layers recomputed."""
    try:
        max_tokens_per_rank(
            model,
            num_devices=num_devices,
            memory_bytes=int(ACCELERATOR_MEMORY_SHARE * hardware.memory_bytes),
            recomputed_layers=model.num_layers,
            bytes_per_element=hardware.dtype_bytes,
            reduce_every="microbatch",
        )
    except InfeasiblePlanError:
        return False
    return True


SIZES = ("model", "GPUs", "step, s", "state of a node; a GPU, GB", "copy to the host; to another node, s")


def size_row(case: Case) -> Sequence[str]:
    copy_s = case.device_bytes / min(TO_HOST_BYTES_PER_S, TO_FILE_BYTES_PER_S)
    away_s, node_gb = case.costs.away_s, case.device_bytes * min(case.devices_per_node, case.num_devices) / 1e9
    return (
        case.model,
        f"{case.num_devices:,}",
        f"{case.step_s:.1f}",
        f"{node_gb:.3g}; {case.device_bytes / 1e9:.3g}",
        f"{copy_s:.2g}; {'-' if away_s is None else f'{away_s:.2g}'}",
    )


LOSSES = (
    *("model", "GPUs", "rates", "one loss in, h", "auto: k here; k away", "share of a step: every step; auto"),
    *("every step", "auto", "auto's parts", "Young alone", "restart", "torchft"),
)


def loss_rows(cases: Sequence[Case]) -> Iterator[Sequence[str]]:
    """Yield a row for each case and rate. Parts: copies, steps that run again, recoveries, checkpoints."""
    for case in cases:
        for times in TIMES:
            rates = LossRates(times=times)
            rate = sum(rates.per_second(kind, num_devices=case.num_devices) for kind in Loses)
            auto = choose(case.costs, rates, num_devices=case.num_devices)
            every, found, least = (
                lost(case, rates, each) for each in (Intervals.fixed(1), auto, young_alone(case, rates))
            )
            parts = (found.copies_s, found.repeated_s, found.recoveries_s, found.checkpoints_s)
            shares = (copies_share(case.costs, each) for each in (Intervals.fixed(1), auto))
            yield (
                case.model,
                f"{case.num_devices:,}",
                f"{times:g}x",
                f"{1 / rate / 3600:,.0f}",
                f"{auto.here}; {auto.away if case.costs.away_s is not None else '-'}",
                "; ".join(f"{share:.2%}" for share in shares),
                _shown(every.total_s),
                f"**{_shown(found.total_s)}**",
                " + ".join(map(_shown, parts)),
                _shown(least.total_s),
                f"{_shown(lost_with_restarts(rates, num_devices=case.num_devices).total_s)}"
                f" (every {young_s(CHECKPOINT_S, rate) / 60:.0f} min)",
                _torchft(case, rates),
            )


def young_alone(case: Case, rates: LossRates) -> Intervals:
    """Return the intervals that cost least, without bounds."""
    costs, (process, node) = case.costs, (rates.per_second(each, num_devices=case.num_devices) for each in Loses)
    here = max(1, round(young_s(costs.here_s, process) / costs.step_s))
    away_s = costs.away_s or 0.0
    send = max(1, round(young_s(AWAY_STALL * away_s, node) / costs.step_s))
    return Intervals(here=here, away=send + here - 1 + math.ceil(away_s / costs.step_s), send=send)


def lost(case: Case, rates: LossRates, intervals: Intervals) -> LostTime:
    return lost_with_copies(
        case.costs,
        rates,
        intervals=intervals,
        num_devices=case.num_devices,
        devices_per_node=case.devices_per_node,
    )


def _torchft(case: Case, rates: LossRates) -> str:
    if case.group_devices is None:
        return "-"
    found = lost_with_replicas(
        rates, step_s=case.step_s, num_devices=case.num_devices, group_devices=case.group_devices
    )
    return f"{_shown(found.total_s)} (of {case.group_devices})"


def _shown(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2f}"


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b", "llama3-70b"], metavar="NAME")
    parser.add_argument(
        "--devices", nargs="+", type=int, default=[*TOKENS_OF_STEP], metavar="D", help="numbers of GPUs"
    )
    parser.add_argument("--hardware", default="h100", metavar="NAME", help="(default: h100)")
    parser.add_argument("--mfu", type=float, default=MFU, help=f"assumed, for the time of a step (default: {MFU})")
    parser.add_argument(
        "--network-gb-s",
        type=float,
        default=NETWORK_BYTES_PER_S / 1e9,
        metavar="GB/S",
        help=f"from a node to another (default: {NETWORK_BYTES_PER_S / 1e9:.0f})",
    )
    return parser


if __name__ == "__main__":
    main()
