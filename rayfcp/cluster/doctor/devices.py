"""Checks of devices: that Ray has them, that torch sees them, that a kernel runs on them."""

from collections.abc import Iterator

from rayfcp.cluster.doctor.facts import NOTHING, Facts, Finding, NodeFacts, Verdict

RESOURCES = {"cuda": "GPU", "npu": "NPU"}

INSTALL = {
    "cuda": "install the driver and torch's CUDA build; in a container, run it with the GPUs (--gpus all)",
    "npu": "install the driver, CANN and torch-npu of torch's version; in a container, mount its devices and driver",
    "cpu": "reinstall torch and rayfcp",
    "auto": "reinstall torch and rayfcp",
}
SLOWER = "torch's flash,"
FASTER = "pip install 'rayfcp[flash-attn]' (needs a CUDA toolkit); on Hopper flash-attn 3, from hopper/ of its sources"


def kernels(node: NodeFacts) -> Iterator[Finding]:
    seen = node.accelerators
    if seen.kernel is None:
        yield Finding(
            verdict=Verdict.FAIL,
            what=f"no attention kernel for {seen.kind}: {seen.error[:300]}",
            remedy=INSTALL.get(seen.kind, INSTALL["auto"]),
        )
    elif seen.kernel.startswith(SLOWER):
        yield Finding(verdict=Verdict.WARN, what=f"attention on {seen.kind}: {seen.kernel}", remedy=FASTER)
    else:
        yield Finding(verdict=Verdict.OK, what=f"attention on {seen.kind}: {seen.kernel}")


def seen_by_torch(node: NodeFacts) -> Iterator[Finding]:
    """Torch sees as many as Ray gives out there."""
    seen = node.accelerators
    if node.devices is None:
        if seen.count:
            yield _found(seen.count, seen.kind, ", ".join(seen.names))
        return
    for kind, name in RESOURCES.items():
        offered = int(node.devices.get(name, 0))
        if offered and kind == seen.kind and seen.count == offered:
            yield _found(offered, name, ", ".join(seen.names))
        elif offered:
            have = seen.count if kind == seen.kind else 0
            yield Finding(
                verdict=Verdict.FAIL if have < offered else Verdict.WARN,
                what=f"Ray offers {offered} {name}, torch sees {have}",
                remedy=INSTALL[kind] if have < offered else f"start Ray there with all {have} of them",
            )


def _found(count: int, kind: str, names: str) -> Finding:
    return Finding(verdict=Verdict.OK, what=f"{count} {kind} ({names or 'no names'})")


def enough(facts: Facts) -> Iterator[Finding]:
    """Devices for the run, and CPUs for its workers, planners and controller."""
    needs, cluster = facts.needs, facts.cluster
    if cluster is None:
        return
    have = cluster.resources or NOTHING
    kind = needs.device
    if kind == "auto":
        kind = next((each for each, name in RESOURCES.items() if have.get(name, 0) >= 1), "cpu")
    name = RESOURCES.get(kind)
    least_cpus = needs.min_workers * needs.threads_per_worker + needs.planner_actors + 1
    asked = [(name, needs.min_workers, needs.max_workers)] if name else []
    asked.append(("CPU", least_cpus, least_cpus + (needs.max_workers - needs.min_workers) * needs.threads_per_worker))
    for resource, least, most in asked:
        count = int(have.get(resource, 0))
        what = f"{count} {resource} in the cluster, the run asks for {least}" + (f" to {most}" if most > least else "")
        if count >= least:
            yield Finding(verdict=Verdict.OK, what=what)
        else:
            yield Finding(
                verdict=Verdict.WARN if cluster.autoscales else Verdict.FAIL,
                what=what,
                remedy="the autoscaler may add them"
                if cluster.autoscales
                else "add nodes, or lower cluster.num_workers",
            )


def check(facts: Facts) -> Iterator[tuple[NodeFacts | None, Finding]]:
    """Kernels on nodes that have the run's devices; nodes without, such as a head, need none."""
    for node in facts.nodes:
        name = RESOURCES.get(node.accelerators.kind)
        if node.devices is None or name is None or node.devices.get(name, 0):
            for finding in kernels(node):
                yield node, finding
        for finding in seen_by_torch(node):
            yield node, finding
    for finding in enough(facts):
        yield None, finding
