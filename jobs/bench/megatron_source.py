"""Megatron-LM's planner of dynamic context parallelism, from its source: only the functions that plan are run."""

import ast
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Rows = list[list[list[int]]]
"""Ids by microbatch and rank."""

FOLDER = "megatron/core/datasets"
UTILITIES = {
    "next_hdp_group_packing_aware",
    "align_sample_id_groups",
    "dcp_gpus_needed",
    "_DYNAMIC_CP_WORKLOAD_CAP_DELTA",
}
MODULES = ("typing", "math", "functools")


def megatron_planner(source: Path, *, ref: str) -> Callable[..., Rows]:
    """`plan(lengths by id, num_ranks=, max_tokens=)` by the functions of Megatron-LM's source."""
    names: dict[str, Any] = {}
    for file, wanted in (("data_schedule_utils.py", UTILITIES), ("data_schedule.py", {"get_groups_and_subsamples"})):
        tree = ast.parse(read_source(source, ref=ref, path=f"{FOLDER}/{file}"))
        kept = [node for node in _flat(tree.body) if _is_wanted(node, wanted)]
        exec(compile(ast.Module(kept, []), file, "exec"), names)

    def plan(lengths: Sequence[tuple[int, int]], *, num_ranks: int, max_tokens: int) -> Rows:
        scheduler = SimpleNamespace(
            max_seq_len_per_rank=max_tokens,
            total_hdp_gpus=num_ranks,
            min_cp_size=1,
            microbatch_group_size_per_vp_stage=None,
        )
        return names["get_groups_and_subsamples"](scheduler, list(lengths))  # type: ignore[no-any-return]

    return plan


def read_source(source: Path, *, ref: str, path: str) -> str:
    """A file of a checkout, or of a branch or commit of a bare clone."""
    if (source / path).is_file():
        return (source / path).read_text()
    found = subprocess.run(
        ["git", "-C", str(source), "show", f"{ref}:{path}"], check=True, capture_output=True, text=True
    )
    return found.stdout


def _flat(nodes: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module and of its planner of dynamic context parallelism."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == "DefaultDynamicCPScheduler":
            yield from node.body
        else:
            yield node


def _is_wanted(node: ast.stmt, names: set[str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in MODULES
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    return isinstance(node, ast.FunctionDef) and node.name in names
