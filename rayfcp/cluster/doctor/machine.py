"""Checks of each machine: Python, packages, shared memory, file handles."""

from collections.abc import Callable, Iterator

from rayfcp.cluster.doctor.facts import GIB, PYTHON, REQUIRED, Facts, Finding, NodeFacts, Verdict, numbers, size

LEAST_SHM_BYTES = 2 * GIB
LEAST_SHM_SHARE = 0.1
"""Of the memory; Ray itself would take 30 % for its object store."""

LEAST_STORE_BYTES = GIB
LEAST_OPEN_FILES = 8192
GOOD_OPEN_FILES = 65536


def python(node: NodeFacts) -> Iterator[Finding]:
    shown = ".".join(map(str, node.python))
    if node.python[:2] < PYTHON:
        yield Finding(
            verdict=Verdict.FAIL,
            what=f"Python {shown}, must be {PYTHON[0]}.{PYTHON[1]} or newer",
            remedy=f"install Python {PYTHON[0]}.{PYTHON[1]} and rayfcp in an environment of it",
        )
    else:
        yield Finding(verdict=Verdict.OK, what=f"Python {shown}")


def packages(node: NodeFacts) -> Iterator[Finding]:
    wrong = []
    for package, least in REQUIRED.items():
        have = node.versions.get(package)
        if have is None or numbers(have) < numbers(least):
            wrong.append(f"{package}>={least}")
            yield Finding(
                verdict=Verdict.FAIL,
                what=f"{package} {have or 'is missing'}, must be {least} or newer",
                remedy=f"pip install '{package}>={least}'",
            )
    if not wrong:
        shown = ", ".join(f"{name} {node.versions[name]}" for name in ("ray", "torch", "transformers"))
        yield Finding(verdict=Verdict.OK, what=f"{len(REQUIRED)} packages: {shown}")


def ray_extras(node: NodeFacts) -> Iterator[Finding]:
    if node.missing_modules:
        yield Finding(
            verdict=Verdict.FAIL,
            what=f"Ray's extra 'default' is incomplete ({', '.join(node.missing_modules)}): no job server, no metrics",
            remedy="pip install 'ray[default,train]'",
        )
    else:
        yield Finding(verdict=Verdict.OK, what="Ray's extra 'default': dashboard, job server, metrics")


def shared_memory(node: NodeFacts) -> Iterator[Finding]:
    what = f"/dev/shm has {size(node.shm_bytes)}"
    if node.shm_bytes < max(LEAST_SHM_BYTES, LEAST_SHM_SHARE * node.memory_bytes):
        yield Finding(
            verdict=Verdict.WARN,
            what=f"{what} beside {size(node.memory_bytes)} of memory: Ray's object store would be slow or small",
            remedy="docker run --shm-size with a third of the memory; on Kubernetes an emptyDir of medium Memory there",
        )
    else:
        yield Finding(verdict=Verdict.OK, what=what)


def open_files(node: NodeFacts) -> Iterator[Finding]:
    what = f"{node.open_files} open files permitted"
    if node.open_files >= GOOD_OPEN_FILES:
        yield Finding(verdict=Verdict.OK, what=what)
        return
    yield Finding(
        verdict=Verdict.FAIL if node.open_files < LEAST_OPEN_FILES else Verdict.WARN,
        what=f"{what}, should be {GOOD_OPEN_FILES}: connections between many workers fail without",
        remedy=f"ulimit -n {GOOD_OPEN_FILES} before ray start, or nofile in /etc/security/limits.conf",
    )


def object_store(node: NodeFacts) -> Iterator[Finding]:
    """Batches' programs, and what planners and workers hand each other, pass through it."""
    have = (node.devices or {}).get("object_store_memory")
    if have is not None and have < LEAST_STORE_BYTES:
        yield Finding(
            verdict=Verdict.WARN,
            what=f"Ray's object store has {size(have)} there",
            remedy="ray start --object-store-memory with 1073741824 bytes or more, and a /dev/shm that holds it",
        )


CHECKS: tuple[Callable[[NodeFacts], Iterator[Finding]], ...] = (
    python,
    packages,
    ray_extras,
    shared_memory,
    open_files,
    object_store,
)


def check(facts: Facts) -> Iterator[tuple[NodeFacts, Finding]]:
    """All of them on each node."""
    for node in facts.nodes:
        for each in CHECKS:
            for finding in each(node):
                yield node, finding
