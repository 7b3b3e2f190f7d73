"""The device's code of the product on a stand-in for an accelerator, for `test_fake_accelerator`.

`python -m tests.execute.fake_runs cuda` (or npu) prints, as JSON, what each part found.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rayfcp.bench.alone import device_clock, random_shards
from rayfcp.config import Config, config_of_keys
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.execute.calibrate import through_stages, time_parts, time_passes
from rayfcp.execute.devices.backend import backend_of, resolve_device
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.kernels import Pairs
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.copying import Source
from rayfcp.models.build import Initializer, sharded_model
from rayfcp.models.describe import model_config, profile_of
from rayfcp.program import RankProgram, lower
from rayfcp.values import Action, GlobalBatch, Primitive, Sample
from rayfcp.values.state import StateId
from tests.execute.fake_accelerator import Accelerator, use
from tests.execute.fake_memory import Case, figures
from tests.execute.saving import save

LENGTHS = (200, 33)
VOCAB = 128
SHAPE = ("num_layers=2", "hidden_size=64", "num_heads=4", "num_kv_heads=2", "head_dim=16", "ffn_size=96")
BATCH = tuple(Sample(id=at, shard=0, row=at, start=0, stop=n, num_targets=n - 1) for at, n in enumerate(LENGTHS))
CASES = (
    Case(recomputed_layers=2, microbatches=2, reduce_every="step"),
    Case(recomputed_layers=1, microbatches=1, reduce_every="microbatch"),
)
"""Steps whose peak is in the backward pass, and in the loss."""

Found = dict[str, Any]


def config_of(dtype: str) -> Config:
    """A run of a small model; the engine is told its device."""
    words = [*(f"model.architecture.{each}" for each in SHAPE), f"model.dtype={dtype}", "train.steps=8"]
    return config_of_keys([*words, "data.max_seqlen=8192", "cluster.communication_sms=4"])


@contextlib.contextmanager
def joined(at: Accelerator, position: MeshPosition, *, dtype: str = "bfloat16") -> Iterator[RankEngine]:
    """An engine in a generation, as one device of many."""
    config = config_of(dtype)
    library = model_config(config.model, vocab_size=VOCAB)
    layers = (2,) if position.num_stages == 1 else (1, 1)
    with tempfile.TemporaryDirectory() as folder:
        random_shards(Path(folder), LENGTHS, vocab_size=VOCAB, seed=0)
        copies = CopyFolder(Path(folder) / "copies")
        engine = RankEngine(config, device=at.device, data_dir=str(Path(folder) / "shards"), copies=copies)
        engine.join(
            position,
            store=dist.HashStore,
            make_model=lambda world: sharded_model(
                library, run=config.model, seed=0, world=world, layers_of_stage=layers
            ),
            hidden_size=library.hidden_size,
            layers_of_stage=layers,
        )
        yield engine
        engine.close()


def program_of(num_ranks: int, *, recomputed: int = 1) -> RankProgram:
    """Rank 0's program of one pass over all samples by all ranks."""
    shape = PassShape(degree=num_ranks, lengths=LENGTHS)
    plan, sequences = pass_plan(shape, num_ranks=num_ranks, recomputed_layers=recomputed)
    return lower(plan, sequences)[0]


def step(engine: RankEngine, program: RankProgram, number: int, *, copy_as: StateId | None = None) -> Any:
    """One step on the batch."""
    batch = GlobalBatch(step=number, epoch=0, samples=BATCH)
    return engine.run_step(program, batch, plan_hash=program.plan_hash, copy_as=copy_as)


def rings(at: Accelerator) -> Found:
    """Steps of rank 0 of 3 with copies of the state; a rehearsal; the memory left after an abort."""
    with joined(at, MeshPosition(rank=0, num_ranks=3)) as engine:
        step(engine, program_of(3), 1, copy_as=StateId(version=1, generation=0))
        ran = at.operators.copy()
        report = step(engine, program_of(3), 2, copy_as=StateId(version=2, generation=0))
        ran = at.operators - ran
        assert engine.copies is not None
        held = [header.num_bytes for header in engine.copies.headers()]
        owned = sum(each.to_local().numel() for each in engine.generation.module.parameters())
        engine.rehearse(program_of(3, recomputed=0), _Numbers())
        engine.abort()
        aborted = engine.is_aborted
    gc.collect()
    return {
        "reached": report.loss,
        "spans": [each.label for each in report.spans],
        "message_s": report.message_s,
        "held": held,
        "copied": report.copied == StateId(version=2, generation=0),
        "owned": owned,
        "aborted": aborted,
        "memory": report.memory_bytes,
        "left": at.memory.num_bytes,
        "ran": dict(ran),
    }


class _Numbers:
    """See `TokenSource`."""

    def read(self, _sequence: int, *, start: int, stop: int) -> tuple[Any, Any]:
        tokens = np.arange(start, stop) % VOCAB
        return tokens, tokens


def one_rank(at: Accelerator) -> Found:
    """A rank alone: a step, a checkpoint and its load, a restore from a copy."""
    state = StateId(version=1, generation=0)
    with joined(at, MeshPosition(rank=0, num_ranks=1)) as engine, tempfile.TemporaryDirectory() as folder:
        report = step(engine, program_of(1), 1, copy_as=state)
        copies = engine.copies
        assert copies is not None
        (header,) = copies.headers()
        saved = save(copies, state, nodes=[[0]], folder=Path(folder) / "saved")
        engine.load(f"{folder}/saved")
        read = partial(copies.read, state, 0)
        engine.load_copies([Source(header=header, read=lambda wanted, into: read(wanted=wanted, into=into))])
        kinds = sorted({entry.kind for entry in header.entries})
        again = step(engine, program_of(1), 2)
    return {"loss": [report.loss, again.loss], "saved": len(saved), "kinds": kinds}


def stages(at: Accelerator) -> Found:
    """A step of each of two stages, of two microbatches: the last stage runs them one by one, the first both ahead."""
    found = {}
    plan, sequences = pass_plan(PassShape(degree=1, lengths=LENGTHS), num_ranks=1, recomputed_layers=1)
    plan = through_stages(plan, layers_of_stage=(1, 1))
    (whole,), (pipeline,) = plan.microbatches, plan.pipelines
    first, second = (
        dataclasses.replace(whole, groups=(dataclasses.replace(whole.groups[0], sequences=(each,)),)) for each in (0, 1)
    )
    forward, backward = ([Action(microbatch=each, backward=back) for each in (0, 1)] for back in (False, True))
    alternating = [each for pair in zip(forward, backward, strict=True) for each in pair]
    pipeline = dataclasses.replace(
        pipeline,
        stop=2,
        actions=((*forward, *backward), tuple(alternating)),
        recomputed_layers=tuple(each * 2 for each in pipeline.recomputed_layers),
    )
    programs = lower(dataclasses.replace(plan, microbatches=(first, second), pipelines=(pipeline,)), sequences)
    for stage, program in enumerate(programs):
        with joined(at, MeshPosition(rank=0, num_ranks=1, stage=stage, num_stages=2)) as engine:
            found[str(stage)] = step(engine, program, 1).loss
    return found


def tensor_parallel(at: Accelerator) -> Found:
    """A step of one of two tensor-parallel devices."""
    with joined(at, MeshPosition(rank=0, num_ranks=1, tensor_rank=1, tensor_parallel=2)) as engine:
        return {"loss": step(engine, program_of(1), 1).loss}


def calibration(at: Accelerator) -> Found:
    """Timed passes and parts, of rings too."""
    with joined(at, MeshPosition(rank=0, num_ranks=2)) as engine:
        model = profile_of(model_config(config_of("bfloat16").model, vocab_size=VOCAB), name="small")
        shapes = [PassShape(degree=2, lengths=(64,), primitive=primitive) for primitive in Primitive]
        passes = time_passes(engine, shapes, clock=device_clock(at.device))
        parts = time_parts(engine, model, max_tokens=16)
    return {
        "primitives": [each.primitive.value for each in passes],
        "parts": [len(each) for each in (parts.attention_s, parts.linear_s, parts.message_s, parts.gather_s)],
    }


def conformance(at: Accelerator) -> Found:
    """Shapes and dtypes of each kernel's results, in each dtype, at heads that need padding and grouping."""
    rows = []
    for kernel in backend_of(at.device).kernels(sm_margin=4):
        for dtype in (torch.bfloat16, torch.float32):
            for lengths, causal, head_dim in (((9, 1), True, 8), ((1, 1), False, 8), ((130,), True, 20)):
                rows.append(_conform(kernel, lengths, dtype=dtype, causal=causal, head_dim=head_dim, at=at))
    return {"rows": len(rows), "wrong": [row for row in rows if row]}


def _conform(
    kernel: Any, lengths: tuple[int, ...], *, dtype: torch.dtype, causal: bool, head_dim: int, at: Accelerator
) -> list[str]:
    query, grad = (torch.randn(sum(lengths), 4, head_dim, dtype=dtype, device=at.device) for _ in range(2))
    key, value = torch.randn(sum(lengths), 4, head_dim, dtype=dtype, device=at.device).chunk(2, dim=1)
    pairs = Pairs(query_lengths=lengths, key_lengths=lengths, causal=causal, scale=0.125)
    out, lse = kernel.forward(query, key, value, pairs=pairs)
    dq, dk, dv = kernel.backward(grad, query, key, value, out, lse, pairs=pairs)
    wrong = [
        f"{kernel.name}: {name} is {tuple(found.shape)}, must be {tuple(like.shape)}"
        for name, found, like in zip(
            ("out", "dq", "dk", "dv"), (out, dq, dk, dv), (query, query, key, value), strict=True
        )
        if found.shape != like.shape
    ]
    if lse.shape != query.shape[:2] or lse.dtype is not torch.float32:
        wrong.append(f"{kernel.name}: lse is {tuple(lse.shape)} in {lse.dtype}")
    return wrong


def device(at: Accelerator) -> Found:
    """What the product learns of the device, and what it does with it besides running on it."""
    backend = backend_of(at.device)
    pinned = [backend.allocate_host(size).nbytes for size in (0, 1000)]
    if at.device.type == "npu":
        backend.abort_collectives(at.device)
        pinned.append(len(at.module.stopped))
    backend.restart(at.device)
    return {
        "resolved": resolve_device("auto").type == at.device.type,
        "devices": backend.num_devices,
        "peak_flops": backend.peak_flops(at.device),
        "memory_bytes": backend.total_memory_bytes(at.device),
        "pinned": pinned,
        "registered": [at.module.pinned[each] for each in ("pinned", "released")],
    }


def sections(at: Accelerator) -> Found:
    """Sections of `jobs/bench/gpu.py` that read nothing of the device but times, sizes and losses, at small sizes."""
    sys.path.append(str(Path(__file__).parents[2] / "jobs" / "bench"))
    sizes, gpu_sections = importlib.import_module("gpu_sizes"), importlib.import_module("gpu_sections")
    make = Initializer.__init__

    def on_host(initializer: Initializer, model: Any, *, seed: int, **_: Any) -> None:
        make(initializer, model, seed=seed)

    Initializer.__init__ = on_host  # a module of fake tensors cannot be converted back to the meta device
    backend = backend_of(at.device)
    backend.info = dataclasses.replace(backend.info, compiles=False)  # generated code needs memory
    little = dataclasses.replace(sizes.LITTLE, dtype="bfloat16")
    bench = sizes.Bench(device=at.device, sizes=little, log=lambda _: None)
    found = {name: gpu_sections.SECTIONS[name](bench) for name in ("one_rank", "memory")}
    return {
        "waits": [wait for run in found["one_rank"]["runs"].values() for wait in run["waits"]],
        "peaks": [row["peak_bytes"] for row in found["memory"]["rows"]],
    }


def memory(at: Accelerator) -> Found:
    """Bytes at the peak of a step, and the memory model's."""
    label = at.memory.label
    rows = [figures(at, case) for case in CASES]
    at.memory.label = label
    return {"rows": rows}


PARTS: dict[str, Callable[[Accelerator], Found]] = {
    each.__name__: each
    for each in (device, rings, one_rank, stages, tensor_parallel, calibration, conformance, sections, memory)
}


def main(arguments: Sequence[str]) -> None:
    """Run the parts named, or all, on a device of the first argument's kind."""
    kind, *names = arguments
    at, found = use(kind), {}
    with at.running():
        for name in names or PARTS:
            found[name] = PARTS[name](at)
    found["operators"] = dict(at.operators)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
