"""Peak memory of one rank's step on a stand-in for an accelerator, by kind of tensor, beside the memory model's.

The whole engine runs with shapes and no contents, on any machine: FSDP over all ranks, one planned pass over a sequence
in rings, loss and update. Bytes are those of storages that live, not of an allocator that rounds and fragments them.

    python jobs/bench/fake_memory.py --model qwen3-8b --ranks 64 --tokens 131072 --degree 8 --recomputed 36

The peak is that of a second step: in the first, DTensor looks up the shapes of whole tensors, which are counted too.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
sys.path.insert(0, str(Path(__file__).parents[2]))

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
from tests.execute.fake_accelerator import Accelerator, use

GIB = 1 << 30


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
"""What a new storage is for, by the innermost of these functions that runs; otherwise of the backward pass."""


def kind_of(operator: Any) -> str:
    """What a new storage is for, by the functions that run."""
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


def program_of(arguments: argparse.Namespace) -> RankProgram:
    """Rank 0's program of one sequence a microbatch for each ring."""
    shape = PassShape(degree=arguments.degree, lengths=(arguments.tokens,))
    kept = {"recomputed_layers": arguments.recomputed, "keeps_attention": not arguments.recompute_attention}
    one, sequences = pass_plan(shape, num_ranks=arguments.ranks, **kept)
    every = [dataclasses.replace(each, id=at) for at, each in enumerate(sequences * arguments.microbatches)]
    microbatches = []
    for first in range(0, len(every), len(sequences)):
        groups = tuple(
            dataclasses.replace(group, sequences=tuple(first + each for each in group.sequences))
            for group in one.microbatches[0].groups
        )
        microbatches.append(dataclasses.replace(one.microbatches[0], groups=groups))
    plan = dataclasses.replace(one, microbatches=tuple(microbatches))
    return lower(plan, every, reduce_every=arguments.reduce_every)[0]


def one_step(at: Accelerator, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a step and return bytes at its peak."""
    config = config_of_keys(
        [f"model.name={arguments.model}", "model.dtype=bfloat16", "train.steps=8", "data.max_seqlen=131072"]
    )
    program = program_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        random_shards(Path(folder), [arguments.tokens], vocab_size=1000, seed=0)
        engine = RankEngine(config, device=at.device, data_dir=str(Path(folder) / "shards"))
        _join(engine, config, arguments)
        states = at.memory.num_bytes
        _steps(at, engine, program=program, num_tokens=arguments.tokens)
        engine.close()
    return {
        "parameters": states,
        "peak": at.memory.peak,
        "at_peak": dict(at.memory.at_peak.most_common()),
    }


def _join(engine: RankEngine, config: Config, arguments: argparse.Namespace) -> None:
    library: Any = model_config(config.model, vocab_size=1000)
    if arguments.layers:
        library.num_hidden_layers = arguments.layers
        library.layer_types = library.layer_types[: arguments.layers]

    def make_model(world: Any) -> Any:
        return sharded_model(library, run=config.model, seed=0, world=world, empty=True)

    engine.join(
        MeshPosition(rank=0, num_ranks=arguments.ranks),
        store=dist.HashStore,
        make_model=make_model,
        hidden_size=library.hidden_size,
        layers_of_stage=(library.num_hidden_layers,),
    )


def _steps(at: Accelerator, engine: RankEngine, *, program: RankProgram, num_tokens: int) -> None:
    """Two steps, the first of which makes the optimizer's state; the peak is of the second."""
    sample = Sample(id=0, shard=0, row=0, start=0, stop=num_tokens, num_targets=num_tokens - 1)
    samples = (sample,) * (program.num_ranks * len(program.instructions))  # any sequence is the same row
    for number in (1, 2):
        at.memory.forget_peak()
        started_s = time.perf_counter()
        engine.run_step(program, GlobalBatch(step=number, epoch=0, samples=samples), plan_hash=program.plan_hash)
        seconds = time.perf_counter() - started_s
        print(f"step {number}: {seconds:.0f} s, {at.memory.peak / GIB:.3f} GiB", file=sys.stderr)  # noqa: T201


def modelled(arguments: argparse.Namespace) -> dict[str, int]:
    """Bytes by the memory model: in all, of each kind beside tokens, and of tokens."""
    model = model_profile(arguments.model)
    kept = not arguments.recompute_attention
    model = dataclasses.replace(model, keeps_attention=kept, num_layers=arguments.layers or model.num_layers)
    settings: dict[str, Any] = {"bytes_per_element": 2, "reduce_every": arguments.reduce_every}
    whole = {"layers_of_stage": (model.num_layers,), "stage": 0, "num_ranks": arguments.ranks}
    parts = stage_state_parts(model, **whole, gather_every="microbatch", **settings)
    tokens = -(-arguments.tokens // arguments.degree)
    parts["tokens"] = tokens * token_bytes(model, recomputed_layers=arguments.recomputed, bytes_per_element=2)
    least = ending_bytes(model, num_devices=arguments.ranks, **settings)
    return {"peak": max(sum(parts.values()), least), **parts}


def figures(at: Accelerator, words: Sequence[str] | None = None) -> dict[str, Any]:
    """Counted and modelled bytes at the peak of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="default: all of the model")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--degree", type=int, default=8)
    parser.add_argument("--recomputed", type=int, default=36, help="layers")
    parser.add_argument("--recompute-attention", action="store_true")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--reduce-every", choices=("microbatch", "step"), default="step")
    arguments = parser.parse_args(words)
    at.memory.label = kind_of
    found = one_step(at, arguments)
    want = modelled(arguments)
    return {"found": found, "modelled": want, "modelled_over_found": want["peak"] / found["peak"]}


def main() -> int:
    at = use("cuda")
    with at.running():
        found = figures(at)
    print(json.dumps(found, indent=1))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
