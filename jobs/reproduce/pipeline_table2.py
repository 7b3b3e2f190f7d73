"""Table 2 of InfiniPipe: how even chunks are in time and in length.

    python jobs/reproduce/pipeline_table2.py
    python jobs/reproduce/pipeline_table2.py --max-seqlen 98304 --lengths my_lengths.txt

Relative standard deviation in percent over the chunks of the plan of the first batch, of the seconds of a chunk's
forward and backward by the cost model, without recomputation, and of its tokens. `even`: the share of chunks whose
seconds are within 5 % of the median. The paper's rows are for balance by time alone and for balance by time and length;
ours are for the chunks of the whole method, of which the first and the last ones taper off on purpose, and for chunks
of one length.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from pipelines import MODELS, ablated, model_name, pipeline_parser
from tables import exit_code, lengths_name, log, show, table, write_json

from jobs.reproduce.chunks import chunks_of
from rayfcp.compare.settings import settings_of
from rayfcp.config.models import PipelineOptions
from rayfcp.cost.microbatches import chunk_passes

PAPER: list[dict[str, Any]] = [
    {"lengths": "paper", "chunks": "balance time", "time": 5.9, "length": 35.2, "even": None, "count": None},
    {"lengths": "paper", "chunks": "balance time & length", "time": 6.2, "length": 5.5, "even": None, "count": None},
]
VARIANTS = {"balanced": PipelineOptions(), "one length": PipelineOptions(chunking="fixed")}
NEAR = 0.05
COLUMNS = (
    ("lengths", "lengths", "s"),
    ("chunks", "chunks", "s"),
    ("time %", "time", ".1f"),
    ("length %", "length", ".1f"),
    ("even %", "even", ".0f"),
    ("number", "count", "d"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """The paper's rows, then two for each source of lengths."""
    parser = pipeline_parser(__doc__, model=MODELS[1])
    args = parser.parse_args(argv)
    rows = [*PAPER, *(_row(args, source, name) for source in args.lengths for name in VARIANTS)]
    show(f"{model_name(args.model)}, {args.devices} x {args.hardware}, sequences up to {args.max_seqlen:,} tokens\n")
    show(table(rows, COLUMNS))
    write_json(args.json, args=args, rows=rows)


def _row(args: Any, source: str, name: str) -> dict[str, Any]:
    log(f"{lengths_name(source)}, {name}")
    found = ablated(args, source=source, pipeline=VARIANTS[name])
    (entry,) = found.entries
    row: dict[str, Any] = {"lengths": lengths_name(source), "chunks": name}
    row |= dict.fromkeys(("time", "length", "even", "count"))
    if not entry.feasible:
        log(f"{name}: {entry.reason}")
        return row
    case, (scene,) = found.case, found.scenes
    setting, *_ = settings_of(
        found.inputs, model=case.model, hardware=case.hardware, longest=1, num_stages=entry.num_stages
    )
    sequences = case.batches[0]
    columns = chunks_of(scene.plan.microbatches, by_id={each.id: each for each in sequences})
    group = scene.plan.microbatches[0].groups[0]
    passes = chunk_passes(columns, cost=setting.cost, degree=group.degree, primitive=group.primitive)
    times = passes.forward_s + passes.backward_s
    even = 100 * float(np.mean(np.abs(times / np.median(times) - 1) <= NEAR))
    return row | {"time": _rsd(times), "length": _rsd(columns.tokens), "even": even, "count": len(columns.tokens)}


def _rsd(values: Any) -> float:
    return float(100 * np.std(values) / np.mean(values))


if __name__ == "__main__":
    sys.exit(exit_code(main))
