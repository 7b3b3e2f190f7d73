"""Runs of the product on the stand-in device of `tests.execute.ordered_device`, as they are and with planted faults.

`python -m tests.execute.ordered_runs FILE` writes the faults of each to a file, as JSON. Results are held against dense
attention and a single process: what is checked is what a step really does.
"""

import copy
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from rayfcp.bench.alone import random_shards
from rayfcp.config import Config
from rayfcp.config.models import TrainConfig
from rayfcp.execute import engine as engines
from rayfcp.execute.attention import schedule as schedules
from rayfcp.execute.attention import slots
from rayfcp.execute.attention.function import AttentionContext, attention
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.execute.devices.backend import EventClock, to_device
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import BatchLoss
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.optimization import make_optimizer, totals, update
from rayfcp.execute.parallel import transport as transports
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups
from rayfcp.execute.parallel.transport import AttentionStats, DistributedTransport, Fabric, Pipes
from rayfcp.execute.state import copying
from rayfcp.execute.state.copies import CopyFolder, NewCopy
from rayfcp.execute.state.copying import Copier
from rayfcp.models.build import random_model, sharded_model
from rayfcp.program import Piece, Receive, Send, StageFlow, lower, lower_reshuffle
from rayfcp.values import Block, GlobalBatch, Layout, Round, Sample, Transfer
from rayfcp.values.state import KeptStates, ShardHeader, StateId
from tests.execute import ordered_device, ordered_threads, staged
from tests.execute.cases import (
    ARCHITECTURE,
    SEED,
    VOCAB,
    Case,
    CaseTokens,
    Gradients,
    assert_same,
    expected,
    library_config,
)
from tests.execute.dense import dense, random_tensors, run_ranks
from tests.execute.layouts import over_runs, plan_of, random_layout, ring
from tests.execute.ordered_device import Device, Event, Group, Stream, here, on_device
from tests.execute.ordered_threads import Executor
from tests.execute.ordering import HOST, host
from tests.masks import specs
from tests.program.helpers import forwards

Work = Callable[[int, torch.device], None]


def on_ranks(work: Work, *, num_ranks: int, fabric: Fabric) -> list[Device]:
    """`work(rank, device)` on a thread per rank; the devices."""
    found: dict[int, Device] = {}

    def one(rank: int) -> None:
        with on_device() as device:
            found[rank] = device
            work(rank, torch.device(ordered_device.NAME, device.index))

    run_ranks(one, num_ranks=num_ranks, fabric=fabric)
    return [found[rank] for rank in range(num_ranks)]


def attend(layout: Layout, lengths: Sequence[int], *, theirs: Sequence[Sequence[Piece]] | None = None) -> list[Device]:
    """Attention, forward and backward, by this layout, or brought in the order of `theirs`."""
    sequences, num_ranks = specs(lengths), 1 + max(block.rank for block in layout.blocks)
    lowered = lower(plan_of(layout, sequences, num_ranks=num_ranks), sequences)
    programs = [forwards(each)[0].attention for each in lowered]
    shuffles = lower_reshuffle(theirs, layout) if theirs else [None] * num_ranks
    held = theirs or [[block for block in layout.blocks if block.rank == rank] for rank in range(num_ranks)]
    tensors, fabric = random_tensors(sequences, dtype=torch.float32), Fabric(num_ranks)
    whole = {number: [torch.zeros_like(parts[i]) for i in (0, 0, 1, 2)] for number, parts in tensors.items()}

    def work(rank: int, device: torch.device) -> None:
        group = Group(fabric, rank)
        schedule = make_schedule(programs[rank], reshuffle=shuffles[rank])
        kernel = pick_kernel(ordered_device.NAME)
        context = AttentionContext(schedule=schedule, transport=DistributedTransport(group), kernel=kernel)
        own = [torch.cat([tensors[p.sequence][i][p.start : p.stop] for p in held[rank]]) for i in range(4)]
        *inputs, grad = (to_device(each.numpy(), dtype=torch.float32, device=device) for each in own)
        inputs = [each.requires_grad_() for each in inputs]
        found = attention(*inputs, context)
        grads = torch.autograd.grad(found, inputs, grad)
        context.stats.buffers.clear()
        at = 0
        for piece in held[rank]:
            for target, part in zip(whole[piece.sequence], (found.detach(), *grads), strict=True):
                target[piece.start : piece.stop] = part[at : at + piece.num_tokens].cpu()
            at += piece.num_tokens

    devices = on_ranks(work, num_ranks=num_ranks, fabric=fabric)
    for number, parts in dense(tensors, sequences).items():
        for want, have in zip(parts, whole[number], strict=True):
            assert float((want - have).norm() / want.norm()) < 1e-5
    return devices


def zigzag_ring() -> list[Device]:
    return attend(ring(specs([40, 9]), num_ranks=4), [40, 9])


def relays() -> list[Device]:
    """Blocks anywhere, fetched from owners or passed on."""
    return attend(random_layout(specs([50, 33, 20]), num_ranks=3, seed=4), [50, 33, 20])


def scattered_blocks() -> list[Device]:
    """Rank 0's rows of a sequence lie in six places, where computations and messages find them by the same numbers."""
    blocks = []
    for at in range(12):
        blocks.append(Block(sequence=0, start=4 * at, stop=4 * at + 4, rank=1 - at % 2))
        if at % 2 == 0:
            blocks.append(Block(sequence=1, start=2 * at, stop=2 * at + 4, rank=0))
    moved = [tuple(i for i, each in enumerate(blocks) if (each.sequence, each.rank) == (0, rank)) for rank in (1, 0)]
    rounds = tuple(Round(transfers=(Transfer(blocks=moved[i], source=1 - i, target=i),)) for i in (0, 1))
    return attend(Layout(blocks=tuple(blocks), rounds=rounds), [48, 24])


def heads() -> list[Device]:
    """A ring of two runs of two ranks that share out heads."""
    layout = over_runs(ring(specs([40, 9]), num_ranks=2), num_ranks=4, heads=2)
    return attend(layout, [40, 9])


def reshuffle() -> list[Device]:
    layout = random_layout(specs([50, 33]), num_ranks=3, seed=4)
    theirs = [
        [Piece(sequence=0, start=0, stop=50)],
        [Piece(sequence=1, start=0, stop=20)],
        [Piece(sequence=1, start=20, stop=33)],
    ]
    return attend(layout, [50, 33], theirs=theirs)


class Copies(CopyFolder):
    """What is published here may be read, and sent elsewhere, at any time."""

    def begin(self, header: ShardHeader) -> NewCopy:
        new = super().begin(header)
        here().pinned[new.buffer.ctypes.data] = here().memory(HOST, "a copy")
        return new

    def _publish(self, file: Any, header: ShardHeader) -> None:
        here().host_uses(np.frombuffer(file.mapping, np.uint8)[file.data_start :].ctypes.data, what="publish")
        super()._publish(file, header)


RINGS = Case(
    num_ranks=3,
    lengths=(41, 17, 1),
    microbatches=((((2, 0, 1), (0,)),), (((1,), (1,)), ((0,), (2,)))),
    recomputed=2,
)


ALONE = Case(num_ranks=1, lengths=(9,), microbatches=((((0,), (0,)),),))


def steps(case: Case = RINGS, num_steps: int = 1) -> list[Device]:
    """Steps with an update and a copy of the state each; loss and gradients of the first are a single process's."""
    programs, fabric = lower(case.plan(), case.sequences), Fabric(case.num_ranks)
    first, found = random_model(library_config("float32"), dtype="float32", seed=SEED), {}

    def work(rank: int, device: torch.device) -> None:
        group, model = Group(fabric, rank), copy.deepcopy(first).to(device)
        model.tie()
        transport, kernel = DistributedTransport(group), pick_kernel(ordered_device.NAME)
        interpreter = Interpreter(transport=transport, kernel=kernel, model=model, device=device)
        optimizer, place = make_optimizer(model, TrainConfig()), MeshPosition(rank=0, num_ranks=1)
        copies = Copies(Path(folder) / str(rank))
        copier = Copier(model, optimizer, position=place, copies=copies)
        alone = SimpleNamespace(
            position=place, device=device, tensor=None, pipe_forward=None, sum=ordered_device.all_reduce
        )
        for version in range(num_steps):
            copies.drop(KeptStates(since=StateId(version=version - 1, generation=0)))
            optimizer.zero_grad(set_to_none=True)
            loss = BatchLoss(loss=CrossEntropy(), scale=1.0 / case.num_targets)
            done = interpreter.enqueue(programs[rank], CaseTokens(case), loss=loss)
            grads = {name: each.grad.inner.clone() for name, each in model.named_parameters()}
            sums = totals(alone, model, loss_sum=done.loss_sum)
            copier.hold_update()
            update(optimizer, sums, num_targets=case.num_targets, max_norm=1e-3)
            with torch.no_grad():  # the host has waited for the update; copies are ordered after any writes
                torch._foreach_mul_(list(model.parameters()), 1.0)
            copier.take(StateId(version=version, generation=0))
            found.setdefault(rank, (done.read().loss_sum, grads))
        copier.settle()

    with TemporaryDirectory() as folder:
        devices = on_ranks(work, num_ranks=case.num_ranks, fabric=fabric)
    assert_same(*_summed(found, case.num_targets), want=expected(case, "float32"), dtype="float32")
    return devices


def late_copies() -> list[Device]:
    """Steps that end before the thread that copies the state has begun to."""
    with mock.patch.object(Executor, "is_late", True):
        return steps(ALONE, num_steps=4)


def straight_copies() -> list[Device]:
    """Copies that the device makes into the files."""
    with mock.patch.object(ordered_device.OrderedBackend, "page_locks", SimpleNamespace(cuts=lambda _: [4096])):
        return steps(ALONE, num_steps=2)


def _summed(found: dict[int, tuple[float, Gradients]], num_targets: int) -> tuple[float, Gradients]:
    """Mean loss, and sums of the devices' gradients by name."""
    grads: Gradients = {}
    for _, own in found.values():
        for name, grad in own.items():
            grads[name] = grads[name] + grad if name in grads else grad
    return sum(loss for loss, _ in found.values()) / num_targets, grads


def engine() -> list[Device]:
    """Two steps of an engine that shares its model with another rank, which does not exist: streams of FSDP beside
    ours, and the end of a step. A copy of the state is on its way during the next step."""
    case = Case(
        num_ranks=2, lengths=(9, 7, 5, 3), microbatches=tuple((((0,), (at,)), ((1,), (1 + at,))) for at in (0, 2))
    )
    model = {"architecture": ARCHITECTURE, "dtype": "bfloat16"}
    config = Config.model_validate({"data": {"paths": ["."]}, "model": model, "train": {"grad_clip": 1e-3}})
    program, place = lower(case.plan(), case.sequences)[0], MeshPosition(rank=0, num_ranks=2)
    samples = [Sample(id=i, shard=0, row=i, start=0, stop=n, num_targets=n - 1) for i, n in enumerate(case.lengths)]

    def work(_: int, device: torch.device) -> None:
        world, attend = ordered_device.fake_group(2), Group(Fabric(2), 0)
        groups = ProcessGroups(position=place, device=device, seconds=0.0, shard=world, attend=attend, control=world)
        member = SimpleNamespace(
            join=lambda *_, **__: groups, forget=lambda: None, check_alive=lambda: None, is_aborted=False
        )
        with TemporaryDirectory() as folder, mock.patch.object(engines, "Membership", lambda *_, **__: member):
            random_shards(Path(folder), case.lengths, vocab_size=VOCAB, seed=0)
            copies = Copies(Path(folder) / "copies")
            one = engines.RankEngine(config, device=device, data_dir=f"{folder}/shards", copies=copies)
            make = functools.partial(sharded_model, library_config("bfloat16"), run=config.model, seed=SEED)
            one.join(
                place,
                store=dist.HashStore,
                make_model=lambda world: make(world=world),
                hidden_size=64,
                layers_of_stage=(3,),
            )
            for step in range(1, 3):
                batch = GlobalBatch(step=step, epoch=0, samples=tuple(samples))
                copy = StateId(version=step, generation=0)
                report = one.run_step(program, batch, plan_hash=program.plan_hash, copy_as=copy)
                assert math.isfinite(report.loss) and report.grad_norm > 1e-3
            assert one.copy_state(copy) == copy
        dist.destroy_process_group()

    return on_ranks(work, num_ranks=1, fabric=Fabric(1))


def _pipes(forward: Fabric, back: Fabric, *, stage: int, device: torch.device) -> tuple[Pipes, list[Group]]:
    """One stage's pipes, and their groups, which somebody has to keep."""
    groups = [Group(forward, stage, "forward"), Group(back, stage, "backward")]
    activations, gradients = (DistributedTransport(each) for each in groups)
    width, dtype = staged.HIDDEN_SIZE, torch.float32
    pipes = Pipes(activations=activations, gradients=gradients, hidden_size=width, dtype=dtype, device=device)
    return pipes, groups


def hand_overs() -> list[Device]:
    """Three activations leave a stage that does not keep them."""
    fabric = Fabric(2)

    def work(stage: int, device: torch.device) -> None:
        (pipes, _groups), stats = _pipes(fabric, fabric, stage=stage, device=device), AttentionStats()
        for number in range(3):
            given = {"microbatch": number, "flow": StageFlow.ACTIVATION, "stage": 1 - stage, "num_tokens": 4}
            if stage == 0:
                pipes.send(Send(**given), torch.ones(4, staged.HIDDEN_SIZE, device=device))
            else:
                assert pipes.receive(Receive(**given), stats=stats).tolist() == [[1.0] * staged.HIDDEN_SIZE] * 4
        pipes.finish()

    return on_ranks(work, num_ranks=2, fabric=fabric)


def stages() -> list[Device]:
    """Two stages of two ranks: slices whose keys and values are kept, activations and their gradients in pipes."""
    case = staged.typical_case(0, num_ranks=2, layers_of_stage=(1, 1), is_tied=False)
    fabrics = staged.Fabrics(num_stages=2, num_ranks=2)
    models = [case.models("float32") for _ in range(2)]
    found = {}

    def work(number: int, device: torch.device) -> None:
        stage, rank = divmod(number, 2)
        pipes, _groups = _pipes(*fabrics.pipes[rank], stage=stage, device=device)
        group, model = Group(fabrics.attend[stage], rank), models[rank][stage].to(device)
        transport, kernel = DistributedTransport(group), pick_kernel(ordered_device.NAME)
        interpreter = Interpreter(transport=transport, kernel=kernel, model=model, pipes=pipes, device=device)
        done = interpreter.run(case.programs[number], CaseTokens(case), loss_scale=1.0 / case.num_targets)
        found[number] = done.loss_sum, {name: each.grad.inner for name, each in model.named_parameters()}

    devices = on_ranks(work, num_ranks=4, fabric=fabrics)
    assert_same(*_summed(found, case.num_targets), want=staged.expected(case, "float32"), dtype="float32")
    return devices


RUNS = (
    zigzag_ring, relays, scattered_blocks, heads, reshuffle, hand_overs, stages, steps, late_copies, straight_copies,
    engine,
)  # fmt: skip

Plant = Callable[[], Any]


def _unordered(self: Any, works: list[Any], event: Any) -> None:
    """`_Enqueued` whose event is recorded before the works are waited for."""
    self._works, self._event = works, event
    event.record()
    for work in works:
        work.wait()


@contextmanager
def _own_stream(self: DistributedTransport, *, after_compute: bool) -> Iterator[None]:
    """`message_stream` that waits for itself."""
    if after_compute:
        self._stream.wait_stream(self._stream)
    with ordered_device.stream(self._stream):
        yield


def _at_once(self: Copier) -> None:
    """`settle` that publishes what may still be copied."""
    if self._pending is not None:
        (new, _), self._pending = self._pending, None
        self._publish(new)


_synchronize = Event.synchronize


def _wait_in_main(self: Event) -> None:
    """`Event.synchronize` that does nothing in other threads."""
    if host() == HOST:
        _synchronize(self)


def _unsynchronized(self: EventClock, *marks: Any) -> tuple[float, ...]:
    now = self.mark()
    return tuple(mark.elapsed_time(now) for mark in marks)


_give = slots.Buffers.give


def _give_unmarked(self: slots.Buffers, tensor: torch.Tensor, *, computed: bool) -> None:
    _give(self, tensor, computed=False)


_shared = functools.lru_cache(lambda ranges, device: schedules._rows_of.__wrapped__(ranges, device, None))

PLANTS: dict[str, tuple[Callable[[], list[Device]], Plant]] = {
    "computation does not wait for messages": (
        zigzag_ring, lambda: mock.patch.object(transports._Enqueued, "wait", lambda self: None)),
    "messages wait for the wrong stream": (
        zigzag_ring, lambda: mock.patch.object(DistributedTransport, "message_stream", _own_stream)),
    "the event behind messages is recorded too early": (
        zigzag_ring, lambda: mock.patch.object(transports._Enqueued, "__init__", _unordered)),
    "a buffer is reused without its event": (
        zigzag_ring, lambda: mock.patch.object(slots.Buffers, "give", _give_unmarked)),
    "a buffer is freed without record_stream": (
        zigzag_ring, lambda: mock.patch.object(ordered_device.OrderedTensor, "record_stream", lambda *_: None)),
    "a sent activation is freed early": (
        hand_overs, lambda: mock.patch.object(transports._Enqueued, "done", lambda self: True)),
    "streams share row numbers": (
        scattered_blocks, lambda: mock.patch.object(schedules, "rows_of", _shared)),
    "the host reads a copy that is on its way": (
        lambda: steps(ALONE, num_steps=2),
        lambda: mock.patch.multiple(Copier, settle=_at_once, _settle_later=lambda *_: None)),
    "a pinned buffer is emptied before it is full": (
        lambda: steps(ALONE, num_steps=2), lambda: mock.patch.object(Event, "synchronize", _wait_in_main)),
    "a pinned buffer is filled before it is empty": (
        late_copies, lambda: mock.patch.object(itertools, "cycle", lambda buffers: itertools.repeat(buffers[0]))),
    "a copy is published before the device has made it": (
        straight_copies, lambda: mock.patch.object(Event, "synchronize", _wait_in_main)),
    "an update does not wait for the copy": (
        lambda: steps(ALONE, num_steps=2), lambda: mock.patch.object(Copier, "hold_update", lambda self: None)),
    "a copy does not wait for the update": (
        lambda: steps(ALONE, num_steps=2), lambda: mock.patch.object(Stream, "wait_event", lambda *_: None)),
    "computation does not wait for gathered parameters": (
        engine, lambda: mock.patch.object(Stream, "wait_event", lambda *_: None)),
    "the host reads times that have not come": (
        lambda: steps(ALONE, num_steps=2), lambda: mock.patch.object(EventClock, "times", _unsynchronized)),
}  # fmt: skip
"""Runs with one wait, one event or one record less than the product has."""


def main(path: str) -> None:
    """Write the faults of each run and of each plant."""
    torch.set_num_threads(1)
    found = {}
    with (
        ordered_device.install(),
        ordered_threads.installed(),
        mock.patch.object(copying, "BOUNCE_BYTES", 4096),  # so that most tensors take several turns
    ):
        for run in RUNS:
            found[run.__name__] = [*dict.fromkeys(fault for device in run() for fault in device.order.faults)]
        for name, (run, plant) in PLANTS.items():
            with plant():
                found[name] = [*dict.fromkeys(fault for device in run() for fault in device.order.faults)]
    Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
