"""Counting what a process does, by the names of torch's operators."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts calls of the operators whose name holds `name`, in forward and backward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self.count = name, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self._name in str(function)
        return function(*args, **(kwargs or {}))
