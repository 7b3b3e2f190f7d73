"""A rank alone calls its kernel and does nothing else to its tensors."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayfcp.execute.attention.function import attention
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.plan import lay_out
from rayfcp.values import Group, MicrobatchPlan
from tests.execute.threads import InProcessTransport
from tests.masks import specs
from tests.program.lowered import attention_of

VIEWS = {
    "detach",
    "transpose.int",
    "unsqueeze",
    "squeeze.dim",
    "slice.Tensor",
    "alias",
    "split_with_sizes",
    "empty_like",
}
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


class Work(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.").removesuffix(".default")
        self.found[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


def work(lengths: list[int], *, dtype: torch.dtype) -> dict[str, int]:
    """Counts of operations in attention forward and backward."""
    sequences = specs(lengths)
    group = Group(ranks=(0,), sequences=tuple(range(len(lengths))))
    layout = lay_out(MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0), sequences)
    (program,) = attention_of(layout, num_ranks=1)
    tensors = [torch.randn(sum(lengths), heads, 16).to(dtype) for heads in (4, 2, 2, 4)]
    query, key, value = (each.requires_grad_() for each in tensors[:3])
    with Work() as counted:
        out = attention(
            query, key, value, program, transport=InProcessTransport(Fabric(1), 0), kernel=pick_kernel("cpu")
        )
        torch.autograd.grad(out, (query, key, value), tensors[3])
    return {name: count for name, count in counted.found.items() if count}


def test_one_sequence() -> None:
    """Results in the model's dtype are not cast, copied or added to anything."""
    for dtype in (torch.bfloat16, torch.float32):
        assert work([70], dtype=dtype) == {KERNEL: 1, f"{KERNEL}_backward": 1}


def test_packed_sequences() -> None:
    """torch's kernel for CPUs takes one sequence at a time; their results are put together, which is all."""
    assert work([40, 7, 3], dtype=torch.bfloat16) == {KERNEL: 3, f"{KERNEL}_backward": 3, "cat": 5}
