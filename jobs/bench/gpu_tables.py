"""Markdown tables and hardware profiles of what `gpu.py` measured:

    python -m jobs.bench.gpu_tables first.json second.json > tables.md
    python -m jobs.bench.gpu_tables first.json second.json --profiles profiles > tables.md

Of a section in several files the last counts. Profiles stand at the end as entries of rayfcp/cost/data/hardware.yaml;
`--profiles` writes each to a file of its own too, which `--hardware` of `rayfcp compare` takes. Needs neither torch nor
rayfcp.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Rows = Sequence[Sequence[Any]]
GIB = 1 << 30


def main() -> int:
    """Print the tables of all files, and write profiles if they are asked for."""
    args = _parser().parse_args()
    sections: dict[str, Any] = {}
    for path in args.files:
        found = json.loads(path.read_text())
        for name, section in found["sections"].items():
            sections[name] = {**section, "from": f"{found['started']}, `{' '.join(['python', *found['command']])}`"}
        for name, reason in found.get("left_out", {}).items():
            sections.setdefault(name, {"left_out": reason})
    sys.stdout.write("\n".join(tables(sections)))
    for name, text in profiles(sections).items():
        sys.stdout.write(f"\n```yaml\n{entry(text)}```\n")
        if args.profiles:
            args.profiles.mkdir(parents=True, exist_ok=True)
            (args.profiles / f"{name}.yaml").write_text(text)
            sys.stderr.write(f"wrote {args.profiles / name}.yaml\n")
    return 0


def tables(sections: dict[str, Any]) -> Iterator[str]:
    """Lines of a page: a heading, where it was measured, and tables of each section."""
    for name, section in sections.items():
        yield f"## {name}\n"
        if "left_out" in section:
            yield f"Left out: {section['left_out']}.\n"
            continue
        about = section.get("machine", {})
        words = [about.get("device"), about.get("kernel"), f"torch {about.get('torch')}", section["from"]]
        yield f"{', '.join(word for word in words if word)}; {section['wall_s']:.0f} s.\n"
        for problem in ("error", "cut_off"):
            if problem in section:
                yield f"**{problem.replace('_', ' ')}**: {section[problem]}\n"
        yield from TABLES[name](section)
        yield from _targets(section)


def profiles(sections: dict[str, Any]) -> dict[str, str]:
    """YAML of the hardware profiles by their names."""
    texts = [model["hardware_yaml"] for model in sections.get("profile", {}).get("models", {}).values()]
    return {yaml.safe_load(text)["name"]: text for text in texts}


def entry(text: str) -> str:
    """A profile as an entry of the file with all of them.

    >>> print(entry("name: mine\\npeak_flops: 2.0\\n"), end="")
    mine:
      peak_flops: 2.0
    """
    fields = yaml.safe_load(text)
    return yaml.safe_dump({fields.pop("name"): fields}, sort_keys=False, width=118)


def table(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Lines of a table; nothing without rows. The first column is text."""
    if rows:
        yield f"| {' | '.join(columns)} |"
        yield f"| --- |{' --: |' * (len(columns) - 1)}"
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)
        yield ""


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f} GiB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _conformance(section: dict[str, Any]) -> Iterator[str]:
    worst: dict[tuple[str, str], list[float]] = {}
    for case in section.get("cases", ()):
        worst.setdefault((case["kernel"], case["dtype"]), [case["bound"]]).append(max(case["errors"].values()))
    rows = [(kernel, dtype, len(all_) - 1, max(all_[1:]), all_[0]) for (kernel, dtype), all_ in worst.items()]
    yield from table(("kernel", "dtype", "cases", "largest error", "bound"), rows)
    rows = [
        (
            f"{each['num_parts']} x {each['num_tokens']} tokens, {each['heads']} x {each['head_dim']}",
            each["dtype"],
            "yes" if each["fused"] else "no",
            each["num_cuts"],
            *(f"{each[name]:.2g}" for name in ("found", "by_operators", "bound")),
        )
        for each in section.get("merges", ())
    ]
    columns = ("merged results", "dtype", "fused", "cuts", "largest error", "of operators on a CPU", "bound")
    yield from table(columns, rows)
    yield from _merge_seconds(section)


def _merge_seconds(section: dict[str, Any]) -> Iterator[str]:
    rows = []
    for each in section.get("merge_seconds", ()):
        name = f"{each['num_tokens']} tokens, {each['heads']} x {each['head_dim']}"
        for way, seconds in each["seconds"].items():
            if seconds is not None:
                rows.append((name, each["dtype"], way, _ms(seconds), f"{each['num_bytes'] / seconds / 1e9:,.0f} GB/s"))
    yield from table(("merged with as many", "dtype", "way", "time", "least bytes moved"), rows)


def _one_rank(section: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            name,
            each["num_sequences"],
            _ms(each["kernel_s"]),
            _ms(each["program_s"]),
            _percent(each["overhead"]),
            ", ".join(each["waits"]) or "none",
        )
        for name, each in section.get("runs", {}).items()
    ]
    yield from table(("heads, lengths", "sequences", "kernel", "plan", "overhead", "waits of the host"), rows)


def _training(section: dict[str, Any]) -> Iterator[str]:
    rows = []
    for row in section.get("rows", ()):
        runs = {"rayfcp": row.get("ours", {"left_out": row.get("left_out", "not reached")})}
        runs |= {"rayfcp, compiled": row["compiled"]} if "compiled" in row else {}
        runs |= row.get("plain", {})
        for name, run in runs.items():
            if "step_s" in run:
                figures = [_ms(run["step_s"]), run["tokens_per_s"], _percent(run["mfu"]), _gib(run["peak_bytes"])]
            else:
                figures = [run.get("error") or run["left_out"], None, None, None]
            rows.append((row["model"], row["num_tokens"], name, row.get("recomputed_layers"), *figures))
    columns = ("model", "tokens", "system", "recomputed layers", "step", "tokens/s", "MFU", "peak memory")
    yield from table(columns, rows)


def _attention(section: dict[str, Any]) -> Iterator[str]:
    rows, blocks = [], []
    for run in section.get("runs", ()):
        asked, kernel = run["inputs"], run["single_kernel"]
        name = f"{asked['model']}, {asked['num_ranks']} x {asked['tokens_per_rank']} tokens, {asked['lengths']}"
        seconds = kernel["forward_s"] + kernel["backward_s"]
        rows.append((name, "one kernel", _ms(seconds), None, None, _percent(kernel["mfu"]), None))
        for each in run["results"]:
            if each["feasible"]:
                shares = [_percent(each[key]) for key in ("efficiency", "imbalance", "mfu")]
                rows.append((name, each["strategy"], _ms(each["slowest_s"]), *shares, each["error"]))
            else:
                rows.append((name, each["strategy"], each["reason"], None, None, None, None))
        blocks += [
            (each["block_tokens"], "yes" if each["causal"] else "no", _ms(each["seconds"]), _percent(each["mfu"]))
            for each in run["blocks"]
        ]
    columns = ("heads, ranks, lengths", "strategy", "slowest rank", "efficiency", "imbalance", "MFU", "error")
    yield from table(columns, rows)
    yield from table(("tokens of a block", "causal", "time", "MFU"), blocks)


def _memory(section: dict[str, Any]) -> Iterator[str]:
    rows = []
    for row in section.get("rows", ()):
        over = row.get("predicted_over_peak")
        figures = [_gib(row.get("predicted_bytes")), _gib(row.get("peak_bytes")), _percent(over)]
        told = row.get("error") or row.get("left_out") or ""
        layers = "compiled" if row.get("compiled") else "eager"
        rows.append((row["model"], row["num_tokens"], layers, row["recomputed"], *figures, told))
    columns = ("model", "tokens", "layers", "recomputed layers", "predicted", "peak", "predicted over peak", "")
    yield from table(columns, rows)


def _profile(section: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name, each in section.get("models", {}).items():
        hardware = yaml.safe_load(each["hardware_yaml"])
        shares = [hardware["linear_efficiency"], hardware["attention_efficiency"], each["fit_error"]]
        shares += [each["held_out_error"], each["simulation_error"]]
        rows.append((name, len(each["passes"]), *map(_percent, shares)))
    columns = ("model", "passes", "linear layers", "attention", "error of fit", "held out", "of simulation")
    yield from table(columns, rows)


def _copies(section: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            row["work"],
            row["num_units"],
            row["num_spared"],
            _ms(row["alone_s"]),
            _percent(row["slowed"]),
            f"{row['copied_bytes_per_s'] / 1e9:.3g} GB/s",
            "yes" if row["covered"] else "no",
        )
        for row in section.get("rows", ())
    ]
    columns = ("work", "copying SMs", "spared SMs", "alone", "slowed by", "copied", "copied all along")
    yield from table(columns, rows)


def _devices(section: dict[str, Any]) -> Iterator[str]:
    if "step_s" in section:
        peak = max(section["peak_bytes"], key=lambda each: each or 0)
        row = (section["model"], section["num_devices"], section["num_tokens"], _ms(section["step_s"]))
        row += (section["tokens_per_s"], _percent(section["mfu"]), _gib(peak))
        yield from table(("model", "devices", "tokens", "step", "tokens/s", "MFU", "peak memory"), [row])
        parts = section["parts"][0]
        pairs = zip(parts["message_s"], parts["gather_s"], strict=True)
        rows = [
            (size, _ms(seconds), f"{size / seconds / 1e9:.3g} GB/s", _ms(more)) for (size, seconds), (_, more) in pairs
        ]
        yield from table(("bytes", "round of a ring", "its rate", "gather"), rows)
    if recovery := section.get("recovery"):
        names = {"abort_s": "exchanges ended", "join_s": "joined again", "load_s": "checkpoint loaded"}
        names |= {"step_s": "first step", "total_s": "in all"}
        yield from table(
            ("after a killed process", "time"), [(text, _ms(recovery[key])) for key, text in names.items()]
        )


def _targets(section: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name, target in section.get("targets", {}).items():
        least, most, value = target.get("at_least"), target.get("at_most"), target["found"]
        met = (least is None or value >= least) and (most is None or value <= most)
        rows.append((name, value, least, most, "met" if met else "missed"))
    yield from table(("target", "found", "at least", "at most", ""), rows)


TABLES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "conformance": _conformance,
    "one_rank": _one_rank,
    "training": _training,
    "attention": _attention,
    "memory": _memory,
    "profile": _profile,
    "copies": _copies,
    "devices": _devices,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="written by gpu.py")
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="where hardware profiles are written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
