"""Figure 11 of InfiniPipe: what its parts add, 13B, sequences up to 64K.

    python jobs/reproduce/pipeline_figure11.py
    python jobs/reproduce/pipeline_figure11.py --global-batches 512 --lengths my_lengths.txt

`w/o wbc`: chunks of one length; `w/o ckpt`: nothing recomputed; `full ckpt`: everything. Simulated seconds, `times`:
over the whole method's; `compute %`, `bubble %`: of the iteration of the whole method.
The paper's bars are in a picture; its text has their order: the whole method is the fastest everywhere.
"""

import sys
from collections.abc import Sequence
from typing import Any

from pipelines import MODELS, ablated, model_name, pipeline_parser
from tables import exit_code, lengths_name, log, show, table, write_json

from rayfcp.compare.results import Entry
from rayfcp.config.models import PipelineOptions

VARIANTS = {
    "whole": PipelineOptions(),
    "w/o wbc": PipelineOptions(chunking="fixed"),
    "w/o ckpt": PipelineOptions(recompute="none"),
    "full ckpt": PipelineOptions(recompute="full"),
}
COLUMNS = (
    ("lengths", "lengths", "s"),
    ("batch", "global_batch", "d"),
    ("variant", "variant", "s"),
    ("iteration s", "iteration_s", ".2f"),
    ("times", "times", ".3f"),
    ("compute %", "compute", ".1f"),
    ("bubble %", "bubble", ".1f"),
    ("microbatches", "num_microbatches", ".0f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each source of lengths, batch and variant."""
    parser = pipeline_parser(__doc__, model=MODELS[1])
    parser.add_argument("--global-batches", type=int, nargs="+", default=[128, 256, 512], help="default: 128 256 512")
    args = parser.parse_args(argv)
    rows = [row for source in args.lengths for batch in args.global_batches for row in _rows(args, source, batch)]
    show(f"{model_name(args.model)}, {args.devices} x {args.hardware}, sequences up to {args.max_seqlen:,} tokens\n")
    show(table(rows, COLUMNS))
    write_json(args.json, args=args, rows=rows)


def _rows(args: Any, source: str, batch: int) -> list[dict[str, Any]]:
    log(f"{lengths_name(source)}, batches of {batch}")
    entries: dict[str, Entry] = {}
    for name, options in VARIANTS.items():
        (entries[name],) = ablated(args, source=source, pipeline=options, global_batch=batch).entries
        if not entries[name].feasible:
            log(f"{name}: {entries[name].reason}")
    whole_s = entries["whole"].iteration_s
    return [
        {
            "lengths": lengths_name(source),
            "global_batch": batch,
            "variant": name,
            "iteration_s": entry.iteration_s,
            "times": _times(entry.iteration_s, whole_s),
            "compute": _percent(entry.breakdown.compute if entry.breakdown else None, whole_s),
            "bubble": _percent(entry.breakdown.bubble if entry.breakdown else None, whole_s),
            "num_microbatches": entry.num_microbatches,
        }
        for name, entry in entries.items()
    ]


def _times(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


def _percent(value: float | None, whole: float | None) -> float | None:
    times = _times(value, whole)
    return None if times is None else 100 * times


if __name__ == "__main__":
    sys.exit(exit_code(main))
