"""A run directory as a run of some hours leaves it, written with the run's own writers."""

import math
import random
from dataclasses import dataclass
from pathlib import Path

from rayfcp.telemetry.baseline import Baseline, Unrefitted
from rayfcp.telemetry.events import Event, EventKind, append_event
from rayfcp.telemetry.rank_times import RankTimes
from rayfcp.telemetry.report import write_report
from rayfcp.telemetry.steps import StepLog
from rayfcp.telemetry.trace import TracedStep, write_steps
from rayfcp.values import ClusterSpec, EvalResult, Imbalance, Span, SpanKind, StepReport
from tests.telemetry.samples import PAIRS, report

LOST_AT, BACK_AT = 0.4, 0.7
"""Shares of the run after which a device is lost, and another one comes."""


@dataclass(frozen=True)
class Sample:
    """A run of so many steps on so many devices."""

    num_steps: int = 240
    num_devices: int = 8
    name: str = "qwen3-8b-128k"

    def world(self, step: int) -> int:
        lost = self.num_devices > 1 and LOST_AT * self.num_steps < step <= BACK_AT * self.num_steps
        return self.num_devices - lost

    def write(self, folder: Path) -> tuple[StepReport, ...]:
        """All files of the run; its steps."""
        rng = random.Random(self.num_steps)
        steps = tuple(_step(step, of=self, rng=rng) for step in range(1, self.num_steps + 1))
        with StepLog(folder / "steps.jsonl") as log:
            for each in steps:
                log.append(each)
        times = RankTimes()
        for each in steps:
            slow = {3: 1.25} if each.step > BACK_AT * self.num_steps else {}
            busy = {rank: each.step_s * rng.uniform(0.78, 0.8) * slow.get(rank, 1) for rank in range(each.world_size)}
            times.add(each.step, busy)
        times.write(folder / "ranks.json")
        self._events(folder / "events.jsonl", wall_s=sum(each.step_s for each in steps) * 1.2)
        traced = [_traced(each, of=self, rng=rng) for each in steps[-3:]]
        write_steps(folder / "trace.json", traced)
        (folder / "config.yaml").write_text(f"run: {{name: {self.name}}}\nmodel: {{name: qwen3-8b, dtype: bfloat16}}\n")
        write_report(folder, baseline=self._baseline(rng))
        return steps

    def _events(self, path: Path, *, wall_s: float) -> None:
        began_s, many = 1.7e9, self.num_devices
        lost, back = int(LOST_AT * self.num_steps), int(BACK_AT * self.num_steps)
        told = [
            (EventKind.START, 0, 12.0, 12.0, 0, many, 0, "", f"all {many} devices are there"),
            (EventKind.RECOVERY, lost, wall_s * LOST_AT, 3.4, many, many - 1, 1, "process", "rank 3: its process died"),
            (EventKind.RESIZE, back, wall_s * BACK_AT, 1.2, many - 1, many, 0, "", "a new device stands by: growing"),
            (EventKind.END, self.num_steps, wall_s, 0.0, 0, many, 0, "", ""),
        ]
        told = told if many > 1 else [told[0], told[-1]]
        for number, (kind, step, at_s, seconds, before, devices, again, cause, reason) in enumerate(told):
            append_event(
                path,
                Event(
                    kind=kind,
                    step=step,
                    at_s=began_s + at_s,
                    devices=devices,
                    devices_before=before,
                    seconds=seconds,
                    lost_steps=again,
                    cause=cause,
                    reason=reason,
                    cluster=ClusterSpec(num_ranks=devices, max_tokens_per_rank=4096, generation=number),
                ),
            )

    def _baseline(self, rng: random.Random) -> Baseline:
        steps = tuple(range(1, self.num_steps + 1, max(1, self.num_steps // 12)))
        return Baseline(
            static="static-cp",
            own="flex-ring",
            steps=steps,
            imbalances=tuple((rng.uniform(0.25, 0.35), rng.uniform(0.02, 0.05)) for _ in steps),
            step_s=tuple((rng.uniform(3.0, 4.0), rng.uniform(2.0, 2.2)) for _ in steps),
            unrefitted=Unrefitted(regrouped=0.07, step_s=tuple(rng.uniform(2.1, 2.2) for _ in steps)),
        )


def _imbalance(compute: float) -> Imbalance:
    return Imbalance(compute=compute, attention=compute * 1.6, memory=compute * 3, communication=compute * 6)


def _step(step: int, *, of: Sample, rng: random.Random) -> StepReport:
    step_s, world = rng.uniform(2.0, 2.5) + (step == 1), of.world(step)
    degrees = {1: rng.randint(1, 3), 2: rng.randint(0, 1), 4: rng.randint(0, 1)}
    return report(
        step,
        loss=2 + 3.5 * math.exp(-step / 60) + rng.uniform(0, 0.1),
        grad_norm=rng.uniform(1, 1.4),
        num_tokens=int(4000 * world * rng.uniform(1, 1.2)),
        step_s=step_s,
        predicted_s=step_s * rng.uniform(0.92, 1.06),
        mfu=rng.uniform(0.31, 0.34),
        attention_mfu=rng.uniform(0.17, 0.19),
        imbalance=_imbalance(rng.uniform(0.03, 0.05)),
        bubble=rng.uniform(0.04, 0.07),
        gap=rng.uniform(1.01, 1.05),
        plan_s=rng.uniform(0.01, 0.02),
        prepare_s=rng.uniform(0.04, 0.06),
        plan_wait_s=rng.uniform(0, 0.002),
        world_size=world,
        degrees={degree: count for degree, count in degrees.items() if count},
        pairs=PAIRS,
        eval={"val": EvalResult(loss=2.5, tokens=9, pairs=PAIRS)} if step % 60 == 0 else {},
    )


def _traced(step: StepReport, *, of: Sample, rng: random.Random) -> TracedStep:
    """Three microbatches, in which ranks wait for the slowest."""
    measured, predicted = (
        tuple(_spans(of.num_devices, start_s=start_s, noise=noise, rng=rng))
        for start_s, noise in ((1.7e9 + 3.0 * step.step, 0.05), (0.0, 0.0))
    )
    return TracedStep(step=step.step, measured=measured, predicted=predicted)


def _spans(num_ranks: int, *, start_s: float, noise: float, rng: random.Random) -> list[Span]:
    spans, at_s = [], start_s
    for microbatch in range(3):
        takes = [0.2 + 0.03 * ((rank + microbatch) % 4) + rng.uniform(0, noise) for rank in range(num_ranks)]
        for rank, forward_s in enumerate(takes):
            ends = (at_s, at_s + forward_s, at_s + max(takes), at_s + max(takes) + 0.4, at_s + max(takes) + 0.45)
            kinds = (SpanKind.FORWARD, SpanKind.WAIT, SpanKind.BACKWARD, SpanKind.REDUCE)
            spans += [
                Span(rank=rank, stage=0, kind=kind, label=f"{kind} {microbatch}", start_s=one, stop_s=two)
                for kind, one, two in zip(kinds, ends, ends[1:], strict=False)
                if two > one
            ]
        at_s += max(takes) + 0.45
    return spans
