"""Checks of a machine or cluster: functions of facts that yield findings, each with a remedy unless all is well."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from packaging.version import Version

from rayfcp.cluster.recovery.room import COPY_BYTES, MEMORY_SHARE, copies_of_state
from rayfcp.cluster.tools.doctor.facts import (
    GIB,
    PYTHON,
    REQUIRED,
    Facts,
    Finding,
    NodeFacts,
    Verdict,
    size,
)
from rayfcp.values.devices import AUTO, CPU, DEVICES, DeviceInfo, device_in

LEAST_SHM_BYTES, LEAST_SHM_SHARE = 2 * GIB, 0.1
"""Size of /dev/shm, and its share of the memory; Ray itself would take 30 % for its object store."""

LEAST_STORE_BYTES = GIB
LEAST_OPEN_FILES, GOOD_OPEN_FILES = 8192, 65536
LEAST_FREE_BYTES = GIB
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 60.0
OVERSUBSCRIBED = 4
"""Threads per core beyond which a run on CPUs is pointless: every exchange waits for ranks without a core."""

WORKER_BYTES = GIB // 2
"""Memory of one worker process without model and activations: Python, torch, transformers, Ray."""

CHECKPOINT_BYTES, STATE_BYTES = COPY_BYTES, 16
"""Per trained parameter: the fp32 value and Adam's two moments; with the gradient."""

SAME_EVERYWHERE = ("ray", "torch")
"""Packages with the same version on all nodes."""

TOKEN_PLACES = "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
SLOWER = "torch's flash,"
FASTER = (
    "on Hopper and Blackwell pip install flash-attn-4 (no build), or on Hopper flash-attn 3, from hopper/ of its "
    "sources; elsewhere pip install 'rayfcp[flash-attn]' (needs a CUDA toolkit)"
)
LINEAR = "; models that have such layers run faster with pip install 'rayfcp[linear]' (needs a CUDA toolkit)"

Findings = Iterator[Finding]


def check(what: str, remedy: str = "", *, well: bool = False, fails: bool = True) -> Finding:
    """Return the finding of a check: all is `well`, or the run `fails`, or else a warning."""
    if well:
        return Finding(verdict=Verdict.OK, what=what)
    return Finding(verdict=Verdict.FAIL if fails else Verdict.WARN, what=what, remedy=remedy)


def ok(what: str) -> Finding:
    return check(what, well=True)


def warn(what: str, remedy: str) -> Finding:
    return check(what, remedy, fails=False)


# Each node.


def software(node: NodeFacts) -> Findings:
    """Python, rayfcp's dependencies, and Ray's dashboard."""
    shown, least = ".".join(map(str, node.python)), f"{PYTHON[0]}.{PYTHON[1]}"
    if node.python[:2] < PYTHON:
        remedy = f"install Python {least} and rayfcp in its environment"
        yield check(f"Python {shown}, must be {least} or newer", remedy)
    else:
        yield ok(f"Python {shown}")
    wrong = {
        package: have
        for package, least in REQUIRED.items()
        if (have := node.versions.get(package)) is None or Version(have).release < Version(least).release
    }
    for package, have in wrong.items():
        least = REQUIRED[package]
        yield check(f"{package} {have or 'is missing'}, must be {least} or newer", f"pip install '{package}>={least}'")
    if not wrong:
        shown = ", ".join(f"{name} {node.versions.get(name)}" for name in ("ray", "torch", "transformers"))
        yield ok(f"{len(REQUIRED)} packages: {shown}")
    if node.missing_modules:
        missing = ", ".join(node.missing_modules)
        what = f"Ray's extra 'default' is incomplete ({missing}): no job server, no metrics"
        yield check(what, "pip install 'ray[default,train]'")
    else:
        yield ok("Ray's extra 'default': dashboard, job server, metrics")


def limits(node: NodeFacts) -> Findings:
    """Shared memory, open files, and Ray's object store, which all programs from planners to workers pass through."""
    what = f"/dev/shm has {size(node.shm_bytes)}"
    if node.shm_bytes < max(LEAST_SHM_BYTES, LEAST_SHM_SHARE * node.memory_bytes):
        what += f", the memory {size(node.memory_bytes)}: Ray's object store would be slow or small"
        remedy = "docker run --shm-size with a third of the memory; on Kubernetes an emptyDir of medium Memory there"
        yield warn(what, remedy)
    else:
        yield ok(what)
    what = f"{node.open_files} open files permitted"
    if node.open_files < GOOD_OPEN_FILES:
        what += f", should be {GOOD_OPEN_FILES}: connections between many workers fail otherwise"
        remedy = f"ulimit -n {GOOD_OPEN_FILES} before ray start, or nofile in /etc/security/limits.conf"
        yield check(what, remedy, fails=node.open_files < LEAST_OPEN_FILES)
    else:
        yield ok(what)
    have = (node.devices or {}).get("object_store_memory")
    if have is not None and have < LEAST_STORE_BYTES:
        remedy = "ray start --object-store-memory with 1073741824 bytes or more, and a /dev/shm that holds it"
        yield warn(f"Ray's object store has {size(have)} there", remedy)


def kernels(node: NodeFacts) -> Findings:
    """Attention kernel for the run's devices; nodes without any, such as a head, need none."""
    seen = node.accelerators
    device = DEVICES.get(seen.kind, CPU)
    if node.devices is not None and device.resource is not None and not node.devices.get(device.resource, 0):
        return
    if seen.kernel is None:
        yield check(f"no attention kernel for {seen.kind}: {seen.error[:300]}", device.install)
    else:
        what = f"attention on {seen.kind}: {seen.kernel}"
        yield check(what, FASTER, well=not seen.kernel.startswith(SLOWER), fails=False)
    if seen.recurrence and device.resource is not None:
        by_torch = any(each.startswith("torch's") for each in seen.recurrence)
        yield ok(f"recurrent layers on {seen.kind}: {', '.join(seen.recurrence)}{LINEAR if by_torch else ''}")


def environment(node: NodeFacts) -> Findings:
    """Variables of the device's libraries that rayfcp leaves as the user has set them."""
    settings = DEVICES.get(node.accelerators.kind, CPU).environment
    for name, value, reason in settings:
        if node.environment.get(name, value) != value:
            what = f"{name} is {node.environment[name]} there, rayfcp would set {value}: otherwise {reason}"
            yield warn(what, "unset it before ray start, unless it is meant")
    if settings:
        yield ok(f"workers set {', '.join(f'{name}={value}' for name, value, _ in settings)}")


def devices_in_torch(node: NodeFacts) -> Findings:
    """Devices that Ray offers, compared with those that torch finds there."""
    seen = node.accelerators
    names = ", ".join(seen.names) or "no names"
    if node.devices is None:
        if seen.count:
            yield ok(f"{seen.count} {seen.kind} ({names})")
        return
    for kind, info in DEVICES.items():
        offered = int(node.devices.get(info.resource or "", 0))
        have = seen.count if kind == seen.kind else 0
        what = f"Ray offers {offered} {info.resource}, torch sees {have}"
        if offered and have < offered:
            yield check(what, info.install)
        elif have > offered > 0:
            yield warn(what, f"start Ray there with all {have} of them")
        elif offered:
            yield ok(f"{offered} {info.resource} ({names})")


def files(node: NodeFacts) -> Findings:
    """Run directory, data and model."""
    found = node.storage
    if found is not None and found.error:
        remedy = "create it for this user, mount the shared storage, or set run.dir elsewhere"
        yield check(f"run.dir: nothing can be written in {found.folder}: {found.error}", remedy)
    elif found is not None and found.sees_marker is False:
        remedy = "mount one shared file system there on all nodes, or set run.dir to one"
        yield check(f"run.dir: {found.folder} is not the same storage as on the driver's node", remedy)
    elif found is not None:
        yield ok(f"run.dir: files can be written in {found.folder}")
    for path in node.missing_paths:
        remedy = "mount it on this node, correct the path, or give this user the right to read"
        yield check(f"{path} does not exist or may not be read", remedy)
    if node.num_paths and not node.missing_paths:
        yield ok(f"{node.num_paths} paths of data and model can be read")


def connection(node: NodeFacts) -> Findings:
    """Clock, by the part of the difference that is certain, without the round trip; and a port of the driver."""
    ahead_s = max(0.0, abs(node.clock_ahead_s) - node.clock_within_s)
    if ahead_s >= CLOCK_WARN_S:
        what = f"the clock differs from the driver's by {ahead_s:.1f} s: drain notices and charts are off by that"
        yield check(what, "synchronise clocks (chrony or systemd-timesyncd)", fails=ahead_s >= CLOCK_FAIL_S)
    if node.reaches_driver is False:
        what = "the driver's node cannot be reached on a free port: workers could not connect"
        yield check(what, "permit all TCP ports between the nodes of the cluster")


# The machine or cluster as a whole.


def checkpoint_space(facts: Facts) -> Findings:
    """Space for the checkpoints that are kept and the one being written, on the driver's node: storage is shared."""
    found = facts.nodes[0].storage if facts.nodes else None
    if found is None or found.error:
        return
    free = f"{size(found.free_bytes)} free in {found.folder}"
    if facts.num_parameters is None:
        yield check(free, "free space for checkpoints", well=found.free_bytes >= LEAST_FREE_BYTES, fails=False)
        return
    each_bytes, number = CHECKPOINT_BYTES * facts.num_parameters, facts.config.checkpoint.keep + 1
    yield check(
        f"{free}, up to {number} checkpoints of {size(each_bytes)}",
        "free space, lower checkpoint.keep, or set run.dir elsewhere",
        well=found.free_bytes >= number * each_bytes,
        fails=found.free_bytes < each_bytes,
    )


def _device(facts: Facts) -> DeviceInfo:
    """Kind of device that the run would use."""
    if facts.config.cluster.device != AUTO:
        return DEVICES[facts.config.cluster.device]
    if facts.cluster is not None:
        return device_in(facts.cluster.resources)
    return DEVICES.get(facts.nodes[0].accelerators.kind, CPU)


def cluster_resources(facts: Facts) -> Findings:
    """Devices for the run, and CPUs for its workers, planners and controller."""
    config, cluster = facts.config, facts.cluster
    if cluster is None:
        return
    least, most, threads = config.cluster.min_workers, config.cluster.max_workers, config.train.threads_per_worker
    others = config.plan.planner_bounds[0] + 1
    wanted = [("CPU", least * threads + others, most * threads + others)]
    if name := _device(facts).resource:
        wanted.insert(0, (name, least, most))
    remedy = "the autoscaler may add them" if cluster.autoscales else "add nodes, or lower cluster.num_workers"
    for resource, least, most in wanted:
        count = int(cluster.resources.get(resource, 0))
        what = f"{count} {resource} in the cluster, the run asks for {least}" + (f" to {most}" if most > least else "")
        yield check(what, remedy, well=count >= least, fails=not cluster.autoscales)


def local_devices(facts: Facts) -> Findings:
    """Accelerators, or cores, of this machine for the workers of a run without cluster."""
    if facts.cluster is not None or facts.nodes[0].storage is None:
        return
    node, workers, device = facts.nodes[0], facts.config.cluster.min_workers, _device(facts)
    remedy = f"lower cluster.num_workers ({workers}), or name a cluster in cluster.address"
    if not device.is_host:
        count = node.accelerators.count if node.accelerators.kind == device.name else 0
        what = f"{count} {device.resource} on this machine, the run asks for {workers}"
        yield check(what, remedy, well=count >= workers)
        return
    threads = workers * facts.config.train.threads_per_worker
    what = f"{node.num_cpus} CPUs on this machine, {workers} workers use {threads} threads"
    enough = not node.num_cpus or node.num_cpus >= threads
    yield check(what, remedy, well=enough, fails=threads > OVERSUBSCRIBED * node.num_cpus)


def host_memory(facts: Facts) -> Findings:
    """Memory for the worker processes, and for weights, gradients and optimizer states if these are on the host."""
    has_run = any(node.storage for node in facts.nodes)
    if not has_run or not _device(facts).is_host or (facts.cluster and facts.cluster.autoscales):
        return
    have, workers = sum(node.memory_bytes for node in facts.nodes), facts.config.cluster.min_workers
    need = workers * WORKER_BYTES + STATE_BYTES * (facts.num_parameters or 0) + facts.frozen_bytes
    what = f"{size(have)} of memory, {workers} workers need at least {size(need)} for processes and model states"
    remedy = f"lower cluster.num_workers ({workers}), choose a smaller model, or add memory"
    yield check(what, remedy, well=have >= need)


def shared_memory(facts: Facts) -> Findings:
    """Shared memory for copies of the state on the nodes with devices."""
    nodes = _nodes_of_run(facts)
    if facts.num_parameters is None or not nodes:
        return
    for_recovery = facts.config.elastic.snapshot_every_steps != 0
    number = copies_of_state(len(nodes), for_recovery=for_recovery)
    share = COPY_BYTES * facts.num_parameters / len(nodes)
    least = min(nodes, key=lambda node: min(node.shm_bytes, node.memory_bytes))
    have = min(least.shm_bytes, int(MEMORY_SHARE * least.memory_bytes))
    what = f"{size(have)} for copies of the state in memory, {number} of {size(share)} are made on a node"
    remedy = "enlarge /dev/shm (docker run --shm-size, an emptyDir of medium Memory), or elastic.snapshot_every_steps=0"
    yield check(what, remedy, well=have >= number * share)


def _nodes_of_run(facts: Facts) -> list[NodeFacts]:
    """Nodes on which workers may run; none if no run was named."""
    return [node for node in facts.nodes if node.storage and (node.devices is None or _offers_devices(node, facts))]


def _offers_devices(node: NodeFacts, facts: Facts) -> bool:
    """Whether workers may run there."""
    return bool((node.devices or {}).get(_device(facts).resource or "CPU", 0))


def same_versions(facts: Facts) -> Findings:
    if len(facts.nodes) < 2:
        return
    of_node = {name: {node.name: str(node.versions.get(name)) for node in facts.nodes} for name in SAME_EVERYWHERE}
    of_node["Python"] = {node.name: ".".join(map(str, node.python[:2])) for node in facts.nodes}
    different = {name: versions for name, versions in of_node.items() if len(set(versions.values())) > 1}
    for name, versions in different.items():
        shown = ", ".join(f"{version} on {node}" for node, version in sorted(versions.items())[:4])
        yield check(f"{name} differs between nodes: {shown}", "use one image or environment")
    if not different:
        yield ok(f"{len(facts.nodes)} nodes have the same {', '.join(of_node)}")


def services(facts: Facts) -> Findings:
    """Nodes that answer, the dashboard, and the run's metrics port."""
    for name, why in (facts.cluster.broken if facts.cluster else {}).items():
        remedy = "install rayfcp and its dependencies there, as on the driver's node"
        yield replace(check(f"this node could not be examined: {why[:300]}", remedy), node=name)
    if facts.cluster is not None and not facts.cluster.dashboard:
        what = f"the cluster at {facts.cluster.address} has no dashboard: no jobs can be submitted"
        yield warn(what, "pip install 'ray[default]' on the head and start it with --include-dashboard=true")
    metrics = facts.config.metrics
    if facts.access.metrics_port_taken:
        yield check(
            f"port {metrics.port} on {metrics.host} is taken", "set metrics.port to another, or 0 for a free one"
        )
    elif metrics.port:
        yield ok(f"port {metrics.port} is free for metrics")


def token(facts: Facts) -> Findings:
    access = facts.access
    if access.mode == "token" and not access.token_from:
        remedy = f"copy the cluster's token to {TOKEN_PLACES}; for a new cluster ray get-auth-token --generate"
        yield check("RAY_AUTH_MODE is token, and there is none", remedy)
    elif access.token_open:
        yield warn(f"other users can read Ray's token in {access.token_from}", f"chmod 600 {access.token_from}")
    elif access.mode == "disabled":
        what = "RAY_AUTH_MODE is disabled: anyone who reaches the cluster can run code on it"
        yield warn(what, "RAY_AUTH_MODE=token on all nodes and clients, or a closed network")
    elif access.token_from and access.mode != "token":
        what = (
            f"RAY_AUTH_MODE is not set beside the token in {access.token_from}: clusters that require it refuse access"
        )
        yield warn(what, "export RAY_AUTH_MODE=token")
    else:
        yield ok(f"Ray's token: {f'from {access.token_from}' if access.token_from else 'none, and none required'}")


OF_NODE: tuple[Callable[[NodeFacts], Findings], ...] = (
    software,
    limits,
    kernels,
    environment,
    devices_in_torch,
    files,
    connection,
)
OF_WHOLE: tuple[Callable[[Facts], Findings], ...] = (
    *(services, same_versions, cluster_resources, local_devices, host_memory, shared_memory),
    *(checkpoint_space, token),
)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Findings of all checks. With several nodes a finding names its node, unless all nodes agree."""
    found: list[Finding] = []
    for of_node in OF_NODE:
        nodes_of: dict[Finding, list[str]] = {}
        for node in facts.nodes:
            for finding in of_node(node):
                nodes_of.setdefault(finding, []).append(node.name)
        for finding, names in nodes_of.items():
            on_all = len(names) == len(facts.nodes)
            found += [finding] if on_all else [replace(finding, node=name) for name in names]
    for of_whole in OF_WHOLE:
        found += of_whole(facts)
    return tuple(found)
