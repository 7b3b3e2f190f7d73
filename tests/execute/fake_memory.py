"""Peak memory of one rank's step on a stand-in for an accelerator, by kind of tensor, beside the memory model's.

The whole engine runs with shapes and no contents: FSDP over all ranks, one sequence per ring and microbatch, loss and
update. Bytes are those of live storages, not of an allocator that rounds and fragments them.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from rayfcp.bench.alone import random_shards
from rayfcp.config import Config, config_of_keys
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.cost.memory import ending_bytes, stage_state_parts, token_bytes
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.models.build import sharded_model
from rayfcp.models.describe import model_config
from rayfcp.plan import model_profile
from rayfcp.program import RankProgram, lower
from rayfcp.values import GlobalBatch, Sample
from tests.execute.fake_accelerator import Accelerator

MODEL, LAYERS, RANKS, TOKENS, DEGREE = "qwen3-8b", 2, 64, 32768, 2
"""Layers as wide as those of real runs; two of them are enough for every kind of tensor."""

KINDS = (
    ("execute/attention/slots.py", "Buffers.take", "messages"),
    ("models/head.py", "", "loss"),
    ("execute/attention/", "", "attention"),
    ("_fsdp_param_group.py", "FSDPParamGroup.post_backward", "gradients"),
    ("_fsdp_param_group.py", "FSDPParamGroup.unshard", "gathered parameters"),
    ("_fsdp_param_group.py", "FSDPParamGroup.wait_for_unshard", "gathered parameters"),
    ("torch/optim/", "", "optimizer state"),
    ("execute/interpreter.py", "Passes.forward", "activations"),
)
"""Kind of a new storage by the innermost running function: (part of its file, start of its name, kind)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Step whose memory is counted."""

    recomputed_layers: int
    microbatches: int
    reduce_every: str


def figures(at: Accelerator, case: Case) -> dict[str, Any]:
    """Return counted and modelled bytes at the peak of a step."""
    at.memory.label = _kind_of
    found, modelled = _counted(at, case), _modelled(case)
    return {"found": found, "modelled": modelled, "modelled_over_found": modelled["peak"] / found["peak"]}


def _kind_of(operator: Any) -> str:
    """Return what a new storage is for: a kind of `KINDS`, or the operator of the backward pass."""
    running = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.append((frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back
    if any(name == "_join" for _, name in running):
        return "parameters"
    found = (
        kind for file, name in running for part, function, kind in KINDS if part in file and name.startswith(function)
    )
    return next(found, f"backward: {operator.name().removeprefix('aten::')}")


def _program_of(case: Case) -> RankProgram:
    """Rank 0's program of one sequence per microbatch for each ring."""
    shape = PassShape(degree=DEGREE, lengths=(TOKENS,))
    one, sequences = pass_plan(shape, num_ranks=RANKS, recomputed_layers=case.recomputed_layers, keeps_attention=True)
    every = [dataclasses.replace(each, id=at) for at, each in enumerate(sequences * case.microbatches)]
    microbatches = []
    for first in range(0, len(every), len(sequences)):
        groups = tuple(
            dataclasses.replace(group, sequences=tuple(first + each for each in group.sequences))
            for group in one.microbatches[0].groups
        )
        microbatches.append(dataclasses.replace(one.microbatches[0], groups=groups))
    plan = dataclasses.replace(one, microbatches=tuple(microbatches))
    return lower(plan, every, reduce_every=case.reduce_every)[0]


def _counted(at: Accelerator, case: Case) -> dict[str, Any]:
    """Run two steps and return bytes at the peak of the second: in the first, DTensor looks up the shapes of whole
    tensors, which are counted too."""
    config = config_of_keys(
        [f"model.name={MODEL}", "model.dtype=bfloat16", "train.steps=8", f"data.max_seqlen={TOKENS}"]
    )
    program = _program_of(case)
    sample = Sample(id=0, shard=0, row=0, start=0, stop=TOKENS, num_targets=TOKENS - 1)
    samples = (sample,) * (RANKS * len(program.instructions))  # any sequence is the same row
    with tempfile.TemporaryDirectory() as folder:
        random_shards(Path(folder), [TOKENS], vocab_size=1000, seed=0)
        engine = RankEngine(config, device=at.device, data_dir=str(Path(folder) / "shards"))
        _join(engine, config)
        for number in (1, 2):
            at.memory.forget_peak()
            engine.run_step(program, GlobalBatch(step=number, epoch=0, samples=samples), plan_hash=program.plan_hash)
        engine.close()
    return {"peak": at.memory.peak, "at_peak": dict(at.memory.at_peak.most_common())}


def _join(engine: RankEngine, config: Config) -> None:
    library: Any = model_config(config.model, vocab_size=1000)
    library.num_hidden_layers, library.layer_types = LAYERS, library.layer_types[:LAYERS]
    engine.join(
        MeshPosition(rank=0, num_ranks=RANKS),
        store=dist.HashStore,
        make_model=lambda world: sharded_model(library, run=config.model, seed=0, world=world, empty=True),
        hidden_size=library.hidden_size,
        layers_of_stage=(LAYERS,),
    )


def _modelled(case: Case) -> dict[str, int]:
    """Bytes by the memory model: in all, of each kind beside tokens, and of tokens."""
    model = dataclasses.replace(model_profile(MODEL), keeps_attention=True, num_layers=LAYERS)
    settings: dict[str, Any] = {"bytes_per_element": 2, "reduce_every": case.reduce_every}
    whole = {"layers_of_stage": (LAYERS,), "stage": 0, "num_ranks": RANKS}
    parts = stage_state_parts(model, **whole, gather_every="microbatch", **settings)
    parts["tokens"] = (
        TOKENS // DEGREE * token_bytes(model, recomputed_layers=case.recomputed_layers, bytes_per_element=2)
    )
    return {"peak": max(sum(parts.values()), ending_bytes(model, num_devices=RANKS, **settings)), **parts}
