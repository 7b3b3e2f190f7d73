"""Ownership of process groups."""

import weakref

import pytest
import torch
import torch.distributed as dist

from rayfcp.execute.parallel.transport import default_transport


def test_a_transport_does_not_keep_a_destroyed_group() -> None:
    """Threads of a gloo group that is alive when the interpreter ends may abort the process."""
    with pytest.raises(ValueError, match="there is no process group"):
        default_transport()
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group, transport = weakref.ref(dist.group.WORLD), default_transport()
        assert transport is default_transport()
        transport.post([], []).wait()
        dist.destroy_process_group()
        assert group() is None
        with pytest.raises(ValueError, match="its process group is destroyed"):
            transport.post([(0, torch.zeros(1))], [])
