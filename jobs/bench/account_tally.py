"""Counts of a rank's program: operators of real passes on tensors without memory, as the host would launch them.

The model, the interpreter of attention, the kernel's wrapper and the loss are those of a run; messages go nowhere.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfcp.cost.analytic import ATTENTION_BACKWARD
from rayfcp.execute.attention import function, slots
from rayfcp.execute.attention.heads import ToHeads, ToTokens
from rayfcp.execute.devices.cpu import CpuBackend
from rayfcp.execute.interpreter import Passes
from rayfcp.execute.kernels import Pairs
from rayfcp.execute.kernels.flash import TorchFlashKernel
from rayfcp.execute.losses.base import BatchLoss
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.parallel.transport import Envelope, Transport
from rayfcp.models.causal_lm import CausalLM
from rayfcp.program import Backward, Forward, Load, RankProgram

PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1}
"""Matrix products, and the position of their first factor."""
UNLAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"}
UNLAUNCHED |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size"}
BY_ROW = {"index_select", "gather", "embedding"}
"""Operators that read as much of their first argument as they return."""
INTO_ROWS = {"index_copy_": 1, "index_add_": 2, "scatter_add_": 2}
"""Operators that touch, so many times, as much of their first argument as of their last."""
OVERWRITING = {"copy_", "fill_", "zero_"}

Tally = Counter[str]
"""Amounts: `launches` and FLOPs of `products` and of `attention`, and the latter over the calls' mean number of queries
(`per_query`); bytes and launches of what stands between these, one by one (`eager_`) and as a compiler would fuse it
(`fused_`), of merges of partial results and sums of partial gradients (`merge_`), and of the rest of attention
(`attention_`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Messages of one round, and what is computed while they travel."""

    num_bytes: int
    beside: Tally


@dataclass(slots=True)
class _Tensor:
    """State of memory that operators between products made in `region`; `read`: region that read it last. `memory` is
    held, so that no other has its number."""

    memory: Tensor
    region: int
    written: bool = False
    read: int = -1


class Operators(TorchDispatchMode):
    """Tally of the operators that are called in this context.

    What a compiler fuses: between two products, or attention, everything is one launch, which reads what it did not
    make and writes what products or a later region read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tally, self.flights = Tally(), list[Flight]()
        self.inside = ""
        self.called = (0.0, 1.0)
        """Forward FLOPs and mean number of queries of the attention call that comes next."""
        self._region, self._last_fused = 0, -1
        self._made: dict[int, _Tensor] = {}

    def add(self, kind: str, amount: float) -> None:
        self.tally[kind] += amount  # type: ignore[assignment]  # bytes and FLOPs are large floats

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        alias = [each.alias_info for each in function._schema.returns]
        if name in UNLAUNCHED or any(each is not None and not each.is_write for each in alias):
            return result
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if name in PRODUCTS:
            factor = args[PRODUCTS[name]]
            self.add("products", 2.0 * prod(factor.shape) * args[PRODUCTS[name] + 1].shape[-1])
            self._unfused(read, made)
        elif name.startswith("_flash_attention"):
            flops = self.called[0] * (ATTENTION_BACKWARD if "backward" in name else 1.0)
            self.add("attention", flops)
            self.add("per_query", flops / self.called[1])
            self._unfused(read, made)
        else:
            self._between(_bytes(name, args, read, made=made), read, made)
        return result

    def _unfused(self, read: list[Tensor], made: list[Tensor]) -> None:
        """A product or attention: what it reads must be in memory."""
        self.add("launches", 1)
        for each in read:
            self._write(each)
        for each in made:
            self._made.pop(_key(each), None)
        self._region += 1

    def _between(self, num_bytes: int, read: list[Tensor], made: list[Tensor]) -> None:
        if self.inside:
            self.add(f"{self.inside}_launches", 1)
            self.add(f"{self.inside}_bytes", num_bytes)
            return
        self.add("eager_launches", 1)
        self.add("eager_bytes", num_bytes)
        for each in read:
            held = self._made.get(_key(each))
            if held is None or held.region != self._region:
                self._write(each)
                held = self._made.setdefault(_key(each), _Tensor(memory=each, region=-1, written=True))
                if held.read != self._region:
                    self.add("fused_bytes", _nbytes(each))
                    held.read = self._region
        for each in made:
            self._made[_key(each)] = _Tensor(memory=each, region=self._region)
        if self._last_fused != self._region:
            self.add("fused_launches", 1)
            self._last_fused = self._region

    def _write(self, tensor: Tensor) -> None:
        held = self._made.get(_key(tensor))
        if held is not None and not held.written:
            self.add("fused_bytes", _nbytes(tensor))
            held.written = True

    @contextmanager
    def within(self, inside: str) -> Iterator[None]:
        """Context of operators that no compiler fuses: `merge` of partial results, or the rest of `attention`."""
        before, self.inside = self.inside, inside
        yield
        self.inside = before


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor; expanded ones once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size()


def _bytes(name: str, args: Any, read: list[Tensor], *, made: list[Tensor]) -> int:
    total = sum(map(_nbytes, read)) + sum(map(_nbytes, made))
    if name in BY_ROW:
        return total - _nbytes(read[0]) + _nbytes(made[0])
    if name in INTO_ROWS:
        return total - 2 * _nbytes(args[0]) + INTO_ROWS[name] * _nbytes(read[-1])
    return total - _nbytes(args[0]) if name in OVERWRITING else total


class _Kernel(TorchFlashKernel):
    """Torch's flash kernel, whose FLOPs follow from the pairs."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, pairs: Pairs) -> tuple[Tensor, Tensor]:
        self._operators.called = _call(pairs, query)
        return super().forward(query, key, value, pairs=pairs)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._operators.called = _call(pairs, query)
        return super().backward(grad_out, query, key, value, out, lse, pairs=pairs)


def _call(pairs: Pairs, query: Tensor) -> tuple[float, float]:
    each = zip(pairs.query_lengths, pairs.key_lengths, strict=True)
    computed = sum(q * (q + 1) / 2 if pairs.causal else q * k for q, k in each)
    return 4.0 * computed * query.shape[1] * query.shape[2], len(query) / len(pairs.query_lengths)


class _Nowhere(Transport):
    """Notes what is computed between posting and waiting."""

    def __init__(self, rank: int, operators: Operators) -> None:
        self.rank, self._operators = rank, operators

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> "_Posted":
        num_bytes = max(sum(tensor.nbytes for _, tensor in each) for each in (sends, receives))
        return _Posted(self._operators, num_bytes)


class _Posted:
    def __init__(self, operators: Operators, num_bytes: int) -> None:
        self._operators, self._num_bytes, self._before = operators, num_bytes, operators.tally.copy()

    def wait(self) -> None:
        if self._num_bytes:
            done = self._operators
            beside = Tally({key: done.tally[key] - self._before[key] for key in done.tally})
            done.flights.append(Flight(num_bytes=self._num_bytes, beside=beside))

    def done(self) -> bool:
        return True


@dataclass(slots=True)
class _Words:
    """See `TokenSource`."""

    zeros: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(1 << 20, np.int64))

    def read(self, sequence: int, /, *, start: int, stop: int) -> tuple[Any, Any]:  # noqa: ARG002
        return self.zeros[: stop - start], self.zeros[: stop - start]


def _in_triton(operators: Operators) -> dict[str, Callable[..., Any]]:
    """Kernels in Triton by the methods of the backend that give them."""

    def merge(known_out: Tensor, known_lse: Tensor, *, rows: Tensor | int, out: Tensor, lse: Tensor) -> None:  # noqa: ARG001
        operators.add("merge_launches", 1)
        operators.add("merge_bytes", sum(map(_nbytes, (out, lse))) + 2 * out.numel() * 4 + 2 * lse.numel() * 4)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        operators.add("eager_launches", 1)
        operators.add("eager_bytes", 3 * _nbytes(logits) + _nbytes(targets))
        return logits.new_empty(len(logits), dtype=torch.float32)

    return {"merge_kernel": lambda _: merge, "loss_kernel": lambda _: loss}


@contextmanager
def _noted(operators: Operators, *, in_triton: bool) -> Iterator[None]:
    """Attention and its merges as such in the tally."""

    def noted(inside: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with operators.within(inside):
                return work(*args, **keywords)

        return call

    with ExitStack() as stack:
        for owner in (function._Attention, ToHeads, ToTokens):
            for name in ("forward", "backward"):
                work = staticmethod(noted("attention", getattr(owner, name)))
                stack.enter_context(patch.object(owner, name, work))
        for owner in (slots.MergedAttention, slots.RowSums):
            for name in ("add", "result"):
                stack.enter_context(patch.object(owner, name, noted("merge", getattr(owner, name))))
        for name, method in _in_triton(operators).items() if in_triton else ():
            stack.enter_context(patch.object(CpuBackend, name, method))
        stack.enter_context(operators)
        yield


def tally(
    program: RankProgram, model: CausalLM, *, recomputed_layers: int, in_triton: bool
) -> tuple[Tally, list[Flight]]:
    """Amounts of the passes of a program without stages, with `model` on the meta device in its place, of which so many
    layers are recomputed; and its messages."""
    operators = Operators()
    passes = Passes(program, model, pipes=None, loss=BatchLoss(loss=CrossEntropy()), device=torch.device("meta"))
    transport, kernel = _Nowhere(program.rank, operators), _Kernel(operators)
    with _noted(operators, in_triton=in_triton):
        for item in _whole(program.instructions, recomputed_layers):
            match item:
                case Load():
                    passes.load(item, _Words(), images=None)
                case Forward():
                    context = function.AttentionContext.of(item, stats=passes.stats, transport=transport, kernel=kernel)
                    passes.forward(item, context, keep_logits=True)
                case Backward():
                    passes.backward(item)
    model.zero_grad(set_to_none=True)
    return operators.tally, operators.flights


def _whole(instructions: Iterable[Any], recomputed_layers: int) -> Iterator[Any]:
    for item in instructions:
        yield replace(item, recomputed_layers=recomputed_layers) if isinstance(item, Forward) else item
