"""Attention of every strategy as CUDA devices compute it, on tensors without memory: launches and traffic."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.devices.cuda import CudaKernel
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.flash import TorchFlashKernel
from rayfcp.execute.parallel.transport import AttentionStats, Envelope, Pending, Transport
from rayfcp.program import Forward
from tests.execute.test_launches import FLAT, LAYERS, planned

BUDGETS = ((12, 6.0), (28, 6.5))
"""Of forward and backward passes: launches for each call of flash attention, messages and exchanges of heads included,
and bytes for each byte that flash attention reads or writes. Partial results merge by torch's operators here."""


class Sent(Transport):
    """Messages that are checked and arrive at once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        assert all(tensor.is_contiguous() and tensor.is_meta for _, tensor in (*sends, *receives))
        return self

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class Traffic(TorchDispatchMode):
    """Launches, and bytes that these read and write, of flash attention (True) and of all else (False)."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes = Counter[bool](), Counter[bool]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, arguments = func._schema.name, func._schema.arguments
        is_view = any(each.alias_info and not each.alias_info.is_write for each in arguments)
        if not is_view and "empty" not in name and "scalar_tensor" not in name:
            self.launches["flash" in name] += 1
            tensors = [each for each in tree_leaves((args, result)) if isinstance(each, Tensor)]
            self.bytes["flash" in name] += sum(each.nbytes for each in tensors)
        return result


@pytest.mark.parametrize("strategy", FLAT)
def test_launches_and_traffic_beside_flash_attention(strategy: str) -> None:
    """One launch of flash attention a call; all others within `BUDGETS`. Gradients keep the dtype, on all ranks."""
    kernel = CudaKernel(half=TorchFlashKernel(), single=CutlassKernel())
    for rank, program in enumerate(planned(strategy, LAYERS).programs):
        for item in program.instructions:
            if not isinstance(item, Forward):
                continue
            schedule = make_schedule(item.attention)
            context = AttentionContext(schedule=schedule, transport=Sent(rank), kernel=kernel, stats=AttentionStats())
            query, key, value = (
                torch.empty(schedule.num_tokens, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
                for heads in (12, 6, 6)
            )
            with Traffic() as forward:
                out = attention(query, key, value, context)
            with Traffic() as backward:
                gradients = torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
            assert [each.dtype for each in gradients] == [torch.bfloat16] * 3
            passes = ((forward, schedule.forward), (backward, schedule.backward))
            for (traffic, rounds), (launches, times) in zip(passes, BUDGETS, strict=True):
                num_calls = sum(len(step.calls) for step in rounds)
                assert traffic.launches[True] == num_calls
                assert traffic.launches[False] <= launches * num_calls
                assert traffic.bytes[False] <= times * traffic.bytes[True]
