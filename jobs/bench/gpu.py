"""All that one GPU can prove and measure of rayfcp, in minutes, without Ray:

    python jobs/bench/gpu.py --out gpu.json
    python jobs/bench/gpu.py --out gpu.json --sections conformance,one_rank
    python jobs/bench/gpu.py --out tiny.json --tiny --device cpu

conformance  kernels in bf16 and fp32 against fp64
attention    all ranks' attention of every strategy's plan on the one device, and the kernel by block length
one_rank     what it costs that a plan drives attention, and whether the host ever waits
training     tokens/s, MFU and memory of whole models, beside the transformers library alone
memory       the memory model beside peaks
profile      the device's hardware profile (as `rayfcp profile --alone` writes it), and its error on held-out passes
copies       what attention and matrix products lose while some multiprocessors copy, as communication does

Every section runs in a process of its own, so that one that fails, or takes the device with it, leaves the others. The
file is written after each: errors and targets stand in it. Exit code 1 if a section failed. rayfcp need not be
installed, nor Ray be there; what else rayfcp depends on must be.
"""

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2]))  # where rayfcp is, installed or not

NAMES = ("conformance", "attention", "one_rank", "training", "memory", "profile", "copies")


def main() -> int:
    """Run the sections; one of them in this process if it is told to."""
    args = _parser().parse_args()
    if args.here:
        args.out.write_text(json.dumps(_section(args.here, args), indent=1) + "\n")
        return 0
    found: dict[str, Any] = {"started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "command": sys.argv, "sections": {}}
    for name in _names(args.sections):
        _log(f"== {name}")
        found["sections"][name] = _apart(name, args)
        found["targets"] = _targets(found["sections"])
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        _log(_summary(found["sections"][name]))
    for name, target in found.get("targets", {}).items():
        _log(f"{'met   ' if target['met'] else 'MISSED'} {name}: {target}")
    failed = [name for name, section in found["sections"].items() if "error" in section]
    _log(f"failed: {', '.join(failed)}" if failed else "all sections ran")
    return 1 if failed else 0


def _apart(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A section in a process of its own; what it said goes to stderr as it comes."""
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [sys.executable, str(HERE), "--here", name, "--out", str(out), "--device", args.device]
        words += ["--models", args.models] if args.models else []
        try:
            done = subprocess.run([*words, *(["--tiny"] if args.tiny else [])], check=False, timeout=args.limit_s)
            found = json.loads(out.read_text()) if out.exists() else {"error": f"ended with code {done.returncode}"}
        except subprocess.TimeoutExpired:
            found = {"error": f"took more than --limit-s {args.limit_s}"}
    return {**found, "wall_s": time.perf_counter() - start_s}


def _section(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Result of a section, or the error that ended it."""
    try:
        import torch
        from gpu_sections import SECTIONS
        from gpu_sizes import FULL, LITTLE, Bench

        from rayfcp.bench.alone import one_thread
        from rayfcp.execute.devices.backend import device_kind
        from rayfcp.execute.kernels import pick_kernel

        device = torch.device(device_kind(args.device))
        sizes = LITTLE if args.tiny else FULL
        if args.models:
            sizes = dataclasses.replace(sizes, models=tuple(args.models.split(",")))
        bench = Bench(device=device, sizes=sizes, log=_log)
        about = {**_machine(device), "kernel": pick_kernel(device.type).name}
        with one_thread(device):
            found = SECTIONS[name](bench)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {**found, "machine": about, "ray_imported": "ray" in sys.modules}


def _machine(device: Any) -> dict[str, Any]:
    """Environment of a section."""
    import torch
    import transformers

    from rayfcp.bench.alone import device_name, peak_of
    from rayfcp.execute.devices.backend import backend_of

    return {
        "device": device_name(device),
        "memory_bytes": backend_of(device).total_memory_bytes(device),
        "peak_flops": peak_of(device, dtype="bfloat16"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _targets(sections: dict[str, Any]) -> dict[str, Any]:
    """Criteria of all sections, each with True if it is met."""
    found = {}
    for section, values in sections.items():
        for name, target in values.get("targets", {}).items():
            met = target.get("at_least", target["found"]) <= target["found"] <= target.get("at_most", target["found"])
            found[f"{section}: {name}"] = {**target, "met": met}
    return found


def _summary(section: dict[str, Any]) -> str:
    return f"   {section['error']}" if "error" in section else f"   done in {section['wall_s']:.0f} s"


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SystemExit(f"--sections has {unknown[0]!r}, must be of {', '.join(NAMES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    from rayfcp.values.devices import AUTO, DEVICES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON of all results")
    parser.add_argument("--sections", default=",".join(NAMES), metavar="A,B", help="(default: all)")
    parser.add_argument("--device", choices=(AUTO, *DEVICES), default=AUTO, help="(default: auto)")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU in seconds, to see that all of it works")
    parser.add_argument("--models", metavar="A,B", help="that are trained (default: qwen3-1.7b,llama3.2-1b)")
    parser.add_argument("--limit-s", type=float, default=900.0, help="of one section (default: 900)")
    parser.add_argument("--here", choices=NAMES, help="run this section alone, in this process")
    return parser


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
