"""What a vision encoder adds to the script of a step.

Its parameters are gathered and its gradients scattered as those of the language model: what embeds patches and the
mergers once a microbatch, layers one by one. Attention is over each picture alone. Features travel when all is encoded,
in the rounds of their exchange; their gradients take these rounds back when the language model's backward pass is over,
and the encoder's follows, unless it is frozen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.plan.costs.analytic import ATTENTION_BACKWARD, LINEAR_BACKWARD
from rayfcp.plan.costs.flops import vision_flops
from rayfcp.program import Backward, Encode, Load, RankProgram
from rayfcp.simulate.arrays import ATTEND, COMPUTE, Floats
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.writer import Writer
from rayfcp.values import VisionProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWork:
    """`[microbatch, device]`: patches of real pictures; patches and cells that take time, the half length of kernels in
    cells and what encodes nothing included."""

    real: Floats
    real_cells: Floats
    patches: Floats
    cells: Floats

    @property
    def rows(self) -> Floats:
        """As further rows of tokens that operations count."""
        return np.concatenate((self.patches, self.cells))


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Seconds of forward, at speed 1: of a layer per patch and per cell, of all else per patch."""

    layer_s_per_patch: float
    layer_s_per_cell: float
    outer_s_per_patch: float
    outer_parameters: int
    vision: VisionProfile

    @classmethod
    def of(cls, machine: Machine) -> "Encoder":
        """
        Raises:
            ValueError: the model has no vision encoder.
        """
        vision, size, hardware = machine.model.vision, machine.model.hidden_size, machine.hardware
        if vision is None:
            raise ValueError(
                f"programs encode pictures, model {machine.model.name} has no vision encoder; give the model's profile"
            )
        linear = machine.peak_flops * hardware.linear_efficiency
        flops = 2.0 * vision.layer_parameters
        return cls(
            layer_s_per_patch=flops / linear,
            layer_s_per_cell=vision.attention_flops_per_cell
            / vision.num_layers
            / (machine.peak_flops * hardware.attention_efficiency),
            outer_s_per_patch=(vision.linear_flops_per_patch(size) - vision.num_layers * flops) / linear,
            outer_parameters=vision.outer_parameters(size),
            vision=vision,
        )


def encodes(programs: Sequence[RankProgram]) -> bool:
    """Whether programs encode pictures."""
    return any(isinstance(item, Encode) for item in programs[0].instructions)


def work_of(programs: Sequence[RankProgram], *, machine: Machine) -> EncoderWork | None:
    """What all devices encode; None where nothing is encoded."""
    if not encodes(programs):
        return None
    vision = Encoder.of(machine).vision
    half = machine.hardware.attention_half_tokens
    num_microbatches = sum(isinstance(item, Load) for item in programs[0].instructions)
    table = np.zeros((4, num_microbatches, len(programs)))
    for device, program in enumerate(programs):
        for item in program.instructions:
            if isinstance(item, Encode):
                patches = np.array([run.num_patches for run in item.pictures], np.float64)
                counts = np.array([run.count for run in item.pictures], np.float64)
                table[:2, item.microbatch, device] = counts @ patches, counts @ patches**2
                if not item.pictures:
                    patches, counts = np.array([vision.merged_patches], np.float64), np.ones(1)
                table[2:, item.microbatch, device] = counts @ patches, counts @ (patches * (patches + half))
    return EncoderWork(real=table[0], real_cells=table[1], patches=table[2], cells=table[3])


def encoder_seconds(work: EncoderWork, *, machine: Machine) -> Floats:
    """`[microbatch, device]`: seconds of pictures, forward and backward."""
    encoder = Encoder.of(machine)
    vision, trained = encoder.vision, not encoder.vision.frozen
    per_patch = vision.num_layers * encoder.layer_s_per_patch + encoder.outer_s_per_patch
    linear_s = (1 + trained * LINEAR_BACKWARD) * per_patch * work.real
    cells = work.real_cells + machine.hardware.attention_half_tokens * work.real
    attention_s = (1 + trained * ATTENTION_BACKWARD) * vision.num_layers * encoder.layer_s_per_cell * cells
    return np.asarray((linear_s + attention_s) * machine.slowness)


def encoder_flops(work: EncoderWork | None, *, machine: Machine) -> float:
    """Of all pictures, forward and, unless frozen, backward."""
    if work is None:
        return 0.0
    return vision_flops(machine.model, num_patches=float(work.real.sum()), cells=float(work.real_cells.sum()))


def _layer(
    writer: Writer, encoder: Encoder, microbatch: int, *, times: tuple[float, float]
) -> Callable[[int, bool], None]:
    """One layer, its linear part and its attention so many times as long as forward."""
    linear, attention = times

    def layer(_number: int, _recorded: bool) -> None:
        _linear(writer, microbatch, linear * encoder.layer_s_per_patch)
        _count(writer, 2, microbatch, base_s=0.0, each_s=attention * encoder.layer_s_per_cell)

    return layer


def _row(
    writer: Writer, encoder: Encoder, *, position: int, first: int | None, layer: Callable[[int, bool], None]
) -> None:
    """All layers of a pass, `first` the gather of the one that runs first."""
    writer.row(
        (position, "encoder"),
        numbers=[0] * encoder.vision.num_layers,
        first=first,
        last=True,
        layer=layer,
        records=False,
        parameters=encoder.vision.layer_parameters,
    )


def _linear(writer: Writer, microbatch: int, s_per_patch: float) -> None:
    base_s = s_per_patch * writer.machine.hardware.linear_half_tokens
    _count(writer, 1, microbatch, base_s=base_s, each_s=s_per_patch)


def _count(writer: Writer, kind: int, microbatch: int, *, base_s: float, each_s: float) -> None:
    """An operation by the rows of `EncoderWork.rows`: patches (1) or cells (2)."""
    row = kind * writer.num_microbatches + microbatch
    writer.operations.append((COMPUTE, row, base_s, each_s, 0))


def _exchange(writer: Writer, microbatch: int, *, backward: bool) -> None:
    number = writer.machine.features_number(microbatch, num_microbatches=writer.num_microbatches, backward=backward)
    writer.operations.append((ATTEND, number, 0.0, 0.0, 0))


def encode(writer: Writer, microbatch: int, *, position: int) -> tuple[int, int]:
    """Encode a microbatch and exchange its features; returns the marks at which the first layer has its parameters,
    and at which everything is encoded."""
    encoder = Encoder.of(writer.machine)
    layer = _layer(writer, encoder, microbatch, times=(1.0, 1.0))
    root = writer.gather(encoder.outer_parameters)
    first = writer.gather(encoder.vision.layer_parameters)
    writer.wait(root)
    ready = writer.marks
    _row(writer, encoder, position=position, first=first, layer=layer)
    _linear(writer, microbatch, encoder.outer_s_per_patch)
    encoded = writer.mark()
    _exchange(writer, microbatch, backward=False)
    return ready, encoded


def encode_backward(writer: Writer, item: Backward, *, position: int) -> tuple[int, int] | None:
    """The way of the features' gradients, and the encoder's backward pass; returns the marks of its start and of the
    end of computation, None where the encoder is frozen."""
    encoder, microbatch = Encoder.of(writer.machine), item.microbatch
    if encoder.vision.frozen:
        return None
    forward = _layer(writer, encoder, microbatch, times=(LINEAR_BACKWARD, ATTENTION_BACKWARD))
    reduced: list[int] = []

    def layer(number: int, recorded: bool) -> None:
        forward(number, recorded)
        if item.reduce:
            writer.reduce(encoder.vision.layer_parameters, after=reduced)

    start = writer.mark()
    _exchange(writer, microbatch, backward=True)
    gather = writer.gather(encoder.vision.layer_parameters)
    _linear(writer, microbatch, LINEAR_BACKWARD * encoder.outer_s_per_patch)
    _row(writer, encoder, position=position, first=gather, layer=layer)
    computed = writer.mark()
    if item.reduce:
        writer.reduce(encoder.outer_parameters, after=reduced)
        writer.wait(reduced[-1])
    return start, computed
