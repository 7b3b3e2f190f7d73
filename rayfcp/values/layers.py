"""Kinds of decoder layers: how tokens of a sequence mix in them, which keys a query sees, and the work that this is.

A kind is a value: it keys the programs of a stage's layers, and everything that differs between kinds is asked of it.
To add one, derive from `LayerKind`, say how its masks are cut into kernel calls (`rayfcp.program.attends`), and read it
from the library's configuration (`rayfcp.models.layers`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:  # without numpy, the values import fast
    from rayfcp.values.arrays import Ints

Positions = TypeVar("Positions", int, "Ints")


class Work(NamedTuple):
    """Work of a layer for a block of queries; seconds, messages and memory are linear in it.

    `pairs`: visible (query, key) pairs. `tokens`: of the block. `moved_tokens`: tokens whose keys and values the block
    offers to other ranks in a round. `state_tokens`: tokens whose keys and values its last query needs, the block's own
    included. The last two are bytes once multiplied by `ModelProfile.kv_bytes_per_token`.
    """

    pairs: Any
    tokens: Any
    moved_tokens: Any
    state_tokens: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of softmax attention, whose rounds carry keys and values.

    Every mask is causal. In a layer with a `window` w, query q sees keys `[q - w + 1, q + 1)`, itself included, as in
    the transformers library; 0 stands for no window.

    >>> str(LayerKind()), str(LayerKind(window=8))
    ('full attention', 'window 8')
    """

    window: int = 0

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window is {self.window}, must be at least 0 (0: none); correct the model's profile")

    def __str__(self) -> str:
        return f"window {self.window}" if self.window else "full attention"

    def __lt__(self, other: "LayerKind") -> bool:
        """Any order of kinds, the same in every process; by window among those of this class."""
        return (type(self).__name__, astuple(self)) < (type(other).__name__, astuple(other))

    def hides(self, num_tokens: Positions) -> Any:
        """True where some query of a sequence of `num_tokens` does not see a key before it."""
        return (self.window > 0) & (num_tokens > self.window)

    def first_visible(self, query: Positions) -> Positions:
        """First position that a query sees; below 0 where it would see more than there is."""
        return query - self.window + 1 if self.window else query * 0

    def visible_pairs(self, queries: Positions, keys: Positions) -> Positions:
        """Visible (query, key) pairs of the queries `[0, queries)` and keys `[0, keys)` of a sequence.

        The definition that cost, plan, program, simulation and checks share: pairs of a rectangle are sums and
        differences of these. Plain arithmetic, so that arrays broadcast.

        >>> [LayerKind(window=each).visible_pairs(5, 5) for each in (0, 1, 2, 5, 9)]
        [15, 5, 9, 15, 15]
        >>> LayerKind(window=2).visible_pairs(5, 3)
        6
        """
        pairs = _causal_pairs(queries, keys)
        if self.window == 0:
            return pairs
        hidden: Positions = _causal_pairs((queries - self.window + abs(queries - self.window)) // 2, keys)
        return pairs - hidden

    def work(self, start: Any, stop: Any) -> Work:
        """Work of the queries `[start, stop)` of a sequence, or of each of arrays of them."""
        first = self.first_visible(stop - 1)
        return Work(
            pairs=self.visible_pairs(stop, stop) - self.visible_pairs(start, start),
            tokens=stop - start,
            moved_tokens=stop - start,
            state_tokens=stop - (first + abs(first)) // 2,  # first, at least 0
        )


LayerKinds = tuple[tuple[LayerKind, int], ...]
"""Kinds of a model's layers, ascending, each with the number of its layers. Empty: full attention in all."""

FULL = LayerKind()


def layers_work(kinds: LayerKinds, *, start: Any, stop: Any) -> Work:
    """Work of the queries `[start, stop)` of a sequence in the mean over layers; whole numbers if there is one kind."""
    if len(kinds) <= 1:
        return (kinds[0][0] if kinds else FULL).work(start, stop)
    num_layers = sum(layers for _, layers in kinds)
    of_kinds = [[layers * each for each in kind.work(start, stop)] for kind, layers in kinds]
    return Work(*(sum(column) / num_layers for column in zip(*of_kinds, strict=True)))


def _causal_pairs(queries: Positions, keys: Positions) -> Positions:
    shared = (queries + keys - abs(queries - keys)) // 2  # the smaller of both
    pairs: Positions = shared * (shared + 1) // 2 + (queries - shared) * keys
    return pairs


def count_kinds(kinds: Iterable[LayerKind]) -> LayerKinds:
    """Number of layers by kind, ascending."""
    return tuple(sorted(Counter(kinds).items()))
