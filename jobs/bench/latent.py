"""Bytes that multi-head latent attention sends as latents and as expanded keys and values.

    python jobs/bench/latent.py [--model deepseek-v3] [--degrees 2 4] [--tokens 256] [--json FILE]

Measured on processes over gloo: one layer's attention, forward and backward, in bfloat16, of one sequence of
`--tokens` over each degree, on a zig-zag ring and on a group that shares out heads (Ulysses). `latents`: the
up-projection is part of attention; `expanded`: it is before attention, and keys and values of all heads travel.
Printed are bytes that a rank sends for each of its tokens, the largest over ranks, and how far the outputs of both
differ, relative to their norm.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rayfcp import attention, lower
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import AttentionStats, default_transport
from rayfcp.plan import model_profile
from rayfcp.program import Forward
from rayfcp.values import AttentionProfile, Primitive

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's layer: bytes sent, and the output."""

    bytes_sent: int
    out: Tensor


def run(mixer: AttentionProfile, forward: Forward, *, latents: bool) -> Measured:
    """This rank's part; its tensors are the same for both ways."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def made(*shape: int, source: torch.Generator = generator) -> Tensor:
        return torch.randn(shape, generator=source).to(DTYPE).requires_grad_()

    tokens, heads, nope = forward.attention.num_tokens, mixer.num_heads, mixer.head_dim - mixer.rope_size
    query = made(tokens, heads, mixer.head_dim)
    latent, rope = made(tokens, 1, mixer.latent_size), made(tokens, 1, mixer.rope_size)
    up = made(heads, nope + mixer.value_dim, mixer.latent_size, source=torch.Generator().manual_seed(99))
    stats, transport = AttentionStats(), default_transport()
    context = AttentionContext.of(forward, transport=transport, kernel=pick_kernel("cpu"), stats=stats)
    if latents:
        out = attention(query, latent, rope, context, up_projection=up)
    else:
        both = (latent.squeeze(1) @ up.flatten(0, 1).t()).unflatten(1, (heads, -1))
        key = torch.cat([both[..., :nope], rope.expand(-1, heads, -1)], dim=2)
        out = attention(query, key, both[..., nope:], context)
    out.backward(torch.ones_like(out))
    return Measured(bytes_sent=stats.bytes_sent, out=out.detach().float())


def rows_of_rank(mixer: AttentionProfile, *, degree: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each primitive, over all ranks."""
    rows = []
    for primitive in Primitive:
        shape = PassShape(degree=degree, lengths=(tokens,), primitive=primitive)
        program = lower(*pass_plan(shape, num_ranks=degree, recomputed_layers=0))[dist.get_rank()]
        (forward,) = (item for item in program.instructions if isinstance(item, Forward))
        found = {name: run(mixer, forward, latents=name == "latents") for name in ("latents", "expanded")}
        row: dict[str, Any] = {"degree": degree, "primitive": primitive.value}
        for name, each in found.items():
            largest = torch.tensor(each.bytes_sent / forward.attention.num_tokens, dtype=torch.float64)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            row[f"{name}_bytes_per_token"] = float(largest)
        row["factor"] = row["expanded_bytes_per_token"] / row["latents_bytes_per_token"]
        difference = (found["latents"].out - found["expanded"].out).norm() / found["expanded"].out.norm()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        rows.append(row | {"difference": float(difference)})
    return rows


def _process(rank: int, folder: str, model: str, degree: int, tokens: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=degree)
    rows = rows_of_rank(mixer_of(model), degree=degree, tokens=tokens)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def mixer_of(model: str) -> AttentionProfile:
    """Latent attention of a named model."""
    mixers = (each.attention for each in model_profile(model).every_layer)
    return next(each for each in mixers if each is not None and each.latent_size)


def measured(model: str, *, degree: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of one degree, on processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(folder, model, degree, tokens), nprocs=degree)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for degree in options.degrees:
        rows += (found := measured(options.model, degree=degree, tokens=options.tokens))
        for row in found:
            sys.stdout.write(
                f"degree {row['degree']} {row['primitive']:8} bytes a token: latents "
                f"{row['latents_bytes_per_token']:9.0f}, expanded {row['expanded_bytes_per_token']:9.0f}, "
                f"{row['factor']:5.1f} x; outputs differ by "
                f"{row['difference']:.1e}\n"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
