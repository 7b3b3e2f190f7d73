"""Size and shape of the code base: what a restructuring should make smaller.

    python -m jobs.bench.size
    python -m jobs.bench.size --root ../older-checkout

Prints three Markdown tables, from syntax trees alone: nothing is imported, so that an older checkout is measured in the
same way.

1. Files and lines of each package against the budget of `BUDGET`; those of `jobs` and `tests` have none.
2. Import cycles: modules that import each other in a circle (strongly connected components), when they are loaded, and
   with the imports in functions. Left out are imports for type checking, and by names that are computed.
3. Classes with behaviour that have the most constructor arguments and attributes above the limits.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "rayfcp"
TOP = "top-level modules"

BUDGET = {
    ("values", "config"): 3000,
    ("cost",): 4400,
    ("plan",): 8400,
    ("baselines",): 1900,
    ("program",): 3900,
    ("verify",): 1000,
    ("simulate",): 2300,
    ("telemetry",): 3200,
    ("elastic",): 1100,
    ("data",): 4300,
    ("execute",): 8400,
    ("models",): 4000,
    ("cluster",): 9000,
    ("compare", "bench", "commands", TOP): 5000,
    ("adapters",): 1600,
}
"""Lines that top-level packages may have together."""

MOST_ARGUMENTS, MOST_ATTRIBUTES, NUM_CLASSES = 8, 10, 20

Function = ast.FunctionDef | ast.AsyncFunctionDef
Row = Sequence[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Python file; `name` is its path in the checkout."""

    name: str
    module: str
    num_lines: int
    tree: ast.Module

    @property
    def package(self) -> str:
        parts = Path(self.name).parts
        return parts[1] if len(parts) > 2 else TOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Constructor arguments, and attributes that the methods of a class assign."""

    name: str
    arguments: int
    attributes: int

    @property
    def excess(self) -> int:
        return max(self.arguments - MOST_ARGUMENTS, 0) + max(self.attributes - MOST_ATTRIBUTES, 0)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    root = parser.parse_args().root.resolve()
    sources = read_sources(root / PACKAGE)
    cycles = {"loaded": cycles_of(sources, loaded=True), "all imports": cycles_of(sources, loaded=False)}
    classes = sorted(classes_of(sources), key=lambda each: (-each.excess, -each.attributes, each.name))
    budget = budget_rows(sources)
    for name in ("jobs", "tests"):
        lines = [source.num_lines for source in read_sources(root / name)]
        budget.append((f"{name}/", len(lines), sum(lines), "", ""))
    tables = [
        table(("package", "files", "lines", "budget", "over budget"), budget),
        table(
            ("import cycles", "modules", "names"),
            [(name, len(cycle), ", ".join(cycle)) for name, found in cycles.items() for cycle in found],
        ),
        table(
            (f"classes, {sum(each.excess > 0 for each in classes)} over a limit", "arguments", "attributes"),
            [(each.name, each.arguments, each.attributes) for each in classes[:NUM_CLASSES]],
        ),
    ]
    print("\n\n".join(tables))  # noqa: T201


def table(head: Row, rows: Sequence[Row]) -> str:
    """Return a table in Markdown; columns of numbers are aligned to the right."""
    right = [all(isinstance(row[at], int | float) for row in rows) for at in range(len(head))]
    ruler = ["---:" if each else "---" for each in right]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ruler, *rows))


def read_sources(folder: Path) -> list[Source]:
    """Return all Python files in a folder of a checkout, by path.

    Raises:
        SystemExit: there are none.
    """
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder.parent)
        parts = name.with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(
            Source(name=name.as_posix(), module=module, num_lines=len(text.splitlines()), tree=ast.parse(text))
        )
    if not found:
        raise SystemExit(f"{folder} has no Python files; give --root a checkout of the repository")
    return found


def budget_rows(sources: Sequence[Source]) -> list[Row]:
    """Return files, lines and budget by package; a package that `BUDGET` does not name has a budget of 0."""
    known = {name for names in BUDGET for name in names}
    others = {(name,): 0 for name in sorted({source.package for source in sources} - known)}
    rows: list[Row] = []
    for names, budget in (BUDGET | others).items():
        lines = [source.num_lines for source in sources if source.package in names]
        rows.append((" + ".join(names), len(lines), sum(lines), budget, sum(lines) - budget))
    num_lines, total = sum(source.num_lines for source in sources), sum(BUDGET.values())
    return [*rows, (f"{PACKAGE}/", len(sources), num_lines, total, num_lines - total)]


def cycles_of(sources: Sequence[Source], *, loaded: bool) -> list[list[str]]:
    """Return the strongly connected components of two or more modules, the largest first."""
    modules = {source.module: number for number, source in enumerate(sources)}
    edges = [
        (at, modules[each]) for at, source in enumerate(sources) for each in imports(source, modules, loaded=loaded)
    ]
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(modules), len(modules)))
    _, labels = connected_components(graph, directed=True, connection="strong")
    members: dict[int, list[str]] = defaultdict(list)
    for module, number in modules.items():
        members[int(labels[number])].append(module)
    return sorted((each for each in members.values() if len(each) > 1), key=len, reverse=True)


def imports(source: Source, modules: dict[str, Any], *, loaded: bool) -> set[str]:
    """Return the other modules of the package that a file imports; `loaded`: at once, not when functions are called."""
    found = set()
    for node in _import_nodes(source.tree, loaded=loaded):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in modules else f"{node.module}" for each in inner}
    return {each for each in found if each in modules and each != source.module}


def _import_nodes(node: ast.AST, *, loaded: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    children: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = node.orelse
    for child in children:
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (loaded and isinstance(child, Function)):
            yield from _import_nodes(child, loaded=loaded)


def classes_of(sources: Sequence[Source]) -> Iterator[Size]:
    """Yield the size of each class that has methods and is no frozen dataclass, which is a value."""
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef) or any(
                "frozen=True" in ast.unparse(mark) for mark in node.decorator_list
            ):
                continue
            if any(isinstance(each, Function) for each in node.body):
                yield _size(f"{source.name}:{node.lineno} {node.name}", node)


def _size(name: str, node: ast.ClassDef) -> Size:
    """Fields of a dataclass are arguments and attributes."""
    is_dataclass = any("dataclass" in ast.unparse(mark) for mark in node.decorator_list)
    fields = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign) and is_dataclass}
    constructors = [each.args for each in node.body if isinstance(each, Function) and each.name == "__init__"]
    given = [each for args in constructors for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    return Size(name=name, arguments=max(len(given) - 1, len(fields)), attributes=len(assigned | fields))


if __name__ == "__main__":
    main()
