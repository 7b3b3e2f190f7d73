"""Table 2 of FCP with blocks: what each of its parts adds to the MFU of attention, 128 ranks.

    python jobs/reproduce/block_ablation.py
    python jobs/reproduce/block_ablation.py --ranks 64 --lengths my_lengths.txt --json table2.json

Simulated MFU relative to one kernel's on the same sequences. The placement of all but the last step is the
paper's, blocks of 4K by Algorithm 1 with zig-zag pairs:

    base  each rank fetches what it needs in an order of its own, drawn at random; nothing hides behind attention
    #1    block-level pipelining: the same order, behind attention
    #2    congestion-free solver: rounds that are matchings, one by one
    #3    bottom-up coalescer: rounds by 16
    #4    transparent reshuffler
    ours  shares of sequences in place of blocks of one size, rounds at the pace of attention

Up to #3 the user's layout, sequences end to end, is reshuffled before attention (queries, keys, values) and after it
(outputs), and the same for gradients, in two exchanges that nothing hides. From #4 on that is gone: the paper hides it,
here tokens are loaded where the plan wants them. The exchanges are not simulated but priced by the busiest port.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from attention import PAPERS_OWN, Bench, Lengths, Trial, batches_of, bench_of, blocks_plan, mean, parser_of, trial
from tables import exit_code, lengths_name, log, show, table, write_json

from rayfcp.config.models import BlockOptions
from rayfcp.cost.placement import node_of_ranks
from rayfcp.values import BatchPlan, Layout, Pacing, Round, Transfer

STEPS = ("base", "#1", "#2", "#3", "#4", "ours")
PAPER = {
    "forward": {"base": 0.29, "#1": 0.48, "#2": 0.62, "#3": 0.70, "#4": 0.75},
    "backward": {"base": 0.37, "#1": 0.46, "#2": 0.59, "#3": 0.69, "#4": 0.74},
}
COLUMNS = (("lengths", "lengths", "s"), ("pass", "pass", "s"), *((name, name, ".2f") for name in STEPS))


def main(argv: Sequence[str] | None = None) -> None:
    """Two rows for each source of lengths, two of the paper."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=128, help="default: 128")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = [
        {"lengths": "paper", "pass": name, **steps, "ours": None} for name, steps in PAPER.items()
    ]
    for source in args.lengths:
        log(lengths_name(source))
        rows += _rows(args, source)
    show(f"{args.hardware}, {args.ranks} ranks of {args.tokens_per_rank} tokens\n")
    show(table(rows, COLUMNS))
    write_json(args.json, args=args, rows=rows)


def _rows(args: Any, source: str) -> list[dict[str, Any]]:
    bench = bench_of(args, num_ranks=args.ranks)
    num_tokens = args.ranks * args.tokens_per_rank
    batches = batches_of(source, num_tokens=num_tokens, batches=args.batches, seed=args.seed)
    found = [_steps(lengths, bench=bench, seed=args.seed) for lengths in batches]
    steps = {name: mean([each[name] for each in found]) for name in STEPS}
    return [
        {"lengths": lengths_name(source), "pass": "forward"} | {name: steps[name].forward_mfu for name in STEPS},
        {"lengths": lengths_name(source), "pass": "backward"} | {name: steps[name].backward_mfu for name in STEPS},
    ]


def _steps(lengths: Lengths, *, bench: Bench, seed: int) -> dict[str, Trial]:
    """Time of each step, exchanges included."""
    one_by_one = blocks_plan(lengths, bench=bench, options=PAPERS_OWN.model_copy(update={"coalesce": 1}))
    coalesced = blocks_plan(lengths, bench=bench, options=PAPERS_OWN)
    (layout,) = (each.layout for each in one_by_one.microbatches)
    assert layout is not None  # of `flex-block`
    random = _with(one_by_one, _fetched(layout, num_ranks=bench.num_ranks, seed=seed))
    exposed = replace(bench, hardware=replace(bench.hardware, overlap=0.0))
    exchange_s = _exchange_s(layout, lengths, bench=bench)
    paper = trial(coalesced, lengths, bench=bench)
    return {
        "base": _reshuffled(trial(random, lengths, bench=exposed), exchange_s),
        "#1": _reshuffled(trial(random, lengths, bench=bench), exchange_s),
        "#2": _reshuffled(trial(one_by_one, lengths, bench=bench), exchange_s),
        "#3": _reshuffled(paper, exchange_s),
        "#4": paper,
        "ours": trial(blocks_plan(lengths, bench=bench, options=BlockOptions()), lengths, bench=bench),
    }


def _with(plan: BatchPlan, layout: Layout) -> BatchPlan:
    (microbatch,) = plan.microbatches
    return replace(plan, microbatches=(replace(microbatch, layout=layout),))


def _fetched(layout: Layout, *, num_ranks: int, seed: int) -> Layout:
    """The same transfers, each target's one after the other in a random order, whoever else asks the same source: in
    no round a matching, which is what the solver is for."""
    brought: list[list[Transfer]] = [[] for _ in range(num_ranks)]
    for step in layout.rounds:
        for transfer in step.transfers:
            brought[transfer.target].append(transfer)
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(each)).tolist() for each in brought]
    rounds = [
        Round(transfers=tuple(each[order[at]] for each, order in zip(brought, orders, strict=True) if at < len(order)))
        for at in range(max(map(len, brought)))
    ]
    return Layout(blocks=layout.blocks, rounds=tuple(rounds), pacing=Pacing(coalesce=1, num_buffers=3))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """Tokens that pass the busiest port in the reshuffle, between nodes and inside one."""

    between: int
    inside: int


def _exchange_s(layout: Layout, lengths: Lengths, *, bench: Bench) -> float:
    """Both exchanges of a pass: what the user's layout, sequences end to end in equal parts, has elsewhere."""
    moved = _moved(layout, lengths, bench=bench)
    model, hardware = bench.model, bench.hardware
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    token_bytes = heads * model.head_dim * hardware.dtype_bytes
    between_s = token_bytes * moved.between / hardware.inter_node_bandwidth
    return max(between_s, token_bytes * moved.inside / hardware.intra_node_bandwidth)


def _moved(layout: Layout, lengths: Lengths, *, bench: Bench) -> _Moved:
    """Tokens on another rank in the user's layout than in the plan's."""
    ranks = bench.num_ranks
    first = np.concatenate([[0], np.cumsum(lengths)])
    opens = np.array([first[block.sequence] + block.start for block in layout.blocks])
    order = np.argsort(opens)
    target = np.array([block.rank for block in layout.blocks])[order]
    shares = first[-1] * np.arange(ranks + 1) // ranks
    edges = np.unique(np.concatenate([opens, shares]))
    begin, size = edges[:-1], np.diff(edges)
    to = target[np.searchsorted(opens[order], begin, side="right") - 1]
    of = np.searchsorted(shares, begin, side="right") - 1
    node = np.array(node_of_ranks(bench.setting.cluster, ranks_per_node=bench.hardware.devices_per_node))
    across, near = node[of] != node[to], (node[of] == node[to]) & (of != to)
    between, inside = (
        max(np.bincount(end, size * kept, minlength=ranks).max() for end in (of, to)) for kept in (across, near)
    )
    return _Moved(between=int(between), inside=int(inside))


def _reshuffled(each: Trial, exchange_s: float) -> Trial:
    """Time with the exchanges in either pass."""
    return replace(each, forward_s=each.forward_s + exchange_s, iteration_s=each.iteration_s + 2 * exchange_s)


if __name__ == "__main__":
    sys.exit(exit_code(main))
