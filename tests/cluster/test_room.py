"""Room for copies of the state: runs that it is too small for are refused in one line before they start."""

from dataclasses import replace
from pathlib import Path

import pytest

from rayfcp.cluster.facts.devices import DeviceFacts, HostFacts
from rayfcp.cluster.recovery.room import COPY_BYTES, check_room
from rayfcp.cluster.workers import environment
from rayfcp.cluster.workers.environment import host_facts
from rayfcp.config import ConfigError
from rayfcp.plan import model_profile
from tests.cluster.runs import run_config

MODEL = model_profile("qwen3-1.7b")
GIB = 1 << 30
STATE = COPY_BYTES * MODEL.num_parameters


def devices(*nodes: str, shm_bytes: float, limit_bytes: float = 1000 * GIB, device: str = "cuda") -> list[DeviceFacts]:
    host = HostFacts(limit_bytes=int(limit_bytes), used_bytes=2 * GIB, store_bytes=3 * GIB, shm_bytes=int(shm_bytes))
    return [DeviceFacts(node_id=node, device=device, memory_bytes=1, peak_flops=None, host=host) for node in nodes]


def test_what_fits_is_accepted(tmp_path: Path) -> None:
    """Four copies on one node; on several nodes seven of each one's share; one without recovery."""
    config = run_config(tmp_path, name="room")
    check_room(config, MODEL, facts=devices("a", "a", shm_bytes=4.01 * STATE))
    check_room(config, MODEL, facts=devices("a", "a", "b", "b", shm_bytes=3.51 * STATE))
    with pytest.raises(ConfigError):
        check_room(config, MODEL, facts=devices("a", "a", "a", "b", shm_bytes=3.51 * STATE))
    off = run_config(tmp_path, name="room", elastic={"snapshot_every_steps": 0})
    check_room(off, MODEL, facts=devices("a", shm_bytes=1.01 * STATE))
    check_room(off, MODEL, facts=devices("a", "b", shm_bytes=0.51 * STATE))
    with pytest.raises(ConfigError, match=r"^elastic\.snapshot_dir: copies of .*, or name a folder on a disk$"):
        check_room(off, MODEL, facts=devices("a", shm_bytes=0.99 * STATE))


def test_small_shared_memory_is_named_with_the_remedy(tmp_path: Path) -> None:
    config = run_config(tmp_path, name="room", elastic={"snapshot_dir": "/dev/shm"})
    with pytest.raises(ConfigError) as caught:
        check_room(config, MODEL, facts=devices("node-of-ray", shm_bytes=64 << 20))
    assert str(caught.value) == (
        f"elastic.snapshot_dir: 4 copies of a state of {STATE / GIB:.2f} GiB do not fit on node node-of-, where "
        "/dev/shm has 0.06 GiB free; enlarge it (docker run --shm-size, or an emptyDir of medium Memory), use more "
        "nodes or a smaller model, or set elastic.snapshot_every_steps=0 to copy it for checkpoints only"
    )


@pytest.mark.parametrize(("device", "spare"), [("cuda", 0.0), ("cpu", STATE)])
def test_memory_is_not_filled_to_where_ray_ends_all_actors(tmp_path: Path, device: str, spare: float) -> None:
    """What is in use counts, Ray's object store, and on CPUs the state itself."""
    config, need = run_config(tmp_path, name="room"), 5 * GIB + 4 * STATE + spare
    enough = devices("a", shm_bytes=9 * STATE, limit_bytes=need / 0.849, device=device)
    check_room(config, MODEL, facts=enough)
    with pytest.raises(ConfigError, match=r"85% may be used, by 2\.0 GiB that are in use and 3\.0 GiB of Ray"):
        check_room(config, MODEL, facts=[replace(enough[0], host=replace(enough[0].host, limit_bytes=int(need)))])


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions of control groups; without either, that of the machine."""
    monkeypatch.setattr(environment, "CGROUP", tmp_path / "none")
    machine = host_facts(str(tmp_path), store_bytes=7, copies_bytes=0)
    assert 0 < machine.used_bytes < machine.limit_bytes and machine.store_bytes == 7 and machine.shm_bytes > 0
    for folder, names in (
        (tmp_path / "v2", ("memory.max", "memory.current", "memory.stat")),
        (tmp_path / "v1" / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")),
    ):
        folder.mkdir(parents=True)
        for name, text in zip(names, ("1000000\n", "500000\n", "anon 1\ninactive_file 200000\n"), strict=True):
            (folder / name).write_text(text)
        monkeypatch.setattr(environment, "CGROUP", tmp_path / folder.relative_to(tmp_path).parts[0])
        found = host_facts(str(tmp_path), store_bytes=0, copies_bytes=0)
        assert (found.limit_bytes, found.used_bytes) == (1_000_000, 300_000)
    left = host_facts(str(tmp_path), store_bytes=0, copies_bytes=50_000)
    assert left.used_bytes == 250_000, "copies that an earlier start left make room for new ones"
    (tmp_path / "v2" / "memory.max").write_text("max\n")
    monkeypatch.setattr(environment, "CGROUP", tmp_path / "v2")
    assert host_facts(str(tmp_path), store_bytes=0, copies_bytes=0).limit_bytes == machine.limit_bytes
