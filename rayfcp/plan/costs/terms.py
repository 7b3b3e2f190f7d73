"""What a group costs a rank in one pass, forward or backward, apart by cause."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Arrays by degree, in s per cell, s per token of the whole group, and s.

    attention = cells x `attention_s_per_cell` + tokens x `attention_s_per_token`; moved = tokens x
    `moved_s_per_token` + `moved_s`; the pass takes attention + tokens x `linear_s_per_token` + `fixed_s` + moved
    - `hidden` x min(moved - tail, `cover` x attention, `steady` x attention + edges), with
    tail = tokens x `tail_s_per_token` + `tail_s`: of what moves, the tail has no attention left to hide behind;
    edges = tokens x `edges_s_per_token` + `edges_s`: what moves in rounds in which less does than in the steady ones,
    beside attention that it does not fill. Infinite `moved_s` where the primitive cannot have that degree.

    In every layer shards travel from its start on. What moves first, tokens x `first_s_per_token`, shares its ports
    with them and takes twice as long while they are under way: for `busy_s` less tokens x `before_s_per_token`, the
    linear work before attention. What moves behind attention, tokens x `last_s_per_token`, may still meet the rest of
    them. Both come on top of moved.
    """

    attention_s_per_cell: Seconds
    attention_s_per_token: Seconds
    linear_s_per_token: Seconds
    fixed_s: float | Seconds
    moved_s_per_token: Seconds
    moved_s: Seconds
    tail_s_per_token: Seconds
    tail_s: Seconds
    cover: Seconds
    steady: Seconds
    edges_s_per_token: Seconds
    edges_s: Seconds
    hidden: float
    busy_s: Seconds
    before_s_per_token: Seconds
    first_s_per_token: Seconds
    last_s_per_token: Seconds

    def at(self, speed: npt.ArrayLike) -> "Terms":
        """The same on a rank of so many times the usual speed: what it does itself, the fixed seconds included, takes
        1 / speed as long, what moves as long as ever."""
        if isinstance(speed, float) and speed == 1.0:
            return self
        per = np.asarray(speed, np.float64)
        return replace(
            self,
            attention_s_per_cell=self.attention_s_per_cell / per,
            attention_s_per_token=self.attention_s_per_token / per,
            linear_s_per_token=self.linear_s_per_token / per,
            fixed_s=self.fixed_s / per,
            before_s_per_token=self.before_s_per_token / per,
        )

    def seconds(
        self, cells: npt.ArrayLike, num_tokens: npt.ArrayLike, *, moved_tokens: npt.ArrayLike | None = None
    ) -> Seconds:
        """Of groups with so many cells and tokens, of which keys and values of `moved_tokens` travel (absent: of all);
        arguments broadcast against the degrees."""
        tokens = np.asarray(num_tokens, np.float64)
        moved = tokens if moved_tokens is None else np.asarray(moved_tokens, np.float64)
        attention_s = self.attention_s_per_cell * np.asarray(cells, np.float64) + self.attention_s_per_token * tokens
        first_s = self.first_s_per_token * moved
        left_s = self.busy_s - self.before_s_per_token * tokens
        later_s = np.clip(left_s - first_s - attention_s, 0.0, self.last_s_per_token * moved)
        moved_s = self.moved_s_per_token * moved + self.moved_s + np.clip(left_s, 0.0, first_s) + later_s
        exposed_s = moved_s
        if self.hidden:
            can_hide_s = moved_s - self.tail_s_per_token * moved - self.tail_s
            steady_s = self.steady * attention_s + self.edges_s_per_token * moved + self.edges_s
            exposed_s = moved_s - self.hidden * np.minimum(can_hide_s, np.minimum(self.cover * attention_s, steady_s))
        return np.asarray(attention_s + self.linear_s_per_token * tokens + self.fixed_s + exposed_s)

    def sums(self) -> tuple[tuple[Seconds, Seconds, Seconds], ...]:
        """Three of s per cell, s per token and s, of which a pass that meets no shards takes the largest: all that can
        hide hides, or as much as attention can hide, or as much as that of steady rounds can and all of the edges."""
        cell, token, hidden = self.attention_s_per_cell, self.attention_s_per_token, self.hidden
        always, alone_s = token + self.linear_s_per_token, np.asarray(self.fixed_s)
        covered, steady = hidden * self.cover, hidden * self.steady
        return (
            (
                cell,
                always + (1 - hidden) * self.moved_s_per_token + hidden * self.tail_s_per_token,
                alone_s + (1 - hidden) * self.moved_s + hidden * self.tail_s,
            ),
            ((1 - covered) * cell, always + self.moved_s_per_token - covered * token, alone_s + self.moved_s),
            (
                (1 - steady) * cell,
                always + self.moved_s_per_token - steady * token - hidden * self.edges_s_per_token,
                alone_s + self.moved_s - hidden * self.edges_s,
            ),
        )
