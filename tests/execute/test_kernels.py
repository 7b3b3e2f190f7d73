"""Every kernel against dense attention in fp64, with the interface's promises: pairs, views, halves of the keys."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayfcp.execute.kernels import AttentionKernel, KernelUnavailableError, pick_kernel
from rayfcp.execute.kernels.cpu import CpuKernel
from rayfcp.execute.kernels.cuda import CudaKernel, TorchFlashKernel
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.varlen import Offsets
from tests.execute import fake_cutlass, fake_npu

SCALE = 0.3
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2}
TF32_FACTOR = 10
"""CUDA's fp32 products are sums of three in tf32."""

few_examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True, kw_only=True)
class Pairs:
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
def pairs(draw: st.DrawFn) -> Pairs:
    count, causal = draw(st.integers(1, 3)), draw(st.booleans())
    lengths = st.lists(st.integers(1, 24), min_size=count, max_size=count).map(tuple)
    queries = draw(lengths)
    kv_heads, times = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4), (3, 2)]))
    return Pairs(
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


def dense(shape: Pairs, tensors: tuple[Tensor, ...], *, parts: tuple[str, ...]) -> Dense:
    """out, lse and gradients (dq, then dk and dv of each of `parts`, "before" and "own") of all pairs."""
    leaves = [tensor.detach().cpu().double().contiguous().requires_grad_() for tensor in tensors]
    query, grad_out = leaves[0].split(shape.queries), tensors[1].cpu().double().split(shape.queries)
    held = {"before": (leaves[2], leaves[3], shape.before), "own": (leaves[4], leaves[5], shape.own)}
    outs, sums = [], []
    for index, q in enumerate(query):
        key, value = (torch.cat([held[part][i].split(held[part][2])[index] for part in parts]) for i in range(2))
        key, value = (t.repeat_interleave(shape.heads // shape.kv_heads, dim=1).transpose(0, 1) for t in (key, value))
        scores = q.transpose(0, 1) @ key.transpose(1, 2) * SCALE
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
    error = float((found.cpu().double() - want).norm() / want.norm().clamp_min(1e-3 * want.numel() ** 0.5))
    bound = BOUNDS[dtype] * (TF32_FACTOR if found.is_cuda and dtype is torch.float32 else 1)
    assert error <= bound, f"{name}: relative error {error:.2e}"


def assert_conforms(kernel: AttentionKernel, shape: Pairs, *, dtype: torch.dtype, device: str = "cpu") -> None:
    """Forward over the keys before and over the own keys, each alone; backward of each with (out, lse) of both."""
    tensors = shape.tensors(dtype, device)
    query, grad_out = tensors[:2]
    calls = (("before", tensors[2:4], shape.before, False), ("own", tensors[4:6], shape.own, shape.causal))
    whole = dense(shape, tensors, parts=("before", "own"))
    out, lse = whole.out.to(device, dtype), whole.lse.to(device, torch.promote_types(dtype, torch.float32))
    dq = torch.zeros_like(whole.grads[0])
    for name, (key, value), lengths, causal in calls:
        how = {"query_lengths": shape.queries, "key_lengths": lengths, "causal": causal, "scale": SCALE}
        alone = dense(shape, tensors, parts=(name,))
        found_out, found_lse = kernel.forward(query, key, value, **how)
        assert found_out.dtype == dtype and found_lse.dtype == lse.dtype
        assert_near(found_out, alone.out, dtype=dtype, name=f"{name} out")
        assert_near(found_lse, alone.lse, dtype=dtype, name=f"{name} lse")
        found = kernel.backward(grad_out, query, key, value, out, lse, **how)
        dq += found[0].cpu().double()
        want = whole.grads[1:3] if name == "before" else whole.grads[3:5]
        assert_near(found[1], want[0], dtype=dtype, name=f"{name} dk")
        assert_near(found[2], want[1], dtype=dtype, name=f"{name} dv")
    assert_near(dq, whole.grads[0], dtype=dtype, name="dq")


@few_examples
@given(shape=pairs(), dtype=st.sampled_from(list(BOUNDS)))
def test_cpu(shape: Pairs, dtype: torch.dtype) -> None:
    assert_conforms(CpuKernel(), shape, dtype=dtype)


LONG = Pairs(
    queries=(300, 1), before=(1, 600), own=(300, 1), causal=True, kv_heads=2, heads=4, head_dim=64, strided=True, seed=0
)
"""Longer than a block of any kernel, with pairs of one query and of one key."""


@pytest.mark.parametrize("dtype", BOUNDS)
def test_cpu_over_many_blocks(dtype: torch.dtype) -> None:
    assert_conforms(CpuKernel(), LONG, dtype=dtype)


@pytest.fixture
def npu_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torch_npu", fake_npu)
    yield


@few_examples
@given(shape=pairs(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_npu_calls_follow_the_documented_contract(npu_library: None, shape: Pairs, dtype: torch.dtype) -> None:
    """Against a library that computes on the CPU what Ascend's documentation says of the operators."""
    assert_conforms(pick_kernel("npu"), shape, dtype=dtype)


@pytest.mark.usefixtures("npu_library")
def test_npu_over_many_blocks() -> None:
    assert_conforms(pick_kernel("npu"), LONG, dtype=torch.float32)


CUDA_DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@few_examples
@given(shape=pairs(), dtype=st.sampled_from(CUDA_DTYPES))
def test_cuda(shape: Pairs, dtype: torch.dtype) -> None:
    assert_conforms(pick_kernel("cuda"), shape, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_cuda_over_many_blocks(dtype: torch.dtype) -> None:
    assert_conforms(pick_kernel("cuda"), LONG, dtype=dtype, device="cuda")


@pytest.fixture
def torch_kernels() -> Iterator[CudaKernel]:
    """What a CUDA device without flash-attn gets."""
    with fake_cutlass.registered():
        yield CudaKernel(half=TorchFlashKernel(), single=CutlassKernel())


@few_examples
@given(shape=pairs())
def test_fp32_calls_follow_the_layout_of_torchs_sources(torch_kernels: CudaKernel, shape: Pairs) -> None:
    """Against operators that compute on the CPU what torch's CUDA sources say of them."""
    assert_conforms(torch_kernels, shape, dtype=torch.float32)


def test_fp32_over_many_blocks(torch_kernels: CudaKernel) -> None:
    assert_conforms(torch_kernels, LONG, dtype=torch.float32)


@pytest.mark.parametrize("head_dim", [12, 64])
def test_flash_calls_fit_torchs_schemas(head_dim: int) -> None:
    """On the meta device: arguments are taken, and shapes come out as the interface says."""
    kernel, dtype = CudaKernel(half=TorchFlashKernel(), single=CutlassKernel()), torch.bfloat16
    how = {"query_lengths": (5, 40), "key_lengths": (7, 3), "causal": False, "scale": SCALE}
    query = torch.empty(45, 4, head_dim, dtype=dtype, device="meta")
    key, value = torch.empty(2, 10, 2, head_dim, dtype=dtype, device="meta").unbind()
    out, lse = kernel.forward(query, key, value, **how)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (query.shape, dtype, (45, 4), torch.float32)
    grads = kernel.backward(out, query, key, value, out, lse, **how)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_layers_share_the_offsets_of_a_call() -> None:
    first, second = (Offsets((3, 4), (5, 6), device=torch.device("cpu")) for _ in range(2))
    assert first.query is second.query and first.key is second.key
    assert (first.query.tolist(), first.key.tolist()) == ([0, 3, 7], [0, 5, 11])
    assert (first.max_query, first.max_key) == (4, 6)


def test_fp64_on_cuda_is_refused() -> None:
    tensor = torch.zeros(4, 2, 8, dtype=torch.float64)
    how = {"query_lengths": (4,), "key_lengths": (4,), "causal": True, "scale": SCALE}
    with pytest.raises(
        KernelUnavailableError, match=r"model\.dtype is float64, cuda computes attention in float32 and"
    ):
        CudaKernel(half=TorchFlashKernel(), single=CutlassKernel()).forward(tensor, tensor, tensor, **how)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_what_to_install_is_named() -> None:
    with pytest.raises(KernelUnavailableError, match="install torch's CUDA build and a driver, or"):
        pick_kernel("cuda")


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_what_to_install_is_named() -> None:
    with pytest.raises(KernelUnavailableError, match=r"install CANN, then pip install 'rayfcp\[torch-npu\]'"):
        pick_kernel("npu")


def test_the_fake_refuses_what_the_operators_would() -> None:
    """So that the conformance above means something."""
    tensor = torch.zeros(4, 2, 8)
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    good = {"actual_seq_qlen": [1, 4], "actual_seq_kvlen": [1, 4], "sparse_mode": 3, "atten_mask": triangle}
    fake_npu.npu_fusion_attention(tensor, tensor, tensor, 2, "TND", **good)
    for wrong in (
        {"actual_seq_qlen": [1, 3]},
        {"actual_seq_kvlen": (1, 4)},
        {"sparse_mode": 0},
        {"sparse_mode": 2},
        {"atten_mask": ~triangle},
        {"atten_mask": triangle[:4, :4]},
    ):
        with pytest.raises((ValueError, TypeError)):
            fake_npu.npu_fusion_attention(tensor, tensor, tensor, 2, "TND", **(good | wrong))
    for heads, layout, query in ((4, "TND", tensor), (2, "BSND", tensor), (2, "TND", tensor.double())):
        with pytest.raises(ValueError, match="must be"):
            fake_npu.npu_fusion_attention(query, tensor, tensor, heads, layout, **good)
