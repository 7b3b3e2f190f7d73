"""Control code reaches its surroundings through `Runtime` only."""

import ast
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parents[2] / "rayfcp" / "cluster"

ACTORS = {
    "actors/decoders",
    "actors/planner",
    "recovery/store",
    "runtime/lifetime",
    "runtime/on_ray",
    "workers/environment",
    "workers/worker",
}
"""Code of actors other than the controller, which runs on Ray itself, and the runtime on Ray."""

ON_RAY = ACTORS | {"session/lock"}  # waits for processes of another run

CONTROL = [
    name
    for folder in ("runtime", "facts", "actors", "workers", "recovery", "checkpoints", "session", "jobs")
    for path in sorted((CLUSTER / folder).glob("*.py"))
    if (name := f"{folder}/{path.stem}") not in ON_RAY and path.stem != "__init__"
]

OUTSIDE = {"ray", "time", "threading", "asyncio", "concurrent", "torch", "transformers", "uuid", "random", "socket"}


@pytest.mark.parametrize("name", CONTROL)
def test_control_code_uses_no_other_surroundings(name: str) -> None:
    tree = ast.parse((CLUSTER / f"{name}.py").read_text())
    used = {
        module.split(".")[0]
        for node in ast.walk(tree)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not used & OUTSIDE
