"""`simulate`: programs of all ranks on a machine, as a timeline."""

from collections.abc import Sequence

import numpy as np

from rayfcp.plan.costs.analytic import LINEAR_BACKWARD
from rayfcp.plan.costs.flops import FORWARD_AND_BACKWARD
from rayfcp.program import Forward, Load, RankProgram
from rayfcp.simulate.arrays import ALL_TO_ALL, IDLE, RING, SHARDING, WORK, Floats
from rayfcp.simulate.machine import Machine, machine_of
from rayfcp.simulate.memory import memory_over_time
from rayfcp.simulate.rounds import Traffic, flatten
from rayfcp.simulate.spans import spans_of
from rayfcp.simulate.steady import Outcome, run
from rayfcp.simulate.timeline import Breakdown, Loads, PerRank, Timeline
from rayfcp.values import HardwareProfile, ModelProfile


def simulate(
    programs: Sequence[RankProgram],
    *,
    model: ModelProfile,
    hardware: HardwareProfile,
    node_of_rank: tuple[int, ...] = (),
    bytes_per_element: int | None = None,
    detail: bool = False,
) -> Timeline:
    """Replay the programs of all ranks, rank r at index r, every instruction, layer, round and message.

    The rules are those of `Machine` (kernels and links), `write_script` (sharded parameters) and `replay` (ports,
    rounds, overlap). Without `node_of_rank`, nodes of `hardware.devices_per_node` ranks are filled one after the other;
    numbers have `hardware.dtype_bytes` bytes if `bytes_per_element` is absent. `detail` adds the rounds of one
    layer of each pass to the spans. Same arguments, same timeline, in any process.

    Raises:
        ValueError: no programs, programs that disagree or would wait for ever, or a profile that makes no sense.
    """
    _check_programs(programs)
    machine = machine_of(
        model, hardware, num_ranks=len(programs), node_of_rank=node_of_rank, bytes_per_element=bytes_per_element
    )
    traffic = flatten(programs, machine=machine)
    held = _tokens(programs)
    outcome = run(programs[0].instructions, machine=machine, traffic=traffic, tokens=held)
    loads = _loads(programs, machine=machine, traffic=traffic, held=held)
    num_tokens = sum(sum(row) for row in loads.num_tokens)
    padded = sum(count == 0 for row in loads.num_tokens for count in row)
    cells = float(traffic.cells[0::2].sum()) - padded
    attention_flops = FORWARD_AND_BACKWARD * model.attention_flops_per_cell * cells
    return Timeline(
        iteration_s=float(outcome.mark_s[-1].max()),
        spans=spans_of(programs, machine=machine, traffic=traffic, outcome=outcome, detail=detail),
        by_rank=_breakdowns(outcome),
        loads=loads,
        memory=memory_over_time(programs, machine=machine, instants=outcome.plot.instants, mark_s=outcome.mark_s),
        num_ranks=len(programs),
        num_tokens=num_tokens,
        model_flops=FORWARD_AND_BACKWARD * model.linear_flops_per_token * num_tokens + attention_flops,
        attention_flops=attention_flops,
        peak_flops=hardware.peak_flops,
    )


def _check_programs(programs: Sequence[RankProgram]) -> None:
    if not programs:
        raise ValueError("programs is empty, must hold one program for each rank; lower the plan")
    orders = {tuple((type(item), item.microbatch) for item in program.instructions) for program in programs}
    if len(orders) > 1 or [program.rank for program in programs] != list(range(len(programs))):
        raise ValueError(
            "programs must be those of all ranks, in the order of ranks, with the same passes; lower one plan for all"
        )
    if any(program.num_stages != 1 for program in programs):
        raise ValueError(f"num_stages is {programs[0].num_stages}, must be 1; pipelines are not simulated")


def _tokens(programs: Sequence[RankProgram]) -> Floats:
    """`[microbatch, rank]`, padding included."""
    forwards = [[item for item in program.instructions if isinstance(item, Forward)] for program in programs]
    return np.array([[item.attention.num_tokens for item in each] for each in forwards], np.float64).T.copy()


def _breakdowns(outcome: Outcome) -> tuple[Breakdown, ...]:
    """By rank. What a rank waits for shards beyond the rank that waits least, it waits because it was there early."""
    end_s, spent = outcome.mark_s[-1], outcome.spent
    sharding_s = float(spent[:, SHARDING].min())
    idle_s = spent[:, IDLE] + end_s.max() - end_s + spent[:, SHARDING] - sharding_s
    return tuple(
        Breakdown(
            compute=float(each[WORK]),
            sharding=sharding_s,
            all_to_all=float(each[ALL_TO_ALL]),
            ring=float(each[RING]),
            bubble=float(idle),
        )
        for each, idle in zip(spent, idle_s, strict=True)
    )


def _loads(programs: Sequence[RankProgram], *, machine: Machine, traffic: Traffic, held: Floats) -> Loads:
    layers = machine.model.num_layers
    again = np.array(
        [min(item.recomputed_layers, layers) for item in programs[0].instructions if isinstance(item, Forward)]
    )
    passes = np.stack([layers + again, np.full_like(again, layers)], axis=1).ravel()
    attend_s = (traffic.attend_s * passes[:, None]).reshape(len(again), 2, -1).sum(axis=1)
    times = layers * (1 + LINEAR_BACKWARD) + again[:, None]
    linear_s = machine.linear_s_per_token * times + machine.head_s_per_token * (1 + LINEAR_BACKWARD)
    compute_s = attend_s + linear_s * (held + machine.hardware.linear_half_tokens)
    moved = traffic.message_bytes * passes[traffic.message_pass]
    place = (traffic.message_pass // 2) * machine.num_ranks
    ends = (traffic.messages.source, traffic.messages.target)
    sent, received = (
        np.bincount(place + end, moved, minlength=held.size).astype(np.float64).reshape(held.shape) for end in ends
    )
    loaded = [[item for item in program.instructions if isinstance(item, Load)] for program in programs]
    num_tokens = [
        tuple(sum(piece.num_tokens for piece in each[at].pieces) for each in loaded) for at in range(len(again))
    ]
    flops = FORWARD_AND_BACKWARD * machine.model.attention_flops_per_cell * traffic.cells[0::2]
    return Loads(
        compute_s=_rows(compute_s),
        attention_flops=_rows(flops),
        num_tokens=tuple(num_tokens),
        sent_bytes=_rows(sent),
        received_bytes=_rows(received),
    )


def _rows(values: Floats) -> tuple[PerRank, ...]:
    return tuple(tuple(row) for row in values.tolist())
