"""Figure 10 of InfiniPipe: throughput of 13B by context length and by global batch.

    python jobs/reproduce/pipeline_figure10.py
    python jobs/reproduce/pipeline_figure10.py --contexts 65536 --global-batches 512 1024 --lengths my_lengths.txt

Simulated tokens a second of each device, means over batches. Contexts at batches of 512, batches at the shortest
context: the paper does not log which.
"""

import sys
from collections.abc import Sequence
from typing import Any

from pipelines import (
    MODELS,
    OURS,
    SYSTEMS,
    K,
    compare_systems,
    model_name,
    pipeline_parser,
    share,
    speedup,
    tokens_per_s,
)
from tables import exit_code, lengths_name, log, show, table, write_json

BASELINES = tuple(name for name in SYSTEMS if name != OURS)
COLUMNS = (
    ("lengths", "lengths", "s"),
    ("context", "context", "d"),
    ("batch", "global_batch", "d"),
    *((name, name, ",.0f") for name in SYSTEMS),
    *((f"over {name}", f"{name}_speedup", ".2f") for name in BASELINES),
    ("bubble %", "bubble", ".1f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each source of lengths, context and batch."""
    parser = pipeline_parser(__doc__, model=MODELS[1])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[64 * K, 96 * K, 128 * K, 192 * K], help="longest sequences"
    )
    parser.add_argument("--global-batches", type=int, nargs="+", default=[128, 256, 512], help="default: 128 256 512")
    args = parser.parse_args(argv)
    points = [(context, max(args.global_batches)) for context in args.contexts]
    points += [(min(args.contexts), batch) for batch in args.global_batches if batch != max(args.global_batches)]
    rows = [_row(args, source, context, batch) for source in args.lengths for context, batch in points]
    show(f"{model_name(args.model)}, {args.devices} x {args.hardware}, tokens a second of each device\n")
    show(table(rows, COLUMNS))
    show(
        "paper, 64K to 192K: 1.30 to 1.37 over FlexSP, 1.23 to 1.63 over Seq1F1B; "
        "batches of 512: 1.33 over FlexSP, 1.49 over DeepSpeed\n"
    )
    write_json(args.json, args=args, rows=rows)


def _row(args: Any, source: str, context: int, batch: int) -> dict[str, Any]:
    log(f"{lengths_name(source)}, {context:,} tokens, batches of {batch}")
    entries = compare_systems(args, source=source, max_seqlen=context, global_batch=batch)
    return {
        "lengths": lengths_name(source),
        "context": context,
        "global_batch": batch,
        **{name: tokens_per_s(entry, devices=args.devices) for name, entry in entries.items()},
        **{f"{name}_speedup": speedup(entries, name) for name in BASELINES},
        "bubble": share(entries[OURS], "bubble"),
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
