"""Figure 8 of InfiniPipe: iteration time by model, lengths and context, and the speedup over each system.

    python jobs/reproduce/pipeline_figure8.py
    python jobs/reproduce/pipeline_figure8.py --models gpt-30b --contexts 98304 196608 --lengths my_lengths.txt

Simulated seconds, means over batches; `over`: how many times the iteration of InfiniPipe another system's takes.
`over M*`, `over D*`: over Megatron-LM and DeepSpeed with the degrees in the caption of the figure (first batch): tensor
parallelism of 8 and context parallelism of 2 for 7B, 4 for larger models, all-to-all over heads of degree 16 for 7B, 32
for larger ones. `bubble`, `gap`: of InfiniPipe, the share of an iteration in which devices wait,
and iteration over lower bound. The paper's bars are in a picture; its text has the highest speedups.
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
    configured,
    model_name,
    pipeline_parser,
    seconds,
    share,
    speedup,
)
from tables import exit_code, lengths_name, log, show, table, write_json

from rayfcp.plan import model_profile

BASELINES = tuple(name for name in SYSTEMS if name != OURS)
DEGREES = {"Megatron*": ("static-cp", 8, 2, 4), "DeepSpeed*": ("ulysses", 1, 16, 32)}
"""Strategy, tensor parallelism, degree of the smallest model and of the others."""
SMALL = 10e9
"""Parameters up to which a model takes the smallest one's degrees."""
PAPER = {"Megatron": 2.60, "DeepSpeed": 2.07, "FlexSP": 1.69, "Seq1F1B": 1.40}
COLUMNS = (
    ("model", "model", "s"),
    ("lengths", "lengths", "s"),
    ("context", "context", "s"),
    *((f"{name} s", f"{name}_s", ".2f") for name in SYSTEMS),
    *((f"over {name}", f"{name}_speedup", ".2f") for name in BASELINES),
    ("over M*", "Megatron*_speedup", ".2f"),
    ("over D*", "DeepSpeed*_speedup", ".2f"),
    ("bubble %", "bubble", ".1f"),
    ("gap", "gap", ".3f"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """A row for each model, source of lengths and context."""
    parser = pipeline_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="names or YAML paths (default: the paper's)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[48 * K, 96 * K], help="longest sequences")
    args = parser.parse_args(argv)
    rows = [
        _row(args, model, source, context)
        for model in args.models
        for source in args.lengths
        for context in args.contexts
    ]
    show(f"{args.devices} x {args.hardware}, {args.stages} stages, batches of {args.global_batch}\n")
    show(table(rows, COLUMNS))
    show(_summary(rows))
    write_json(args.json, args=args, rows=rows)


def _row(args: Any, model: str, source: str, context: int) -> dict[str, Any]:
    log(f"{model_name(model)}, {lengths_name(source)}, {context:,} tokens")
    entries = compare_systems(args, source=source, model=model, max_seqlen=context)
    ours = entries[OURS]
    fixed: dict[str, float | None] = {}
    for name, (strategy, tensor_parallel, *degrees) in DEGREES.items():
        theirs = configured(
            args,
            source=source,
            strategy=strategy,
            degree=degrees[model_profile(model).num_parameters > SMALL],
            tensor_parallel=tensor_parallel,
            model=model,
            max_seqlen=context,
        )
        fixed[f"{name}_speedup"] = theirs / ours.iteration_s if theirs and ours.iteration_s else None
    return {
        "model": model_name(model),
        "lengths": lengths_name(source),
        "context": f"{context // K}K" if context % K == 0 else str(context),
        **{f"{name}_s": seconds(entry) for name, entry in entries.items()},
        **{f"{name}_speedup": speedup(entries, name) for name in BASELINES},
        **fixed,
        "bubble": share(ours, "bubble"),
        "gap": ours.gap,
        "reasons": {name: entry.reason for name, entry in entries.items() if not entry.feasible},
    }


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for name in (*BASELINES, *DEGREES):
        found = [row[f"{name}_speedup"] for row in rows if row[f"{name}_speedup"] is not None]
        told = f"{min(found):.2f} to {max(found):.2f}" if found else "not feasible"
        lines.append(f"over {name}: {told} (paper: up to {PAPER[name.rstrip('*')]:.2f})")
    bubbles = [row["bubble"] for row in rows if row["bubble"] is not None]
    if bubbles:
        lines.append(f"bubble: {min(bubbles):.1f} to {max(bubbles):.1f} % (paper: under 20 %)")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_code(main))
