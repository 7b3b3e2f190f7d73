"""Several devices of one node, a process each: rings and sharded states over the device's own collectives (NCCL), and
recovery in the living processes after one was killed."""

import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from gpu_plain import fitting_tokens, flops_of
from gpu_sizes import Bench, Found
from transformers import PreTrainedConfig

from rayfcp.bench.alone import model_of, peak_of, random_shards
from rayfcp.cluster.runtime import LOOPBACK
from rayfcp.cluster.workers.environment import use_interface
from rayfcp.config import Config
from rayfcp.config.models import TrainConfig
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.execute.calibrate import time_parts
from rayfcp.execute.devices.backend import backend_of
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.reports import SavedPart
from rayfcp.execute.state.checkpoint import write_index
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.saving import write_part
from rayfcp.models.build import sharded_model
from rayfcp.models.library import text_of
from rayfcp.program import RankProgram, lower
from rayfcp.values import GlobalBatch, ModelProfile, Sample, StateId
from rayfcp.values.devices import DEVICES

ANSWER_S = 180.0
"""Longest wait for an answer: first steps compile and connect."""
ABORT_EVERY_S = 0.02
CHECKPOINT_STEP = 2
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
LOSS_DIFFERENCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest relative difference of the loss of a step on other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, and one sequence that all ranks compute on in a ring."""

    config: Config
    library: PreTrainedConfig
    model: ModelProfile
    device: str
    data_dir: str
    port: int
    num_tokens: int

    def program(self, position: MeshPosition) -> RankProgram:
        """This rank's program of a step."""
        shape = PassShape(degree=position.num_ranks, lengths=(self.num_tokens,))
        plan, sequences = pass_plan(
            shape,
            num_ranks=position.num_ranks,
            recomputed_layers=self.model.num_layers,
            keeps_attention=self.model.keeps_attention,
        )
        return lower(plan, sequences)[position.rank]


class Device:
    """One process's engine."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        device = torch.device(setting.device)
        copies = self._copies = CopyFolder(Path(setting.data_dir) / "copies", page_locks=backend_of(device).page_locks)
        self.engine = RankEngine(setting.config, device=device, data_dir=setting.data_dir, copies=copies)

    def join(self, generation: str, rank: int, num_ranks: int) -> float:
        """Join a world; seconds, building the model included."""
        setting, start_s = self._setting, time.perf_counter()

        def store() -> dist.Store:
            client: Any = dist.TCPStore(LOOPBACK, setting.port, is_master=False)
            return dist.PrefixStore(generation, client)

        self.engine.join(
            MeshPosition(rank=rank, num_ranks=num_ranks),
            store=store,
            make_model=lambda world: sharded_model(
                setting.library, run=setting.config.model, seed=0, world=world, draw_on=world.device
            ),
            hidden_size=text_of(setting.library).hidden_size,
            layers_of_stage=(text_of(setting.library).num_hidden_layers,),
        )
        return time.perf_counter() - start_s

    def step(self, number: int) -> tuple[float, float]:
        """Loss and seconds of a step."""
        tokens, program = self._setting.num_tokens, self._setting.program(self.engine.position)
        sample = Sample(id=0, shard=0, row=0, start=0, stop=tokens, num_targets=tokens - 1)
        batch = GlobalBatch(step=number, epoch=0, samples=(sample,))
        report = self.engine.run_step(program, batch, plan_hash=program.plan_hash)
        return report.loss, report.step_s

    def save(self, folder: str) -> SavedPart:
        """Write its part of a checkpoint.

        Raises:
            SaveError: it could not be written.
        """
        state = StateId(version=CHECKPOINT_STEP, generation=0)
        self.engine.copy_state(state)
        return write_part(self._copies, state, numbers=[self.engine.position.device], folder=Path(folder))

    def load(self, folder: str) -> None:
        self.engine.load(folder)

    def parts(self, max_tokens: int) -> dict[str, Any]:
        """Seconds of messages and gathers among others; see `PartTimings`."""
        return asdict(time_parts(self.engine, self._setting.model, max_tokens=max_tokens))

    def peak(self) -> int | None:
        return backend_of(self.engine.device).memory_bytes(self.engine.device).get("peak")

    def die(self, after_s: float) -> None:
        """End as a process that is killed from outside, while others wait for it."""
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.engine.close()


def serve(setting: Setting, connection: Connection) -> None:
    """Run commands `(method, arguments)` of a `Device` one after the other and answer each with (True, value) or
    (False, error); "abort" at once. Ends with None."""
    use_interface(LOOPBACK, own_address=LOOPBACK)
    torch.set_num_threads(1)
    device = Device(setting)
    commands: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()

    def receive() -> None:
        command: Any = ("",)
        while command is not None:
            try:
                command = connection.recv()
            except EOFError:
                command = None
            if command == ("abort", ()):
                device.engine.abort()
            else:
                commands.put(command)

    threading.Thread(target=receive, daemon=True).start()
    while (command := commands.get()) is not None:
        name, given = command
        try:
            connection.send((True, getattr(device, name)(*given)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))


@contextmanager
def seeing(device: str, number: int) -> Iterator[None]:
    """Processes that start meanwhile see this device alone, as workers of a run do: their libraries are told before
    they are loaded."""
    name = VISIBLE.get(device)
    before = os.environ.get(name) if name else None
    if name:
        os.environ[name] = before.split(",")[number] if before else str(number)
    try:
        yield
    finally:
        if name:
            del os.environ[name]
            os.environ.update({name: before} if before else {})


class Node:
    """Processes of a node, one a device."""

    def __init__(self, setting: Setting, *, num_devices: int, start_method: str) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self.connections, self.processes = [], []
        for number in range(num_devices):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(setting, theirs), daemon=True)
            with seeing(setting.device, number):
                process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def tell(self, numbers: Sequence[int], name: str, *given: Any) -> None:
        for number in numbers:
            self.connections[number].send((name, given))

    def answers(self, numbers: Sequence[int]) -> list[tuple[bool, Any]]:
        """Of the last command, in order.

        Raises:
            RuntimeError: a process is gone, or does not answer.
        """
        found = []
        for number in numbers:
            try:
                if not self.connections[number].poll(ANSWER_S):
                    raise RuntimeError(f"device {number} has not answered within {ANSWER_S:.0f} s")
                found.append(self.connections[number].recv())
            except (EOFError, ConnectionError) as error:
                raise RuntimeError(f"the process of device {number} is gone") from error
        return found

    def ask(self, numbers: Sequence[int], name: str, *given: Any) -> list[Any]:
        """Values of a command.

        Raises:
            RuntimeError: it failed on a device.
        """
        self.tell(numbers, name, *given)
        answers = self.answers(numbers)
        for number, (done, value) in zip(numbers, answers, strict=True):
            if not done:
                raise RuntimeError(f"{name} on device {number}: {value}")
        return [value for _, value in answers]

    def join(self, generation: str, numbers: Sequence[int]) -> float:
        """Seconds until all have joined."""
        start_s = time.perf_counter()
        for rank, number in enumerate(numbers):
            self.tell([number], "join", generation, rank, len(numbers))
        for done, value in self.answers(numbers):
            if not done:
                raise RuntimeError(f"join: {value}")
        return time.perf_counter() - start_s

    def abort(self, numbers: Sequence[int]) -> list[tuple[bool, Any]]:
        """Answers to the command under way, after its exchanges were aborted, again and again: connections that are
        being made are missed."""
        end_s = time.perf_counter() + ANSWER_S
        while time.perf_counter() < end_s and not all(self.connections[each].poll() for each in numbers):
            self.tell(numbers, "abort")
            time.sleep(ABORT_EVERY_S)
        return self.answers(numbers)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def node_of(bench: Bench, folder: str) -> Iterator[tuple[Node, Setting]]:
    """A node with data, of as many tokens as one device fewer can hold, and a store at which its processes meet."""
    name, count = next(iter(bench.sizes.models)), bench.num_devices
    config = bench.config(name)
    library, model = model_of(config)
    memory = backend_of(bench.device).total_memory_bytes(bench.device)
    fit = fitting_tokens(model, memory_bytes=memory, recomputed_layers=model.num_layers, dtype=bench.sizes.dtype)
    tokens = min(count * bench.sizes.device_tokens, (count - 1) * max(fit, 1))
    random_shards(Path(folder), [tokens], vocab_size=model.vocab_size, seed=0)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    setting = Setting(
        config=config,
        library=library,
        model=model,
        device=bench.device.type,
        data_dir=str(Path(folder) / "shards"),
        port=store.port,
        num_tokens=tokens,
    )
    node = Node(setting, num_devices=count, start_method=bench.start_method)
    try:
        yield node, setting
    finally:
        node.end()


def devices(bench: Bench) -> Found:
    """Steps of one sequence in a ring of all devices, messages and gathers alone; then one process is killed in a step,
    and the others go on from a checkpoint, in place.

    Raises:
        ValueError: fewer than two devices are asked for, or here.
    """
    count, here = bench.num_devices, backend_of(bench.device).num_devices
    if count < 2 or (not DEVICES[bench.device.type].is_host and here < count):
        raise ValueError(f"--devices is {count}, must be 2 or more, and at most the {here} that torch sees; change it")
    with tempfile.TemporaryDirectory() as folder, node_of(bench, folder) as (node, setting):
        every = list(range(count))
        bench.log(f"{count} devices: joining, then a sequence of {setting.num_tokens} tokens in a ring")
        found: Found = {"num_devices": count, "model": setting.model.name, "num_tokens": setting.num_tokens}
        found["join_s"] = node.join("one", every)
        steps, wanted = _trained(node, every, checkpoint=str(Path(folder) / "checkpoint"), train=setting.config.train)
        step_s = statistics.median(steps)
        peak = peak_of(bench.device, dtype=bench.sizes.dtype)
        flops = flops_of(setting.model, [setting.num_tokens])
        found |= {
            "step_s": step_s,
            "tokens_per_s": setting.num_tokens / step_s,
            "mfu": None if peak is None else flops / step_s / peak / count,
            "peak_bytes": node.ask(every, "peak"),
            "parts": node.ask(every, "parts", bench.sizes.device_tokens),
        }
        bench.keep(found)
        bench.log(f"{count} devices: one is killed in a step")
        found["recovery"] = _recovered(node, every, checkpoint=str(Path(folder) / "checkpoint"))
    difference = abs(found["recovery"]["loss"] - wanted) / abs(wanted)
    bound = LOSS_DIFFERENCE[bench.sizes.dtype]
    return {**found, "loss": wanted, "targets": {"loss on one rank fewer": {"found": difference, "at_most": bound}}}


def _trained(node: Node, every: Sequence[int], *, checkpoint: str, train: TrainConfig) -> tuple[list[float], float]:
    """Seconds of steps, without the first, and the loss of the step after the checkpoint."""
    seconds, loss = [], 0.0
    for number in range(1, CHECKPOINT_STEP + 2):
        answers = node.ask(every, "step", number)
        seconds.append(max(step_s for _, step_s in answers))
        loss = answers[0][0]
        if number == CHECKPOINT_STEP:
            parts = node.ask(every, "save", checkpoint)
            write_index(Path(checkpoint), parts, step=number, config=train)
    return seconds[1:], loss


def _recovered(node: Node, every: Sequence[int], *, checkpoint: str) -> Found:
    """Seconds from a process's death to the end of its neighbours' exchanges, of the new process groups and models, of
    the load, and of the first step; the loss of that step."""
    *living, last = every
    node.tell(living, "step", CHECKPOINT_STEP + 2)
    node.tell([last], "die", 0.5)
    node.processes[last].join(ANSWER_S)
    start_s = time.perf_counter()
    failed = node.abort(living)
    if any(done for done, _ in failed):
        raise RuntimeError("a step ended without one of its ranks")
    aborted_s = time.perf_counter()
    joined_s = node.join("two", living)
    load_s = time.perf_counter()
    node.ask(living, "load", checkpoint)
    loaded_s = time.perf_counter()
    answers = node.ask(living, "step", CHECKPOINT_STEP + 1)
    return {
        "errors": sorted({str(value) for _, value in failed}),
        "abort_s": aborted_s - start_s,
        "join_s": joined_s,
        "load_s": loaded_s - load_s,
        "step_s": time.perf_counter() - loaded_s,
        "total_s": time.perf_counter() - start_s,
        "loss": answers[0][0],
    }
