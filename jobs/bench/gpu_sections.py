"""The sections of `gpu.py`: each measures one thing and gives plain values, with targets where there are any."""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from gpu_conformance import CASES, TINY, conform, kernels_of
from gpu_devices import devices
from gpu_merge import CASES as MERGES
from gpu_merge import TIMED, TINY_TIMED, merge_seconds, merges
from gpu_merge import TINY as TINY_MERGES
from gpu_overhead import copier_of, overhead, time_beside
from gpu_plain import fitting_tokens, predicted_bytes, train_steps
from gpu_sizes import LITTLE, Bench, Found, attempts
from gpu_training import compared

from rayfcp.bench.alone import Alone, alone, model_of, profile_alone
from rayfcp.bench.attention import bench_attention, dense, random_batch
from rayfcp.bench.request import attention_only
from rayfcp.bench.serial import Stopwatch
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.kernels import pick_kernel
from rayfcp.plan import model_profile
from rayfcp.values import ModelProfile

MICROBATCHES = 2
"""Of a step of the section `memory`."""


def conformance(bench: Bench) -> Found:
    """Every kernel, and merges of partial results, in the bench's dtype and in fp32 against fp64.

    Raises:
        AssertionError: one is further from it than rounding explains.
    """
    tiny, device, rounds = bench.sizes is LITTLE, bench.device, bench.sizes.rounds
    dtypes = dict.fromkeys((bench.sizes.dtype, "float32"))
    found = [
        conform(kernel, case, device=device, dtype=dtype).as_json()
        for kernel in kernels_of(device)
        for dtype in dtypes
        for case in (TINY if tiny else CASES)
    ]
    bench.keep({"cases": found})
    merged = [row for dtype in dtypes for row in merges(TINY_MERGES if tiny else MERGES, device=device, dtype=dtype)]
    timed = TINY_TIMED if tiny else TIMED
    seconds = [merge_seconds(timed, device=device, dtype=dtype, rounds=rounds) for dtype in dtypes]
    results = {"cases": found, "merges": merged, "merge_seconds": seconds}
    bench.keep(results)
    wrong = [each for each in found if not each["holds"]] + [
        each for each in merged if not each["found"] < each["bound"]
    ]
    assert not wrong, wrong
    return results


def attention(bench: Bench) -> Found:
    """All ranks of every strategy's plan, and the kernel by block length.

    Raises:
        AssertionError: a plan's result is not the kernel's.
    """
    runs, targets = [], {}
    for mix in bench.sizes.mixes:
        lengths = bench.sizes.block_lengths if mix == bench.sizes.mixes[0] else ()
        found = bench_attention(bench.asked(lengths=mix, block_lengths=lengths), log=bench.log)
        assert not found.wrong, [(each.strategy, each.error) for each in found.wrong]
        runs.append(found.as_json())
        bench.keep({"runs": runs})
        for row in runs[-1]["results"]:
            if row["strategy"] == "flex-block" and row["feasible"]:
                targets[f"{mix}: efficiency of flex-block"] = {"found": row["efficiency"], "at_least": 0.95}
    return {"runs": runs, "targets": targets}


def one_rank(bench: Bench) -> Found:
    """Attention by a plan of one rank against the kernel called once, and what makes the host wait."""
    found = {}
    for heads in (bench.sizes.heads, *(name for name in bench.sizes.models if name)):
        for mix in bench.sizes.mixes:
            asked = bench.asked(model=heads, num_ranks=1, tokens_per_rank=bench.sizes.alone_tokens, lengths=mix)
            found[f"{heads}, {mix}"] = overhead(asked).as_json()
    targets = {f"{name}: overhead": {"found": row["overhead"], "at_most": 0.03} for name, row in found.items()}
    targets |= {f"{name}: waits": {"found": len(row["waits"]), "at_most": 0} for name, row in found.items()}
    return {"runs": found, "targets": targets}


def training(bench: Bench) -> Found:
    """Steps of whole models on packed documents, ours and the library's own."""
    rows: list[Found] = []
    for name in bench.sizes.models:
        before = list(rows)

        def keep(found: Sequence[Found], before: Sequence[Found] = before) -> None:
            bench.keep(_trained([*before, *found]))

        rows += compared(bench, name, keep=keep)
    return _trained(rows)


def _trained(rows: Sequence[Found]) -> Found:
    targets = {}
    for row in rows:
        name, ours = f"{row['model']}, {row['num_tokens']} tokens", _default(row)
        plain = [each["tokens_per_s"] for each in row.get("plain", {}).values() if "tokens_per_s" in each]
        if plain and "tokens_per_s" in ours:
            targets[f"{name}: over the fastest plain run"] = {
                "found": ours["tokens_per_s"] / max(plain),
                "at_least": 1.0,
            }
        if name == "qwen3-1.7b, 32768 tokens" and ours.get("mfu"):
            targets[f"{name}: MFU"] = {"found": ours["mfu"], "at_least": 0.45}
    return {"rows": list(rows), "targets": targets, **_failures([row.get("ours", {}) for row in rows])}


def _default(row: Found) -> Found:
    """Ours as a run trains that sets no key: compiled where layers are."""
    compiled: Found = row.get("compiled", {})
    return compiled if "tokens_per_s" in compiled else row.get("ours", {})


def memory(bench: Bench) -> Found:
    """Peaks of steps of two microbatches, the second with gradients of the first, beside the memory model's, with
    no, half and all layers recomputed, each of as many tokens as fit by it, up to the bench's; as layers are, and
    compiled where the device compiles them."""
    rows: list[Found] = []
    kinds = ("false", "auto") if backend_of(bench.device).info.compiles else ("false",)
    for name, kind in itertools.product(bench.sizes.models, kinds):
        config = bench.config(name, train__compile=kind)
        _, model = model_of(config)
        works = []
        for layers in (0, model.num_layers // 2, model.num_layers):
            row: Found = {"model": model.name, "recomputed": layers, "compiled": kind == "auto"}
            row["num_tokens"] = _tokens(bench, model, layers)
            rows.append(row)
            if row["num_tokens"] < 1:
                row["left_out"] = "states and one token need more than the device has"
            else:
                works.append((row, MICROBATCHES * bench.documents(row["num_tokens"])))
        packs = list(accumulate((len(pack) for _, pack in works), initial=0))
        made = partial(alone, config, device=bench.device, lengths=[each for _, pack in works for each in pack])
        tried = [
            partial(_peak, bench, row=row, rows=range(start, start + len(pack)))
            for (row, pack), start in zip(works, packs, strict=False)
        ]
        for (row, _), found in zip(works, attempts(made, tried, device=bench.device), strict=True):
            row.update(found)
            bench.keep(_remembered(rows))
    return _remembered(rows)


def _remembered(rows: Sequence[Found]) -> Found:
    targets = {
        f"{row['model']}{', compiled' * row['compiled']}, {row['recomputed']} recomputed: predicted over peak": {
            "found": row["predicted_over_peak"],
            "at_least": 0.95,
            "at_most": 1.05,
        }
        for row in rows
        if row.get("predicted_over_peak")
    }
    return {"rows": list(rows), "targets": targets, **_failures(rows)}


def _tokens(bench: Bench, model: ModelProfile, layers: int) -> int:
    memory_bytes = backend_of(bench.device).total_memory_bytes(bench.device)
    fit = fitting_tokens(model, memory_bytes=memory_bytes, recomputed_layers=layers, dtype=bench.sizes.dtype)
    return min(bench.sizes.memory_tokens, fit)


def _failures(attempts: Sequence[Found]) -> Found:
    """An error of the section if some of its attempts have one."""
    found = list(dict.fromkeys(each["error"] for each in attempts if "error" in each))
    return {"error": "; ".join(found)} if found else {}


def _peak(bench: Bench, rank: Alone, *, row: Found, rows: range) -> Found:
    tokens, layers, dtype = row["num_tokens"], row["recomputed"], bench.sizes.dtype
    bench.log(f"{row['model']}: {tokens} tokens, {layers} layers recomputed")
    predicted = predicted_bytes(rank.model, num_tokens=tokens, recomputed_layers=layers, dtype=dtype)
    steps = train_steps(rank, rows, recomputed_layers=layers, steps=1, num_microbatches=MICROBATCHES)
    peak = steps.peak_bytes
    found: Found = {"compiled": rank.model.compiled, "peak_bytes": peak, "predicted_bytes": predicted}
    return found | {"predicted_over_peak": predicted / peak if peak else None}


def profile(bench: Bench) -> Found:
    """The device's own hardware profile, and how well it foretells passes that it was not fitted to."""
    found = {}
    for name in bench.sizes.models:
        config = bench.config(name, run__name=name or "tiny", train__compile="auto")
        with tempfile.TemporaryDirectory() as folder:
            done = profile_alone(
                config, out_dir=folder, rounds=bench.sizes.rounds, max_tokens=bench.sizes.profile_tokens, log=bench.log
            )
            text = Path(done.hardware_path).read_text()
        measured = done.measured
        for note in measured.fit.notes:
            bench.log(note)
        found[name or "tiny"] = {
            "hardware_yaml": text,
            "passes": [asdict(each) for each in measured.passes],
            "held_out": measured.held_out,
            "fit_error": measured.fit.mean_error,
            "notes": measured.fit.notes,
            "cost": asdict(measured.fit.cost),
            "held_out_error": measured.held_out_error,
            "simulation_error": done.simulation_error,
        }
        bench.keep({"models": found})
    targets = {
        f"{name}: held-out error": {"found": row["held_out_error"], "at_most": 0.05} for name, row in found.items()
    }
    return {"models": found, "targets": targets}


def copies(bench: Bench) -> Found:
    """Slowdown of attention and matrix products while some multiprocessors copy, spared by them or not."""
    sizes, device = bench.sizes, bench.device
    copier = copier_of(device, num_bytes=sizes.copied_bytes)
    rows = []
    for count, is_spared in itertools.product(sizes.copies, (False, True)):
        spared = count if is_spared else 0
        backend_of(device).reserve_sms(spared)
        for name, work in (("attention", _attend(bench, spared)), ("matrix product", _multiply(bench))):
            bench.log(f"{name} that spares {spared} beside a copy on {count}")
            found = time_beside(
                name,
                work,
                copier=copier,
                num_units=count,
                num_spared=spared,
                device=device,
                rounds=sizes.rounds,
            )
            rows.append(found.as_json())
        bench.keep({"rows": rows})
    backend_of(device).reserve_sms(0)
    return {"rows": rows}


def _attend(bench: Bench, sm_margin: int) -> Callable[[], object]:
    """One kernel over one causal sequence, forward and backward."""
    sizes = bench.sizes
    model, dtype = attention_only(model_profile(sizes.heads)), getattr(torch, sizes.dtype)
    batch = random_batch((sizes.context_tokens,), model=model, device=bench.device, dtype=dtype, seed=0)
    return partial(dense, batch, pick_kernel(bench.device.type, sm_margin=sm_margin), watch=Stopwatch(bench.device))


def _multiply(bench: Bench) -> Callable[[], object]:
    shape, dtype = (bench.sizes.matmul,) * 2, getattr(torch, bench.sizes.dtype)
    left, right = (torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(2))
    return partial(torch.matmul, left, right)


SECTIONS: dict[str, Callable[[Bench], Found]] = {
    "conformance": conformance,
    "one_rank": one_rank,
    "training": training,
    "attention": attention,
    "memory": memory,
    "profile": profile,
    "copies": copies,
    "devices": devices,
}
