"""Size and shape of the code base, to be compared before and after a restructuring.

    python -m jobs.bench.size
    python -m jobs.bench.size --root ../older-checkout --json older.json

Three Markdown tables are printed; `--json` writes the same figures with the names behind them.

1. Totals over the Python files of the package, from their text and syntax trees. Nothing is imported. Imports that are
   made by name at run time (`importlib.import_module`) are not seen, and `import a.b` counts as an import of `a.b`
   alone, not of the package `a`. A function's length leaves out its docstring, as `tests/test_house.py` does.
2. Lines of each top-level package against a budget.
3. The path of one text batch: which files and lines of the package execute when a batch is planned, lowered, checked
   and run, how often control passes from one file to another, and in which order packages are entered. Two processes
   are the ranks of the quickstart's model, which meet over gloo on this machine's CPU. Rank 0 plans, lowers and checks
   two batches of different lengths, both ranks run them, and rank 0 is traced (`sys.settrace`, main thread) in the
   second. The first is a warm-up: it imports what is imported late, compiles kernels and fills caches, so that neither
   import nor compilation counts. Bodies of numba kernels are compiled code, which has no line events: they do not show
   up, their callers do. Only the training step itself is traced: no controller, no Ray, no snapshot or checkpoint, no
   reading ahead. Compiled kernels are kept beside their sources, or under NUMBA_CACHE_DIR if that is set.

A file switch is a call (or the resumption of a generator) whose file differs from that of the nearest frame of the
package up the stack, so that a call back through torch counts as one from the file that called torch. Polling makes
counts of the run phase differ a little from run to run.
"""

import argparse
import ast
import gc
import importlib
import io
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "rayfcp"
TOP = "top-level modules"

MAX_FUNCTION_LINES, MAX_FILE_LINES, MIN_STRETCH_LINES = 40, 600, 6
OPENINGS = ("What", "Who", "Of", "Whose", "Whether")

BUDGET = (
    (("values", "config"), 2000),
    (("cost",), 3500),
    (("plan",), 8000),
    (("baselines",), 2000),
    (("program",), 3000),
    (("verify",), 1500),
    (("simulate",), 2200),
    (("telemetry",), 3000),
    (("elastic",), 1000),
    (("data",), 3200),
    (("execute",), 5700),
    (("models",), 2600),
    (("cluster",), 6500),
    (("compare", "bench", TOP), 5000),
    (("adapters",), 1500),
)
"""Top-level packages and the lines that they may have together."""

TOTAL_BUDGET = 46_000
"""Lines of the whole package: less than the sum of the budgets, which not every package may use up."""

PHASES = ("plan", "lower", "check", "run")
NUM_RANKS, ROOM, VOCAB = 2, 1000, 256
WARM_UP, MEASURED = (1400, 120, 33, 280, 9, 650), (1500, 90, 41, 300, 5, 700)
"""Lengths: one sequence is longer than a rank's room, and the batch needs two microbatches."""

TIMEOUT_S = 900

Function = ast.FunctionDef | ast.AsyncFunctionDef
Row = Sequence[object]
LayoutCandidate = tuple[int, int]
"""(number of the file, index of the normalised line)."""


def main() -> None:
    args = _parser().parse_args()
    root = args.root.resolve()
    if args.rank is not None:
        _run_rank(root, args.rank, args.folder)
        return
    sources = read_sources(root)
    figures: dict[str, Any] = {"root": str(root), "totals": totals(sources), "packages": package_lines(sources)}
    tables = [totals_table(figures["totals"]), budget_table(figures["packages"])]
    if not args.skip_batch:
        figures["batch"] = trace_batch(root)
        tables.append(batch_table(figures["batch"]))
    print("\n\n".join(tables))  # noqa: T201
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    parser.add_argument("--skip-batch", action="store_true", help="leave out the path of a batch: import nothing")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # how the script starts its own ranks
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def table(head: Row, rows: Sequence[Row]) -> str:
    """Table in Markdown; columns of numbers are aligned to the right."""
    right = [all(isinstance(row[at], int | float) for row in rows) for at in range(len(head))]
    ruler = ["---:" if each else "---" for each in right]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ruler, *rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of the package; `name` is its path in the checkout."""

    name: str
    module: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def package(self) -> str:
        return package_of(self.name)


def package_of(name: str) -> str:
    """The top-level package of a file.

    >>> package_of("rayfcp/plan/batch.py"), package_of("rayfcp/cli.py")
    ('plan', 'top-level modules')
    """
    parts = Path(name).parts
    return parts[1] if len(parts) > 2 else TOP


def read_sources(root: Path) -> list[Source]:
    """All Python files of the package, by path.

    Raises:
        SystemExit: there are none.
    """
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = path.relative_to(root)
        parts = name.with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Source(name=name.as_posix(), module=module, text=text, tree=ast.parse(text)))
    if not found:
        raise SystemExit(f"{root / PACKAGE} has no Python files; give --root a checkout of the repository")
    return found


def totals(sources: Sequence[Source]) -> dict[str, Any]:
    """Section 1; lists of names where the table shows counts."""
    num_lines = {source.name: len(source.lines) for source in sources}
    comments = Counter(kind for source in sources for kind in comment_lines(source))
    documented = [text for source in sources for text in docstrings(source.tree)]
    openings = Counter(word[0] for text in documented if (word := re.match(r"\w+", text.lstrip())))
    raises = [found for source in sources for node in ast.walk(source.tree) if (found := _raised(node)) is not None]
    return {
        "files": len(sources),
        "lines": sum(num_lines.values()),
        "imported_once": imported_once(sources),
        "long_functions": [name for source in sources for name in long_functions(source)],
        "long_files": [name for name, lines in num_lines.items() if lines > MAX_FILE_LINES],
        "comment_lines": dict(comments),
        "cycles": import_cycles(sources),
        "docstrings": len(documented),
        "openings": {word: openings[word] for word in OPENINGS},
        "raises": len(raises),
        "raises_with_value": sum(raises),
        "duplicates": duplicates(sources),
    }


def totals_table(found: dict[str, Any]) -> str:
    """Report as text."""
    lines, comments, raises, repeated = (found[name] for name in ("lines", "comment_lines", "raises", "duplicates"))
    of_init = sum(each["by"].endswith("__init__.py") for each in found["imported_once"])
    share = 100 * found["raises_with_value"] / max(raises, 1)
    rows: list[Row] = [
        ("Python files", found["files"]),
        ("lines", lines),
        ("files imported by exactly one other file", f"{len(found['imported_once'])} ({of_init} by an `__init__.py`)"),
        (f"functions over {MAX_FUNCTION_LINES} lines", len(found["long_functions"])),
        (f"files over {MAX_FILE_LINES} lines", len(found["long_files"])),
        ("comment lines per 100 lines", f"{100 * comments.get('whole', 0) / lines:.2f}"),
        ("lines with a trailing comment per 100 lines", f"{100 * comments.get('trailing', 0) / lines:.2f}"),
        ("import cycles", f"{len(found['cycles'])} ({sum(map(len, found['cycles']))} modules)"),
        ("docstrings", found["docstrings"]),
        *((f'docstrings that begin with "{word}"', count) for word, count in found["openings"].items()),
        ("`raise` of a call that names a value", f"{found['raises_with_value']} of {raises} ({share:.0f} %)"),
        (f"duplicated stretches of {MIN_STRETCH_LINES} or more lines", repeated["stretches"]),
        ("lines of these stretches, each text once", repeated["stretch_lines"]),
        ("lines that stand in such a stretch, all places", repeated["covered_lines"]),
    ]
    return table(("totals", "value"), rows)


def comment_lines(source: Source) -> list[str]:
    """Kind of each line with a comment: `whole` if it is nothing else, or `trailing`."""
    lines = source.lines
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    comments = [token.start for token in tokens if token.type == tokenize.COMMENT]
    return ["trailing" if lines[row - 1][:column].strip() else "whole" for row, column in comments]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Texts that stand as statements: of modules, classes and functions, and behind the names that they describe."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def long_functions(source: Source) -> list[str]:
    """Those over the limit without their docstrings, methods and inner functions included."""
    return [
        f"{source.name}:{node.lineno} {node.name}"
        for node in ast.walk(source.tree)
        if isinstance(node, Function) and _code_lines(node) > MAX_FUNCTION_LINES
    ]


def _code_lines(function: Function) -> int:
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def _raised(node: ast.AST) -> bool | None:
    """True if a raised call's arguments format or name a value; None unless the node raises a call."""
    if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
        return None
    given = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
    return any(isinstance(part, ast.FormattedValue | ast.Name) for each in given for part in ast.walk(each))


def imported_once(sources: Sequence[Source]) -> list[dict[str, str]]:
    """Files that exactly one other file imports, anywhere in it, each with the file that does."""
    modules = {source.module: source.name for source in sources}
    importers: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for module in imports(source, modules, at_start=False):
            importers[modules[module]].add(source.name)
    return [{"file": name, "by": min(found)} for name, found in sorted(importers.items()) if len(found) == 1]


def import_cycles(sources: Sequence[Source]) -> list[list[str]]:
    """Modules that import each other in a circle when they are loaded, directly or through others."""
    modules = {source.module: number for number, source in enumerate(sources)}
    edges = [
        (number, modules[target])
        for number, source in enumerate(sources)
        for target in imports(source, modules, at_start=True)
    ]
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(modules), len(modules)))
    _, labels = connected_components(graph, directed=True, connection="strong")
    members: dict[int, list[str]] = defaultdict(list)
    for module, number in modules.items():
        members[int(labels[number])].append(module)
    return [each for each in members.values() if len(each) > 1]


def imports(source: Source, modules: dict[str, Any], *, at_start: bool) -> set[str]:
    """Other modules of the package that a file imports by absolute names; `at_start`: when it is loaded, so neither in
    functions nor for type checking."""
    found = set()
    for node in _import_nodes(source.tree, at_start=at_start):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        inner = {f"{node.module}.{alias.name}" for alias in node.names}
        found |= {each if each in modules else f"{node.module}" for each in inner}
    return {each for each in found if each in modules and each != source.module}


def _import_nodes(node: ast.AST, *, at_start: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    children: Sequence[ast.AST] = list(ast.iter_child_nodes(node))
    if at_start and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = node.orelse
    for child in children:
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (at_start and isinstance(child, Function)):
            yield from _import_nodes(child, at_start=at_start)


def duplicates(sources: Sequence[Source]) -> dict[str, Any]:
    """Stretches of equal lines that stand in two places, each as long as it is equal, and the lines that they cover.

    Lines are compared without indentation; blank lines, comments and imports are left out. Places in one file do not
    overlap.
    """
    numbered = [_normalised(source) for source in sources]
    texts = [[text for _, text in each] for each in numbered]
    places: dict[tuple[str, ...], list[LayoutCandidate]] = defaultdict(list)
    for number, lines in enumerate(texts):
        for at in range(len(lines) - MIN_STRETCH_LINES + 1):
            places[tuple(lines[at : at + MIN_STRETCH_LINES])].append((number, at))
    found: dict[tuple[str, ...], set[LayoutCandidate]] = defaultdict(set)
    for spots in places.values():
        for one, other in itertools.combinations(spots, 2):
            length = _common_length(texts, one, other)
            if length >= MIN_STRETCH_LINES:
                found[tuple(texts[one[0]][one[1] : one[1] + length])] |= {one, other}
    covered = {(number, at + i) for text, spots in found.items() for number, at in spots for i in range(len(text))}
    return {
        "stretches": len(found),
        "stretch_lines": sum(map(len, found)),
        "covered_lines": len(covered),
        "places": [
            {"lines": len(text), "at": [f"{sources[number].name}:{numbered[number][at][0]}" for number, at in spots]}
            for text, spots in sorted((text, sorted(spots)) for text, spots in found.items())
        ],
    }


def _normalised(source: Source) -> list[tuple[int, str]]:
    """Line numbers and stripped lines."""
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {number for node in nodes for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    stripped = [(number, line.strip()) for number, line in enumerate(source.lines, 1) if number not in imported]
    return [(number, line) for number, line in stripped if line and not line.startswith("#")]


def _common_length(texts: Sequence[list[str]], one: LayoutCandidate, other: LayoutCandidate) -> int:
    """Length of the text that is equal from two places on; 0 if it begins before them."""
    (left, at), (right, there) = one, other
    if at and there and texts[left][at - 1] == texts[right][there - 1]:
        return 0
    pairs = zip(texts[left][at:], texts[right][there:], strict=False)
    length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(length, there - at) if left == right else length


def package_lines(sources: Sequence[Source]) -> dict[str, int]:
    """Number of lines of each top-level package."""
    return dict(Counter(source.package for source in sources for _ in source.lines))


def budget_table(lines: dict[str, int]) -> str:
    """Section 2; a package without a budget has a row of its own, with a budget of 0."""
    known = {name for names, _ in BUDGET for name in names}
    others = tuple(((name,), 0) for name in sorted(set(lines) - known))
    rows: list[Row] = []
    for names, budget in (*BUDGET, *others):
        count = sum(lines.get(name, 0) for name in names)
        rows.append((" + ".join(names), count, budget, count - budget))
    total = sum(lines.values())
    rows.append(("total", total, TOTAL_BUDGET, total - TOTAL_BUDGET))
    return table(("package", "lines", "budget", "over budget"), rows)


def trace_batch(root: Path) -> dict[str, Any]:
    """Section 3, by processes of their own, so that the package is imported from `root`.

    Raises:
        SystemExit: a rank failed, and has written why, or all take too long.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with TemporaryDirectory() as name:
        command = [sys.executable, "-P", __file__, "--root", str(root), "--folder", name]
        processes = [subprocess.Popen([*command, "--rank", f"{rank}"], env=environment) for rank in range(NUM_RANKS)]
        codes: list[int | None] = [None] * NUM_RANKS
        until_s = time.monotonic() + TIMEOUT_S
        try:
            while None in codes and not any(codes) and time.monotonic() < until_s:
                time.sleep(0.1)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()  # does nothing to one that has ended
        if codes != [0] * NUM_RANKS:
            raise SystemExit(f"the ranks of the batch ended with {codes}; --skip-batch leaves them out")
        return dict(json.loads((Path(name) / "traced.json").read_text(encoding="utf-8")))


def batch_table(found: dict[str, Any]) -> str:
    """Report as text; a package is re-entered where an earlier phase has entered and, at its end, left it."""
    rows: list[Row] = []
    for at, phase in enumerate(PHASES):
        traced = found["phases"][phase]
        earlier = {
            package: [other for other in PHASES[:at] if package in found["phases"][other]["entries"]]
            for package in traced["entries"]
        }
        again = [f"{package} (after {', '.join(others)})" for package, others in earlier.items() if others]
        order = ", ".join(f"{package} {count}" for package, count in traced["entries"].items())
        rows.append((phase, len(traced["files"]), traced["lines"], traced["switches"], order, ", ".join(again)))
    switches = sum(found["phases"][phase]["switches"] for phase in PHASES)
    rows.append(("all", len(found["files"]), found["lines"], switches, "", ""))
    columns = ("files", "lines", "file switches", "packages by first entry, with calls from others", "re-entered")
    return table(("phase", *columns), rows)


class Trace:
    """Events of this thread in files of the package while it is `on`."""

    def __init__(self, root: Path) -> None:
        self._folder, self._prefix = f"{root}{os.sep}", f"{root / PACKAGE}{os.sep}"
        self.lines: set[tuple[str, int]] = set()
        self.switches = 0
        self.entries = Counter[str]()

    @contextmanager
    def on(self) -> Iterator[None]:
        gc.collect()
        gc.disable()  # finalizers run when their turn comes, not in the middle of anything
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            gc.enable()

    def _called(self, frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(self._prefix):
            return None
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._prefix):
            caller = caller.f_back
        before = caller.f_code.co_filename if caller is not None else ""
        self.switches += before != name
        if not before or self._package(before) != self._package(name):
            self.entries[self._package(name)] += 1
        return self._went_on

    def _went_on(self, frame: FrameType, event: str, _arg: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._went_on

    def _package(self, name: str) -> str:
        return package_of(name.removeprefix(self._folder))

    def files(self) -> list[str]:
        """Files of which a line was executed."""
        return sorted({name.removeprefix(self._folder) for name, _ in self.lines})


class Names:
    """Public functions and classes of a checkout, wherever its layout has them."""

    def __init__(self, root: Path) -> None:
        self._homes: dict[str, list[str]] = defaultdict(list)
        for source in read_sources(root):
            for node in source.tree.body:
                if isinstance(node, Function | ast.ClassDef):
                    self._homes[node.name].append(source.module)

    def __getattr__(self, name: str) -> Any:
        homes = self._homes[name]
        if len(homes) != 1:
            raise AttributeError(f"{name} is defined in {homes or 'no file'}, must be in exactly one")
        return getattr(importlib.import_module(homes[0]), name)


class Rank:
    """One rank of a run of the quickstart's model, from the lengths of a batch to the update of its weights."""

    def __init__(self, root: Path, number: int, folder: Path) -> None:
        import torch.distributed as dist

        import rayfcp

        self._programs = dist.FileStore(str(folder / "programs"), NUM_RANKS)
        self._programs.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._names = names = Names(root)
        self._number, self._config = number, rayfcp.load_config(root / "jobs" / "quickstart.yaml")
        library = names.model_config(self._config.model, vocab_size=VOCAB)
        self._model = names.profile_of(library, name="quickstart")
        self._cost = names.CostModel.from_profiles(
            self._model,
            names.hardware_profile("cpu"),
            num_ranks=NUM_RANKS,
            bytes_per_element=4,
            reduce_every=self._config.train.reduce_every,
        )
        self.engine = self._joined(library, folder)

    def _joined(self, library: Any, folder: Path) -> Any:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        data_dir = self._prepared(folder / f"data-{self._number}")
        engine = self._names.RankEngine(self._config, device=torch.device("cpu"), data_dir=data_dir)
        engine.join(
            type(engine.position)(rank=self._number, num_ranks=NUM_RANKS),
            store=lambda: dist.FileStore(str(folder / "store"), NUM_RANKS),
            make_model=lambda world: self._names.sharded_model(library, run=self._config.model, seed=0, world=world),
            hidden_size=self._model.hidden_size,
            layers_of_stage=(self._model.num_layers,),
        )
        return engine

    def _prepared(self, folder: Path) -> str:
        """Random tokens of both batches, as a run reads them."""
        import pyarrow as pa
        from pyarrow import parquet

        folder.mkdir()
        random = np.random.default_rng(0)
        rows = [random.integers(0, VOCAB, length, np.int32) for length in (*WARM_UP, *MEASURED)]
        parquet.write_table(pa.table({"input_ids": rows}), folder / "rows.parquet")
        data = self._names.DataConfig(paths=(str(folder / "rows.parquet"),), format="parquet")
        self._names.prepare_local(data, out_dir=str(folder / "shards"))
        return str(folder / "shards")

    def step(self, number: int, *, first: int, traced: Callable[[str], AbstractContextManager[None]]) -> None:
        """Train on one batch: the rows from `first` on; each phase in the context of its name."""
        lengths = (*WARM_UP, *MEASURED)[first : first + len(MEASURED)]
        specs = [self._names.SequenceSpec(id=i, num_tokens=n, num_targets=n - 1) for i, n in enumerate(lengths)]
        samples = [
            self._names.Sample(id=row, shard=0, row=row, start=0, stop=n, num_targets=n - 1)
            for row, n in enumerate(lengths, first)
        ]
        batch = self._names.GlobalBatch(step=number, epoch=0, samples=tuple(samples))
        if self._number == 0:
            self._programs.set(f"{number}", pickle.dumps(self._lowered(specs, traced)))
        program = pickle.loads(self._programs.get(f"{number}"))[self._number]
        with traced("run"):
            self.engine.run_step(program, batch, plan_hash=program.plan_hash)

    def _lowered(self, specs: list[Any], traced: Callable[[str], AbstractContextManager[None]]) -> Any:
        """Programs of all ranks, checked."""
        import rayfcp
        from rayfcp.plan.layout import placements_of

        plan_batch, lower, check_progress = rayfcp.plan_batch, rayfcp.lower, self._names.check_progress
        cluster = self._names.ClusterSpec(num_ranks=NUM_RANKS, max_tokens_per_rank=ROOM)
        options, reduce_every = self._config.plan, self._config.train.reduce_every
        with traced("plan"):
            plan = plan_batch(specs, cluster=cluster, cost=self._cost, strategy=options.strategy, options=options)
            placements = placements_of(plan, specs)  # as the planner does, which needs them for its report as well
        with traced("lower"):
            programs = lower(plan, specs, placements=placements, reduce_every=reduce_every)
        with traced("check"):
            check_progress(programs)
        return programs


def _run_rank(root: Path, number: int, folder: Path) -> None:
    """Warm up, then do a step that rank 0 traces and writes down; all other ranks take part in it."""
    rank = Rank(root, number, folder)
    traces = {phase: Trace(root) for phase in PHASES}
    rank.step(1, first=0, traced=lambda _: nullcontext())
    rank.step(2, first=len(WARM_UP), traced=lambda name: traces[name].on() if number == 0 else nullcontext())
    rank.engine.close()
    if number == 0:
        (folder / "traced.json").write_text(json.dumps(_traced(traces)), encoding="utf-8")


def _traced(traces: dict[str, Trace]) -> dict[str, Any]:
    return {
        "phases": {
            phase: {
                "files": trace.files(),
                "lines": len(trace.lines),
                "switches": trace.switches,
                "entries": dict(trace.entries),
            }
            for phase, trace in traces.items()
        },
        "files": sorted({name for trace in traces.values() for name in trace.files()}),
        "lines": len(set().union(*(trace.lines for trace in traces.values()))),
    }


if __name__ == "__main__":
    main()
