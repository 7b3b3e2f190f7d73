"""Results of attention that recomputed layers keep."""

from collections.abc import Callable

from torch import Tensor

Results = tuple[Tensor, ...]


class KeptResults:
    """Results of one recomputed layer's attention in one microbatch, by name, from its forward pass to its
    recomputation, which takes them instead of exchanging and computing again."""

    def __init__(self) -> None:
        self._results: dict[str, Results] = {}

    def once(self, name: str, compute: Callable[[], Results]) -> Results:
        """Results of `compute` at the first call, the same at the second, which forgets them: the graph has them
        then, and frees them with the layer's backward pass."""
        if name in self._results:
            return self._results.pop(name)
        found = compute()
        self._results[name] = tuple(each.detach() for each in found)  # outputs hold the graph, which holds these
        return found


def once(name: str, compute: Callable[[], Results], *, kept: KeptResults | None) -> Results:
    """`kept.once`, or, where nothing is kept, results of `compute` at every call."""
    return kept.once(name, compute) if kept else compute()
