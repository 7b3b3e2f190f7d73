"""Checks of storage: rights and room where the run's folder would be, on every node, and data that all can read."""

from collections.abc import Iterator

from rayfcp.cluster.doctor.facts import GIB, Facts, Finding, NodeFacts, Verdict, size

LEAST_FREE_BYTES = GIB


def rights(node: NodeFacts) -> Iterator[Finding]:
    storage = node.storage
    if storage is None:
        return
    if storage.error:
        yield Finding(
            verdict=Verdict.FAIL,
            what=f"run.dir: nothing can be written in {storage.folder}: {storage.error}",
            remedy="create it for this user, mount the shared storage, or set run.dir elsewhere",
        )
    elif storage.sees_marker is False:
        yield Finding(
            verdict=Verdict.FAIL,
            what=f"run.dir: {storage.folder} is not the same storage as on the driver's node",
            remedy="mount one shared file system there on all nodes, or set run.dir to one",
        )
    else:
        yield Finding(verdict=Verdict.OK, what=f"run.dir: files can be written in {storage.folder}")


def room(node: NodeFacts, *, facts: Facts) -> Iterator[Finding]:
    """For the checkpoints that are kept, and the one that is being written."""
    storage, needs = node.storage, facts.needs
    if storage is None or storage.error:
        return
    free = f"{size(storage.free_bytes)} free in {storage.folder}"
    if needs.checkpoint_bytes is None:
        verdict = Verdict.OK if storage.free_bytes >= LEAST_FREE_BYTES else Verdict.WARN
        yield Finding(verdict=verdict, what=free, remedy="" if verdict is Verdict.OK else "make room for checkpoints")
        return
    number = needs.kept_checkpoints + 1
    what = f"{free}, {number} checkpoints of {size(needs.checkpoint_bytes)} may lie there at a time"
    if storage.free_bytes < number * needs.checkpoint_bytes:
        yield Finding(
            verdict=Verdict.FAIL if storage.free_bytes < needs.checkpoint_bytes else Verdict.WARN,
            what=what,
            remedy="make room, lower checkpoint.keep, or set run.dir elsewhere",
        )
    else:
        yield Finding(verdict=Verdict.OK, what=what)


def data(node: NodeFacts, *, facts: Facts) -> Iterator[Finding]:
    for path in node.missing_paths:
        yield Finding(
            verdict=Verdict.FAIL,
            what=f"{path} is not there or may not be read",
            remedy="mount it on this node, correct the path, or give this user the right to read",
        )
    if facts.needs.paths and not node.missing_paths:
        yield Finding(verdict=Verdict.OK, what=f"{len(facts.needs.paths)} paths of data and model can be read")


def check(facts: Facts) -> Iterator[tuple[NodeFacts | None, Finding]]:
    """Room is asked of the driver's node, for the storage is the same."""
    for driver in facts.nodes[:1]:
        for finding in room(driver, facts=facts):
            yield None, finding
    for node in facts.nodes:
        for finding in (*rights(node), *data(node, facts=facts)):
            yield node, finding
