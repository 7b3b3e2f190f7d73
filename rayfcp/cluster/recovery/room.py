"""Room for copies of the state in the memory of nodes, checked before training starts.

Ray's memory monitor counts shared memory, cannot free it by ending processes, and ends all actors of the node when
memory runs out.
"""

from collections import Counter
from collections.abc import Sequence

from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.config import Config, ConfigError
from rayfcp.values import ModelProfile
from rayfcp.values.devices import DEVICES

GIB = 1 << 30

COPY_BYTES = 12
"""Of a trained parameter in copies: fp32 with both moments of AdamW."""

COPIES_ALONE, COPIES_WITH_OTHERS = 4, 7
"""Copies of its devices' state in the memory of a node: the newest, the next, one that is written to a checkpoint, and
one whose memory is used again; with several nodes, one more that is on another node too, and two of another node's
devices."""

MEMORY_SHARE = 0.85
"""Of a node's memory that may be used; Ray's monitor acts at 0.95."""


def copies_of_state(num_nodes: int, *, for_recovery: bool = True) -> int:
    """Copies of its own share of the state that a node needs room for; one for checkpoints alone."""
    if not for_recovery:
        return 1
    return COPIES_ALONE if num_nodes == 1 else COPIES_WITH_OTHERS


def check_room(config: Config, model: ModelProfile, *, facts: Sequence[DeviceFacts]) -> None:
    """Check that the copies of these devices' state fit into the memory of their nodes.

    Raises:
        ConfigError: they do not, in one line with the remedy.
    """
    for_recovery = config.elastic.snapshot_every_steps != 0
    devices = Counter(each.node_id for each in facts)
    of_node = {each.node_id: each for each in facts}
    for node, count in sorted(devices.items()):
        host, share = of_node[node].host, COPY_BYTES * model.num_trained * count / len(facts)
        if host is None:
            continue
        copies = copies_of_state(len(devices), for_recovery=for_recovery)
        what = (
            f"elastic.snapshot_dir: {f'{copies} copies' if for_recovery else 'copies'} of a state of "
            f"{share / GIB:.2f} GiB do not fit on node {node[:8]}, "
        )
        remedy = "use more nodes or a smaller model, or " + (
            "set elastic.snapshot_every_steps=0 to copy it for checkpoints only"
            if for_recovery
            else "name a folder on a disk"
        )
        if copies * share > host.shm_bytes:
            raise ConfigError(
                f"{what}where {config.elastic.snapshot_dir} has {host.shm_bytes / GIB:.2f} GiB free; enlarge it "
                f"(docker run --shm-size, or an emptyDir of medium Memory), {remedy}"
            )
        live = share if DEVICES[of_node[node].device].is_host else 0.0
        standbys = min(config.elastic.standby_workers, count) * config.elastic.standby_memory_gib * GIB
        used = host.used_bytes + standbys
        need = used + host.store_bytes + copies * share + live
        if need > MEMORY_SHARE * host.limit_bytes:
            raise ConfigError(
                f"{what}of whose {host.limit_bytes / GIB:.1f} GiB of memory {MEMORY_SHARE:.0%} may be used, by "
                f"{used / GIB:.1f} GiB that are in use{' or for elastic.standby_workers' if standbys else ''} and "
                f"{host.store_bytes / GIB:.1f} GiB of Ray's object store too; lower that (ray start "
                f"--object-store-memory), {remedy}"
            )
