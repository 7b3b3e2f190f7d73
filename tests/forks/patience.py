"""Time for Ray's nodes to start."""

import time
from functools import wraps
from typing import Any

import pytest

from tests.waiting import PATIENCE_S


def nodes_may_take_long(patch: pytest.MonkeyPatch) -> None:
    """Ray gives up a node that this process starts after 30 s, which a busy machine may take."""
    from ray._private import services

    look = services.get_node

    @wraps(look)
    def get_node(*args: Any, **kwargs: Any) -> Any:
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return look(*args, **kwargs)
            except RuntimeError:  # not known yet
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)

    patch.setattr(services, "get_node", get_node)
