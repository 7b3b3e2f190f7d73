"""Devices are killed, hang, come and leave; those that are left go on from copies of the shards as if nothing had
happened. On real gloo processes."""

import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayfcp.cluster.dataset import open_dataset
from rayfcp.config import Config
from rayfcp.data.prepare import prepare_local
from rayfcp.execute.parallel.groups import MeshPosition
from tests.cluster.runs import run_config, write_texts
from tests.execute.generations import PATIENCE_S, Device, Generation, Member, results_of
from tests.execute.gloo import client_of

SCRIPT = (
    Generation(world=(1, 4, 1), members=(0, 1, 2, 3), steps=(1, 2), end="forward"),
    Generation(world=(1, 3, 1), members=(0, 1, 2), steps=(3,)),
    Generation(world=(1, 4, 1), members=(0, 1, 2, 4), steps=(4,)),
    Generation(world=(2, 2, 1), members=(0, 1, 2, 4), steps=(5,), end="update"),
    Generation(world=(3, 1, 1), members=(0, 1, 2), steps=(6,)),
    Generation(world=(1, 2, 2), members=(0, 1, 2, 5), steps=(7,), end="forward"),
    Generation(world=(1, 3, 1), members=(2, 0, 1), steps=(8,), end="hang"),
    Generation(world=(1, 3, 1), members=(0, 1, 2), steps=(9,)),
)
KILLED = {3, 4, 5}
LAST = SCRIPT[-1].steps[-1]
TIMEOUT_S = 120.0
"""Timeout of rendezvous and exchanges: far more than either takes."""

FORGOTTEN = 2
"""Waiters of the whole script that may stay until that timeout: gloo forgets a message whose connection breaks as it is
sent (see `RendezvousClient.abort`); in a cluster the controller ends such a device after `elastic.hang_min_s`."""


def config_of(folder: Path) -> Config:
    architecture = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
    return run_config(
        folder,
        name="recovery",
        model={"architecture": architecture | {"ffn_size": 100, "tied_embeddings": True}, "dtype": "float64"},
        data={"max_seqlen": 64, "global_batch_sequences": 4},
        train={"steps": LAST, "grad_clip": 0.5},
        elastic={"start_timeout_s": PATIENCE_S, "collective_timeout_s": TIMEOUT_S},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recovery")
    write_texts(folder)
    prepare_local(config_of(folder).data, out_dir=str(folder / "shards"))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Results of each process that survived."""
    return results_of(_process, {member for each in SCRIPT for member in each.members}, killed=KILLED, folder=folder)


def _process(me: int, port: int, folder: str) -> None:
    faulthandler.dump_traceback_later(0.9 * PATIENCE_S)  # where it hangs, if it does
    torch.set_num_threads(1)
    config = config_of(Path(folder))
    data = open_dataset(config, data_dir=str(Path(folder) / "shards"))
    member = Member(
        config,
        data,
        folder=Path(folder),
        me=me,
        connect=lambda: client_of(port),
    )
    member.run(SCRIPT)
    torch.save(member.found, Path(folder) / f"{me}.pt")
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[list[Any]]:
    """Reports of the undisturbed run on one device."""
    config = config_of(folder)
    device = Device(config, open_dataset(config, data_dir=str(folder / "shards")), folder=folder)
    device.join(MeshPosition(rank=0, num_ranks=1), store=dist.HashStore(), empty=False)
    yield [device.step(step) for step in range(1, LAST + 1)]
    device.engine.close()


def test_steps_are_those_of_the_undisturbed_run(found: dict[int, list[dict[str, Any]]], alone: list[Any]) -> None:
    """Also that which was finished by some devices only, and is done again from the state before."""
    assert alone[-1].loss < alone[0].loss - 0.02
    for me, facts in found.items():
        steps = [fact for fact in facts if "loss" in fact]
        assert {fact["step"] for fact in steps} == set(range(1, LAST + 1)), me
        for fact in steps:
            want = alone[fact["step"] - 1]
            assert fact["loss"] == pytest.approx(want.loss, rel=1e-9), (me, fact)
            assert fact["norm"] == pytest.approx(want.grad_norm, rel=1e-8), (me, fact)


def test_survivors_are_free_soon_after_the_abort(found: dict[int, list[dict[str, Any]]]) -> None:
    late = []
    for me, facts in found.items():
        for index, generation in enumerate(SCRIPT):
            mine = [fact for fact in facts if fact["generation"] == index]
            if generation.end == "leave":
                assert not [fact for fact in mine if "failed" in fact]
                continue
            (abort,) = [fact for fact in mine if "aborted" in fact]
            assert abort["took"] < 0.25 * TIMEOUT_S
            failed = [fact for fact in mine if "failed" in fact]
            idle = generation.end == "hang" and me == generation.members[-1]
            assert len(failed) == (0 if idle else 1) or generation.end == "update", (me, index)
            for fact in failed:
                assert fact["failed"].startswith("exchange between devices"), fact
                late += [(me, index)] if fact["at"] - abort["aborted"] > 0.25 * TIMEOUT_S else []
    assert len(late) <= FORGOTTEN, late


def test_few_copies_are_held_and_beats_tell_the_step(found: dict[int, list[dict[str, Any]]]) -> None:
    for facts in found.values():
        for fact in facts:
            if "loss" in fact:
                assert fact["copies"] <= 5 * 4, "of each process that lives three, and two that are not in use"
                assert fact["beat"] == (fact["step"], False, True)
                assert fact["copy_s"] > 0.0


def test_nothing_is_left_of_old_generations(found: dict[int, list[dict[str, Any]]]) -> None:
    """Compare the last generation with the first one of its shape, six rebuilds before: the same threads in each
    process, and the same open files in all of them together but for a few, since connections close when they do. The
    smallest group has two connections in each of three processes; one left behind in each rebuild would be 36 files."""
    files = {1: 0, 7: 0}
    for me, facts in found.items():
        of = {fact["generation"]: fact for fact in facts if "threads" in fact}
        assert of[7]["threads"] <= of[1]["threads"], (me, of)
        files = {each: count + of[each]["files"] for each, count in files.items()}
    assert files[7] < files[1] + 6 * len(SCRIPT[7].members), files
