"""A vision encoder in a simulated step: its work, and the operations that it adds to a stage's script.

Its parameters are gathered and its gradients scattered as those of the language model: patch embedding and mergers once
a microbatch, layers one by one. Attention is over each image alone. Features travel when all is encoded, in the rounds
of their exchange; their gradients take these rounds back when the language model's backward pass is over, and the
encoder's follows, unless it is frozen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD, LINEAR_BACKWARD, vision_flops
from rayfcp.program import Backward, Encode
from rayfcp.simulate.machine import Machine
from rayfcp.simulate.replay import ATTEND, COMPUTE
from rayfcp.simulate.script import ScriptWriter
from rayfcp.values import VisionProfile
from rayfcp.values.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWork:
    """`[microbatch, device]`: patches and (patch, patch) pairs of real images, `real` and `real_pairs`; those that take
    time, with the half length of kernels and the placeholder image of a rank without images."""

    real: Floats
    real_pairs: Floats
    patches: Floats
    pairs: Floats

    @property
    def rows(self) -> Floats:
        """As further rows of tokens that operations count."""
        return np.concatenate((self.patches, self.pairs))

    def seconds(self, machine: Machine) -> Floats:
        """`[microbatch, device]`: seconds of images, forward and backward."""
        encoder = _Encoder(machine)
        vision, trained = encoder.vision, not encoder.vision.frozen
        per_patch = vision.num_layers * encoder.layer_s_per_patch + encoder.outer_s_per_patch
        linear_s = (1 + trained * LINEAR_BACKWARD) * per_patch * self.real
        pairs = self.real_pairs + machine.hardware.attention_half_tokens * self.real
        attention_s = (1 + trained * ATTENTION_BACKWARD) * vision.num_layers * encoder.layer_s_per_pair * pairs
        return np.asarray((linear_s + attention_s) * machine.slowness)

    def flops(self, machine: Machine) -> float:
        """FLOPs of all images, forward and, unless frozen, backward."""
        num_patches, pairs = float(self.real.sum()), float(self.real_pairs.sum())
        return vision_flops(machine.model, num_patches=num_patches, pairs=pairs)


def work_of(encodes: Sequence[Sequence[Encode]], *, machine: Machine) -> EncoderWork:
    """The work of all devices' encoders; `encodes` by microbatch, then rank."""
    vision = _Encoder(machine).vision
    half = machine.hardware.attention_half_tokens
    table = np.zeros((4, len(encodes), machine.num_devices))
    for microbatch, items in enumerate(encodes):
        for device, item in enumerate(items):
            patches = np.array([run.num_patches for run in item.images], np.float64)
            counts = np.array([run.count for run in item.images], np.float64)
            table[:2, microbatch, device] = counts @ patches, counts @ patches**2
            if not item.images:
                patches, counts = np.array([vision.merged_patches], np.float64), np.ones(1)
            table[2:, microbatch, device] = counts @ patches, counts @ (patches * (patches + half))
    return EncoderWork(real=table[0], real_pairs=table[1], patches=table[2], pairs=table[3])


class _Encoder:
    """Seconds of forward, at speed 1: of a layer per patch and per pair, of all else per patch.

    Raises:
        ValueError: the model has no vision encoder.
    """

    def __init__(self, machine: Machine) -> None:
        model, hardware = machine.model, machine.hardware
        if model.vision is None:
            raise ValueError(
                f"programs encode images, model {model.name} has no vision encoder; give the model's profile"
            )
        self.vision: VisionProfile = model.vision
        linear, layer_flops = machine.peak_flops * hardware.linear_efficiency, 2.0 * self.vision.layer_parameters
        attention = machine.peak_flops * hardware.attention_efficiency
        outer_flops = self.vision.linear_flops_per_patch(model.hidden_size) - self.vision.num_layers * layer_flops
        self.layer_s_per_patch = layer_flops / linear
        self.layer_s_per_pair = self.vision.attention_flops_per_pair / self.vision.num_layers / attention
        self.outer_s_per_patch = outer_flops / linear
        self.outer_parameters = self.vision.outer_parameters(model.hidden_size)


class _EncoderWriter(_Encoder):
    """Writes the encoder's part of one instruction, at `position`, of a microbatch."""

    def __init__(self, writer: ScriptWriter, microbatch: int, *, position: int) -> None:
        super().__init__(writer.machine)
        self._writer, self._microbatch, self._position = writer, microbatch, position

    def layers(self, *, times: tuple[float, float], after: Callable[[], None], first: int | None) -> None:
        """All layers, their linear part and their attention `times` as long as forward, `after` behind each; `first`:
        the gather of the one that runs first."""
        linear, attention = times

        def layer(_number: int, _recorded: bool) -> None:
            self.linear(linear * self.layer_s_per_patch)
            self._compute(2, base_s=0.0, each_s=attention * self.layer_s_per_pair)
            after()

        self._writer.row(
            (self._position, "encoder"),
            numbers=[0] * self.vision.num_layers,
            first=first,
            layer=layer,
            records=False,
            parameters=self.vision.layer_parameters,
        )

    def linear(self, s_per_patch: float) -> None:
        half_tokens = self._writer.machine.hardware.linear_half_tokens
        self._compute(1, base_s=s_per_patch * half_tokens, each_s=s_per_patch)

    def _compute(self, kind: int, *, base_s: float, each_s: float) -> None:
        """An operation by the rows of `EncoderWork.rows`: patches (1) or pairs (2)."""
        row = kind * self._writer.num_microbatches + self._microbatch
        self._writer.operations.append((COMPUTE, row, base_s, each_s, 0))

    def exchange(self, *, backward: bool) -> None:
        number = self._writer.machine.features_number(
            self._microbatch, num_microbatches=self._writer.num_microbatches, backward=backward
        )
        self._writer.operations.append((ATTEND, number, 0.0, 0.0, 0))


def encode(writer: ScriptWriter, microbatch: int, *, position: int) -> tuple[int, int]:
    """Encode a microbatch and exchange its features; returns the marks at which the first layer has its parameters,
    and at which everything is encoded."""
    mine = _EncoderWriter(writer, microbatch, position=position)
    root = writer.gather(mine.outer_parameters)
    first = writer.gather(mine.vision.layer_parameters)
    writer.wait(root)
    ready = writer.marks
    mine.layers(times=(1.0, 1.0), after=lambda: None, first=first)
    mine.linear(mine.outer_s_per_patch)
    encoded = writer.mark()
    mine.exchange(backward=False)
    return ready, encoded


def encode_backward(writer: ScriptWriter, item: Backward, *, position: int) -> tuple[int, int] | None:
    """Bring the features' gradients back and run the encoder's backward pass; returns the marks of its start and of the
    end of computation, None where the encoder is frozen."""
    mine = _EncoderWriter(writer, item.microbatch, position=position)
    if mine.vision.frozen:
        return None
    reduced: list[int] = []

    def reduce_layer() -> None:
        if item.reduce:
            writer.reduce(mine.vision.layer_parameters, after=reduced)

    start = writer.mark()
    mine.exchange(backward=True)
    gather = writer.gather(mine.vision.layer_parameters)
    mine.linear(LINEAR_BACKWARD * mine.outer_s_per_patch)
    mine.layers(times=(LINEAR_BACKWARD, ATTENTION_BACKWARD), after=reduce_layer, first=gather)
    computed = writer.mark()
    if item.reduce:
        writer.reduce(mine.outer_parameters, after=reduced)
        writer.wait(reduced[-1])
    return start, computed
