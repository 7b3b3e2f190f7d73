"""Figure 9 of FCP with blocks: imbalance of attention and of communication on 16 to 256 ranks.

    python jobs/reproduce/block_imbalance.py
    python jobs/reproduce/block_imbalance.py --ranks 128 --lengths my_lengths.txt --json figure9.json

Imbalance is (max - mean) / max over ranks, in per cent, simulated, means over batches. `attention`: (query, key) pairs,
which is the paper's computation; `seconds`: the same in seconds of kernels, slowed by short pieces; `memory`: tokens;
`communication`: bytes sent or received, whichever is more. `port`: seconds that the busiest port is in use if all goes
between nodes, and `exposed`: what communication adds to the slowest rank, both as shares of the mean rank's attention.
`blocks` is flex-block without heads shared inside nodes; `letter` is flex-block as the paper has it: blocks of 4K by
Algorithm 1, rounds by 16, no moves.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from attention import (
    BLOCKS,
    PAPERS_OWN,
    Trial,
    batches_of,
    bench_of,
    blocks_plan,
    comparisons_of,
    mean,
    parser_of,
    trial,
)
from tables import exit_code, lengths_name, show, table, write_json

NAMES = ("flex-block", "bytescale", "magi")
TARGET = 2.0  # per cent
COLUMNS = (
    ("lengths", "lengths", "s"),
    ("ranks", "ranks", "d"),
    ("strategy", "strategy", "s"),
    ("attention", "attention", ".2f"),
    ("seconds", "seconds", ".2f"),
    ("memory", "memory", ".2f"),
    ("communication", "communication", ".1f"),
    ("port", "port", ".1f"),
    ("exposed", "exposed", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each strategy, source of lengths and number of ranks."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128, 256], help="default: 16 64 128 256")
    args = parser.parse_args(argv)
    rows = []
    for source in args.lengths:
        for num_ranks in args.ranks:
            found = comparisons_of(args, NAMES, source=source, num_ranks=num_ranks)
            found["letter"] = _letter(args, source=source, num_ranks=num_ranks)
            rows += [
                {"lengths": lengths_name(source), "ranks": num_ranks, "strategy": name, **_shares(each)}
                for name, each in found.items()
            ]
    show(f"{args.hardware}, {args.tokens_per_rank} tokens a rank, all in %\n")
    show(table(rows, COLUMNS))
    show(_summary(rows))
    write_json(args.json, args=args, rows=rows)


def _letter(args: Any, *, source: str, num_ranks: int) -> Trial:
    bench = bench_of(args, num_ranks=num_ranks)
    num_tokens = num_ranks * args.tokens_per_rank
    batches = batches_of(source, num_tokens=num_tokens, batches=args.batches, seed=args.seed)
    plans = [blocks_plan(lengths, bench=bench, options=PAPERS_OWN) for lengths in batches]
    return mean([trial(plan, lengths, bench=bench) for plan, lengths in zip(plans, batches, strict=True)])


def _shares(each: Trial) -> dict[str, float | None]:
    return {
        "attention": _percent(each.attention_imbalance),
        "seconds": _percent(each.seconds_imbalance),
        "memory": _percent(each.memory_imbalance),
        "communication": _percent(each.communication_imbalance),
        "port": _percent(each.port_s, of=each.attention_s),
        "exposed": _percent(each.exposed_s, of=each.attention_s),
    }


def _percent(share: float | None, *, of: float | None = 1.0) -> float | None:
    return None if share is None or of is None else 100 * share / of


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["paper: FCP below 5 % in both, MagiAttention up to 17 % of communication, ByteScale up to 70 %"]
    for strategy, key in itertools.product(("flex-block", BLOCKS), ("attention", "exposed")):
        own = [row for row in rows if row["strategy"] == strategy]
        above = [f"{row['lengths']} on {row['ranks']}" for row in own if row[key] >= TARGET]
        worst = max(row[key] for row in own)
        lines.append(
            f"{strategy}, {key}: at most {worst:.2f} %; not below {TARGET:.0f} %: {', '.join(above) or 'none'}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_code(main))
