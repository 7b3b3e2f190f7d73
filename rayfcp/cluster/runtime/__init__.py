"""The controller's surroundings: `Runtime` is the protocol, `RayRuntime` (`on_ray.py`) implements it on Ray.

The tests implement it once more, in one process with a virtual clock and injected faults (`tests/simulated`).
"""

from rayfcp.cluster.runtime.interface import (
    ActorLostError,
    ActorSpec,
    Background,
    CallError,
    Flag,
    NoAnswerError,
    NodeView,
    PageServer,
    RendezvousServer,
    Role,
    Runtime,
    Task,
    TaskFailedError,
    Timer,
)

__all__ = [
    "ActorLostError",
    "ActorSpec",
    "Background",
    "CallError",
    "Flag",
    "NoAnswerError",
    "NodeView",
    "PageServer",
    "RendezvousServer",
    "Role",
    "Runtime",
    "Task",
    "TaskFailedError",
    "Timer",
]
