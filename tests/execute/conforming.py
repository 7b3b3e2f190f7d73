"""Guarantees of the kernels' interface: pairs, views, halves of the keys, against dense attention in fp64."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from rayfcp.execute.kernels import AttentionKernel, Pairs

SCALE = 0.3
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2}
FLOORS = {torch.float64: 1e-3, torch.float32: 0.2, torch.bfloat16: 0.2}
"""Numbers that errors are relative to are no smaller: scores and gradients are sums and differences of numbers of about
1, rounded."""

TF32_FACTOR = 10
"""CUDA's fp32 products are sums of three in tf32."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Pair i: `queries[i]` queries on `before[i]` keys that all see, then on `own[i]` keys: as many as queries, up to
    each one's own position, if `causal`; else all of them."""

    queries: tuple[int, ...]
    before: tuple[int, ...]
    own: tuple[int, ...]
    causal: bool
    kv_heads: int
    heads: int
    head_dim: int
    strided: bool
    seed: int
    softcap: float = 0.0

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
        """query, gradient of out, then key and value before, key and value own."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = (sum(self.queries),) * 2 + (sum(self.before),) * 2 + (sum(self.own),) * 2
        heads = (self.heads,) * 2 + (self.kv_heads,) * 4
        made = []
        for tokens, num_heads in zip(counts, heads, strict=True):
            # A part of a fused projection: rows and heads lie apart, the last dimension is contiguous.
            fused = torch.randn(tokens, num_heads + 3, self.head_dim + 8, generator=generator, dtype=torch.float64)
            part = fused.to(device, dtype)[:, 2 : 2 + num_heads, : self.head_dim]
            made.append(part if self.strided else part.contiguous())
        return tuple(made)


@st.composite
def shapes(draw: st.DrawFn, first: int = 1) -> Shape:
    """The first pair has at least `first` queries."""
    count, causal = draw(st.integers(1, 3)), draw(st.booleans())
    lengths = st.lists(st.integers(1, 24), min_size=count, max_size=count).map(tuple)
    queries = draw(lengths)
    queries = (queries[0] + first - 1, *queries[1:])
    kv_heads, times = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4), (3, 2)]))
    return Shape(
        queries=queries,
        before=draw(lengths),
        own=queries if causal else draw(lengths),
        causal=causal,
        kv_heads=kv_heads,
        heads=kv_heads * times,
        head_dim=draw(st.sampled_from([8, 12, 16, 32])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One softmax over a set of keys, in fp64."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


def dense(shape: Shape, tensors: tuple[Tensor, ...], *, parts: tuple[str, ...]) -> Dense:
    """out, lse and gradients (dq, then dk and dv of each of `parts`, "before" and "own") of all pairs."""
    leaves = [tensor.detach().cpu().double().contiguous().requires_grad_() for tensor in tensors]
    query, grad_out = leaves[0].split(shape.queries), tensors[1].cpu().double().split(shape.queries)
    held = {"before": (leaves[2], leaves[3], shape.before), "own": (leaves[4], leaves[5], shape.own)}
    outs, sums = [], []
    for index, q in enumerate(query):
        key, value = (torch.cat([held[part][i].split(held[part][2])[index] for part in parts]) for i in range(2))
        key, value = (t.repeat_interleave(shape.heads // shape.kv_heads, dim=1).transpose(0, 1) for t in (key, value))
        scores = q.transpose(0, 1) @ key.transpose(1, 2) * SCALE
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if shape.causal and "own" in parts:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - len(q) + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        outs.append((scores.softmax(-1) @ value).transpose(0, 1))
        sums.append(scores.logsumexp(-1).transpose(0, 1))
    torch.cat(outs).backward(torch.cat(grad_out))
    keys = [leaf for part in parts for leaf in held[part][:2]]
    return Dense(
        out=torch.cat(outs).detach(),
        lse=torch.cat(sums).detach(),
        grads=tuple(leaf.grad for leaf in (leaves[0], *keys)),
    )


def assert_near(found: Tensor, want: Tensor, *, dtype: torch.dtype, name: str) -> None:
    assert found.shape == want.shape, name
    least = FLOORS[dtype] * want.numel() ** 0.5
    error = float((found.cpu().double() - want).norm() / want.norm().clamp_min(least))
    bound = BOUNDS[dtype] * (TF32_FACTOR if found.is_cuda and dtype is torch.float32 else 1)
    assert error <= bound, f"{name}: relative error {error:.2e}"


def assert_conforms(kernel: AttentionKernel, shape: Shape, *, dtype: torch.dtype, device: str = "cpu") -> None:
    """Forward over the keys before and over the own keys, each alone; backward of each with (out, lse) of both."""
    tensors = shape.tensors(dtype, device)
    query, grad_out = tensors[:2]
    calls = (("before", tensors[2:4], shape.before, False), ("own", tensors[4:6], shape.own, shape.causal))
    whole = dense(shape, tensors, parts=("before", "own"))
    out, lse = whole.out.to(device, dtype), whole.lse.to(device, torch.promote_types(dtype, torch.float32))
    dq = torch.zeros_like(whole.grads[0])
    for name, (key, value), lengths, causal in calls:
        pairs = Pairs(
            query_lengths=shape.queries, key_lengths=lengths, causal=causal, scale=SCALE, softcap=shape.softcap
        )
        alone = dense(shape, tensors, parts=(name,))
        found_out, found_lse = kernel.forward(query, key, value, pairs=pairs)
        assert found_out.dtype == dtype and found_lse.dtype == lse.dtype
        assert_near(found_out, alone.out, dtype=dtype, name=f"{name} out")
        assert_near(found_lse, alone.lse, dtype=dtype, name=f"{name} lse")
        found = kernel.backward(grad_out, query, key, value, out, lse, pairs=pairs)
        dq += found[0].cpu().double()
        want = whole.grads[1:3] if name == "before" else whole.grads[3:5]
        assert_near(found[1], want[0], dtype=dtype, name=f"{name} dk")
        assert_near(found[2], want[1], dtype=dtype, name=f"{name} dv")
    assert_near(dq, whole.grads[0], dtype=dtype, name="dq")


LONG = Shape(
    queries=(300, 1), before=(1, 600), own=(300, 1), causal=True, kv_heads=2, heads=4, head_dim=64, strided=True, seed=0
)
"""Longer than a block of any kernel, with pairs of one query and of one key."""
