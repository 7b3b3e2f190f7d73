"""Signatures of what rayfcp calls in torch and in attention libraries, by version, and the private names it uses.

    python -m tests.execute.signatures FOLDER

writes them to `signatures.json` from the files in FOLDER: wheels of torch, torch-npu, flash-attn-4 and fla-core (for
any system), and checkouts of flash-attention and causal-conv1d named `flash_attn-2.8.3`. Nothing is imported from them.
"""

import ast
import inspect
import json
import re
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("signatures.json")

Source = Path | zipfile.Path

OPERATORS = (
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_efficient_attention_forward",
    "_efficient_attention_backward",
    "_cudnn_attention_forward",
    "_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
CALLED = {
    "torch": {"torchgen/packaged/ATen/native/native_functions.yaml": OPERATORS},
    "torch_npu": {"torch_npu/lib/libtorch_npu.so": ("npu_fusion_attention", "npu_fusion_attention_grad")},
    "flash_attn_4": {"flash_attn/cute/interface.py": ("_flash_attn_fwd", "_flash_attn_bwd")},
    "fla_core": {
        "fla/ops/gated_delta_rule/chunk.py": ("chunk_gated_delta_rule",),
        "fla/ops/kda/chunk.py": ("chunk_kda",),
        "fla/ops/simple_gla/chunk.py": ("chunk_simple_gla",),
        "fla/ops/gla/chunk.py": ("chunk_gla",),
    },
    "causal_conv1d": {"causal_conv1d/causal_conv1d_interface.py": ("causal_conv1d_fn",)},
    "flash_attn": {
        "flash_attn/flash_attn_interface.py": ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
        "hopper/flash_attn_interface.py": ("_flash_attn_forward", "_flash_attn_backward"),
    },
}
"""Functions by distribution and file."""

FSDP, TENSOR = "torch/distributed/fsdp/_fully_shard/", "torch/distributed/tensor/"
PRIVATE = {
    "torch/_C/__init__.pyi": ("_set_sm_carveout_experimental",),
    "torch/distributed/checkpoint/filesystem.py": ("_StorageInfo",),
    "torch/distributed/distributed_c10d.py": ("_World", "_world", "pg_map", "_abort_process_group"),
    f"{FSDP}_fsdp_collectives.py": ("DefaultAllGather", "DefaultReduceScatter"),
    f"{FSDP}_fsdp_param_group.py": ("gradient_divide_factor", "_post_forward_indices"),
    f"{FSDP}_fsdp_state.py": ("_fsdp_param_groups", "_fsdp_param_group"),
    f"{FSDP}_fully_shard.py": (
        "_get_fsdp_state",
        "reshard",
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_force_sum_reduction_for_comms",
        "set_gradient_divide_factor",
        "set_is_last_backward",
        "set_requires_gradient_sync",
        "set_reshard_after_backward",
        "set_reshard_after_forward",
        "set_unshard_in_backward",
    ),
    f"{TENSOR}_redistribute.py": ("_planner_cache",),
    f"{TENSOR}_utils.py": ("compute_local_shape_and_global_offset",),
    f"{TENSOR}debug/__init__.py": ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"),
    "torch/nn/modules/module.py": ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    "torch/optim/adam.py": ("_init_group",),
    "torch/storage.py": ("_cdata",),
    "torch/utils/_pytree.py": ("tree_map",),
    "torch/utils/_python_dispatch.py": ("TorchDispatchMode",),
    "torchgen/packaged/ATen/native/native_functions.yaml": (
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_norm",
        "_fused_adamw_",
    ),
}
"""Names of torch without a promise, or methods of FSDP that are young, by the file that defines them."""


def parameters(text: str) -> inspect.Signature:
    """The signature that `text` describes.

    >>> list(parameters("q, causal=False, *, scale").parameters)
    ['q', 'causal', 'scale']
    """
    return inspect.signature(eval(f"lambda {text}: None"))


def of_schema(text: str) -> str:
    """Parameters of an operator's schema.

    >>> of_schema("f(Tensor(a!)[] self, Tensor? mask=None, *, float? scale=None) -> (Tensor out)")
    'self, mask=None, *, scale=None'
    """
    import torch

    found = []
    for each in torch._C.parse_schema(text).arguments:
        if each.kwarg_only and "*" not in found:
            found.append("*")
        found.append(f"{each.name}={each.default_value!r}" if each.has_default_value() else each.name)
    return ", ".join(found)


def of_source(text: str, name: str) -> str:
    """Parameters of a function of this module, without annotations."""
    (function,) = (
        each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef) and each.name == name
    )
    for each in ast.walk(function.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(function.args)


def signature_of(source: Source, file: str, name: str) -> str:
    data = source.joinpath(file).read_bytes()
    if file.endswith(".py"):
        return of_source(data.decode(), name)
    before, after = (b"- func: ", b"\n") if file.endswith(".yaml") else (b"\0", b"\0")
    (schema,) = set(re.findall(re.escape(before) + rf"({name}\([^\0\n]*)".encode() + after, data))
    return of_schema(schema.decode())


def defines(source: Source, file: str, name: str) -> bool:
    """True if a file defines the name: a function, a class, a variable, an attribute or an operator."""
    path = source.joinpath(file)
    pattern = rf"(^|\s)(def|class) {name}\b|^\s*(self\.)?{name}\s*[:=]|- func: {name}[(.]"
    return path.exists() and re.search(pattern, path.read_text(), re.MULTILINE) is not None


def sources(folder: Path) -> list[tuple[str, str, Source]]:
    """Distribution, version, files; oldest first."""
    found: list[tuple[str, str, Source]] = []
    for path in folder.iterdir():
        name, version = path.name.split("-")[:2]
        if name in CALLED:
            found.append((name, version, zipfile.Path(path) if path.suffix == ".whl" else path))
    return sorted(found, key=lambda each: (each[0], [int(part) for part in re.findall(r"\d+", each[1])]))


def record(folder: Path) -> dict[str, Any]:
    """Everything, with the versions that each holds for."""
    functions: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    private: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for library, version, source in sources(folder):
        for file, names in CALLED[library].items():
            for name in names:
                functions[name][signature_of(source, file, name)].append(f"{library} {version}")
        if library == "torch":
            for file, names in PRIVATE.items():
                for name in names:
                    private[file].setdefault(name, [])
                    if defines(source, file, name):
                        private[file][name].append(version)
    return {"functions": functions, "private": private}


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
