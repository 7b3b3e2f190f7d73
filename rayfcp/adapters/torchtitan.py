"""Rows of torchtitan: documents are packed for all data-parallel ranks together, so that rows take equally long."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from rayfcp.adapters import bins
from rayfcp.adapters.planning import planner_for
from rayfcp.plan.assembly import best_fit_decreasing
from rayfcp.values import InfeasiblePlanError

MOST_DROPPED = 10_000
"""Documents in a row that may be dropped: a stream that repeats ones that fit no row would be read for ever."""


class Document(Protocol):
    """A tokenized document; torchtitan's `TextSequence`."""

    @property
    def input_ids(self) -> Any: ...


D_co = TypeVar("D_co", bound=Document, covariant=True)


class Stream(Protocol[D_co]):
    """Documents in an order that all ranks share, from a place that can be kept; a `DatasetIterator` of Grain."""

    def __next__(self) -> D_co: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class FlexRows(Iterator[list[D_co]]):
    """The rows of one data-parallel rank: lists of documents, which torchtitan's `TextCollator` makes a batch of.

    A step has `rows_per_step` rows (gradient accumulation steps) of `num_tokens_per_batch` tokens on each of
    `dp_world_size` ranks. It takes documents in the order of the stream, as many as fit; the next step begins with the
    next one. Documents without tokens and those longer than a row are dropped, and counted in `num_dropped`. All ranks
    must read the same stream, so that each document is tokenized on each of them. The stream's end drops what does not
    fill a step.

    `cp_size`: ranks that share a row. `model` and `hardware` with further `settings` of `HostPlanner`, or a `planner`,
    predict times.

    Raises:
        ValueError: A size below 1, or no such rank; when rows are read, a stream of documents that are all dropped.
    """

    def __init__(
        self,
        stream: Stream[D_co],
        *,
        dp_world_size: int,
        dp_rank: int,
        num_tokens_per_batch: int,
        rows_per_step: int,
        cp_size: int = 1,
        **settings: Any,
    ) -> None:
        sizes = {"dp_world_size": dp_world_size, "num_tokens_per_batch": num_tokens_per_batch}
        for name, value in (sizes | {"rows_per_step": rows_per_step, "cp_size": cp_size}).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1; raise it")
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank is {dp_rank}, must be below dp_world_size {dp_world_size}; correct it")
        self._stream, self._replicas, self._rank, self._cp_size = stream, dp_world_size, dp_rank, cp_size
        self._row_tokens, self._num_bins = num_tokens_per_batch, rows_per_step * dp_world_size
        self._planner = planner_for(**settings)
        self.num_dropped = 0
        self._waiting: deque[tuple[Any, D_co]] = deque()
        self._rows: deque[list[D_co]] = deque()
        self._place: tuple[Any, int] = (stream.get_state(), 0)

    def __next__(self) -> list[D_co]:
        if not self._rows:
            start = self._waiting[0][0] if self._waiting else self._stream.get_state()
            self._rows.extend(self._step())
            self._place = (start, 0)
        self._place = (self._place[0], self._place[1] + 1)
        return self._rows.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream: where the step began whose rows are being read, and how many were."""
        if self._rows:
            return {"stream": self._place[0], "num_rows": self._place[1]}
        return {"stream": self._waiting[0][0] if self._waiting else self._stream.get_state(), "num_rows": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` returned. Inside a step the rows are those of the step's plan, which must not
        depend on times that were observed since; torchtitan saves between steps."""
        self._stream.set_state(state["stream"])
        self._waiting.clear()
        self._rows.clear()
        for _ in range(state["num_rows"]):
            next(self)

    def _step(self) -> list[list[D_co]]:
        """Documents of this rank's rows of the next step."""
        self._draw()
        documents = [document for _, document in self._waiting]
        lengths = [len(document.input_ids) for document in documents]
        count, too_many = self._num_bins, len(lengths)  # one document a row fits; all have too many tokens
        while too_many - count > 1:
            middle = (count + too_many) // 2
            fits = best_fit_decreasing(
                sorted(lengths[:middle], reverse=True), capacity_tokens=self._row_tokens, max_bins=self._num_bins
            )
            count, too_many = (count, middle) if fits is None else (middle, too_many)
        while (packed := self._bins(lengths[:count])) is None:
            count = (count + self._num_bins) // 2
        for _ in range(count):
            self._waiting.popleft()
        return [[documents[at] for at in row] for row in packed[self._rank :: self._replicas]]

    def _draw(self) -> None:
        """Fill up the documents that wait with those whose tokens fit into a step, and the first that does not."""
        tokens, most = sum(len(each.input_ids) for _, each in self._waiting), self._num_bins * self._row_tokens
        in_a_row = 0
        while tokens <= most:
            state = self._stream.get_state()
            document = next(self._stream)
            size = len(document.input_ids)
            if 0 < size <= self._row_tokens:
                self._waiting.append((state, document))
                tokens, in_a_row = tokens + size, 0
                continue
            self.num_dropped, in_a_row = self.num_dropped + 1, in_a_row + 1
            if in_a_row == MOST_DROPPED:
                raise ValueError(
                    f"{in_a_row} documents in a row were dropped, the last one of {size} tokens; a row holds 1 to "
                    f"{self._row_tokens}; raise num_tokens_per_batch, or cut the documents"
                )

    def _bins(self, lengths: list[int]) -> bins.Bins | None:
        """Rows of documents; None if no plan was found that holds all of them, which one a row always has."""
        try:
            return bins.pack(
                self._planner,
                lengths,
                capacity=self._row_tokens,
                num_replicas=self._replicas,
                cp_size=self._cp_size,
                num_bins=self._num_bins,
                exactly=True,
            )
        except InfeasiblePlanError:
            if len(lengths) <= self._num_bins:
                raise
            return None
