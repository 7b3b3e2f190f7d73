"""Figure 12 of FCP with blocks: attention MFU by size of blocks, 128 ranks.

    python jobs/reproduce/block_sizes.py
    python jobs/reproduce/block_sizes.py --blocks 2048 4096 --ranks 64 --lengths my_lengths.txt

`letter` is flex-block as the paper has it, Algorithm 1 and rounds by 16, without moves. `flex-block` places shares of
sequences, not blocks of one size, so that there the size bounds parcels and cuts; `-` in place of a size: it chooses.
Simulated MFU, forward and backward, relative to one kernel's on the same sequences; `imbalance` of pairs in per cent.
"""

import sys
from collections.abc import Sequence
from typing import Any

from attention import PAPERS_OWN, Trial, batches_of, bench_of, blocks_plan, mean, parser_of, trial
from tables import exit_code, lengths_name, log, show, table, write_json

from rayfcp.config.models import BlockOptions

K = 1024
COLUMNS = (
    ("lengths", "lengths", "s"),
    ("block", "block_tokens", "d"),
    ("letter", "letter", ".3f"),
    ("imbalance", "letter_imbalance", ".1f"),
    ("flex-block", "flex", ".3f"),
    ("imbalance", "flex_imbalance", ".1f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each source of lengths and size, and one without."""
    parser = parser_of(__doc__)
    sizes = [each * K for each in (1, 2, 4, 6, 8, 16)]
    parser.add_argument("--blocks", type=int, nargs="+", default=sizes, help="tokens of a block (default: 1K to 16K)")
    parser.add_argument("--ranks", type=int, default=128, help="default: 128")
    args = parser.parse_args(argv)
    rows = [_row(args, source, size) for source in args.lengths for size in (*args.blocks, None)]
    show(f"{args.hardware}, {args.ranks} ranks of {args.tokens_per_rank} tokens\n")
    show(table(rows, COLUMNS))
    show("paper: best with 4K; 2K and 6K differ by about 7 %\n")
    write_json(args.json, args=args, rows=rows)


def _row(args: Any, source: str, block_tokens: int | None) -> dict[str, Any]:
    log(f"{lengths_name(source)}, blocks of {block_tokens or 'any size'}")
    letter = PAPERS_OWN.model_copy(update={"block_tokens": block_tokens}) if block_tokens else None
    found = {"letter": letter, "flex": BlockOptions(block_tokens=block_tokens)}
    row: dict[str, Any] = {"lengths": lengths_name(source), "block_tokens": block_tokens}
    for name, options in found.items():
        each = None if options is None else _trial(args, source, options)
        row[name] = each and each.mfu
        row[f"{name}_imbalance"] = each and 100 * (each.attention_imbalance or 0.0)
    return row


def _trial(args: Any, source: str, options: BlockOptions) -> Trial:
    bench = bench_of(args, num_ranks=args.ranks)
    num_tokens = args.ranks * args.tokens_per_rank
    batches = batches_of(source, num_tokens=num_tokens, batches=args.batches, seed=args.seed)
    plans = [blocks_plan(lengths, bench=bench, options=options) for lengths in batches]
    return mean([trial(plan, lengths, bench=bench) for plan, lengths in zip(plans, batches, strict=True)])


if __name__ == "__main__":
    sys.exit(exit_code(main))
