"""The script of a stage: operations that all of its ranks run in order, layer by layer, and where things are in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rayfcp.program import Backward, Receive, Send, StageFlow
from rayfcp.simulate.machine import Machine, StageModel
from rayfcp.simulate.replay import ATTEND, COMPUTE, ENQUEUED, MARK, POST, RECEIVE, SEND, WAIT
from rayfcp.values import LayerProfile

SHOWN_LAYERS = 6

RowKey = tuple[int, str]
"""(position of the instruction, kind of layers): names a row of equal layers."""

Operation = tuple[int, int, float, float, int]
"""kind, arg, base_s, per_token_s, recorded, as in `Script`."""

HopKey = tuple[StageFlow, int, int]
"""(flow, microbatch, stage that sends)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """Equal layers in a row, the first few of `total` in the script. Layer i ends at `marks[i]`; `gathers`: the
    collectives that gather them, without those of layers that are still gathered."""

    key: RowKey
    total: int
    marks: tuple[int, ...]
    gathers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Marks of one instruction: start; end of the wait for its first parameters; end of computation; end. `encoder`:
    start and end of the vision encoder's backward pass, before the end."""

    start: int
    ready: int
    computed: int
    stop: int
    encoder: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageScript:
    """The script of a stage with the marks of its instructions. `recorded[p]`: the mark after the recorded layer of
    pass p (`Machine.number`). Collectives are numbered from `first_collective`."""

    operations: tuple[Operation, ...]
    rows: tuple[LayerRow, ...]
    first_collective: int
    collective_bytes: tuple[float, ...]
    instants: tuple[Instants, ...]
    recorded: Mapping[int, int]
    num_marks: int


@dataclass(slots=True, kw_only=True)
class ScriptWriter:
    """Operations while a script is written, of a step of `num_microbatches`. `held`: all layers are gathered, `kept`:
    the last one is."""

    machine: Machine
    num_microbatches: int
    stage: int
    part: StageModel
    once: bool
    shown: Mapping[RowKey, int] | None
    first_collective: int
    held: bool = False
    kept: bool = False
    operations: list[Operation] = field(default_factory=list)
    rows: list[LayerRow] = field(default_factory=list)
    collectives: list[float] = field(default_factory=list)
    instants: list[Instants] = field(default_factory=list)
    recorded: dict[int, int] = field(default_factory=dict)
    marks: int = 0

    def plot(self) -> StageScript:
        return StageScript(
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
        self.operations.append((COMPUTE, 0, self.part.share * self.machine.hardware.microbatch_overhead_s, 0.0, 0))

    def hop(self, item: Send | Receive, hops: Mapping[HopKey, int]) -> None:
        """Activations or gradients to or from a neighbour."""
        sends = isinstance(item, Send)
        key = (item.flow, item.microbatch, self.stage if sends else item.stage)
        self.operations.append((SEND if sends else RECEIVE, hops[key], 0.0, 0.0, 0))

    def forward(self, position: int, microbatch: int) -> int:
        """Write a forward pass; returns the mark at which the first layer has its parameters."""
        machine = self.machine
        root = self.gather(self.part.root_parameters)
        before = machine.number(microbatch, backward=False)
        numbers = [before + kind for kind in self.part.kinds]
        first = self._gather_layer(numbers[0], kept=self.kept and self.part.num_layers == 1)
        self.wait(root)
        self._enqueue(-1)
        ready = self.marks

        def layer(number: int, recorded: bool) -> None:
            self._layer(microbatch, number=number, recorded=recorded)

        key = (position, "plain")
        self.row(key, numbers=numbers, first=first, layer=layer, records=True, last_kept=self.kept)
        if self.part.last:
            self.linear(microbatch, machine.head_s_per_token)
            self.kept = True
        self.held = self.once
        return ready

    def backward(self, position: int, item: Backward, *, recomputed: int, attends: bool) -> int:
        """Write a backward pass, of which `recomputed` layers run forward again (`attends`: with their attention);
        returns the mark at which computation ends."""
        machine, microbatch = self.machine, item.microbatch
        before = machine.number(microbatch, backward=True)
        numbers = [before + kind for kind in self.part.kinds[::-1]]
        plain, later = numbers[: len(numbers) - recomputed], numbers[len(numbers) - recomputed :]
        reduced: list[int] = []
        gather, self.kept = self._gather_layer(numbers[0], kept=self.kept), False
        self._enqueue(-1)
        if self.part.last:
            self.linear(microbatch, machine.head_s_per_token * machine.model.linear_backward)

        def one(number: int, recorded: bool) -> None:
            self._layer(microbatch, number=number, recorded=recorded, backward=True)
            if item.reduce:
                self.reduce(machine.model.trained_of(self._shape(number)), after=reduced)

        def again(number: int, recorded: bool) -> None:
            if attends:
                self._layer(microbatch, number=number - len(machine.shapes), recorded=False)
            else:
                shape = self._shape(number)
                idle_s = machine.idle_s_per_token(shape)
                self.linear(microbatch, machine.repeated_s_per_token(shape), idle_s=idle_s)
                self._enqueue(number, attends=False)
            one(number, recorded)

        if plain:
            key = (position, "plain")
            gather = self.row(key, numbers=plain, first=gather, following=later[:1], layer=one, records=True)
        if later:
            key = (position, "recomputed")
            self.row(key, numbers=later, first=gather, layer=again, records=not plain)
        computed = self.mark()
        if item.reduce:
            self.reduce(self.part.root_parameters if machine.model.adapter is None else 0, after=reduced)
            self.wait(reduced[-1])
        return computed

    def row(
        self,
        key: RowKey,
        *,
        numbers: Sequence[int],
        first: int | None,
        layer: Callable[[int, bool], None],
        records: bool,
        following: Sequence[int] = (),
        parameters: int | None = None,
        last_kept: bool = False,
    ) -> int | None:
        """Write layers, each gathering the next one's `parameters` (default: those of the language model's layers)
        while it runs, except for a last one that is still gathered (`last_kept`); returns the gather of what follows.
        `numbers`: of their passes, `following`: of that behind them. The last but one layer is recorded, for it stands
        for those not in the script."""
        total = len(numbers)
        count = total if self.shown is None else min(total, self.shown.get(key, SHOWN_LAYERS))
        at, gathers, marks, coming = max(count - 2, 0), [first], [], [*numbers[1:count], *following]
        for index in range(count):
            self.wait(gathers[index])
            if index == 0:
                self.mark()
            if index < len(coming):
                is_kept = last_kept and index + 2 == count
                gathers.append(self._gather_layer(coming[index], parameters=parameters, kept=is_kept))
            layer(numbers[index], records and index == at)
            marks.append(self.mark())
        if records:
            self.recorded[numbers[at]] = marks[at]
        named = tuple(gather for gather in gathers[:count] if gather is not None)
        self.rows.append(LayerRow(key=key, total=total, marks=tuple(marks), gathers=named))
        return gathers[-1]

    def _layer(self, microbatch: int, *, number: int, recorded: bool, backward: bool = False) -> None:
        """A layer's linear work before attention, attention, and that after it, experts included; in backward the other
        way round."""
        machine, shape = self.machine, self._shape(number)
        share, idle_s = machine.before_share(shape), machine.idle_s_per_token(shape)
        if backward:
            linear_s, idle_s = machine.linear_backward_s(shape), machine.model.linear_backward * idle_s
            self.linear(microbatch, linear_s * (1 - share), idle_s=idle_s)
            self.attend(number, recorded=recorded)
            self.linear(microbatch, linear_s * share)
        else:
            linear_s = machine.linear_s_per_token(shape)
            self.linear(microbatch, linear_s * share)
            self.attend(number, recorded=recorded)
            self.linear(microbatch, linear_s * (1 - share), idle_s=idle_s)
        self._enqueue(number - backward * len(machine.shapes), backward=backward, attends=shape.attention is not None)

    def _enqueue(self, number: int, *, backward: bool = False, attends: bool = False) -> None:
        """Wait for the host to enqueue a layer, with the rounds of forward pass `number` where it `attends`; -1: the
        host begins. Nothing where the profile has no host."""
        if self.machine.hosted:
            layer_s, round_s = self.machine.host_s(backward=backward)
            self.operations.append((ENQUEUED, number, layer_s, attends * round_s, 0))

    def _shape(self, number: int) -> LayerProfile:
        """The shape of the layers of a pass."""
        return self.machine.shapes[number % len(self.machine.shapes)]

    def linear(self, microbatch: int, s_per_token: float, *, idle_s: float = 0.0) -> None:
        """Linear work of a token, beside `idle_s` of it in experts that it does not pass."""
        base_s = (s_per_token + idle_s) * self.machine.hardware.linear_half_tokens
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
        """The collective, or None if there is nothing (more) to gather."""
        return None if self.held or not parameters else self._collective(parameters * self.machine.bytes_per_element)

    def _gather_layer(self, number: int, *, kept: bool, parameters: int | None = None) -> int | None:
        if kept:
            return None
        return self.gather(
            self.machine.model.parameters_of([self._shape(number)]) if parameters is None else parameters
        )

    def reduce(self, parameters: int, *, after: list[int]) -> None:
        """Scatter gradients, after earlier ones."""
        if after:
            self.wait(after[-1])
        if parameters:
            after.append(self._collective(parameters * self.machine.reduced_bytes))
