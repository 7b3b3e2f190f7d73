"""All kernels against dense attention in fp64; those whose device is not here by stand-ins that check each argument."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rayfcp.execute import kernels
from rayfcp.execute.devices import cuda, npu
from rayfcp.execute.devices.cpu import CpuKernel
from rayfcp.execute.devices.cuda import CudaKernel, half_kernels
from rayfcp.execute.devices.npu import NpuKernel
from rayfcp.execute.kernels import AttentionKernel, KernelUnavailableError, Pairs, offsets_of, pick_kernel
from rayfcp.execute.kernels.cudnn import CudnnKernel, agrees, keeps_plans
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.flash import FlashAttn2Kernel, FlashAttn3Kernel, FlashAttn4Kernel, TorchFlashKernel
from rayfcp.execute.kernels.operators import AnyPairs, OperatorKernel
from rayfcp.execute.kernels.widths import EqualWidths
from tests.examples import examples
from tests.execute import fake_aten, fake_cutlass, fake_flash2, fake_flash3, fake_flash4, fake_npu
from tests.execute.conforming import BOUNDS, LONG, SCALE, Shape, assert_conforms, shapes

few_examples = examples(25, suppress=[HealthCheck.function_scoped_fixture])
SINGLE, HALF = (torch.float32,), (torch.bfloat16,)
CAPS = (0.0, 1.5)
"""None, and one that bends most scores."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel, the dtypes and soft caps that it takes, and how many queries the first pair has at least."""

    make: Callable[[], AttentionKernel]
    dtypes: tuple[torch.dtype, ...]
    first: int = 1
    caps: tuple[float, ...] = (0.0,)


def on_cuda(half: AttentionKernel) -> CudaKernel:
    """The kernel as CUDA devices get it: head_dim padded, fp32 by another one."""
    return CudaKernel(half=half, single=CutlassKernel())


CASES = {
    "cpu": Case(make=lambda: EqualWidths(CpuKernel()), dtypes=tuple(BOUNDS)),
    "operators": Case(make=OperatorKernel, dtypes=tuple(BOUNDS), caps=CAPS),
    "flash-attn 2": Case(make=lambda: on_cuda(FlashAttn2Kernel(fake_flash2)), dtypes=HALF, caps=CAPS),
    "flash-attn 3": Case(make=lambda: on_cuda(FlashAttn3Kernel(fake_flash3, sm_margin=8)), dtypes=HALF, caps=CAPS),
    "flash-attn 4": Case(
        make=lambda: on_cuda(FlashAttn4Kernel(fake_flash4, wide=FlashAttn2Kernel(fake_flash2))), dtypes=HALF, caps=CAPS
    ),
    "torch's flash": Case(make=lambda: on_cuda(TorchFlashKernel()), dtypes=HALF),
    "cuDNN": Case(make=lambda: on_cuda(CudnnKernel(short=TorchFlashKernel())), dtypes=HALF, first=129),
    "cuDNN, short": Case(make=lambda: on_cuda(CudnnKernel(short=TorchFlashKernel())), dtypes=HALF),
    "memory-efficient": Case(make=lambda: on_cuda(TorchFlashKernel()), dtypes=SINGLE),
    "npu": Case(make=lambda: EqualWidths(NpuKernel()), dtypes=SINGLE + HALF),
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for libraries and operators that need a device which is absent here."""
    monkeypatch.setitem(sys.modules, "torch_npu", fake_npu)
    with ExitStack() as registered:
        registered.enter_context(fake_cutlass.registered())
        registered.enter_context(fake_aten.registered())
        yield


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", CASES)
@few_examples
@given(data=st.data())
def test_conforms(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    shape, dtype = data.draw(shapes(first=case.first)), data.draw(st.sampled_from(case.dtypes))
    assert_conforms(case.make(), replace(shape, softcap=data.draw(st.sampled_from(case.caps))), dtype=dtype)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", CASES)
def test_conforms_over_many_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfcp.execute.kernels.operators.BLOCK_SCORES", 1 << 14)
    for dtype in CASES[name].dtypes:
        for softcap in CASES[name].caps:
            assert_conforms(CASES[name].make(), replace(LONG, softcap=softcap), dtype=dtype)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", CASES)
def test_pairs_that_a_kernel_does_not_support_run_in_operators(name: str) -> None:
    case, capped = CASES[name], replace(LONG, softcap=CAPS[1])
    kernel, query = case.make(), torch.empty(1, 1, 8, dtype=case.dtypes[0])
    pairs = Pairs(query_lengths=(1,), key_lengths=(1,), causal=True, scale=1.0)
    assert kernel.supports(query, pairs=pairs)
    assert kernel.supports(query, pairs=replace(pairs, softcap=CAPS[1])) == (CAPS[1] in case.caps)
    assert_conforms(AnyPairs(kernel), capped, dtype=case.dtypes[0])


WIDTHS = ((24, 16), (16, 24), (20, 12), (192, 128), (160, 88))
"""Of keys and of values; flash-attn 3 takes the fourth as they are."""


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", CASES)
def test_values_of_other_sizes_than_keys(name: str) -> None:
    kernel, dtype = CASES[name].make(), CASES[name].dtypes[0]
    for head_dim, value_dim in WIDTHS:
        shape = replace(LONG, queries=(140, 1), own=(140, 1), head_dim=head_dim, value_dim=value_dim)
        assert_conforms(kernel, shape, dtype=dtype)


@pytest.mark.usefixtures("stand_ins")
def test_heads_wider_than_flash_kernels_take_run_in_the_memory_efficient_one() -> None:
    none: Any = None  # a library that must not be called
    shape = replace(LONG, queries=(140, 1), own=(140, 1), head_dim=512, value_dim=512)
    assert_conforms(on_cuda(FlashAttn2Kernel(none)), shape, dtype=torch.bfloat16)


CUDA_DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@few_examples
@given(shape=shapes(), dtype=st.sampled_from(CUDA_DTYPES))
def test_cuda(shape: Shape, dtype: torch.dtype) -> None:
    assert_conforms(pick_kernel("cuda"), shape, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_cuda_over_many_blocks(dtype: torch.dtype) -> None:
    assert_conforms(pick_kernel("cuda"), LONG, dtype=dtype, device="cuda")


@pytest.mark.parametrize("head_dim", [12, 64])
def test_flash_calls_fit_torchs_schemas(head_dim: int) -> None:
    """Run on the meta device: arguments are taken, and shapes come out as the interface says."""
    kernel, dtype = on_cuda(TorchFlashKernel()), torch.bfloat16
    pairs = Pairs(query_lengths=(5, 40), key_lengths=(7, 3), causal=False, scale=SCALE)
    query = torch.empty(45, 4, head_dim, dtype=dtype, device="meta")
    key, value = torch.empty(2, 10, 2, head_dim, dtype=dtype, device="meta").unbind()
    out, lse = kernel.forward(query, key, value, pairs=pairs)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (query.shape, dtype, (45, 4), torch.float32)
    grads = kernel.backward(out, query, key, value, out, lse, pairs=pairs)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_layers_share_the_offsets_of_a_call() -> None:
    pairs = Pairs(query_lengths=(3, 4), key_lengths=(5, 6), causal=False, scale=SCALE)
    first, second = (offsets_of(pairs, device=torch.device("cpu")) for _ in range(2))
    assert first.query is second.query and first.key is second.key
    assert (first.query.tolist(), first.key.tolist()) == ([0, 3, 7], [0, 5, 11])
    assert (first.max_query, first.max_key) == (4, 6)


def best(capability: tuple[int, int], sm_margin: int) -> AttentionKernel:
    return next(half_kernels(capability, sm_margin))


@pytest.mark.usefixtures("stand_ins")
def test_kernels_are_taken_by_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 3 on Hopper only, then 4 if it agrees, then 2, then cuDNN where its plans are kept and it agrees, then
    torch's flash."""
    here: dict[str, object] = {}
    monkeypatch.setattr(cuda, "_library", lambda names: here.get(names[0]))
    monkeypatch.setattr(cuda, "agrees", lambda *_, **__: here.get("agrees", False))
    monkeypatch.setattr(cuda, "keeps_plans", lambda: "cudnn" in here)
    hopper, ampere = (9, 0), (8, 0)
    assert isinstance(best(hopper, 0), TorchFlashKernel)
    here["cudnn"] = True
    assert isinstance(best(hopper, 0), TorchFlashKernel)
    here["agrees"] = True
    assert isinstance(best(hopper, 0), CudnnKernel) and isinstance(best(ampere, 0), TorchFlashKernel)
    here["flash_attn.flash_attn_interface"] = fake_flash2
    assert isinstance(best(hopper, 0), FlashAttn2Kernel)
    here["flash_attn_interface"] = fake_flash3
    assert isinstance(best(hopper, 8), FlashAttn3Kernel) and isinstance(best(ampere, 8), FlashAttn2Kernel)
    here["flash_attn.cute.interface"] = fake_flash4
    all_of_them = [FlashAttn3Kernel, FlashAttn4Kernel, FlashAttn2Kernel, CudnnKernel, TorchFlashKernel]
    assert [type(each) for each in half_kernels(hopper, 0)] == all_of_them
    assert isinstance(best((10, 0), 0), FlashAttn4Kernel) and isinstance(best(ampere, 0), FlashAttn2Kernel)
    here["agrees"] = False
    assert isinstance(best((10, 0), 0), FlashAttn2Kernel)


@pytest.mark.usefixtures("stand_ins")
def test_a_kernel_that_does_not_agree_is_not_used() -> None:
    flash = TorchFlashKernel()
    cudnn = CudnnKernel(short=flash)
    assert agrees(cudnn, flash, device="cpu")
    scaled = SimpleNamespace(name="scaled", forward=lambda *a, **k: tuple(2 * each for each in flash.forward(*a, **k)))
    scaled.backward = flash.backward
    assert not agrees(scaled, flash, device="cpu")


def test_a_kernel_that_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """There is no cuDNN for CPUs."""
    assert not agrees(CudnnKernel(short=TorchFlashKernel()), CpuKernel(), device="cpu")
    assert "torch's cuDNN cannot be used here" in caplog.text


def test_a_torch_that_forgets_plans_is_known_by_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {each.name for each in torch.ops.aten._cudnn_attention_forward.default._schema.arguments}
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert keeps_plans() == ("seqused_k" in arguments)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    assert not keeps_plans()


def test_the_kernel_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels._best.cache_clear()
    with caplog.at_level(logging.INFO, logger="rayfcp.execute.kernels"):
        assert pick_kernel("cpu") is pick_kernel("cpu", sm_margin=0)
    assert [record.getMessage() for record in caplog.records] == ["attention on cpu: torch's flash for CPUs"]


def test_a_library_that_cannot_be_imported_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: xyz')")
    monkeypatch.syspath_prepend(tmp_path)
    assert cuda._library(cuda.FLASH_ATTN_3) is None
    assert "flash_attn_interface is installed but cannot be imported: undefined symbol: xyz" in caplog.text


def test_packages_of_one_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flash-attn 2 and 4 share the package `flash_attn`; either may be here without the other."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text("found = True")
    monkeypatch.syspath_prepend(tmp_path)
    found = cuda._library(cuda.FLASH_ATTN_2)
    assert found is not None and found.found
    assert cuda._library(cuda.FLASH_ATTN_4) is None and not caplog.text
    (tmp_path / "flash_attn_interface.py").write_text("import flash_attn.missing")
    assert cuda._library(cuda.FLASH_ATTN_3) is None
    assert "flash_attn_interface is installed but cannot be imported" in caplog.text


def test_fp64_on_cuda_is_refused() -> None:
    tensor = torch.zeros(4, 2, 8, dtype=torch.float64)
    pairs = Pairs(query_lengths=(4,), key_lengths=(4,), causal=True, scale=SCALE)
    with pytest.raises(
        KernelUnavailableError, match=r"model\.dtype is float64, cuda computes attention in float32 and"
    ):
        on_cuda(TorchFlashKernel()).forward(tensor, tensor, tensor, pairs=pairs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_what_to_install_is_named() -> None:
    with pytest.raises(KernelUnavailableError, match="install torch's CUDA build and a driver, or"):
        pick_kernel("cuda")


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_what_to_install_is_named() -> None:
    with pytest.raises(KernelUnavailableError, match=r"install CANN, then pip install 'rayfcp\[torch-npu\]'"):
        pick_kernel("npu")


@pytest.mark.usefixtures("stand_ins")
def test_more_pairs_than_a_call_takes_on_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are taken in several calls, the last one not full, by a lower limit, since the dense reference takes pairs
    one by one."""
    assert npu.MAX_PAIRS == fake_npu.MOST_SEQUENCES
    monkeypatch.setattr(npu, "MAX_PAIRS", 10)
    monkeypatch.setattr(fake_npu, "MOST_SEQUENCES", 10)
    lengths = (2, 1) * 13
    shape = Shape(
        queries=lengths,
        before=(1,) * 26,
        own=lengths,
        causal=True,
        kv_heads=1,
        heads=2,
        head_dim=8,
        strided=True,
        seed=0,
    )
    assert_conforms(NpuKernel(), shape, dtype=torch.float32)


def test_the_fake_refuses_what_the_operators_would() -> None:
    """The stand-in's refusals make the conformance tests above meaningful."""
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
        {"softmax_layout": "TND"},
    ):
        with pytest.raises((ValueError, TypeError)):
            fake_npu.npu_fusion_attention(tensor, tensor, tensor, 2, "TND", **(good | wrong))
    for heads, layout, query in ((4, "TND", tensor), (2, "BSND", tensor), (2, "TND", tensor.double())):
        with pytest.raises(ValueError, match="must be"):
            fake_npu.npu_fusion_attention(query, tensor, tensor, heads, layout, **good)
