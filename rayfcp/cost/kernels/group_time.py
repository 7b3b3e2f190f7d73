"""Seconds of one pass, forward or backward, of a group: the one definition that cost model and searches share.

Plain arithmetic over named columns: Python calls `pass_s` with arrays that broadcast, compiled searches compile it for
the records of a table (`TERMS`). The derivation is in docs/cost_model.md.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfcp.values.arrays import Floats

Plane = tuple[Floats, Floats, Floats]


class Terms(NamedTuple):
    """Coefficients of one pass of groups, arrays by degree, in s per pair, s per token of the whole group, and s.

    Infinite `moved_s`: the primitive cannot have that degree.
    """

    attention_s_per_pair: Floats
    attention_s_per_token: Floats
    linear_s_per_token: Floats
    fixed_s: Floats
    moved_s_per_token: Floats
    moved_s: Floats
    tail_s_per_token: Floats
    tail_s: Floats
    cover: Floats
    steady: Floats
    edges_s_per_token: Floats
    edges_s: Floats
    overlap: Floats
    states_s_per_sequence: Floats
    states_s_per_token: Floats
    states_s: Floats
    head_s_per_token: Floats
    head_s: Floats
    apart: Floats
    shards_s: Floats
    edge: Floats
    shared_s: Floats
    spare_s: Floats
    before: Floats
    behind: Floats
    host_s: Floats

    def at_speed(self, speed: npt.ArrayLike) -> "Terms":
        """Terms on a rank of `speed` times the usual speed: attention, linear layers and the fixed seconds take it
        1 / speed as long, what moves as long as ever."""
        per = np.asarray(speed, np.float64)
        return self._replace(**{name: getattr(self, name) / per for name in COMPUTED})

    def seconds(
        self,
        pairs: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        *,
        num_sequences: npt.ArrayLike = 1,
        moved_tokens: npt.ArrayLike | None = None,
    ) -> Floats:
        """Seconds of groups with `pairs` and `num_tokens` of so many sequences, of which keys and values of
        `moved_tokens` (absent: of all) travel; arguments broadcast against the degrees."""
        tokens = np.asarray(num_tokens, np.float64)
        moved = tokens if moved_tokens is None else np.asarray(moved_tokens, np.float64)
        sequences = np.asarray(num_sequences, np.float64)
        held = np.asarray(pairs, np.float64)
        later_s = late_s(self, held, tokens, moved) if np.any(self.shared_s) else 0.0
        return np.asarray(recurrent_s(self, pass_s(self, held, tokens, moved, later_s), tokens, later_s, sequences))

    def put_off_s(self, pairs: npt.ArrayLike, num_tokens: npt.ArrayLike, *, moved_tokens: npt.ArrayLike) -> Floats:
        """Seconds by which passes take longer since messages share ports with shards (`late_s`)."""
        held, tokens, moved = (np.asarray(each, np.float64) for each in (pairs, num_tokens, moved_tokens))
        later_s = late_s(self, held, tokens, moved)
        return np.asarray(pass_s(self, held, tokens, moved, later_s) - pass_s(self, held, tokens, moved, 0.0))

    def lines(self) -> tuple[Plane, ...]:
        """The planes (s per pair, s per token, s) of which `pass_s`, but for `states_s_per_sequence`, is the largest
        where all tokens move: three and that of the host, if it takes any, or more beside
        `shards_s`."""
        pair, token, overlap = self.attention_s_per_pair, self.attention_s_per_token, self.overlap
        computed = token + self.linear_s_per_token
        moved = computed + self.moved_s_per_token
        alone_s = self.fixed_s + self.moved_s
        covered, steady = overlap * self.cover, overlap * self.steady
        planes = [
            (
                pair,
                computed + (1 - overlap) * self.moved_s_per_token + overlap * self.tail_s_per_token,
                self.fixed_s + (1 - overlap) * self.moved_s + overlap * self.tail_s,
            ),
            ((1 - covered) * pair, moved - covered * token, alone_s),
            (
                (1 - steady) * pair,
                moved - steady * token - overlap * self.edges_s_per_token,
                alone_s - overlap * self.edges_s,
            ),
        ]
        if np.any(self.host_s):
            planes.append((0 * pair, 0 * pair, self.host_s))
        if np.any(self.shards_s):
            planes = self._beside_shards(planes)
        return tuple((each, per + self.states_s_per_token, s + self.states_s) for each, per, s in planes)

    def _beside_shards(self, planes: list[Plane]) -> list[Plane]:
        """Each of the two kinds of layers takes as long as it computes, or as its shards."""
        head, shards_s = self.head_s_per_token, self.apart * self.shards_s
        apart = self.apart * (self.linear_s_per_token - head), self.apart * self.fixed_s
        attending = [(pair, token - head - apart[0], s - apart[1]) for pair, token, s in planes]
        attending.append(
            (0 * planes[0][0], self.moved_s_per_token, self.shards_s - shards_s + self.moved_s),
        )
        others = apart, (0 * apart[0], shards_s)
        return [(pair, token + head + per, s + other_s) for pair, token, s in attending for per, other_s in others]


COMPUTED = (
    "attention_s_per_pair",
    "attention_s_per_token",
    "linear_s_per_token",
    "fixed_s",
    "head_s_per_token",
    "head_s",
)
"""Fields of `Terms` that are computation of a rank."""

TERMS = np.dtype([(name, np.float64) for name in Terms._fields])
"""A record of `Terms` in a table for kernels."""


def table_of(passes: Sequence[Terms]) -> npt.NDArray[np.void]:
    """Records [degree, pass] of terms by pass, whose columns have one entry a degree."""
    table = np.zeros((len(passes[0].cover), len(passes)), TERMS)
    for number, terms in enumerate(passes):
        for name, column in zip(Terms._fields, terms, strict=True):
            table[name][:, number] = column
    return table


def pass_s(terms: Any, pairs: Any, tokens: Any, moved_tokens: Any, late_s: Any) -> Any:
    """Seconds of a pass over `pairs` and `tokens` of which the keys and values of `moved_tokens` travel.

    attention = pairs x `attention_s_per_pair` + tokens x `attention_s_per_token`, moved = tokens x `moved_s_per_token`
    + `moved_s` + `late_s`. The pass takes attention + tokens x `linear_s_per_token` + `fixed_s` + moved - `overlap` x
    hidden, and hidden is the least of

    - moved - tail, tail = tokens x `tail_s_per_token` + `tail_s`: the last hop has no attention left to hide behind;
    - `cover` x attention: the first piece is computed when nothing moves yet, or the last when nothing moves any more;
    - `steady` x attention + edges, edges = tokens x `edges_s_per_token` + `edges_s`: first and last rounds move less
      than those between, beside attention that they do not fill.

    The host enqueues all that in `host_s` meanwhile; the pass takes no less.
    """
    attention_s = terms.attention_s_per_pair * pairs + terms.attention_s_per_token * tokens
    moved_s = terms.moved_s_per_token * moved_tokens + terms.moved_s + late_s
    can_hide_s = moved_s - (terms.tail_s_per_token * moved_tokens + terms.tail_s)
    steady_s = terms.steady * attention_s + terms.edges_s_per_token * moved_tokens + terms.edges_s
    hidden_s = np.minimum(can_hide_s, np.minimum(terms.cover * attention_s, steady_s))
    device_s = attention_s + terms.linear_s_per_token * tokens + terms.fixed_s + moved_s - terms.overlap * hidden_s
    return np.maximum(device_s, terms.host_s)


def late_s(terms: Any, pairs: Any, tokens: Any, moved_tokens: Any) -> Any:
    """Seconds that messages take longer since they share ports with shards.

    From the start of each layer on, shards fill the ports for `shared_s`. Messages come after the share `before` of
    the layer's linear work, the share `behind` of them (0 or 1 / 2) after attention too. They take twice as long while
    both pass.
    """
    attention_s = terms.attention_s_per_pair * pairs + terms.attention_s_per_token * tokens
    moved_s = terms.moved_s_per_token * moved_tokens + terms.moved_s
    outer_s = terms.head_s_per_token * tokens + terms.head_s
    linear_s = (1.0 - terms.apart) * (terms.linear_s_per_token * tokens + terms.fixed_s - outer_s)
    left_s = np.maximum(terms.shared_s - terms.before * linear_s, 0.0)
    met_s = np.minimum((1.0 - terms.behind) * moved_s, left_s)
    return met_s + terms.behind * np.minimum(moved_s, 2.0 * np.maximum(left_s - met_s - attention_s, 0.0))


def head_s(terms: Any, tokens: Any) -> Any:
    """Seconds of the output head in a pass, and of what a microbatch takes before its layers."""
    return terms.head_s_per_token * tokens + terms.head_s


def recurrent_s(terms: Any, usual_s: Any, tokens: Any, late_s: Any, sequences: Any) -> Any:
    """Seconds of a pass with recurrent layers, `usual_s` (`pass_s`) without states; the same where there are none.

    States of cut sequences add sequences x `states_s_per_sequence` + tokens x `states_s_per_token` + `states_s`, which
    nothing hides. Each kind of layers waits for its own shards, which are gathered one layer ahead: the share `apart`
    of layers, which do not attend, takes its share of `shards_s` at least, the others theirs. Messages put these off by
    `late_s`, less `spare_s` in which their ports have nothing to do while shards pass elsewhere. The head
    (`head_s_per_token` of linear layers, `head_s` of the fixed seconds) hides no shards, nor does the share `edge` of
    the rest, the last layer of a pass without reductions.
    """
    states_s = terms.states_s + terms.states_s_per_token * tokens + terms.states_s_per_sequence * sequences
    outer_s = terms.head_s_per_token * tokens + terms.head_s
    apart_s = terms.apart * (terms.linear_s_per_token * tokens + terms.fixed_s - outer_s)
    apart_shards_s = terms.apart * terms.shards_s
    layers_s = usual_s - outer_s - apart_s
    shards_s = terms.shards_s - apart_shards_s
    beside_s = shards_s + np.maximum(late_s - terms.spare_s, 0.0) + terms.edge * np.minimum(layers_s, shards_s)
    attending_s = np.maximum(layers_s, beside_s)
    return states_s + outer_s + attending_s + np.maximum(apart_s, apart_shards_s)


def overlapped_s(computed_s: Any, traffic_s: Any, exposed_s: Any, overlap: Any) -> Any:
    """Seconds of computation beside traffic: `exposed_s` of the traffic comes before or after it, the share `overlap`
    of the shorter of the rest and the computation hides."""
    rest_s = np.maximum(traffic_s - exposed_s, 0.0)
    return computed_s + rest_s - overlap * np.minimum(rest_s, computed_s) + exposed_s
