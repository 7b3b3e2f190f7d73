"""Checks between nodes and of the way in: versions, clocks, ports, Ray's token."""

from collections.abc import Iterator

from rayfcp.cluster.doctor.facts import SAME_EVERYWHERE, Facts, Finding, NodeFacts, Verdict

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 60.0
TOKEN_PLACES = "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"


def same_versions(facts: Facts) -> Iterator[Finding]:
    if len(facts.nodes) < 2:
        return
    of_node = {name: {node.name: str(node.versions.get(name)) for node in facts.nodes} for name in SAME_EVERYWHERE}
    of_node["Python"] = {node.name: ".".join(map(str, node.python[:2])) for node in facts.nodes}
    different = {name: found for name, found in of_node.items() if len(set(found.values())) > 1}
    for name, found in different.items():
        shown = ", ".join(f"{version} on {node}" for node, version in sorted(found.items())[:4])
        yield Finding(
            verdict=Verdict.FAIL, what=f"{name} differs between nodes: {shown}", remedy="use one image or environment"
        )
    if not different:
        yield Finding(verdict=Verdict.OK, what=f"{len(facts.nodes)} nodes have the same {', '.join(of_node)}")


def clock(node: NodeFacts) -> Iterator[Finding]:
    """What is certain of the difference, the round trip left out."""
    ahead_s = max(0.0, abs(node.clock_ahead_s) - node.clock_within_s)
    if ahead_s >= CLOCK_WARN_S:
        yield Finding(
            verdict=Verdict.FAIL if ahead_s >= CLOCK_FAIL_S else Verdict.WARN,
            what=f"the clock differs from the driver's by {ahead_s:.1f} s: drain notices and charts are off by that",
            remedy="synchronise clocks (chrony or systemd-timesyncd)",
        )


def reachable(node: NodeFacts) -> Iterator[Finding]:
    if node.reaches_driver is False:
        yield Finding(
            verdict=Verdict.FAIL,
            what="the driver's node cannot be reached on a free port: workers could not meet",
            remedy="permit all TCP ports between the nodes of the cluster",
        )


def dashboard(facts: Facts) -> Iterator[Finding]:
    if facts.cluster is not None and not facts.cluster.dashboard:
        yield Finding(
            verdict=Verdict.WARN,
            what=f"the cluster at {facts.cluster.address} has no dashboard: no jobs can be submitted",
            remedy="pip install 'ray[default]' on the head and start it with --include-dashboard=true",
        )


def broken_nodes(facts: Facts) -> Iterator[Finding]:
    for name, why in (facts.cluster.broken if facts.cluster else {}).items():
        yield Finding(
            verdict=Verdict.FAIL,
            node=name,
            what=f"this node could not be examined: {why[:300]}",
            remedy="install rayfcp and its dependencies there, as on the driver's node",
        )


def metrics_port(facts: Facts) -> Iterator[Finding]:
    needs = facts.needs
    if facts.access.metrics_port_taken:
        yield Finding(
            verdict=Verdict.FAIL,
            what=f"port {needs.metrics_port} on {needs.metrics_host} is taken",
            remedy="set metrics.port to another, or 0 for a free one",
        )
    elif needs.metrics_port:
        yield Finding(verdict=Verdict.OK, what=f"port {needs.metrics_port} is free for metrics")


def token(facts: Facts) -> Iterator[Finding]:
    access = facts.access
    if access.mode == "token" and not access.token_from:
        yield Finding(
            verdict=Verdict.FAIL,
            what="RAY_AUTH_MODE is token, and there is none",
            remedy=f"copy the cluster's token to {TOKEN_PLACES}; for a new cluster ray get-auth-token --generate",
        )
    elif access.token_open:
        yield Finding(
            verdict=Verdict.WARN,
            what=f"other users can read Ray's token in {access.token_from}",
            remedy=f"chmod 600 {access.token_from}",
        )
    elif access.mode == "disabled":
        yield Finding(
            verdict=Verdict.WARN,
            what="RAY_AUTH_MODE is disabled: whoever reaches the cluster can run code on it",
            remedy="RAY_AUTH_MODE=token on all nodes and clients, or a closed network",
        )
    elif access.token_from and access.mode != "token":
        yield Finding(
            verdict=Verdict.WARN,
            what=f"RAY_AUTH_MODE is not set beside the token in {access.token_from}: clusters that want it refuse us",
            remedy="export RAY_AUTH_MODE=token",
        )
    else:
        where = f"from {access.token_from}" if access.token_from else "none, and none asked for"
        yield Finding(verdict=Verdict.OK, what=f"Ray's token: {where}")


def check(facts: Facts) -> Iterator[tuple[NodeFacts | None, Finding]]:
    for each in (broken_nodes, same_versions, dashboard, metrics_port, token):
        for finding in each(facts):
            yield None, finding
    for node in facts.nodes:
        for finding in (*clock(node), *reachable(node)):
            yield node, finding
