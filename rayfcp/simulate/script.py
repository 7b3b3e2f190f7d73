"""What a stage does, as operations that all of its ranks run, and where things are in them.

Writes the operations of a stage, layer by layer.

What a vision encoder adds to the script of a step.

Its parameters are gathered and its gradients scattered as those of the language model: what embeds patches and the
mergers once a microbatch, layers one by one. Attention is over each picture alone. Features travel when all is encoded,
in the rounds of their exchange; their gradients take these rounds back when the language model's backward pass is over,
and the encoder's follows, unless it is frozen.

What every rank of a stage does, in order, layer by layer: one script for all of them, since all run the same
passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayfcp.cost.analytic import ATTENTION_BACKWARD, LINEAR_BACKWARD, vision_flops
from rayfcp.program import Backward, Encode, Flow, Forward, Instruction, Load, RankProgram, Receive, Send
from rayfcp.simulate.machine import Machine, Part
from rayfcp.simulate.replay import ATTEND, COMPUTE, MARK, POST, RECEIVE, SEND, WAIT
from rayfcp.values import VisionProfile
from rayfcp.values.arrays import Floats

SHOWN_LAYERS = 6

RowKey = tuple[int, str]
"""(position of the instruction, kind of layers): names a row of equal layers."""

Operation = tuple[int, int, float, float, int]
"""kind, arg, base_s, per_token_s, recorded, as in `Script`."""

HopKey = tuple[Flow, int, int]
"""(flow, microbatch, stage that sends)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal layers one after the other, of `total` the first few in the script. Layer i ends at `marks[i]`; `gathers`:
    the collectives that gather them, without those of layers that are still gathered."""

    key: RowKey
    total: int
    marks: tuple[int, ...]
    gathers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Marks of one instruction: start; end of the wait for its first parameters; end of computation; end. Where a
    backward pass goes on through the vision encoder, `encoder` are start and end of that, before the end."""

    start: int
    ready: int
    computed: int
    stop: int
    encoder: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A stage's script and where things are in it. `recorded[p]` is the mark after the recorded layer, of pass p
    (`Machine.number`). Collectives are numbered from `first_collective`."""

    operations: tuple[Operation, ...]
    rows: tuple[Row, ...]
    first_collective: int
    collective_bytes: tuple[float, ...]
    instants: tuple[Instants, ...]
    recorded: Mapping[int, int]
    num_marks: int


@dataclass(slots=True, kw_only=True)
class Writer:
    """The operations so far, of a step of `num_microbatches`. `held`: all layers are gathered, `kept`: the last one
    is."""

    machine: Machine
    num_microbatches: int
    stage: int
    part: Part
    once: bool
    shown: Mapping[RowKey, int] | None
    first_collective: int
    held: bool = False
    kept: bool = False
    operations: list[Operation] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    collectives: list[float] = field(default_factory=list)
    instants: list[Instants] = field(default_factory=list)
    recorded: dict[int, int] = field(default_factory=dict)
    marks: int = 0

    def plot(self) -> Plot:
        return Plot(
            operations=tuple(self.operations),
            rows=tuple(self.rows),
            first_collective=self.first_collective,
            collective_bytes=tuple(self.collectives),
            instants=tuple(self.instants),
            recorded=self.recorded,
            num_marks=self.marks,
        )

    def mark(self) -> int:
        self.operations.append((MARK, self.marks, 0.0, 0.0, 0))
        self.marks += 1
        return self.marks - 1

    def load(self) -> None:
        share = self.part.num_layers / self.machine.model.num_layers
        self.operations.append((COMPUTE, 0, share * self.machine.hardware.microbatch_overhead_s, 0.0, 0))

    def hop(self, item: Send | Receive, hops: Mapping[HopKey, int]) -> None:
        """Activations or gradients to or from a neighbour.

        Raises:
            ValueError: nobody sends what is received.
        """
        sends = isinstance(item, Send)
        key = (item.flow, item.microbatch, self.stage if sends else item.stage)
        if key not in hops:
            raise ValueError(
                f"stage {self.stage} receives the {item.flow.value} of microbatch {item.microbatch}, which stage "
                f"{item.stage} does not send; lower one plan for all stages"
            )
        self.operations.append((SEND if sends else RECEIVE, hops[key], 0.0, 0.0, 0))

    def forward(self, position: int, microbatch: int) -> int:
        """Returns the mark at which the first layer has its parameters."""
        machine = self.machine
        root = self.gather(self.part.root_parameters)
        first = self._gather_layer(kept=self.kept and self.part.num_layers == 1)
        self.wait(root)
        ready = self.marks

        before = machine.number(microbatch, backward=False)
        numbers = [before + kind for kind in self.part.kinds]

        def layer(number: int, recorded: bool) -> None:
            self._forward_layer(microbatch, number=number, recorded=recorded)

        key = (position, "plain")
        self.row(key, numbers=numbers, first=first, last=True, layer=layer, records=True, last_kept=self.kept)
        if self.part.last:
            self.linear(microbatch, machine.head_s_per_token)
            self.kept = True
        self.held = self.once
        return ready

    def backward(self, position: int, item: Backward, *, recomputed: int) -> int:
        """Returns the mark at which computation ends."""
        machine, microbatch = self.machine, item.microbatch
        before = machine.number(microbatch, backward=True)
        numbers = [before + kind for kind in self.part.kinds[::-1]]
        plain, later = numbers[: len(numbers) - recomputed], numbers[len(numbers) - recomputed :]
        reduced: list[int] = []
        gather, self.kept = self._gather_layer(kept=self.kept), False
        if self.part.last:
            self.linear(microbatch, machine.head_s_per_token * LINEAR_BACKWARD)

        def one(number: int, recorded: bool) -> None:
            self._backward_layer(microbatch, number=number, recorded=recorded)
            if item.reduce:
                self.reduce(machine.layer_parameters, after=reduced)

        def again(number: int, recorded: bool) -> None:
            self._forward_layer(microbatch, number=number - len(machine.windows), recorded=False)
            one(number, recorded)

        if plain:
            key = (position, "plain")
            gather = self.row(key, numbers=plain, first=gather, last=not later, layer=one, records=True)
        if later:
            key = (position, "recomputed")
            self.row(key, numbers=later, first=gather, last=True, layer=again, records=not plain)
        computed = self.mark()
        if item.reduce:
            self.reduce(self.part.root_parameters, after=reduced)
            self.wait(reduced[-1])
        return computed

    def row(
        self,
        key: RowKey,
        *,
        numbers: Sequence[int],
        first: int | None,
        last: bool,
        layer: Callable[[int, bool], None],
        records: bool,
        parameters: int | None = None,
        last_kept: bool = False,
    ) -> int | None:
        """Layers, each gathering the next one's `parameters` (none: those of the language model's layers) while it
        runs, but for the last one if that is still gathered (`last_kept`); returns the gather of what follows.
        `numbers`: of their passes. Of the layers the last but one is recorded: the one that stands for those not shown,
        which all are of one kind."""
        total = len(numbers)
        count = total if self.shown is None else min(total, self.shown.get(key, SHOWN_LAYERS))
        at, gathers, marks = max(count - 2, 0), [first], []
        for index in range(count):
            self.wait(gathers[index])
            if index == 0:
                self.mark()
            if index + 1 < count or not last:
                gathers.append(self._gather_layer(parameters, kept=last_kept and index + 2 == count))
            layer(numbers[index], records and index == at)
            marks.append(self.mark())
        if records:
            self.recorded[numbers[at]] = marks[at]
        named = tuple(gather for gather in gathers[:count] if gather is not None)
        self.rows.append(Row(key=key, total=total, marks=tuple(marks), gathers=named))
        return gathers[-1]

    def _forward_layer(self, microbatch: int, *, number: int, recorded: bool) -> None:
        machine = self.machine
        self.linear(microbatch, machine.linear_s_per_token * machine.before_share)
        self.attend(number, recorded=recorded)
        self.linear(microbatch, machine.linear_s_per_token * (1 - machine.before_share))

    def _backward_layer(self, microbatch: int, *, number: int, recorded: bool) -> None:
        machine = self.machine
        linear_s = LINEAR_BACKWARD * machine.linear_s_per_token
        self.linear(microbatch, linear_s * (1 - machine.before_share))
        self.attend(number, recorded=recorded)
        self.linear(microbatch, linear_s * machine.before_share)

    def linear(self, microbatch: int, s_per_token: float) -> None:
        base_s = s_per_token * self.machine.hardware.linear_half_tokens
        self.operations.append((COMPUTE, microbatch, base_s, s_per_token, 0))

    def attend(self, number: int, *, recorded: bool) -> None:
        self.operations.append((ATTEND, number, 0.0, 0.0, int(recorded)))

    def wait(self, collective: int | None) -> None:
        if collective is not None:
            self.operations.append((WAIT, collective, 0.0, 0.0, 0))

    def _collective(self, moved_bytes: float) -> int:
        number = self.first_collective + len(self.collectives)
        self.collectives.append(moved_bytes)
        self.operations.append((POST, number, 0.0, 0.0, 0))
        return number

    def gather(self, parameters: int) -> int | None:
        """None where there is nothing to gather (any more)."""
        return None if self.held or not parameters else self._collective(parameters * self.machine.bytes_per_element)

    def _gather_layer(self, parameters: int | None = None, *, kept: bool) -> int | None:
        """`parameters`: those of the language model's layers if absent."""
        of_layer = self.machine.layer_parameters if parameters is None else parameters
        return None if kept else self.gather(of_layer)

    def reduce(self, parameters: int, *, after: list[int]) -> None:
        """Scatter gradients, behind those before."""
        if after:
            self.wait(after[-1])
        if parameters:
            after.append(self._collective(parameters * self.machine.reduced_bytes))


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


def write_script(
    instructions: Sequence[Instruction],
    *,
    machine: Machine,
    stage: int = 0,
    gather_every: str = "microbatch",
    hops: Mapping[HopKey, int] | None = None,
    shown: Mapping[RowKey, int] | None,
    first_collective: int = 0,
) -> Plot:
    """The script of the instructions of `stage`. A row has `shown[key]` of its layers, `SHOWN_LAYERS` if that is
    absent, and all where `shown` is None. `hops[key]` is the number of a hop on rank 0.

    Parameters are gathered as FSDP2 does: embedding and head once a microbatch, before the forward pass; each
    layer for forward and for backward, while the layer before computes (the first one is exposed); where the head is,
    the last layer stays gathered from a forward pass to the next backward pass; with `gather_every` "step" all do, from
    the first forward pass on. Gradients are scattered layer by layer, one at a time, beside
    the next layer's backward pass; embedding and head last. A vision encoder follows the same rules
    (`rayfcp.simulate.script`). Of the fixed seconds of a microbatch a stage has its
    layers' share.
    """
    writer = Writer(
        machine=machine,
        num_microbatches=sum(isinstance(item, Load) for item in instructions),
        stage=stage,
        part=machine.part(stage),
        once=gather_every == "step",
        shown=shown,
        first_collective=first_collective,
    )
    for position, item in enumerate(instructions):
        writer.instants.append(_write(writer, item, position=position, before=instructions[:position], hops=hops or {}))
    return writer.plot()


def _write(
    writer: Writer,
    item: Instruction,
    *,
    position: int,
    before: Sequence[Instruction],
    hops: Mapping[HopKey, int],
) -> Instants:
    """One instruction, behind those `before` it."""
    start = writer.mark()
    ready = computed = start
    encoder: tuple[int, int] | None = None
    if isinstance(item, Load):
        writer.load()
    elif isinstance(item, Encode):
        ready, computed = encode(writer, item.microbatch, position=position)
    elif isinstance(item, Forward):
        ready, computed = writer.forward(position, item.microbatch), writer.mark()
    elif isinstance(item, Backward):
        own = [each for each in before if each.microbatch == item.microbatch]
        (again,) = (each.recomputed_layers for each in own if isinstance(each, Forward))
        computed = writer.backward(position, item, recomputed=min(again, writer.part.num_layers))
        if any(isinstance(each, Encode) for each in own):
            encoder = encode_backward(writer, item, position=position)
    else:
        assert isinstance(item, Send | Receive), "others take no time"
        writer.hop(item, hops)
    return Instants(start=start, ready=ready, computed=computed, stop=writer.mark(), encoder=encoder)
