"""Everything that only real processes can show, once, in one training that continues as if nothing had happened."""

from pathlib import Path

import pytest

from tests.chaos.checks import Audience, assert_gradients_after, assert_steps
from tests.chaos.clusters import ManyNodes
from tests.chaos.reference import undisturbed
from tests.chaos.runs import chaos_config, run_as_users_do
from tests.chaos.schedule import Kind, Planned
from tests.cluster.runs import write_texts
from tests.waiting import PATIENCE_S

ONCE = (Kind.CONTROLLER_KILL, Kind.KILL, Kind.NODE_REMOVAL, Kind.NODE_JOINS, Kind.STOP, Kind.FULL_DISK)
STEPS_APART, NUM_DEVICES = 4, 3


def is_whole_again(audience: Audience) -> bool:
    """True once all devices are back and a save has failed."""
    return audience.gauge("world_size") == NUM_DEVICES and audience.counter("failed_checkpoints_total") >= 1


@pytest.mark.timeout(3 * PATIENCE_S)
def test_each_loss_once_and_growth(tmp_path: Path) -> None:
    """It ends with no step missing or twice, the samples, losses and gradients of the undisturbed run on one device,
    and nothing left behind."""
    write_texts(tmp_path)
    config = chaos_config(
        tmp_path,
        name="once",
        cluster={"num_workers": [1, NUM_DEVICES]},
        checkpoint={"every_steps": 3, "max_failures": 1000},
        elastic={"max_recoveries": 1000},
    )
    schedule = [
        Planned(kind=kind, step=STEPS_APART * (index + 1), moment=0.5, target=1) for index, kind in enumerate(ONCE)
    ]
    with ManyNodes(num_nodes=2, head_cpus=3, forks=True) as cluster:
        ended = run_as_users_do(config, schedule, cluster=cluster, num_devices=2, until=is_whole_again)
    want = undisturbed(config, num_steps=len(ended.steps))
    assert_steps(ended.steps, want)
    assert_gradients_after((each.step for each in ended.injected), ended.steps, want=want)
    assert not ended.leaks
    audience = ended.audience
    for cause in ("died", "node", "hung"):
        assert audience.counter("recoveries_total", cause=cause) >= 1, cause
    assert audience.counter("resizes_total", direction="down") >= 1
    assert audience.counter("resizes_total", direction="up") >= 1
    assert audience.counter("failed_checkpoints_total") >= 1
    assert audience.counter("lost_steps_total") <= audience.counter("recoveries_total")
    assert len([line for line in audience.lines if "the controller was lost and starts again" in line]) == 1
