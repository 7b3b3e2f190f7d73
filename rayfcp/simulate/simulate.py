"""`simulate`: programs of all ranks on a machine, as a timeline. `simulate_plan`: a plan, lowered and simulated.
`choose`: the plan of a strategy that is fastest when simulated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rayfcp.cost.analytic import FORWARD_AND_BACKWARD
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.plan.batch import taken
from rayfcp.plan.strategies.registry import AUTO
from rayfcp.program import Forward, Programs, check_progress, lower
from rayfcp.program.instructions import of_kind
from rayfcp.simulate.encoder import EncoderWork, work_of
from rayfcp.simulate.machine import Machine, machine_of
from rayfcp.simulate.memory import memory_over_time
from rayfcp.simulate.replay import ALL_TO_ALL, HOP, IDLE, RING, SHARDING, WORK
from rayfcp.simulate.rounds import AttentionTraffic, flatten
from rayfcp.simulate.steady import ReplayOutcome, run
from rayfcp.simulate.timeline import Breakdown, Loads, PerRank, Timeline, spans_of
from rayfcp.values import BatchPlan, HardwareProfile, ModelProfile, SequenceSpec
from rayfcp.values.arrays import Floats, Ints

CLEARLY = 1.1
"""Plans beyond this multiple of the best prediction are not simulated: prediction and simulation are rarely as much as
3 % apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, its programs if it was simulated, and the seconds of every simulated plan, in the order of `plans`."""

    plan: BatchPlan
    programs: Programs | None
    simulated: tuple[tuple[str, float], ...]


def choose(
    plans: Sequence[BatchPlan],
    *,
    strategy: str = AUTO,
    lowered: Callable[[BatchPlan], Programs],
    seconds: Callable[[Programs], float],
) -> Choice:
    """Return the fastest of the `plans` of `strategy` (`plan_candidates`) by the `seconds` of its programs; of equals
    the first.

    A single plan, or one whose prediction is far better than all others, is not simulated. The plan's reason says why
    it was taken.
    """
    best = min(plans, key=lambda each: each.predicted_s)
    close = [plan for plan in plans if plan.predicted_s <= CLEARLY * best.predicted_s]
    if len(close) == 1:
        predicted = [(each.strategy, each.predicted_s) for each in plans]
        single = strategy != AUTO and len(plans) == 1
        plan = best if single else taken(best, predicted, strategy=strategy, how="predicted")
        return Choice(plan=plan, programs=None, simulated=())
    programs = [lowered(plan) for plan in close]
    simulated = [(plan.strategy, seconds(each)) for plan, each in zip(close, programs, strict=True)]
    at = min(range(len(close)), key=lambda each: simulated[each][1])
    plan = taken(close[at], simulated, strategy=strategy, how="simulated")
    named = programs[at].replaced(plan_hash=plan.plan_hash)  # the plan's hash covers its reason
    return Choice(plan=plan, programs=named, simulated=tuple(simulated))


def simulate(
    programs: Programs,
    *,
    model: ModelProfile,
    hardware: HardwareProfile,
    node_of_rank: tuple[int, ...] = (),
    speed_of_rank: tuple[float, ...] = (),
    bytes_per_element: int | None = None,
    layers_of_stage: tuple[int, ...] = (),
    gather_every: Literal["microbatch", "step"] = "microbatch",
    recurrent_heads: bool = False,
    detail: bool = False,
) -> Timeline:
    """Replay the programs of all stages and ranks, every instruction, layer, round and message.

    The rules are those of `Machine` (kernels and links), `steady` (sharded parameters, gathered again
    `gather_every` microbatch or once a step) and `replay` (ports, rounds, hops, overlap). By default nodes of
    `hardware.devices_per_node` devices are filled one after the other, layers are split evenly, all ranks are as fast,
    numbers have `hardware.dtype_bytes` bytes. `recurrent_heads`: ranks exchange tokens for heads around recurrent
    layers, not states. `detail` adds rounds of one layer of each pass. Same arguments, same timeline, in any process.

    Raises:
        ValueError: programs that would wait for ever, or a profile that makes no sense.
    """
    check_progress(programs, forward_only=isinstance(programs, Programs) and programs.forward_only)
    machine = machine_of(
        model,
        hardware,
        num_ranks=programs.num_ranks,
        num_stages=programs.num_stages,
        layers_of_stage=layers_of_stage,
        node_of_rank=node_of_rank,
        speed_of_rank=speed_of_rank,
        bytes_per_element=bytes_per_element,
    )
    traffic = flatten(programs, machine=machine, by_heads=recurrent_heads)
    held = np.tile(programs.tokens.astype(np.float64), programs.num_stages)
    encoded = work_of(programs.encodes, machine=machine) if any(programs.encodes) else None
    work = np.concatenate((held, encoded.rows)) if encoded else held
    outcome = run(programs, machine=machine, traffic=traffic, work=work, gather_every=gather_every)
    return Timeline(
        iteration_s=float(outcome.end_s.max()),
        draw=lambda: spans_of(programs, machine=machine, traffic=traffic, outcome=outcome, detail=detail),
        account=lambda: memory_over_time(
            programs, machine=machine, outcome=outcome, gather_every=gather_every, by_heads=recurrent_heads
        ),
        by_rank=_breakdowns(outcome, num_ranks=machine.num_ranks),
        **_amounts(programs, machine=machine, traffic=traffic, held=held, encoded=encoded),
    )


def _amounts(
    programs: Programs,
    *,
    machine: Machine,
    traffic: AttentionTraffic,
    held: Floats,
    encoded: EncoderWork | None,
) -> dict[str, Any]:
    """Fields of the timeline: devices and their loads; tokens and operations, those of padding not counted."""
    loads = _loads(programs, machine=machine, traffic=traffic, held=held)
    of_ranks = [row[: machine.num_ranks] for row in loads.num_tokens]
    padded = sum(count == 0 for row in of_ranks for count in row)
    own = float(_pair_flops(machine, traffic)[:, : machine.num_ranks].sum())
    flops = FORWARD_AND_BACKWARD * (own - padded * machine.model.attention_flops_per_pair)
    num_tokens = sum(sum(row) for row in of_ranks)
    linear_flops = (1 + machine.model.linear_backward) * machine.model.linear_flops_per_token * num_tokens
    return {
        "num_ranks": machine.num_ranks,
        "num_stages": machine.num_stages,
        "peak_flops": machine.hardware.peak_flops,
        "loads": replace(loads, encoder_s=_rows(encoded.seconds(machine))) if encoded else loads,
        "num_tokens": num_tokens,
        "attention_flops": flops,
        "model_flops": linear_flops + flops + (encoded.flops(machine) if encoded else 0.0),
    }


def _pair_flops(machine: Machine, traffic: AttentionTraffic) -> Floats:
    """`[microbatch, device]`: FLOPs of attention in all layers of the model, forward."""
    count = np.bincount(machine.kinds) * np.array([float(each.pair_flops) for each in machine.shapes])
    by_shape = traffic.pairs.reshape(-1, 2, len(count), machine.num_devices)[:, 0]
    return np.asarray(np.tensordot(by_shape, count, axes=(1, 0)))


def _passes(machine: Machine, again: Ints) -> Ints:
    """`[pass, device]`: how many layers of the device's stage run a pass, recomputed ones (the first `again[microbatch,
    device]` layers) twice forward."""
    kinds, ends = np.array(machine.kinds), np.cumsum(machine.layers_of_stage)
    found = np.zeros((len(again), 2, len(machine.shapes), machine.num_devices), np.int64)
    for device in range(machine.num_devices):
        stage = device // machine.num_ranks
        own = kinds[ends[stage] - machine.layers_of_stage[stage] : ends[stage]]
        before = np.cumsum(own[:, None] == np.arange(len(machine.shapes)), axis=0)
        before = np.concatenate((np.zeros_like(before[:1]), before))
        found[:, :, :, device] = before[-1]
        found[:, 0, :, device] += before[again[:, device]]
    return found.reshape(-1, machine.num_devices)


def _breakdowns(outcome: ReplayOutcome, *, num_ranks: int) -> tuple[Breakdown, ...]:
    """By device. Waiting for shards longer than the rank of the stage that waits least counts as bubble: the rank came
    early."""
    end_s, spent = outcome.end_s, outcome.spent
    sharding_s = np.repeat(spent[:, SHARDING].reshape(-1, num_ranks).min(axis=1), num_ranks)
    idle_s = spent[:, IDLE] + end_s.max() - end_s + spent[:, SHARDING] - sharding_s
    return tuple(
        Breakdown(
            compute=float(each[WORK]),
            sharding=float(sharding),
            all_to_all=float(each[ALL_TO_ALL]),
            ring=float(each[RING]),
            hop=float(each[HOP]),
            bubble=float(idle),
        )
        for each, sharding, idle in zip(spent, sharding_s, idle_s, strict=True)
    )


def _loads(programs: Programs, *, machine: Machine, traffic: AttentionTraffic, held: Floats) -> Loads:
    layers = np.repeat(machine.layers_of_stage, machine.num_ranks)
    last = np.arange(machine.num_devices) >= machine.num_devices - machine.num_ranks
    forwards = [of_kind(outline, Forward) for outline in programs.outlines]
    again, kept = (
        np.repeat(np.array([[getattr(item, name) for item in each] for each in forwards]).T, machine.num_ranks, axis=1)
        for name in ("recomputed_layers", "keeps_attention")
    )
    again = np.minimum(again, layers)
    passes = _passes(machine, np.where(kept, 0, again))
    exchanges = np.ones((len(traffic.rounds.first) - len(passes), machine.num_devices), np.int64)
    attend_s = (traffic.attend_s * passes).reshape(len(again), -1, machine.num_devices).sum(axis=1)
    linear_s, idle_s = _linear_s(machine, again)
    linear_s = linear_s + last * machine.head_s_per_token * (1 + machine.model.linear_backward)
    half_s = (linear_s + idle_s) * machine.hardware.linear_half_tokens
    compute_s = attend_s + (linear_s * held + half_s) * machine.slowness
    moved = traffic.message_bytes * np.concatenate((passes, exchanges))[traffic.message_pass, traffic.messages.source]
    in_attention = np.repeat(np.arange(len(again)), 2 * len(machine.shapes))
    in_exchanges = np.arange(len(exchanges)) // 2
    place = np.concatenate((in_attention, in_exchanges))[traffic.message_pass] * machine.num_devices
    ends = (traffic.messages.source, traffic.messages.target)
    sent, received = (
        np.bincount(place + end, moved, minlength=held.size).astype(np.float64).reshape(held.shape) for end in ends
    )
    loaded = [tuple(pieces.tokens_of_ranks().tolist()) * programs.num_stages for pieces in programs.pieces]
    flops = FORWARD_AND_BACKWARD * _pair_flops(machine, traffic)
    return Loads(
        compute_s=_rows(compute_s),
        attention_flops=_rows(flops),
        num_tokens=tuple(loaded),
        sent_bytes=_rows(sent),
        received_bytes=_rows(received),
    )


def _linear_s(machine: Machine, again: Ints) -> tuple[Floats, Floats]:
    """`[microbatch, device]`: seconds per token of the linear work of a device's layers, of which the first `again` run
    forward once more, and of the same in experts that a token does not pass."""
    stages = []
    for stage in range(machine.num_stages):
        layers = machine.part(stage).layers
        forward_s = np.array([(machine.linear_s_per_token(each), machine.idle_s_per_token(each)) for each in layers])
        backward_s = [
            (machine.linear_backward_s(each), machine.model.linear_backward * idle_s)
            for each, idle_s in zip(layers, forward_s[:, 1], strict=True)
        ]
        whole_s = forward_s.sum(axis=0) + np.sum(backward_s, axis=0)
        stages.append(whole_s + np.vstack([(0.0, 0.0), np.cumsum(forward_s, axis=0)]))
    device = np.arange(machine.num_devices)
    found = np.asarray([[stages[p // machine.num_ranks][row[p]] for p in device] for row in again])
    return found[..., 0], found[..., 1]


def _rows(values: Floats) -> tuple[PerRank, ...]:
    return tuple(tuple(row) for row in values.tolist())


def simulate_plan(
    plan: BatchPlan,
    sequences: Sequence[SequenceSpec],
    *,
    model: ModelProfile | str,
    hardware: HardwareProfile | str,
    node_of_rank: tuple[int, ...] = (),
    bytes_per_element: int | None = None,
    reduce_every: Literal["microbatch", "step"] = "step",
    layers_of_stage: tuple[int, ...] = (),
    gather_every: Literal["microbatch", "step"] = "microbatch",
    detail: bool = False,
) -> Timeline:
    """The timeline of a plan; also `rayfcp.simulate`. `sequences` are those that were planned.

    `model` and `hardware` are profiles or names of profiles; the other arguments are those of `lower` and
    `rayfcp.simulate.simulate`. Every primitive is simulated.

    Raises:
        ValueError: an unknown name, or what `lower` and `simulate` refuse.
    """
    return simulate(
        lower(plan, sequences, reduce_every=reduce_every),
        model=model_profile(model) if isinstance(model, str) else model,
        hardware=hardware_profile(hardware) if isinstance(hardware, str) else hardware,
        node_of_rank=node_of_rank,
        bytes_per_element=bytes_per_element,
        layers_of_stage=layers_of_stage,
        gather_every=gather_every,
        detail=detail,
    )
