"""Output head: error of the weight gradient by tokens and chunk size, and seconds of a step by fraction of targets.

Open question: both on a GPU, where products of bf16 are added in fp32 by one kernel.

    python jobs/bench/head.py --tokens 32768,131072,1048576 --chunks 512,1365,2048
    python jobs/bench/head.py --step --dtype bfloat16 --targets 0.1
"""

import argparse
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

from rayfcp.config.models import ArchitectureConfig, ModelConfig
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.interpreter import Interpreter, Tokens
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import Targets
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.transport import LoneTransport
from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import head_loss
from rayfcp.models.describe import model_config
from rayfcp.program import lower

VOCAB, SIZE = 512, 64
STEP_VOCAB, STEP_TOKENS = 49_152, 2048


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def print_errors(num_tokens: int, chunks: list[int], *, mean: float, device: str) -> None:
    """Print errors relative to one product in fp64 of the same gradients of the logits. `mean` scales a direction that
    all hidden states have in common."""
    torch.manual_seed(0)
    weight = (0.1 * torch.randn(VOCAB, SIZE)).bfloat16().to(device)
    hidden = (torch.randn(num_tokens, SIZE) + mean * torch.randn(SIZE)).bfloat16().to(device)
    words = torch.multinomial(1.0 / torch.arange(1, VOCAB + 1), num_tokens, replacement=True).to(device)
    exact = torch.zeros(VOCAB, SIZE, dtype=torch.float64, device=device)
    for own, wanted in zip(hidden.split(2048), words.split(2048), strict=True):
        slopes = torch.softmax((own @ weight.t()).float(), -1)
        slopes[torch.arange(len(own)), wanted] -= 1
        exact += slopes.bfloat16().double().t() @ own.double()
    once = relative(exact.bfloat16(), exact)
    for chunk in chunks:
        head = nn.Linear(SIZE, VOCAB, bias=False, dtype=torch.bfloat16, device=device)
        head.weight.data.copy_(weight)
        targets = Targets.of(words, loss=CrossEntropy())
        head_loss(head, hidden.clone().requires_grad_(), targets=targets, chunk_tokens=chunk).backward()
        error = relative(head.weight.grad, exact)
        sys.stdout.write(f"{num_tokens} tokens, mean {mean}, chunk {chunk}: {error:.5f}, once {once:.5f}\n")


class RandomTokens:
    """Two sequences; a fraction `share` of their tokens have targets."""

    def __init__(self, share: float) -> None:
        self._share = share

    def read(self, sequence: int, *, start: int, stop: int) -> tuple[Tokens, Tokens]:
        rng = np.random.default_rng(sequence)
        ids = rng.integers(0, STEP_VOCAB, STEP_TOKENS // 2)
        targets = np.where(rng.random(len(ids)) < self._share, np.append(ids[1:], -100), -100)
        return ids[start:stop], targets[start:stop]


def print_step(dtype: str, *, share: float, device: str) -> None:
    """Print seconds of the second step of a model as wide as SmolLM2-135M, with 4 layers."""
    shape = {"num_layers": 4, "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "ffn_size": 1536}
    architecture = ArchitectureConfig(**shape, vocab_size=STEP_VOCAB, tied_embeddings=True)
    library = model_config(ModelConfig(architecture=architecture), vocab_size=STEP_VOCAB)
    model = random_model(library, dtype="float32", seed=0).to(device, getattr(torch, dtype))
    plan, sequences = pass_plan(PassShape(degree=1, lengths=(STEP_TOKENS // 2,) * 2), num_ranks=1, recomputed_layers=0)
    (program,) = lower(plan, sequences)
    interpreter = Interpreter(transport=LoneTransport(), kernel=pick_kernel(device), model=model, device=device)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        interpreter.run(program, RandomTokens(share), loss_scale=1 / STEP_TOKENS)
        backend_of(device).synchronize()
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        sys.stdout.write(f"step {step}: {wall_s:.3f} s, CPU {cpu_s:.3f} s\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="32768,131072")
    parser.add_argument("--chunks", default="512,1365,2048")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--targets", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.step:
        print_step(options.dtype, share=options.targets, device=options.device)
        return
    for num_tokens in map(int, options.tokens.split(",")):
        for mean in (0.0, 1.0):
            print_errors(num_tokens, [*map(int, options.chunks.split(","))], mean=mean, device=options.device)


if __name__ == "__main__":
    main()
