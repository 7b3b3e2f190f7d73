"""Bytes of the tensors that live, counted as operators make them and as their storages go."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from rayfcp.execute.parallel.transport import Envelope, Pending
from tests.execute.threads import InProcessTransport


class LiveBytes(TorchDispatchMode):
    """Storages that operators of this thread made and that still live, each counted once, `apart` from some."""

    def __init__(self, apart: Callable[[], list[torch.Tensor]]) -> None:
        super().__init__()
        self._apart = apart
        self._sizes = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._sizes[storage] = storage.nbytes()
        return result

    @property
    def num_bytes(self) -> int:
        known = {id(each.untyped_storage()) for each in self._apart()}
        return sum(size for storage, size in self._sizes.items() if id(storage) not in known)


class Peak(LiveBytes):
    """Most bytes that live at a time."""

    peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result


class UncountedTransport(InProcessTransport):
    """Transport that does not count messages under way between threads: between processes they would be elsewhere."""

    def post(self, sends: list[Envelope], receives: list[Envelope]) -> Pending:
        with _disable_current_modes():
            return super().post(sends, receives)
