"""Mutation test of the control code by the simulated runs alone: how many mutants do they kill?

    python -m tests.simulated.mutants --count 80

Each mutant changes one place of the control code: a comparison, a condition, a number, a call that is left out. It is
killed when one of the schedules breaks an invariant, raises, or does not end. Mutants of messages and logs are not
drawn.
"""

import argparse
import ast
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

CONTROL = (
    *("actors.pool", "actors.plan_queue", "checkpoints.saving", "driver.following"),
    *("jobs.controller", "jobs.evaluate", "jobs.learning", "jobs.train", "recovery.stores"),
    *(
        "session.devices",
        "session.losses",
        "session.opening",
        "session.session",
        "session.state",
        "workers.calls",
        "workers.group",
        "workers.starting",
    ),
)
ELASTIC = ("hang", "recoverable", "size")

MODULES = (*(f"rayfcp.cluster.{name}" for name in CONTROL), *(f"rayfcp.elastic.{name}" for name in ELASTIC))

SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

LOGGING = {
    "_announce",
    "_log",
    "info",
    "warning",
    "exception",
    "log",
    "set_standing_by",
    "set_checkpoint",
    "set_copy",
    "set_process_groups",
}
"""Calls that only log or report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place that can be changed: number `number` of the module's."""

    module: str
    number: int
    line: int
    what: str


class Mutator(ast.NodeTransformer):
    """Counts the places of a module, and changes the one with number `wanted`."""

    def __init__(self, wanted: int = -1) -> None:
        self._wanted = wanted
        self.sites: list[tuple[int, str]] = []

    def _is_wanted(self, node: Any, what: str) -> bool:
        self.sites.append((node.lineno, what))
        return len(self.sites) - 1 == self._wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        swapped = SWAPPED.get(type(node.ops[0]))
        if swapped is not None and self._is_wanted(node, f"{type(node.ops[0]).__name__} -> {swapped.__name__}"):
            node.ops[0] = swapped()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        if self._is_wanted(node, f"{type(node.op).__name__} -> {type(other).__name__}"):
            node.op = other
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if all(_only_logs(each) for each in node.body) and not node.orelse:
            return node
        self.generic_visit(node)
        if self._is_wanted(node, "if -> if not"):
            node.test = ast.copy_location(ast.UnaryOp(op=ast.Not(), operand=node.test), node.test)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Add | ast.Sub) and self._is_wanted(node, "+ <-> -"):
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_number = isinstance(node.value, int) and not isinstance(node.value, bool)
        if is_number and self._is_wanted(node, f"{node.value} -> {node.value + 1}"):  # type: ignore[operator]
            return ast.copy_location(ast.Constant(node.value + 1), node)  # type: ignore[operator]
        if isinstance(node.value, bool) and self._is_wanted(node, f"{node.value} -> {not node.value}"):
            return ast.copy_location(ast.Constant(not node.value), node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in LOGGING:
                return node  # and nothing within it
            if self._is_wanted(node, f"{ast.unparse(called)}() left out"):
                return ast.copy_location(ast.Pass(), node)
        self.generic_visit(node)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # its message

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Neither defaults and annotations, nor functions that only make text."""
        if not (isinstance(node.returns, ast.Name) and node.returns.id == "str"):
            node.body = [self.visit(each) for each in node.body]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg in ("strict", "reason", "message") else self.generic_visit(node)


def _only_logs(statement: ast.stmt) -> bool:
    called = statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in LOGGING


def source_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def sites() -> Iterator[Site]:
    for module in MODULES:
        mutator = Mutator()
        mutator.visit(ast.parse(source_of(module).read_text()))
        for number, (line, what) in enumerate(mutator.sites):
            yield Site(module=module, number=number, line=line, what=what)


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutated module."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._site.module:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(source_of(name)))

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        path = source_of(self._site.module)
        tree = Mutator(self._site.number).visit(ast.parse(path.read_text()))
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)


def verdict(site: Site, *, schedules: int, limit_s: int) -> str:
    """Reason for which the mutant was killed, run in a fork; empty if it survives."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # of this process alone, whatever else the machine does
        signal.alarm(20 * limit_s)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.meta_path.insert(0, Loader(site))
        told = ""
        try:
            told = _judged(schedules)
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told[:300].encode(errors="replace"))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return told if status == 0 else f"did not end within {limit_s} s of CPU time"


def _judged(schedules: int) -> str:
    from tests.simulated import test_going_on, test_scenarios
    from tests.simulated.run import simulate
    from tests.simulated.schedule import draw
    from tests.simulated.world import ViolationError

    for name, scenario in [*vars(test_scenarios).items(), *vars(test_going_on).items()]:
        if name.startswith("test_"):
            try:
                with TemporaryDirectory() as folder:
                    scenario(*[Path(folder)] * ("tmp_path" in scenario.__annotations__))
            except (Exception, ViolationError) as error:
                return f"{name}: {type(error).__name__} {str(error).splitlines()[:1]}"
    for seed in range(schedules):
        try:
            simulate(draw(seed))
        except ViolationError as error:
            return f"seed {seed}: {str(error).splitlines()[0]}"
    return ""


def preload() -> None:
    """Everything that takes long to import and is not mutated."""
    import rayfcp.data
    import rayfcp.plan
    import rayfcp.telemetry.metrics
    import rayfcp.telemetry.report  # noqa: F401


def drawn(count: int, *, seed: int) -> Sequence[Site]:
    found = list(sites())
    return random.Random(seed).sample(found, min(count, len(found)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=80, help="mutants (default: 80)")
    parser.add_argument("--schedules", type=int, default=200, help="schedules that each has to survive (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--limit-s", type=int, default=120, help="CPU time of each mutant (default: 120)")
    arguments = parser.parse_args()
    preload()
    chosen, start_s, survivors = drawn(arguments.count, seed=arguments.seed), time.perf_counter(), []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda site: verdict(site, schedules=arguments.schedules, limit_s=arguments.limit_s), chosen)
        for site, told in zip(chosen, found, strict=True):
            survivors += [] if told else [site]
            print(f"{site.module}:{site.line} {site.what}: {told or 'SURVIVES'}", flush=True)  # noqa: T201
    killed = len(chosen) - len(survivors)
    print(  # noqa: T201
        f"{killed} of {len(chosen)} mutants killed ({killed / len(chosen):.0%}) of {len(list(sites()))} possible, in "
        f"{time.perf_counter() - start_s:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
