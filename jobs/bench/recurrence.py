"""Recurrent layers on the CPU: our kernel beside the transformers library's, and the cost of cutting a sequence.

    python jobs/bench/recurrence.py kernels [--tokens 1024] [--rounds 5]
    python jobs/bench/recurrence.py ranks [--degrees 2 4] [--tokens 256 1024 4096] [--rounds 5]

`kernels`: seconds of our kernel in chunks and of the library's functions in torch, in turn, one thread, the best of
some rounds each; the ratio is above 1 where ours is faster. `ranks`: a causal convolution and a gated delta rule,
forward and backward, on processes that exchange states over gloo. `cut`: one sequence over all ranks, two parts each;
`whole`: a sequence of as many tokens on each rank, which exchanges nothing; in turn, the slowest rank counts, medians
over some rounds, of their ratio too. Ranks share this machine's cores, so the difference has the work of summaries as
well as messages.
"""

import argparse
import datetime
import multiprocessing
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next import modeling_qwen3_next

from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.kernels.chunked import ChunkedKernel
from rayfcp.execute.kernels.recurrence import Gated
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.execute.recurrence.convolution import causal_convolution
from rayfcp.execute.recurrence.function import linear_recurrence
from rayfcp.program import Forward, lower
from rayfcp.program.instructions import of_kind
from rayfcp.values import RecurrentKind

HEADS, SIZE = 8, 128
"""Of delta rules: a quarter of Qwen3-Next's heads."""

KIND = RecurrentKind(halo=3)

Run = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernels", "ranks"))
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="of a sequence, or of a rank (default: 1024; 256 to 4096)"
    )
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4], help="ranks (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    given = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {today}")  # noqa: T201
    if given.what == "kernels":
        for tokens in given.tokens or [1024]:
            compare_kernels(tokens, rounds=given.rounds)
        return
    for degree in given.degrees:
        for tokens, rounds in measure_ranks(
            given.tokens or [256, 1024, 4096], degree=degree, rounds=given.rounds
        ).items():
            cut_s, whole_s, ratio = (
                median(each) for each in zip(*((*of, of[0] / of[1]) for of in rounds), strict=True)
            )
            print(  # noqa: T201
                f"{degree} ranks, {tokens:5d} tokens each: cut {cut_s * 1e3:7.1f} ms, whole {whole_s * 1e3:7.1f} ms, "
                f"ratio {ratio:.2f}"
            )


def compare_kernels(tokens: int, *, rounds: int) -> None:
    """Print seconds of both, forward, and forward and backward, and by how much results differ."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, make in (("gated delta rule", gated_delta), ("KDA", kda), ("Mamba-2", mamba_2)):
        ours, theirs = make(tokens)
        with torch.no_grad():
            have, want = ours(), theirs()
        difference = float((have - want).abs().max() / want.abs().max())
        best = [timed(partial(each, ours, theirs), rounds=rounds) for each in (_forward, _both)]
        for what, (own_s, library_s) in zip(("forward", "with backward"), best, strict=True):
            print(  # noqa: T201
                f"{name}, {tokens} tokens, {what}: ours {own_s * 1e3:.0f} ms, transformers {library_s * 1e3:.0f} ms, "
                f"ratio {library_s / own_s:.2f}; outputs differ by {difference:.0e}"
            )


def timed(both: Callable[[], tuple[float, float]], *, rounds: int) -> tuple[float, float]:
    """The best seconds of each of two, over some rounds after one that does not count."""
    both()
    first, second = zip(*(both() for _ in range(rounds)), strict=True)
    return min(first), min(second)


def _forward(*runs: Run) -> tuple[float, ...]:
    found = []
    for run in runs:
        began_s = time.perf_counter()
        with torch.no_grad():
            run()
        found.append(time.perf_counter() - began_s)
    return tuple(found)


def _both(*runs: Run) -> tuple[float, ...]:
    found = []
    for run in runs:
        began_s = time.perf_counter()
        run().sum().backward()
        found.append(time.perf_counter() - began_s)
    return tuple(found)


def delta_inputs(tokens: int, *gates: int) -> Gated:
    """Random ones."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(tokens, HEADS, SIZE, generator=generator) for _ in range(3))
    decay = -F.softplus(torch.randn(tokens, HEADS, *gates, generator=generator) - 2)
    beta = torch.rand(tokens, HEADS, generator=generator)
    tensors = (F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, decay, beta)
    query, key, value, decay, beta = (each.requires_grad_() for each in tensors)
    return Gated(query=query, key=key, value=value, log_decay=decay, beta=beta, scale=SIZE**-0.5)


def _ours(inputs: Gated) -> Tensor:
    return ChunkedKernel(saves_inputs=False)(inputs, lengths=(len(inputs.value),), state=None)[0]


def gated_delta(tokens: int) -> tuple[Run, Run]:
    inputs = delta_inputs(tokens)

    def theirs() -> Tensor:
        query, key, value, g, beta = (each.unsqueeze(0) for each in inputs.tensors)
        return modeling_qwen3_next.torch_chunk_gated_delta_rule(query, key, value, g=g, beta=beta)[0].squeeze(0)

    return partial(_ours, inputs), theirs


def kda(tokens: int) -> tuple[Run, Run]:
    inputs = delta_inputs(tokens, SIZE)

    def theirs() -> Tensor:
        query, key, value, g, beta = (each.unsqueeze(0) for each in inputs.tensors)
        return modeling_kimi_linear.chunk_kimi_delta_attention(query, key, value, g=g, beta=beta)[0].squeeze(0)

    return partial(_ours, inputs), theirs


def mamba_2(tokens: int) -> tuple[Run, Run]:
    """32 heads of 64 in 8 groups, states of 128."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (32, 64), "dt": (32,), "B": (8, 128), "C": (8, 128)}
    given = {name: torch.randn(tokens, *each, generator=generator) for name, each in shapes.items()}
    given["dt"] = F.softplus(given["dt"])
    given = {name: each.requires_grad_() for name, each in given.items()}
    rates = -torch.rand(32, generator=generator) - 0.1

    def ours() -> Tensor:
        value, decay = given["x"] * given["dt"].unsqueeze(-1), given["dt"] * rates
        return _ours(Gated(query=given["C"], key=given["B"], value=value, log_decay=decay))

    def theirs() -> Tensor:
        x, steps, b, c = (each.unsqueeze(0) for each in given.values())
        options = {"D": None, "dt_bias": None, "dt_softplus": False}
        out = modeling_nemotron_h.mamba2_chunk_scan(x, steps, rates, b, c, chunk_size=128, **options)
        return (out[0] if isinstance(out, tuple) else out).squeeze(0)

    return ours, theirs


def measure_ranks(tokens: Sequence[int], *, degree: int, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """Seconds of the slowest rank, cut and whole, in each round, by tokens of a rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        args = (degree, f"{folder}/store", list(tokens), rounds, results)
        ranks = [context.Process(target=_rank, args=(rank, *args)) for rank in range(degree)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
            if each.exitcode:
                raise SystemExit(f"a rank ended with code {each.exitcode}")
        found = [results.get() for _ in ranks]
    return {
        at: [(max(one for one, _ in ranks), max(other for _, other in ranks)) for ranks in zip(*each, strict=True)]
        for at, each in ((at, [of[at] for of in found]) for at in tokens)
    }


def _rank(
    rank: int,
    degree: int,
    file: str,
    tokens: list[int],
    rounds: int,
    results: "multiprocessing.SimpleQueue[dict[int, list[tuple[float, float]]]]",
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(file, degree)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=degree, timeout=timedelta(seconds=300))
    transport = DistributedTransport(dist.group.WORLD)
    found = {}
    for count in tokens:
        runs = [layer_of(rank, degree=degree, tokens=count, cut=cut, transport=transport) for cut in (True, False)]

        def both(runs: list[Run] = runs) -> tuple[float, float]:
            times = []
            for run in runs:
                dist.barrier()
                times += _both(run)
            return times[0], times[1]

        both()
        found[count] = [both() for _ in range(rounds)]
    results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def layer_of(rank: int, *, degree: int, tokens: int, cut: bool, transport: DistributedTransport) -> Run:
    """A convolution of the values and the recurrence, on this rank's tokens."""
    length, together = (tokens * degree, degree) if cut else (tokens, 1)
    shape = PassShape(degree=together, lengths=(length,), layer_kinds=((KIND, 1),))
    plan, sequences = pass_plan(shape, num_ranks=degree, recomputed_layers=0)
    (forward,) = of_kind(lower(plan, sequences)[rank], Forward)
    inputs, weight = delta_inputs(tokens), torch.randn(HEADS * SIZE, KIND.halo + 1, requires_grad=True)

    def run() -> Tensor:
        context = AttentionContext.of(forward, transport=transport, kernel=pick_kernel("cpu"))
        rows = inputs.value.flatten(1)
        value = causal_convolution(rows, weight, None, context=context, kind=KIND, activation="silu")
        query, key, _, decay, beta = inputs.tensors
        return linear_recurrence(
            query, key, value.view_as(inputs.value), decay, beta, context=context, kind=KIND, scale=inputs.scale
        )

    return run


if __name__ == "__main__":
    main()
