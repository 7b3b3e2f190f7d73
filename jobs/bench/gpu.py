"""All that the GPUs of one node can prove and measure of rayfcp, without Ray; two runs of under ten minutes each:

    python jobs/bench/gpu.py --out first.json --limit-s 540 --sections conformance,one_rank,training
    python jobs/bench/gpu.py --out second.json --limit-s 560 --sections attention,memory,profile,copies
    python jobs/bench/gpu.py --out several.json --devices 2 --sections devices
    python jobs/bench/gpu.py --out tiny.json --tiny --device cpu

conformance  kernels, and merges of partial results, in bf16 and fp32 against fp64
one_rank     what it costs that a plan drives attention, and whether the host ever waits
training     tokens/s, MFU and memory of whole models, beside the transformers library alone
attention    all ranks' attention of every strategy's plan on the one device, and the kernel by block length
memory       the memory model beside peaks
profile      the device's hardware profile (as `rayfcp profile --alone` writes it), and its error on held-out passes
copies       what attention and matrix products lose while some multiprocessors copy, as communication does
devices      with --devices 2 or more: a ring over all of them, and recovery in place after a killed process

Sections run in the order given, by default this one: the most important first. One that would not fit into --limit-s by
its estimate is left out; what is cut off keeps what it had measured. They share a process, which is replaced after a
section that failed, or that left memory in use, so that it cannot touch the next. The file is written after each:
errors, targets, and what was left out and why stand in it; Ctrl-C leaves it as it is. Exit code 1 if a section failed.
rayfcp need not be installed, nor Ray be there; what else it depends on must be. `python -m jobs.bench.gpu_tables` makes
tables and hardware profiles of the files.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2]))  # where rayfcp is, installed or not

SECONDS = {
    "conformance": 40,
    "one_rank": 30,
    "training": 400,
    "attention": 150,
    "memory": 145,
    "profile": 220,
    "copies": 35,
    "devices": 120,
}
"""With the default models, as an H200 took; `training` from before it was cut off, `profile` with a quarter of its
tokens (2026-11-28). `attention` and `devices` are estimated."""
OF_MODELS = ("one_rank", "training", "memory", "profile")
"""Sections that take as long again for each model."""
NAMES = tuple(SECONDS)
TINY_SHARE = 0.1
"""Of those seconds, with --tiny on two busy CPU cores, where training took 13 s (2026-11-26)."""
PLANNED = "attention"
"""The section that needs compiled planners."""
NUMBA = "0.68."
"""Releases whose compiler rayfcp.cost.compiled derives from; plans are made in plain Python under others."""
SECTION_LIMIT_S = 900.0
"""Of one section, if there is no other limit: it hangs."""
LOOK_S = 0.1
KEPT_BYTES = 1 << 28
"""A section that leaves more memory in use ends its process."""


def main() -> int:
    """Run the sections, in this process if it is told to."""
    args = _parser().parse_args()
    if args.compile:
        _compile()
        return 0
    if args.folder:
        _here(args)
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results = Results(args.out, limit_s=args.limit_s)
    _run(_names(args), args, results)
    return results.tell()


class Results:
    """The file that is written, and until when."""

    def __init__(self, out: Path, *, limit_s: float | None) -> None:
        self._out = out
        self.stop_s = time.time() + limit_s if limit_s else None
        self.found: dict[str, Any] = {
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "command": sys.argv,
            "limit_s": limit_s,
            "sections": {},
            "left_out": {},
            "targets": {},
        }

    def add(self, name: str, section: dict[str, Any]) -> None:
        """A section that ended, or was left out."""
        if "left_out" in section:
            self.found["left_out"][name] = section["left_out"]
        else:
            self.found["sections"][name] = section
        self.found["targets"] = _targets(self.found["sections"])
        self.write()
        done = f"done in {section.get('wall_s', 0.0):.0f} s"
        _log(f"   {name}: {section.get('left_out') or section.get('error') or section.get('cut_off') or done}")

    def stop(self, todo: Sequence[str], part: dict[str, Any] | None) -> None:
        """Stopped by the user, with sections to do, of the first of which there may be a part."""
        self.found["stopped"] = "by Ctrl-C or SIGTERM"
        if part:
            self.add(todo[0], _cut(part, "stopped"))
        self.write()

    def write(self) -> None:
        self._out.write_text(json.dumps(self.found, indent=1) + "\n")

    def tell(self) -> int:
        """Say what was met and what is missing; return the exit code."""
        for name, target in self.found["targets"].items():
            _log(f"{'met   ' if target['met'] else 'MISSED'} {name}: {target}")
        for name, reason in self.found["left_out"].items():
            _log(f"left out {name}: {reason}")
        failed = [name for name, section in self.found["sections"].items() if "error" in section]
        done = "stopped" if "stopped" in self.found else "all sections ran"
        _log(f"failed: {', '.join(failed)}" if failed else done)
        return 1 if failed or "stopped" in self.found else 0


def _run(names: Sequence[str], args: argparse.Namespace, results: Results) -> None:
    """Run sections in one process after another, until all are done or the time is up."""
    todo = list(names)
    with tempfile.TemporaryDirectory() as folder:
        while todo:
            start_s, before = time.time(), len(todo)
            with _process(todo, args, folder=folder, stop_s=results.stop_s) as process:
                try:
                    ended = _watch(process, todo, folder=Path(folder), results=results)
                except KeyboardInterrupt:
                    _take(todo, folder=Path(folder), results=results)
                    results.stop(todo, _read(Path(folder) / f"{todo[0]}.part") if todo else None)
                    return
            if ended and not process.returncode and len(todo) < before:
                continue
            part = _read(Path(folder) / f"{todo[0]}.part") or {"wall_s": time.time() - start_s}
            reason = f"ended with code {process.returncode}" if ended else "cut off when the time was up"
            results.add(todo.pop(0), {**part, "error": reason} if ended else _cut(part, reason))
            if not ended and results.stop_s:
                for name in todo:
                    results.add(name, {"left_out": f"no time is left of --limit-s {args.limit_s:.0f}"})
                return


def _cut(part: dict[str, Any], reason: str) -> dict[str, Any]:
    """A section that was cut off: what it had, or nothing."""
    return {**part, "cut_off": reason} if part.keys() - {"wall_s"} else {"left_out": reason}


@contextmanager
def _process(
    names: Sequence[str], args: argparse.Namespace, *, folder: str, stop_s: float | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs these sections, and everything that it started, until the end of the `with` block."""
    words = [sys.executable, str(HERE), "--out", str(args.out), "--folder", folder, "--sections", ",".join(names)]
    words += ["--device", args.device, "--devices", str(args.devices)]
    words += ["--models", args.models] if args.models else []
    words += ["--tiny"] if args.tiny else []
    words += ["--stop-s", str(stop_s)] if stop_s else []
    process = subprocess.Popen(words, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _watch(process: subprocess.Popen[bytes], todo: list[str], *, folder: Path, results: Results) -> bool:
    """Take results as they come until the process ends; False if its time was up before."""
    last_s, ended = time.time(), False
    while not ended:
        ended = process.poll() is not None
        if _take(todo, folder=folder, results=results):
            last_s = time.time()
        if not ended and time.time() > (results.stop_s or last_s + SECTION_LIMIT_S):
            return False
        time.sleep(LOOK_S)
    return True


def _take(todo: list[str], *, folder: Path, results: Results) -> int:
    """Take sections that have ended off the list; how many."""
    before = len(todo)
    while todo and (section := _read(folder / f"{todo[0]}.json")) is not None:
        results.add(todo.pop(0), section)
    return before - len(todo)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _here(args: argparse.Namespace) -> None:
    """Run sections in this process and write each to `--folder`, to the first that fails or leaves memory in use."""
    if not importlib.metadata.version("numba").startswith(NUMBA):
        _log(f"numba is not {NUMBA}*: plans are made without it, slowly")
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    from rayfcp.cluster.workers.environment import set_environment

    set_environment({})  # before torch is imported; processes of several devices choose theirs themselves
    names = _names(args)
    compiling = None
    if PLANNED in names and "NUMBA_DISABLE_JIT" not in os.environ:
        compiling = subprocess.Popen([sys.executable, str(HERE), "--out", "-", "--compile"])
    for name in names:
        needed_s, left_s = _estimate(name, args), args.stop_s - time.time()
        if needed_s > left_s:
            found = {"left_out": f"estimated {needed_s:.0f} s, {max(left_s, 0):.0f} s are left; run it alone"}
            _write(Path(args.folder) / f"{name}.json", found)
            continue
        if compiling is not None and name == PLANNED and compiling.wait():
            _log("planners were not compiled beforehand")
        _log(f"== {name}, estimated {needed_s:.0f} s")
        found = _section(name, args)
        _write(Path(args.folder) / f"{name}.json", found)
        if "error" in found or _held_bytes() > KEPT_BYTES:
            return


def _compile() -> None:
    """Compile the kernels of the planners that search, once for this installation, beside sections that need none."""
    from rayfcp.plan.first import compiles_first, warm_up

    if compiles_first("flex-ring") or compiles_first("flex-block"):
        for name, *_ in warm_up():
            if name == "flex-block":
                return


def _write(path: Path, found: dict[str, Any]) -> None:
    part = path.with_suffix(".writing")
    part.write_text(json.dumps(found))
    part.replace(path)


def _estimate(name: str, args: argparse.Namespace) -> float:
    num_models = len(args.models.split(",")) if args.models and name in OF_MODELS else 2
    return SECONDS[name] * num_models / 2 * (TINY_SHARE if args.tiny else 1.0)


def _section(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Result of a section, or the error that ended it."""
    start_s, about = time.perf_counter(), {}

    def keep(found: dict[str, Any]) -> None:
        kept = {**found, "machine": about, "wall_s": time.perf_counter() - start_s}
        _write(Path(args.folder) / f"{name}.part", kept)

    try:
        import torch
        from gpu_sections import SECTIONS
        from gpu_sizes import FULL, LITTLE, Bench, free_memory

        from rayfcp.bench.alone import one_thread
        from rayfcp.execute.devices.backend import device_kind
        from rayfcp.execute.kernels import pick_kernel

        device = torch.device(device_kind(args.device))
        sizes = LITTLE if args.tiny else FULL
        if args.models:
            sizes = dataclasses.replace(sizes, models=tuple(args.models.split(",")))
        bench = Bench(
            device=device, sizes=sizes, log=_log, keep=keep, stop_s=args.stop_s, num_devices=max(args.devices, 1)
        )
        about |= {**_machine(device), "kernel": pick_kernel(device.type).name, "in_triton": _in_triton(device)}
        with one_thread(device):
            found = SECTIONS[name](bench)
        free_memory(device)
    except Exception as error:
        found = {
            **(_read(Path(args.folder) / f"{name}.part") or {}),
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    return {**found, "machine": about, "ray_imported": "ray" in sys.modules, "wall_s": time.perf_counter() - start_s}


def _held_bytes() -> int:
    """Memory of the accelerator that is in use."""
    cuda: Any = sys.modules["torch"].cuda
    return int(cuda.memory_allocated()) if cuda.is_initialized() else 0


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
        "numba": importlib.metadata.version("numba"),
    }


def _in_triton(device: Any) -> list[str]:
    """Kernels that were compiled and agreed with torch's operators."""
    from rayfcp.execute.devices.backend import backend_of

    backend = backend_of(device)
    kernels = {"merge": backend.merge_kernel(), "loss": backend.loss_kernel()}
    return [name for name, kernel in kernels.items() if kernel]


def _targets(sections: dict[str, Any]) -> dict[str, Any]:
    """Criteria of all sections, each with True if it is met."""
    found = {}
    for section, values in sections.items():
        for name, target in values.get("targets", {}).items():
            met = target.get("at_least", target["found"]) <= target["found"] <= target.get("at_most", target["found"])
            found[f"{section}: {name}"] = {**target, "met": met}
    return found


def _names(args: argparse.Namespace) -> list[str]:
    if args.sections is None:
        return [name for name in NAMES if name != "devices" or args.devices > 1]
    names = [name.strip() for name in args.sections.split(",")]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SystemExit(f"--sections has {unknown[0]!r}, must be of {', '.join(NAMES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    from rayfcp.values.devices import AUTO, DEVICES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON of all results")
    parser.add_argument("--sections", metavar="A,B", help="(default: all, `devices` with --devices alone)")
    parser.add_argument("--device", choices=(AUTO, *DEVICES), default=AUTO, help="(default: auto)")
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="of the section `devices`")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU in seconds, to see that all of it works")
    parser.add_argument("--models", metavar="A,B", help="that are trained (default: qwen3-1.7b,llama3.2-1b)")
    parser.add_argument("--limit-s", type=float, metavar="S", help="of all sections together (default: none)")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--stop-s", type=float, default=float("inf"), help=argparse.SUPPRESS)
    return parser


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
