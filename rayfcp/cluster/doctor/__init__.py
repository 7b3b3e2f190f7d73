"""`rayfcp doctor`: what a machine or cluster lacks for a run, and how to mend it.

Facts are gathered first (`gather`, `across`), then judged by pure checks, a file for each group.
"""

from collections.abc import Iterator
from dataclasses import replace

from rayfcp.cluster.doctor import devices, machine, network, storage
from rayfcp.cluster.doctor.facts import Facts, Finding, Verdict

GROUPS = (machine, devices, storage, network)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """All findings, in the order of the groups. With several nodes each names its node, unless all nodes agree."""
    found: list[Finding] = []
    for group in GROUPS:
        found += _merged(group.check(facts), num_nodes=len(facts.nodes))
    return tuple(found)


def _merged(pairs: Iterator, *, num_nodes: int) -> list[Finding]:  # type: ignore[type-arg]
    """What is the same on all nodes is told once."""
    listed = list(pairs)
    nodes_of: dict[Finding, list[str]] = {}
    for node, finding in listed:
        nodes_of.setdefault(finding, []).append("" if node is None else node.name)
    merged = []
    for finding, names in nodes_of.items():
        if num_nodes == 1 or names == [""] or len(names) == num_nodes:
            merged.append(finding)
        else:
            merged += [replace(finding, node=name) for name in names]
    return merged


def is_well(findings: tuple[Finding, ...]) -> bool:
    """Nothing fails."""
    return all(each.verdict is not Verdict.FAIL for each in findings)


__all__ = ["examine", "is_well"]
