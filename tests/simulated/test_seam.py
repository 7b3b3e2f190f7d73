"""Control code reaches its surroundings through `Runtime` only."""

import ast
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parents[2] / "rayfcp" / "cluster"

CONTROL = [
    *("adoption", "asking", "controller", "costs", "crew", "decoders", "fleet", "following", "gathering", "guard"),
    *("hanging", "keeping", "losses", "members", "nodes", "paces", "placement", "planners", "recording", "recruits"),
    *("reporting", "restoring", "resuming", "saving", "startup", "stepping", "training", "transitions", "whole"),
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
