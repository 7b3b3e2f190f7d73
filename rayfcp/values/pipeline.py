"""Slices of sequences, and the order in which pipeline stages pass microbatches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens `[start, stop)` of `sequence`: what one microbatch holds of a sequence that is cut over several.

    Under a causal mask its queries also see `start` tokens of context: the keys and values of the sequence's slices in
    earlier microbatches of the same pipeline.
    """

    sequence: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One pass of a stage. Prints as `F3` (forward of microbatch 3) or `B3` (its backward)."""

    microbatch: int
    backward: bool = False

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Microbatches `[start, stop)` of the batch pass all stages, and every stage is done with them before it begins
    the next pipeline.

    `actions[p]` is the order of stage p: each microbatch once forward, ascending, and once backward. Every stage runs
    backward passes in the same order, and a slice before the slices of its sequence that precede it.
    `recomputed_layers[p][m - start]`: how many layers of stage p keep only their input (and what keys and values later
    slices need) in microbatch m. `predicted_s`: from the first load to the last backward pass, other pipelines apart.
    """

    start: int
    stop: int
    actions: tuple[tuple[Action, ...], ...]
    recomputed_layers: tuple[tuple[int, ...], ...]
    predicted_s: float

    @property
    def num_stages(self) -> int:
        return len(self.actions)
