"""What rayfcp calls exists in every supported version, and takes these arguments.

`signatures.json` holds the versions (`tests.execute.signatures`); the installed torch is asked itself.
"""

import ast
import functools
import gc
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from rayfcp.execute.devices import cpu
from rayfcp.execute.devices.cpu import CpuKernel
from rayfcp.execute.devices.npu import NpuKernel
from rayfcp.execute.kernels import AttentionKernel, Pairs, cudnn, cutlass, flash
from rayfcp.execute.kernels.chunked import ChunkedKernel
from rayfcp.execute.kernels.convolution import CausalConv1d, TorchConvolution
from rayfcp.execute.kernels.cudnn import CudnnKernel
from rayfcp.execute.kernels.cutlass import CutlassKernel
from rayfcp.execute.kernels.flash import FlashAttn2Kernel, FlashAttn3Kernel, FlashAttn4Kernel, TorchFlashKernel
from rayfcp.execute.kernels.linear import FlashLinearKernel
from rayfcp.execute.kernels.recurrence import Gated
from rayfcp.execute.parallel import membership
from rayfcp.execute.parallel.membership import Membership
from tests.execute import (
    fake_aten,
    fake_cutlass,
    fake_flash2,
    fake_flash3,
    fake_flash4,
    fake_linear,
    fake_npu,
    signatures,
)

RECORDED: dict[str, Any] = json.loads(signatures.FILE.read_text())
ROOT = Path(__file__).parents[2]

RENAMED = {"out_": "out", "is_causal": "causal", "sequed_q": "seqused_q", "sequed_k": "seqused_k"}
"""Arguments that flash-attn 3 renamed, which are passed by position."""

TUNING = ("num_threads", "num_stages_Q", "num_stages_dO", "m_block_size", "n_block_size")

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Spy:
    """A library, or torch's operators, whose calls are noted."""

    def __init__(self, library: Any, calls: dict[str, list[Call]]) -> None:
        self._library, self._calls = library, calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        @functools.wraps(function)
        def noted(*args: Any, **keywords: Any) -> Any:
            self._calls[name].append((args, keywords))
            return function(*args, **keywords)

        return noted


class SpiedTorch:
    """torch, with operators whose calls are noted."""

    def __init__(self, calls: dict[str, list[Call]]) -> None:
        self.ops = SimpleNamespace(aten=Spy(torch.ops.aten, calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, list[Call]]]:
    """What all kernels call in both directions, with a mask and without, by name."""
    found: dict[str, list[Call]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as registered:
        registered.enter_context(fake_cutlass.registered())
        registered.enter_context(fake_aten.registered())
        patch.setitem(sys.modules, "torch_npu", fake_npu)
        for module in (flash, cutlass, cudnn):
            patch.setattr(module, "torch", SpiedTorch(found))
        operators = Spy(torch.ops.aten, found)
        patch.setattr(cpu, "_forward", operators._scaled_dot_product_flash_attention_for_cpu)
        patch.setattr(cpu, "_backward", operators._scaled_dot_product_flash_attention_for_cpu_backward)
        npu = NpuKernel()
        npu._library = Spy(fake_npu, found)
        four = FlashAttn4Kernel(Spy(fake_flash4, found), wide=TorchFlashKernel())
        three = FlashAttn3Kernel(Spy(fake_flash3, found), sm_margin=8)
        kernels: list[AttentionKernel] = [three, four, FlashAttn2Kernel(Spy(fake_flash2, found)), TorchFlashKernel()]
        for kernel in (*kernels, CudnnKernel(short=TorchFlashKernel()), CutlassKernel(), CpuKernel(), npu):
            for causal in (False, True):
                run(kernel, causal=causal, dtype=torch.float32 if isinstance(kernel, CutlassKernel) else torch.bfloat16)
        run_recurrent(Spy(fake_linear, found))
    yield found


def run(kernel: AttentionKernel, *, causal: bool, dtype: torch.dtype) -> None:
    pairs = Pairs(query_lengths=(130, 3), key_lengths=(130, 3), causal=causal, scale=0.3)
    query, key, value = (torch.randn(133, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    out, lse = kernel.forward(query, key, value, pairs=pairs)
    kernel.backward(out, query, key, value, out, lse, pairs=pairs)


def run_recurrent(library: Spy) -> None:
    """Every rule, and both convolutions, with a bias and without."""
    recurrence = FlashLinearKernel(library, other=ChunkedKernel(saves_inputs=False))
    tensors = torch.randn(3, 5, 2, 16).unbind()
    for gates in (torch.zeros(5, 2), torch.zeros(5, 2, 16)):
        for beta in (None, torch.ones(5, 2)):
            query, key, value = tensors
            inputs = Gated(query=query, key=key, value=value, log_decay=gates, beta=beta)
            recurrence(inputs, lengths=(2, 3), state=None)
    convolution = CausalConv1d(library, other=TorchConvolution())
    for bias in (None, torch.zeros(8)):
        convolution(torch.randn(5, 8), torch.randn(8, 4), bias, activation="silu")


def test_all_calls_are_recorded(calls: dict[str, list[Call]]) -> None:
    assert set(calls) == set(RECORDED["functions"])
    assert all(len(each) >= 2 for each in calls.values()), "a call with a mask and one without"


@pytest.mark.parametrize("name", RECORDED["functions"])
def test_calls_fit_every_version(name: str, calls: dict[str, list[Call]]) -> None:
    """Arguments are taken, those by position under the same name, and what is left out has the same default."""
    kinds = [signatures.parameters(text) for text in RECORDED["functions"][name]]
    operator = getattr(torch.ops.aten, name, None)
    if operator is not None:
        kinds.append(signatures.parameters(signatures.of_schema(str(operator.default._schema).partition("::")[2])))
    for args, keywords in calls[name]:
        meanings, defaults = set(), defaultdict[str, set[str]](set)
        for signature in kinds:
            bound = signature.bind(*args, **keywords)
            meanings.add(tuple(RENAMED.get(each, each) for each in list(bound.arguments)[: len(args)]))
            for each in signature.parameters.values():
                if each.name not in bound.arguments and each.name not in TUNING:
                    defaults[each.name].add(repr(each.default))
        assert len(meanings) == 1, meanings
        assert all(len(each) == 1 for each in defaults.values()), defaults


def test_calls_that_do_not_fit_are_found() -> None:
    signatures.parameters("q, k, v, *, causal").bind(1, 2, 3, causal=True)
    for text in ("q, k, v", "q, k, *, v, causal", "q, k, v, scale, causal"):
        with pytest.raises(TypeError):
            signatures.parameters(text).bind(1, 2, 3, causal=True)


OPTIONAL = {"_fsdp_param_groups", "_planner_cache", "_post_forward_indices", *membership.SHARDING_CACHES}
"""Absent in some versions, which the code that uses them knows."""

ELSEWHERE = {
    "_cache": "numba",
    "_get_module_for_linking": "numba",
    "_load_index": "numba",
    "_module_pass_manager": "numba",
    "_source_stamp": "numba",
    "_attn_implementation": "transformers",
    "_from_config": "transformers",
    "_init_weights": "transformers",
    "_keys_to_ignore_on_load_unexpected": "transformers",
    "_deepstack_process": "transformers",
    "_commit_hash": "transformers",
    "_is_hf_initialized": "transformers",
    "_PACKERS": "SkyRL, by its adapter",
    "_pack_step_into_mbs": "slime, by its adapter",
    "_private": "ray",
    "_internal_kv_get": "ray",
    "_exit": "os",
    "_getframe": "sys",
    "_lru_cache_wrapper": "functools",
}
"""Private names of other libraries."""


def foreign_names() -> set[str]:
    """Private names that rayfcp and its jobs use, but nothing in them defines: attributes, imports, and in `getattr`
    and `hasattr`."""
    used, own = set[str](), set[str]()
    for path in (*ROOT.joinpath("rayfcp").rglob("*.py"), *ROOT.joinpath("jobs").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                    own.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.ImportFrom(module=str(module), names=names) if not module.startswith("rayfcp"):
                    used |= {each.name for each in names} | set(module.split("."))
                case ast.Import(names=names):
                    used |= {part for each in names for part in each.name.split(".")}
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    used.add(name)
    return {each for each in used - own if each.startswith("_") and not each.endswith("__")}


def test_private_names_are_listed() -> None:
    """A new one is added to `PRIVATE` in `signatures`, and what it is in each version recorded."""
    listed = {name for names in RECORDED["private"].values() for name in names} | set(RECORDED["functions"])
    files = {part.removesuffix(".py") for file in RECORDED["private"] for part in file.split("/")}
    assert not foreign_names() - listed - files - set(ELSEWHERE)


def test_private_names_are_in_every_version() -> None:
    versions = {each for names in RECORDED["private"].values() for found in names.values() for each in found}
    assert versions >= {"2.9.0", "2.13.0"}
    for file, names in signatures.PRIVATE.items():
        for name in names:
            missing = versions - set(RECORDED["private"][file][name])
            assert not missing or name in OPTIONAL, (file, name, missing)
    for either in (("_fsdp_param_groups", "_fsdp_param_group"),):
        found = RECORDED["private"][f"{signatures.FSDP}_fsdp_state.py"]
        assert set().union(*(found[name] for name in either)) == versions


def test_caches_of_shardings_are_cleared_in_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 has none of the functions that clear caches; its one cache is found among all of `functools`."""
    gc.unfreeze()  # by whatever ran before in this process
    member = Membership(torch.device("cpu"), start_timeout_s=1.0, collective_timeout_s=1.0)
    gc.freeze()
    assert DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache in member._caches
    cleared: list[str] = []
    debug = SimpleNamespace(**{each: functools.partial(cleared.append, each) for each in membership.SHARDING_CACHES})
    for found, want in ((debug, list(membership.SHARDING_CACHES)), (SimpleNamespace(), [])):
        cleared.clear()
        monkeypatch.setattr(membership, "tensor_debug", found)
        monkeypatch.setattr(membership, "_redistribute", SimpleNamespace())
        member.collect()
        assert cleared == want
