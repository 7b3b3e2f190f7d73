"""What every rank of a stage does, in order, layer by layer: one script for all of them, since all run the same
passes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rayfcp.plan.costs.analytic import LINEAR_BACKWARD
from rayfcp.program import Backward, Flow, Forward, Free, Instruction, Load, Receive, Send
from rayfcp.simulate.arrays import ATTEND, COMPUTE, MARK, POST, RECEIVE, SEND, WAIT
from rayfcp.simulate.machine import Machine, Part

SHOWN_LAYERS = 6

RowKey = tuple[int, str]
"""(position of the instruction, kind of layers): names a row of equal layers."""

Operation = tuple[int, int, float, float, int]
"""kind, arg, base_s, per_token_s, recorded, as in `Script`."""

HopKey = tuple[Flow, int, int]
"""(flow, microbatch, stage that sends)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Equal layers one after the other, of `total` the first few in the script. Layer i ends at `marks[i]`, its gather
    is collective `gathers[i]` (none where parameters stay gathered)."""

    key: RowKey
    total: int
    marks: tuple[int, ...]
    gathers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Marks of one instruction: start; end of the wait for its first parameters; end of computation; end."""

    start: int
    ready: int
    computed: int
    stop: int


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
    layer for forward and for backward, while the layer before computes (the first one is exposed); with
    `gather_every` "step" in the first forward pass only. Gradients are scattered layer by layer, one at a time, beside
    the next layer's backward pass; embedding and head last. Of the fixed seconds of a microbatch a stage has its
    layers' share.
    """
    writer = _Writer(
        machine=machine,
        stage=stage,
        part=machine.part(stage),
        once=gather_every == "step",
        shown=shown,
        first_collective=first_collective,
    )
    recomputed: dict[int, int] = {}
    for position, item in enumerate(instructions):
        start = writer.mark()
        if isinstance(item, Load):
            writer.load()
            ready = computed = start
        elif isinstance(item, Forward):
            recomputed[item.microbatch] = min(item.recomputed_layers, writer.part.num_layers)
            ready = writer.forward(position, item.microbatch)
            computed = writer.mark()
        elif isinstance(item, Backward):
            ready, computed = start, writer.backward(position, item, recomputed=recomputed[item.microbatch])
        else:
            assert not isinstance(item, Free), "takes no time"
            writer.hop(item, hops or {})
            ready = computed = start
        writer.instants.append(Instants(start=start, ready=ready, computed=computed, stop=writer.mark()))
    return writer.plot()


@dataclass(slots=True, kw_only=True)
class _Writer:
    machine: Machine
    stage: int
    part: Part
    once: bool
    shown: Mapping[RowKey, int] | None
    first_collective: int
    held: bool = False
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
        root = self._gather(self.part.root_parameters)
        first = self._gather(machine.layer_parameters)
        self._wait(root)
        ready = self.marks

        before = machine.number(microbatch, backward=False)
        numbers = [before + kind for kind in self.part.kinds]

        def layer(number: int, recorded: bool) -> None:
            self._forward_layer(microbatch, number=number, recorded=recorded)

        self._row((position, "plain"), numbers=numbers, first=first, last=True, layer=layer, records=True)
        if self.part.last:
            self._linear(microbatch, machine.head_s_per_token)
        self.held = self.once
        return ready

    def backward(self, position: int, item: Backward, *, recomputed: int) -> int:
        """Returns the mark at which computation ends."""
        machine, microbatch = self.machine, item.microbatch
        before = machine.number(microbatch, backward=True)
        numbers = [before + kind for kind in self.part.kinds[::-1]]
        plain, later = numbers[: len(numbers) - recomputed], numbers[len(numbers) - recomputed :]
        reduced: list[int] = []
        gather = self._gather(machine.layer_parameters)
        if self.part.last:
            self._linear(microbatch, machine.head_s_per_token * LINEAR_BACKWARD)

        def one(number: int, recorded: bool) -> None:
            self._backward_layer(microbatch, number=number, recorded=recorded)
            if item.reduce:
                self._reduce(machine.layer_parameters, after=reduced)

        def again(number: int, recorded: bool) -> None:
            self._forward_layer(microbatch, number=number - len(machine.windows), recorded=False)
            one(number, recorded)

        if plain:
            key = (position, "plain")
            gather = self._row(key, numbers=plain, first=gather, last=not later, layer=one, records=True)
        if later:
            key = (position, "recomputed")
            self._row(key, numbers=later, first=gather, last=True, layer=again, records=not plain)
        computed = self.mark()
        if item.reduce:
            self._reduce(self.part.root_parameters, after=reduced)
            self._wait(reduced[-1])
        return computed

    def _row(
        self,
        key: RowKey,
        *,
        numbers: Sequence[int],
        first: int | None,
        last: bool,
        layer: Callable[[int, bool], None],
        records: bool,
    ) -> int | None:
        """Layers, each gathering the next one's parameters while it runs; returns the gather of what follows.
        `numbers`: of their passes. Of the layers the last but one is recorded: the one that stands for those not
        shown, which all are of one kind."""
        total = len(numbers)
        count = total if self.shown is None else min(total, self.shown.get(key, SHOWN_LAYERS))
        at, gathers, marks = max(count - 2, 0), [first], []
        for index in range(count):
            self._wait(gathers[index])
            if index == 0:
                self.mark()
            if index + 1 < count or not last:
                gathers.append(self._gather(self.machine.layer_parameters))
            layer(numbers[index], records and index == at)
            marks.append(self.mark())
        if records:
            self.recorded[numbers[at]] = marks[at]
        named = tuple(gather for gather in gathers[:count] if gather is not None)
        self.rows.append(Row(key=key, total=total, marks=tuple(marks), gathers=named))
        return gathers[-1]

    def _forward_layer(self, microbatch: int, *, number: int, recorded: bool) -> None:
        machine = self.machine
        self._linear(microbatch, machine.linear_s_per_token * machine.before_share)
        self._attend(number, recorded=recorded)
        self._linear(microbatch, machine.linear_s_per_token * (1 - machine.before_share))

    def _backward_layer(self, microbatch: int, *, number: int, recorded: bool) -> None:
        machine = self.machine
        linear_s = LINEAR_BACKWARD * machine.linear_s_per_token
        self._linear(microbatch, linear_s * (1 - machine.before_share))
        self._attend(number, recorded=recorded)
        self._linear(microbatch, linear_s * machine.before_share)

    def _linear(self, microbatch: int, s_per_token: float) -> None:
        base_s = s_per_token * self.machine.hardware.linear_half_tokens
        self.operations.append((COMPUTE, microbatch, base_s, s_per_token, 0))

    def _attend(self, number: int, *, recorded: bool) -> None:
        self.operations.append((ATTEND, number, 0.0, 0.0, int(recorded)))

    def _wait(self, collective: int | None) -> None:
        if collective is not None:
            self.operations.append((WAIT, collective, 0.0, 0.0, 0))

    def _collective(self, moved_bytes: float) -> int:
        number = self.first_collective + len(self.collectives)
        self.collectives.append(moved_bytes)
        self.operations.append((POST, number, 0.0, 0.0, 0))
        return number

    def _gather(self, parameters: int) -> int | None:
        """None where there is nothing to gather (any more)."""
        return None if self.held or not parameters else self._collective(parameters * self.machine.bytes_per_element)

    def _reduce(self, parameters: int, *, after: list[int]) -> None:
        """Scatter gradients, behind those before."""
        if after:
            self._wait(after[-1])
        if parameters:
            after.append(self._collective(parameters * self.machine.reduced_bytes))
