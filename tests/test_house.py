"""Rules of this code base: small files, small functions, few positional arguments, a light start."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "rayfcp").rglob("*.py"))
ALL_FILES = sorted(
    [*SOURCES, *(path for folder in ("tests", "jobs", "dashboards") for path in (ROOT / folder).rglob("*.py"))]
)
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_POSITIONAL = 600, 40, 2
# Signatures that others fix: autograd, context managers, `rayfcp.attention(q, k, v, program)`, recurrent libraries,
# methods of a Trainer.
FIXED_BY_OTHERS = {
    "forward",
    "backward",
    "__exit__",
    "__call__",
    "attention",
    "linear_recurrence",
    "causal_convolution",
}
FIXED_BY_OTHERS |= {"get_batch_samples", "training_step", "prediction_step"}
# Decorators of `rayfcp.cost.compiled`: numba has no keyword-only arguments. Then functions that Python calls too.
COMPILED = {"compiled", "inner", "inner_with_arrays", "inlined"}
COMPILED_ELSEWHERE = {"head_s", "late_s", "overlapped_s", "pass_s", "phase_share", "recurrent_s"}

FIXED_CONSTRUCTORS = {ROOT / "rayfcp" / "adapters" / "megatron.py"}  # Megatron-LM passes sizes by position

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[Function, bool]]:
    """Each function of the file or of a class in it, and whether it is a method that gets `self` or `cls`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in child.decorator_list)
                yield child, isinstance(node, ast.ClassDef) and not static


def code_lines(function: Function) -> int:
    """Lines of the function without its docstring."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def place(path: Path, function: Function) -> str:
    return f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_FILES}
    assert not [
        f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines >= MAX_FILE_LINES
    ]


def test_functions_are_short() -> None:
    long = [
        f"{place(path, function)}: {code_lines(function)} lines"
        for path in SOURCES
        for function, _ in functions(path)
        if code_lines(function) >= MAX_FUNCTION_LINES
    ]
    assert not long


def test_public_functions_take_few_positional_arguments() -> None:
    wide = [
        place(path, function)
        for path in SOURCES
        for function, is_method in functions(path)
        if not COMPILED & {mark.id for mark in function.decorator_list if isinstance(mark, ast.Name)}
        and (not function.name.startswith("_") or function.name == "__init__")
        and function.name not in FIXED_BY_OTHERS | COMPILED_ELSEWHERE
        and not (function.name == "__init__" and path in FIXED_CONSTRUCTORS)
        and len(function.args.posonlyargs) + len(function.args.args) - is_method > MAX_POSITIONAL
    ]
    assert not wide


LATER = {"torch", "ray", "transformers", "numpy", "pyarrow", "numba"}
"""Imported only where they are needed. Packages that plan and check import numpy."""


@pytest.mark.parametrize(
    ("statement", "due"),
    [
        ("import rayfcp", set()),
        ("from rayfcp.cli import main; main(['--help'])", set()),
        ("import rayfcp.program", {"numpy"}),
    ],
)
def test_start_is_light(statement: str, due: set[str]) -> None:
    check = (
        "import sys\ntry:\n    " + statement + "\nexcept SystemExit:\n    pass\n"
        f"loaded = sorted({LATER - due} & set(sys.modules))\n"
        "sys.exit(f'loaded at start: {loaded}' if loaded else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
