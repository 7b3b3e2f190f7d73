"""Files, modules, commands and names of code that pages and docstrings mention are in the tree."""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, SAVED

PATH = re.compile(r"(?<![\w./<>*{}:~$-])(?:\.\./)*((?:[\w.-]+/)*[\w-]+\.(?:py|md|ya?ml))\b(?![/\w(])")
DOTTED = re.compile(r"(?<![\w./-])((?:rayfcp|tests|jobs)(?:\.[A-Za-z_]\w*)+)\b(?![/-])")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*?\))?`")
WORD = re.compile(r"[A-Za-z_]\w*")
CODED = re.compile(r"_.|[a-z][A-Z]|^[A-Z][a-z]")
"""What names of code have and words of prose have not."""
REMOVED = re.compile(r"\b[Aa]t\s+(commit\s+)?`?[0-9a-f]{7,}\b")
FOREIGN = set((Path(__file__).parent / "foreign.txt").read_text(encoding="utf-8").split())
"""Names and files, or the first parts of these, of other projects, and files that readers write."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node, at any depth."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            yield each
            yield from statements(each)


class Module:
    """A file's docstrings, the words of its code, those at its top, and bases and words of its classes."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()
        self.path, self.docstrings = path, list[tuple[int, str]]()
        classes = []
        for each in statements(ast.parse("\n".join(lines))):
            match each:
                case ast.ClassDef():
                    classes.append(each)
                case ast.Expr(value=ast.Constant(value=str(text))):
                    self.docstrings.append((each.lineno, text))
                    first, last = each.lineno - 1, each.end_lineno or 0
                    lines[first:last] = [""] * (last - first)
        code = ["" if line.lstrip().startswith("#") else line.partition("  # ")[0] for line in lines]
        self.words = set(WORD.findall("\n".join(code)))
        is_package = path.name == "__init__.py"  # which import when they are used
        self.top = self.words if is_package else set(re.findall(r"(?m)^(?:async |def |class )*(\w+)", "\n".join(code)))
        self.classes = {
            each.name: (
                {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in each.bases}
                - {"NamedTuple", "Protocol", "Sequence"},
                set(WORD.findall("\n".join(code[each.lineno - 1 : each.end_lineno]))),
            )
            for each in classes
        }


class Tree:
    """Paths and names of the whole tree."""

    def __init__(self) -> None:
        files = [
            path for name in ("rayfcp", "jobs", "tests", "docs", "dashboards") for path in (ROOT / name).rglob("*.*")
        ]
        self._places = {f"/{path.relative_to(ROOT)}" for path in [*files, *ROOT.glob("*.*")]}
        parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in files if path.suffix == ".py"}
        gc.disable()  # its passes over a thousand syntax trees take longer than parsing
        self.modules = {".".join(each).removesuffix(".__init__"): Module(path) for path, each in parts.items()}
        gc.enable()
        others = [path for path in files if path.suffix in (".js", ".yaml")] + [ROOT / "Makefile"]
        self.words = {word for path in others for word in WORD.findall(path.read_text(encoding="utf-8"))}
        self.words.update(*parts.values(), *(each.words for each in self.modules.values()))
        self._classes: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
        for module in self.modules.values():
            for name, (bases, words) in module.classes.items():
                self._classes[name][0].update(bases)
                self._classes[name][1].update(words)

    def has(self, owner: str, name: str) -> bool:
        """Return whether an object has a member, as far as its class is in the tree."""
        if owner not in self._classes:
            return name in self.words
        bases, words = self._classes[owner]
        return name in words or any(self.has(base, name) for base in bases)

    def has_module_name(self, name: str) -> bool:
        """Return whether a dotted name is a module, or a name at its top with its members."""
        parts = name.split(".")
        at = next((at for at in range(len(parts), 0, -1) if ".".join(parts[:at]) in self.modules), 0)
        rest = parts[at:]
        found = at > 0 and (not rest or rest[0] in self.modules[".".join(parts[:at])].top)
        return found and all(self.has(*pair) for pair in pairwise(rest))

    def has_name(self, name: str, *, module: Module | None) -> bool:
        """Return whether a name in backticks is one of the code; a private one in a docstring is of the same file."""
        parts, metric = name.split("."), re.sub(r"^(ray_)?rayfcp_", "", name)
        if DOTTED.fullmatch(name) or not (len(parts) > 1 or CODED.search(name)):
            return True
        if name.startswith("_") and len(parts) == 1 and module:
            return name in module.words
        return not self.words.isdisjoint((parts[0], metric)) and all(self.has(*pair) for pair in pairwise(parts))

    def has_path(self, path: str) -> bool:
        return path in SAVED or any(each.endswith(f"/{path}") for each in self._places)

    def unknown(self, text: str, *, module: Module | None = None) -> Iterator[str]:
        """Yield what a text mentions that is not in the tree; code of `jobs` may be "at commit" of an earlier one."""
        for part in re.split(r"\n\s*\n|\n(?=\|)", text):
            had = ("jobs/", "jobs.") if REMOVED.search(part) else ()
            found = [(each, self.has_path(each)) for each in PATH.findall(part)]
            found += [(each, self.has_module_name(each)) for each in DOTTED.findall(part)]
            found += [(each, self.has_name(each, module=module)) for each in NAME.findall(part)]
            for each, is_known in found:
                if not (
                    is_known or each.startswith(had) or {each, Path(each).stem, re.split("[/.]", each)[0]} & FOREIGN
                ):
                    yield each


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree()


def test_pages_name_what_there_is(tree: Tree) -> None:
    pages = [*PAGES, *(ROOT / "jobs").rglob("*.md")]
    found = [f"{page.relative_to(ROOT)}: {each}" for page in pages for each in tree.unknown(page.read_text("utf-8"))]
    assert not found


def test_docstrings_name_what_there_is(tree: Tree) -> None:
    found = [
        f"{module.path.relative_to(ROOT)}:{line}: {each}"
        for module in tree.modules.values()
        for line, text in module.docstrings
        for each in tree.unknown(text, module=module)
    ]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "`execute/" + "scored.py` sums them",
        "see rayfcp." + "simulate.choose",
        "`rayfcp." + "program.lower.raise_it` and more",
        "run `python -m jobs." + "bench.nothing --flag`",
        "`Interpreter." + "scores` of a program",
        "`Check_" + "kept` of all",
        "items `python -m jobs." + "bench.nothing`\n\nanother at commit 0123abcd",
    ],
)
def test_what_is_not_there_is_found(tree: Tree, text: str) -> None:
    assert list(tree.unknown(text))


def test_what_is_there_or_was_is_not(tree: Tree) -> None:
    """A private name is one of the same file; a removed command is named with its commit."""
    lower, interpreter = tree.modules["rayfcp.program.lower"], tree.modules["rayfcp.execute.interpreter"]
    assert not list(tree.unknown("`_sends_in_order` of `lower`, `Programs.forward_part`", module=lower))
    assert list(tree.unknown("`_sends_in_order`", module=interpreter))
    assert not list(
        tree.unknown("`python -m jobs." + "bench.nothing` and `jobs/bench/" + "nothing.py` at commit 0123abcd")
    )
