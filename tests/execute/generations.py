"""One device through generation after generation, with copies in one folder of all devices' processes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayfcp.cluster.actors.planner import sequences_of
from rayfcp.cluster.dataset import Dataset
from rayfcp.config import Config
from rayfcp.execute.engine import RankEngine
from rayfcp.execute.parallel.groups import MeshPosition
from rayfcp.execute.reports import CollectiveFailedError, DeviceReport
from rayfcp.execute.state.copies import CopyFolder
from rayfcp.execute.state.copying import Source
from rayfcp.models.build import sharded_model
from rayfcp.program import lower
from rayfcp.values import BatchPlan, Group, MicrobatchPlan, SequenceSpec
from rayfcp.values.state import KeptStates, ShardHeader, StateId
from tests.execute.gloo import FORKS, listening_store
from tests.execute.pipelined import pipelined

CPU = torch.device("cpu")
LONG = timedelta(minutes=4)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """`members`: processes by number of device; `steps` are finished in it. `end`: how the step after them ends:
    `leave`: there is none. `forward`, `update`: the last member is killed there. `hang`: it does not take part."""

    world: tuple[int, int, int]
    members: tuple[int, ...]
    steps: tuple[int, ...]
    end: str = "leave"


def flat(sequences: Sequence[SequenceSpec], *, num_ranks: int) -> BatchPlan:
    """All ranks on two sequences at a time."""
    ids, ranks = [each.id for each in sequences], tuple(range(num_ranks))
    return BatchPlan(
        strategy="by hand",
        num_ranks=num_ranks,
        generation=0,
        microbatches=tuple(
            MicrobatchPlan(
                groups=(Group(ranks=ranks, sequences=tuple(ids[at : at + 2])),), group_s=(1.0,), predicted_s=1.0
            )
            for at in range(0, len(ids), 2)
        ),
        recomputed_layers=0,
        predicted_s=1.0,
        lower_bound_s=1.0,
        reason="a test",
    )


class Device:
    """An engine and what a worker does around it."""

    def __init__(self, config: Config, data: Dataset, *, folder: Path) -> None:
        self._config, self._data, self._folder = config, data, folder
        self.copies = CopyFolder(folder / "copies")
        self.engine = RankEngine(config, device=CPU, data_dir=str(folder / "shards"), copies=self.copies)

    def join(self, position: MeshPosition, *, store: dist.Store, empty: bool) -> None:
        total = self._data.library.num_hidden_layers
        layers = {1: (total,), 2: (total - 1, 1), 3: (1,) * total}[position.num_stages]

        def make(world: Any) -> Any:
            self.model = sharded_model(
                self._data.library,
                run=self._config.model,
                seed=0,
                world=world,
                layers_of_stage=layers,
                empty=empty,
            )
            return self.model

        self.position, self._layers = position, layers
        self.engine.join(position, store=lambda: store, make_model=make, hidden_size=48, layers_of_stage=layers)

    def step(self, number: int, **options: Any) -> DeviceReport:
        position, batch = self.position, self._data.sampler.batch(number)
        sequences = sequences_of(batch, layer_kinds=self._data.model.layer_kinds)
        if position.num_stages == 1:
            plan = flat(sequences, num_ranks=position.num_ranks)
        else:
            plan = pipelined(
                sequences, num_stages=position.num_stages, num_ranks=position.num_ranks, recomputed=self._layers
            )
        programs = lower(plan, sequences, reduce_every=self._config.train.reduce_every)
        program = programs[position.stage * position.num_ranks + position.rank]
        return self.engine.run_step(program, batch, plan_hash=program.plan_hash, **options)

    def load_copies(self, state: StateId) -> None:
        """From all copies of a state, also those whose writers are dead."""
        self.engine.load_copies([self._source(header) for header in self.copies.headers() if header.state == state])

    def _source(self, header: ShardHeader) -> Source:
        read = partial(self.copies.read, header.state, header.number)
        return Source(header=header, read=lambda wanted, into: read(wanted=wanted, into=into))


class Member(Device):
    """One process of a script of generations."""

    def __init__(self, config: Config, data: Dataset, *, folder: Path, me: int, connect: Callable[[], Any]) -> None:
        super().__init__(config, data, folder=folder)
        self._me, self._connect, self._client = me, connect, connect()
        self.found: list[dict[str, Any]] = []

    def run(self, script: Sequence[Generation]) -> None:
        for index, generation in enumerate(script):
            if self._me in generation.members:
                self._run(index, generation)

    def _run(self, index: int, generation: Generation) -> None:
        stages, ranks, tensor = generation.world
        number = generation.members.index(self._me)
        position = MeshPosition.of(number, num_ranks=ranks, num_stages=stages, tensor_parallel=tensor)
        before = generation.steps[0] - 1
        self.join(position, store=dist.PrefixStore(str(index), self._client), empty=index > 0)
        if index > 0:
            self.load_copies(StateId(version=before, generation=index - 1))
        state = StateId(version=before, generation=index)
        assert self.engine.copy_state(state) == state
        for step in generation.steps:
            self._step(step, index=index)
        if generation.end == "leave":
            self.engine.leave()
        else:
            self._end(generation.steps[-1] + 1, index=index, generation=generation)

    def _step(self, step: int, *, index: int) -> None:
        state, oldest = (StateId(version=version, generation=index) for version in (step, step - 2))
        kept = KeptStates(since=oldest)
        report = self.step(step, copy_as=state, kept=kept)
        assert report.copied == state
        if self.position.device == 0:
            self.copies.drop(kept, of_dead=True)  # all have taken up what they need: they have made a step
        beat = self.engine.beat()
        self.found.append(
            {
                "generation": index,
                "step": step,
                "loss": report.loss,
                "norm": report.grad_norm,
                "copy_s": report.copy_s,
                "copies": len([*self.copies.path.glob("*.*")]),
                "beat": (beat.step, beat.waiting, beat.num_done > 0),
                "threads": len(list(Path("/proc/self/task").iterdir())),
                "files": len(list(Path("/proc/self/fd").iterdir())),
            }
        )

    def _end(self, step: int, *, index: int, generation: Generation) -> None:
        """The step that fails."""
        is_last = self._me == generation.members[-1]
        aborted: list[float] = []
        ended = threading.Event()
        watch = threading.Thread(target=self._abort_when_told, args=(index, aborted, ended))
        if not (is_last and generation.end in ("forward", "update")):
            watch.start()
        try:
            if generation.end == "hang":
                self._hang(step, index=index, num_others=len(generation.members) - 1, is_last=is_last)
            else:
                if is_last:
                    self._die_in(generation.end, index=index)
                self._step(step, index=index)
        except CollectiveFailedError as error:
            self.found.append({"generation": index, "failed": str(error), "at": time.monotonic()})
        finally:
            ended.set()
        watch.join()
        self.found.append({"generation": index, "aborted": aborted[0], "took": aborted[1]})

    def _hang(self, step: int, *, index: int, num_others: int, is_last: bool) -> None:
        if is_last:
            self._client.wait([f"waits-{index}-{each}" for each in range(num_others)], LONG)
            self._client.set(f"end-{index}", "1")
            return
        teller = threading.Thread(target=self._tell_when_waiting, args=(step, index))
        teller.start()
        try:
            self.step(step)
        finally:
            teller.join()

    def _tell_when_waiting(self, step: int, index: int) -> None:
        pause = threading.Event()
        while not ((beat := self.engine.beat()).waiting and beat.step == step):
            pause.wait(0.01)
        self._connect().set(f"waits-{index}-{self.position.device}", "1")

    def _abort_when_told(self, index: int, aborted: list[float], ended: threading.Event) -> None:
        """Abort as the controller does, again and again until what is aborted has ended."""
        self._connect().wait([f"end-{index}"], LONG)
        aborted.append(time.monotonic())
        self.engine.abort()
        aborted.append(time.monotonic() - aborted[0])
        while not ended.wait(0.2):
            self.engine.abort()

    def _die_in(self, where: str, *, index: int) -> None:
        client = self._connect()

        def die(*_: Any) -> None:
            client.set(f"end-{index}", "1")
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "forward":
            self.model.layers[-1].register_forward_hook(die)
        else:
            self.engine.generation.optimizer.register_step_pre_hook(die)


PATIENCE_S = 600.0
"""Time until a process that hangs is killed."""


def results_of(
    process: Callable[[int, int, str], None], members: Collection[int], *, killed: Collection[int], folder: Path
) -> dict[int, Any]:
    """What each member left in `folder`, MEMBER.pt, that was not killed. `process` gets member, port of the store and
    folder."""
    store = listening_store()
    processes = {me: FORKS.Process(target=process, args=(me, store.port, str(folder))) for me in sorted(members)}
    for each in processes.values():
        each.start()
    for me, each in processes.items():
        each.join(PATIENCE_S)
        each.kill()
        each.join()
        assert each.exitcode == (-9 if me in killed else 0), me
    return {me: torch.load(folder / f"{me}.pt") for me in processes if me not in killed}
