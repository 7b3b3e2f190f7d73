"""Rounds of recurrent layers: what ranks compute of their parts of sequences, and the states that they exchange.

As the executor runs a layer (`rayfcp.execute.recurrence`), forward: halos of the convolution travel; summaries of parts
of cut sequences are computed, of delta rules together with their outputs, by kernels whose values are wider by the
keys; they travel while all that is left is computed; states come back, and one product adds them to outputs. Backward:
gradients of states before parts are made and travel while sequences that are not cut are differentiated; those behind
parts come back, cut sequences are differentiated, and gradients of halos travel.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayfcp.cost.analytic import LINEAR_BACKWARD
from rayfcp.program.scans import ScanTable
from rayfcp.simulate.machine import Machine
from rayfcp.values import LayerProfile, RecurrenceProfile, RecurrentKind
from rayfcp.values.arrays import Bools, Floats, Ints
from rayfcp.values.mixers import CHUNK_TOKENS, STATE_BYTES


class ScanRound(NamedTuple):
    """Seconds of each rank, and bytes `[source, target]`, at the same time."""

    compute_s: Floats
    moved: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanWork:
    """A recurrence, whatever its shape. `cut`, `whole`: tokens of each rank in sequences of several parts, and in
    others. `[chain, rank]`: parts of the rank but last ones (`leading`), but first ones (`later`), and but either
    (`inner`); `position` of the rank among those that fold the chain, of which there are `folders[chain]`, -1 if it is
    none. `halos`: rows, `[source, target]`."""

    cut: Floats
    whole: Floats
    leading: Floats
    later: Floats
    inner: Floats
    position: Ints
    folders: Ints
    halos: Floats

    @classmethod
    def of(cls, table: ScanTable) -> "ScanWork":
        """That of a table."""
        parts, num_ranks = table.parts, len(table.tokens)
        sizes, is_cut = (parts.stop - parts.start).astype(np.float64), table.chain >= 0
        cut = np.bincount(parts.rank, sizes * is_cut, minlength=num_ranks).astype(np.float64)
        chain, number, rank = (each[is_cut] for each in (table.chain, table.number, parts.rank))
        place, num_chains = chain * num_ranks + rank, len(table.size)

        def counted(which: Bools) -> Floats:
            found = np.bincount(place, which, minlength=num_chains * num_ranks)
            return found.astype(np.float64).reshape(num_chains, num_ranks)

        leads, follows = number < table.size[chain] - 1, number > 0
        flat = np.full(num_chains * num_ranks, len(number))
        np.minimum.at(flat, place, number)
        first = flat.reshape(num_chains, num_ranks)
        position = np.argsort(np.argsort(first, axis=1, kind="stable"), axis=1, kind="stable")
        rows, apart = table.halos, table.halos.sender != table.halos.receiver
        halos = np.bincount(rows.sender * num_ranks + rows.receiver, apart, minlength=num_ranks**2)
        return cls(
            cut=cut,
            whole=table.tokens - cut,
            leading=counted(leads),
            later=counted(follows),
            inner=counted(leads & follows),
            position=np.where(first < len(number), position, -1),
            folders=(first < len(number)).sum(axis=1),
            halos=halos.astype(np.float64).reshape(num_ranks, num_ranks),
        )

    def shares(self, num_heads: int, *, num_columns: int) -> tuple[Floats, Floats]:
        """`[chain, rank]`: shares of the transitions and of the states of a layer that a rank folds
        (`rayfcp.program.scan.Chain.share`)."""
        at, count = self.position, self.folders[:, None]
        heads = num_heads * (at + 1) // count - num_heads * at // count
        head = num_heads * at // count
        first, last = (-(-each * count // num_heads) for each in (head, head + 1))
        width = np.maximum(last - first, 1)
        columns = num_columns * (at - first + 1) // width - num_columns * (at - first) // width
        gathered, by_columns = count <= 2, (count > num_heads) & (count > 2)
        heads = np.where(gathered, num_heads, np.where(by_columns, columns > 0, heads)) * (at >= 0)
        states = heads * np.where(by_columns, columns, num_columns)
        return heads / num_heads, states / (num_heads * num_columns)


def recurrences(shape: LayerProfile) -> list[RecurrenceProfile]:
    """Those of a layer."""
    return [each for each in shape.mixers if isinstance(each, RecurrenceProfile)]


def kind_of(mixer: RecurrenceProfile) -> RecurrentKind:
    """The kind of layers with it, of which programs have scans."""
    kind = mixer.kind.recurrence
    assert kind is not None, "a recurrence has one"
    return kind


def rounds_of(work: ScanWork, mixer: RecurrenceProfile, *, machine: Machine, backward: bool) -> list[ScanRound]:
    """The rounds of a layer; one, without messages, where no sequence is cut."""
    return _Layer(work, mixer, machine=machine).rounds(backward=backward)


def summary_flops(mixer: RecurrenceProfile) -> float:
    """Forward FLOPs of a token of a cut sequence, beside `RecurrenceProfile.token_flops`, for T, U and the rows that
    add a state to outputs: of delta rules those of values wider by the keys, of others the products that make U."""
    if mixer.is_delta:
        return mixer.num_heads * (2.0 * CHUNK_TOKENS * mixer.key_dim + 4.0 * mixer.key_dim**2)
    return 2.0 * mixer.num_heads * mixer.key_dim * mixer.value_dim


class _Layer:
    """A layer with one recurrence on all ranks."""

    def __init__(self, work: ScanWork, mixer: RecurrenceProfile, *, machine: Machine) -> None:
        self._work, self._mixer, self._machine = work, mixer, machine
        transition, state = mixer.state_elements
        whole, share = work.shares(mixer.num_heads, num_columns=mixer.value_dim)
        alone = work.folders[:, None] > 2  # elsewhere each folds for itself, and nothing comes back
        lead, later, inner = (STATE_BYTES * each for each in (work.leading, work.later, work.inner))
        self._summaries = _apart((state * lead).T @ share + (transition * inner).T @ whole)
        self._adjoints = _apart((state * later).T @ share)
        self._states = _apart(share.T @ (state * later * alone))
        self._state_grads = _apart(share.T @ (state * lead * alone))
        self._halos = work.halos * mixer.conv_channels * machine.bytes_per_element

    def rounds(self, *, backward: bool) -> list[ScanRound]:
        work, mixer = self._work, self._mixer
        token, part = float(mixer.token_flops), 2.0 * mixer.num_heads * mixer.key_dim * mixer.value_dim
        if not len(work.folders):
            return [self._round(work.whole * token * (LINEAR_BACKWARD if backward else 1.0), half=token)]
        if backward:
            return [
                self._round(work.cut * part),
                self._round(work.whole * token * LINEAR_BACKWARD, moved=self._adjoints),
                self._round(moved=self._state_grads),
                self._round(work.cut * token * LINEAR_BACKWARD, half=token * LINEAR_BACKWARD),
                self._round(moved=self._halos.T),
            ]
        before = work.cut * (summary_flops(mixer) + token * mixer.is_delta)
        meanwhile = token * (work.whole if mixer.is_delta else work.whole + work.cut)
        return [
            self._round(moved=self._halos),
            self._round(before, half=token * mixer.is_delta),
            self._round(meanwhile, half=token * (not mixer.is_delta), moved=self._summaries),
            self._round(moved=self._states),
            self._round(work.cut * part),
        ]

    def _round(self, flops: Floats | float = 0.0, *, half: float = 0.0, moved: Floats | None = None) -> ScanRound:
        """`half`: FLOPs of a token of the kernels that take longer for few tokens."""
        machine, num_ranks = self._machine, self._machine.num_ranks
        seconds = np.zeros(num_ranks) + machine.linear_seconds(flops + half * machine.hardware.linear_half_tokens)
        none = np.zeros((num_ranks, num_ranks))
        return ScanRound(seconds * machine.slowness[:num_ranks], none if moved is None else moved)


def _apart(moved: Floats) -> Floats:
    """Without what stays on a rank."""
    np.fill_diagonal(moved, 0.0)
    return moved
