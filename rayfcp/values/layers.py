"""Kinds of decoder layers: how tokens of a sequence mix in them, which keys a query sees, and the work that this is.

A kind is a value: it keys the programs of a stage's layers, and everything that differs between kinds is asked of it.
`LayerKind` itself is softmax attention, whose rounds carry keys and values; of `RecurrentKind` rounds carry states, and
layers of `TokenwiseKind` exchange nothing. To add a mask, say how it is cut into kernel calls
(`rayfcp.program.attends`), and read it from the library's configuration (`rayfcp.models.layers`).
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
    the transformers library; 0 stands for no window. In a layer with a `chunk` c it sees keys `[q // c x c, q + 1)`,
    those of its own chunk of the sequence (Llama 4); 0 stands for no chunks.

    >>> str(LayerKind()), str(LayerKind(window=8))
    ('full attention', 'window 8')
    """

    window: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}, must be at least 0 (0: none); correct the model's profile")
        if self.window and self.chunk:
            raise ValueError(f"window is {self.window} and chunk {self.chunk}, one must be 0; correct the profile")

    def __str__(self) -> str:
        if self.chunk:
            return f"chunks of {self.chunk}"
        return f"window {self.window}" if self.window else "full attention"

    def __lt__(self, other: "LayerKind") -> bool:
        """Any order of kinds, the same in every process; by window among those of this class."""
        return (type(self).__name__, astuple(self)) < (type(other).__name__, astuple(other))

    @property
    def mask(self) -> "LayerKind":
        """The kind of its attention alone."""
        return LayerKind(window=self.window, chunk=self.chunk)

    @property
    def recurrence(self) -> "RecurrentKind | None":
        """The kind of its recurrence; None without one."""
        return None

    @property
    def reach(self) -> int:
        """Keys that a query sees at most; 0 where it sees all before it."""
        return self.window or self.chunk

    def hides(self, num_tokens: Positions) -> Any:
        """True where some query of a sequence of `num_tokens` does not see a key before it."""
        return (self.reach > 0) & (num_tokens > self.reach)

    def first_visible(self, query: Positions) -> Positions:
        """First position that a query sees; below 0 where it would see more than there is."""
        if self.chunk:
            return query // self.chunk * self.chunk
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
        if self.chunk:
            return self._pairs_in_chunks(queries, keys)
        pairs = _causal_pairs(queries, keys)
        if self.window == 0:
            return pairs
        hidden: Positions = _causal_pairs((queries - self.window + abs(queries - self.window)) // 2, keys)
        return pairs - hidden

    def _pairs_in_chunks(self, queries: Positions, keys: Positions) -> Positions:
        """Chunks before the one in which the shorter of both ends are whole squares; in that one both are cut."""
        shared = (queries + keys - abs(queries - keys)) // 2
        begin = shared // self.chunk * self.chunk
        whole = begin // self.chunk * (self.chunk * (self.chunk + 1) // 2)
        room = begin + self.chunk
        last_query = (queries + room - abs(queries - room)) // 2  # queries of this chunk see its keys
        last_key = (keys + room - abs(keys - room)) // 2
        pairs: Positions = whole + _causal_pairs(last_query - begin, last_key - begin)
        return pairs

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
    """Work of the queries `[start, stop)` of a sequence in the mean over layers, by the weights of their kinds; whole
    numbers if there is one kind, or none that attends."""
    num_layers = sum(layers for _, layers in kinds)
    if len(kinds) <= 1 or not num_layers:
        return (kinds[0][0] if kinds else FULL).work(start, stop)
    of_kinds = [[layers * each for each in kind.work(start, stop)] for kind, layers in kinds]
    return Work(*(sum(column) / num_layers for column in zip(*of_kinds, strict=True)))


def _causal_pairs(queries: Positions, keys: Positions) -> Positions:
    shared = (queries + keys - abs(queries - keys)) // 2  # the smaller of both
    pairs: Positions = shared * (shared + 1) // 2 + (queries - shared) * keys
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenwiseKind(LayerKind):
    """Layers in which tokens do not mix, such as those of an MLP alone.

    >>> str(TokenwiseKind()), TokenwiseKind().visible_pairs(5, 5)
    ('no mixing', 0)
    """

    def __str__(self) -> str:
        return "no mixing"

    def hides(self, num_tokens: Positions) -> Any:  # noqa: ARG002  every length
        """True: no query sees a key."""
        return True

    def first_visible(self, query: Positions) -> Positions:
        """Past the query."""
        return query + 1

    def visible_pairs(self, queries: Positions, keys: Positions) -> Positions:
        """None."""
        return (queries + keys) * 0

    def work(self, start: Any, stop: Any) -> Work:
        """Tokens alone."""
        return Work(pairs=(stop - start) * 0, tokens=stop - start, moved_tokens=0 * stop, state_tokens=0 * stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentKind(TokenwiseKind):
    """Layers with a state `S_t = A_t S_{t-1} + B_t` that runs through each sequence: gated delta rule, Mamba-2, gated
    linear attention. A part of a sequence is an affine map of the state, `S_out = T S_in + U`, and rounds carry T, U
    and S (`rayfcp.program.scan`). Of no query and key is there a pair.

    `halo`: tokens before the first one of a part whose activations its causal convolution needs, one fewer than the
    convolution is wide; 0 where there is none.

    >>> str(RecurrentKind(halo=3))
    'recurrence'
    """

    halo: int = 0

    def __str__(self) -> str:
        return "recurrence"

    @property
    def recurrence(self) -> "RecurrentKind":
        """Itself."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridKind(LayerKind):
    """Layers of which attention and a recurrence with a `halo` read the same input (Falcon-H1).

    >>> str(HybridKind(window=8)), HybridKind(halo=3).recurrence
    ('window 8 and recurrence', RecurrentKind(window=0, chunk=0, halo=3))
    """

    halo: int = 0

    def __str__(self) -> str:
        return f"{self.mask} and recurrence"

    @property
    def recurrence(self) -> RecurrentKind:
        """That of its other half."""
        return RecurrentKind(halo=self.halo)


def attends(kind: LayerKind) -> bool:
    """True for kinds of softmax attention."""
    return not isinstance(kind, TokenwiseKind)


def count_kinds(kinds: Iterable[LayerKind]) -> LayerKinds:
    """Number of layers by kind, ascending."""
    return tuple(sorted(Counter(kinds).items()))
