"""Rounds of recurrent layers: what ranks compute of their parts of sequences, and the states that they exchange.

As the executor runs a layer (`rayfcp.execute.recurrence`), forward: halos of the convolution travel; summaries of parts
of cut sequences are computed, of delta rules by kernels whose values are wider by the keys, beside the outputs of
sequences that are not cut and of first parts, where these give theirs; they travel; states come back, and kernels
compute the outputs that are left. Backward: gradients of states before parts are made and travel; those behind parts
come back, kernels are differentiated, and gradients of halos travel.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse.csgraph import connected_components

from rayfcp.cost.analytic import LINEAR_BACKWARD
from rayfcp.program.scans import ScanWork
from rayfcp.simulate.machine import Machine
from rayfcp.values import LayerProfile, RecurrenceProfile, RecurrentKind
from rayfcp.values.arrays import Floats
from rayfcp.values.mixers import STATE_BYTES


class ScanRound(NamedTuple):
    """Seconds of each rank, and bytes `[source, target]`, at the same time."""

    compute_s: Floats
    moved: Floats


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


def exchanged_rounds(work: ScanWork, mixer: RecurrenceProfile, *, machine: Machine, backward: bool) -> list[ScanRound]:
    """The rounds of a layer where ranks that share sequences exchange tokens for heads and back, each with all tokens
    for its heads in between (Megatron-LM, `megatron/core/ssm/mamba_context_parallel.py`)."""
    held = (work.position >= 0).astype(np.int64)
    _, group = connected_components(held.T @ held, directed=False)
    degree, tokens = np.bincount(group)[group], work.tokens
    inputs, outputs = zip(*(mixer.exchanged_by_heads(each) for each in degree.tolist()), strict=True)
    to_heads, to_tokens = (outputs, inputs) if backward else (inputs, outputs)
    together = (group[:, None] == group) & ~np.eye(len(group), dtype=bool)
    token_bytes = together * machine.bytes_per_element
    share = mixer.token_flops * (LINEAR_BACKWARD if backward else 1.0) / degree
    layer = _Layer(work, mixer, machine=machine)
    return [
        layer.round(moved=tokens[:, None] * token_bytes * np.array(to_heads)),
        layer.round(share * np.bincount(group, tokens)[group], half=share),
        layer.round(moved=tokens * token_bytes * np.array(to_tokens)),
    ]


class _Layer:
    """A layer with one recurrence on all ranks."""

    def __init__(self, work: ScanWork, mixer: RecurrenceProfile, *, machine: Machine) -> None:
        self._work, self._mixer, self._machine = work, mixer, machine
        heads, columns = work.shares(mixer.num_heads, num_columns=mixer.value_dim)
        alone = work.folders[:, None] > 2  # elsewhere each folds for itself, and nothing comes back
        columns *= STATE_BYTES * mixer.key_dim  # bytes, whole numbers: sums are the same in any order
        heads *= STATE_BYTES * mixer.transition_size
        self._summaries = _apart(work.leading.T @ columns + work.inner.T @ heads)
        self._adjoints = _apart(work.later.T @ columns)
        self._states = _apart(columns.T @ (work.later * alone))
        self._state_grads = _apart(columns.T @ (work.leading * alone))
        self._halos = work.halos * mixer.conv_channels * machine.bytes_per_element

    def rounds(self, *, backward: bool) -> list[ScanRound]:
        work, mixer = self._work, self._mixer
        token, part = float(mixer.token_flops), float(mixer.part_flops)
        if not len(work.folders):
            per_token = token * (LINEAR_BACKWARD if backward else 1.0)
            return [self.round(work.tokens * per_token, half=per_token)]
        if backward:
            return [
                self.round(work.later_tokens * part),
                self.round(moved=self._adjoints),
                self.round(moved=self._state_grads),
                self.round(work.tokens * token * LINEAR_BACKWARD, half=token * LINEAR_BACKWARD),
                self.round(moved=self._halos.T),
            ]
        before, behind = work.leading_tokens * mixer.summary_flops, work.tokens * token
        if mixer.is_delta:
            opening = (work.tokens - work.later_tokens) * token
            before, behind = opening + work.later_tokens * mixer.summary_flops, behind - opening
        return [
            self.round(moved=self._halos),
            self.round(before, half=token * mixer.is_delta),
            self.round(moved=self._summaries),
            self.round(moved=self._states),
            self.round(behind, half=np.where(behind > 0, token, 0.0)),
        ]

    def round(
        self, flops: Floats | float = 0.0, *, half: Floats | float = 0.0, moved: Floats | None = None
    ) -> ScanRound:
        """`half`: FLOPs of a token of the kernels that take longer for few tokens."""
        machine, num_ranks = self._machine, self._machine.num_ranks
        seconds = np.zeros(num_ranks) + machine.linear_seconds(flops + half * machine.hardware.linear_half_tokens)
        none = np.zeros((num_ranks, num_ranks))
        return ScanRound(seconds * machine.slowness[:num_ranks], none if moved is None else moved)


def _apart(moved: Floats) -> Floats:
    """Without what stays on a rank."""
    np.fill_diagonal(moved, 0.0)
    return moved
