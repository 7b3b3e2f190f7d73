"""Small trainings that lose processes, nodes and messages, and go on as if nothing had happened.

Each ends with no step missing or twice, the samples and, to rounding, the losses of the undisturbed run on one device,
the right metrics, and nothing left behind.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rayfcp.config import Config
from tests.chaos.checks import assert_gradients_after, assert_steps
from tests.chaos.grounds import ManyNodes
from tests.chaos.reference import undisturbed
from tests.chaos.runs import Ended, chaos_config, run_as_users_do, run_until_struck
from tests.chaos.schedule import Kind, Planned
from tests.cluster.runs import write_texts

pytestmark = pytest.mark.timeout(600)

NODES = 3
"""Beside the first, whose last CPU takes a worker too."""


@pytest.fixture(scope="module")
def ground() -> Iterator[ManyNodes]:
    with ManyNodes(num_nodes=NODES, head_cpus=3) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chaos")
    write_texts(path)
    return path


def at(kinds: Sequence[Kind], *, every: int, seed: int) -> tuple[Planned, ...]:
    """These faults in this order, every so many steps."""
    rng = random.Random(seed)
    return tuple(
        Planned(kind=kind, step=every * (index + 1), moment=rng.random(), target=rng.randrange(1 << 16))
        for index, kind in enumerate(kinds)
    )


def assert_undisturbed(ended: Ended, config: Config) -> None:
    """As the run on one device, and nothing left."""
    want = undisturbed(config, num_steps=len(ended.steps))
    assert_steps(ended.steps, want)
    assert_gradients_after((each.step for each in ended.struck), ended.steps, want=want)
    assert not ended.leaks


def assert_metrics(ended: Ended, *, causes: dict[str, int], kept_steps: int = 1) -> None:
    """At least so many recoveries of each cause; at most `kept_steps` finished steps executed again in each."""
    audience = ended.audience
    for cause, count in causes.items():
        assert audience.counter("recoveries_total", cause=cause) >= count, cause
    recoveries = audience.counter("recoveries_total")
    assert audience.counter("lost_steps_total") <= kept_steps * recoveries
    if recoveries:
        assert 0 < audience.gauge("recovery_seconds") < 60
    assert 0 < audience.gauge("goodput_ratio") < 1


def test_processes_die_and_hang(ground: ManyNodes, folder: Path) -> None:
    kinds = (Kind.KILL, Kind.TWO_KILLS, Kind.STOP, Kind.KEEPER_KILL, Kind.PLANNER_KILL, Kind.KILL_IN_RECOVERY)
    config = chaos_config(folder, name="processes", cluster={"num_workers": [1, 4]})
    ended = run_until_struck(config, at(kinds, every=4, seed=1), ground=ground, num_devices=3)
    assert_undisturbed(ended, config)
    assert_metrics(ended, causes={"died": 3, "hung": 1})
    assert ended.audience.counter("resizes_total", direction="down") >= 3
    assert ended.audience.counter("resizes_total", direction="up") >= 1


def test_nodes_go_and_come(ground: ManyNodes, folder: Path) -> None:
    kinds = (Kind.NODE_REMOVAL, Kind.NODE_JOINS, Kind.DRAIN, Kind.NODE_JOINS)
    config = chaos_config(folder, name="nodes", cluster={"num_workers": [1, 4]})
    ended = run_until_struck(config, at(kinds, every=4, seed=2), ground=ground, num_devices=3)
    assert_undisturbed(ended, config)
    assert_metrics(ended, causes={"node": 1})
    told = [each.what for each in ended.struck]
    assert ended.audience.counter("recoveries_total") == 1, f"a drained node is left before it goes: {told}"
    assert ended.audience.counter("resizes_total", direction="down") >= 2
    assert ended.audience.counter("resizes_total", direction="up") >= 1


def test_messages_come_late_or_never_and_the_disk_is_full(ground: ManyNodes, folder: Path) -> None:
    config = chaos_config(
        folder,
        name="network",
        cluster={"num_workers": 2},
        plan={"strategy": "ring"},
        checkpoint={"every_steps": 4},
    )
    kinds = (Kind.DELAY, Kind.DROP, Kind.FULL_DISK)
    ended = run_until_struck(
        config,
        at(kinds, every=3, seed=3),
        ground=ground,
        num_devices=2,
        until=lambda audience: audience.counter("failed_checkpoints_total") > 0,
    )
    assert_undisturbed(ended, config)
    assert_metrics(ended, causes={})
    assert ended.audience.counter("recoveries_total") == 1, "late messages are waited for"
    assert ended.audience.counter("failed_checkpoints_total") == 1


def test_the_controller_dies_and_nothing_survives_in_memory(ground: ManyNodes, folder: Path) -> None:
    config = chaos_config(
        folder,
        name="controller",
        cluster={"num_workers": [1, 3]},
        checkpoint={"every_steps": 4, "keep": 3},
        train={"steps": 30},
    )
    kinds = (Kind.CONTROLLER_KILL, Kind.TORN_FILE)
    ended = run_as_users_do(config, at(kinds, every=10, seed=4), ground=ground, num_devices=2)
    assert_undisturbed(ended, config)
