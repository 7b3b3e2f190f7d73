"""What hosts launch, recorded from whole steps of every strategy, one device after the other, and replayed together.

Nothing travels: groups are torch's fake ones, in a process of its own. Contents, then, mean nothing; the order of
launches does not depend on them.
"""

import importlib
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rayfcp.config.models import PlanConfig
from rayfcp.cost.memory import stage_state_bytes
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import BatchLoss
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.optimization import totals
from rayfcp.execute.parallel import groups
from rayfcp.execute.parallel.groups import POINT_TO_POINT, MeshPosition, join_process_groups, leave_process_groups
from rayfcp.execute.parallel.transport import DistributedTransport, _by_turns
from rayfcp.models.build import sharded_model
from rayfcp.models.describe import model_config, profile_of
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.plan.strategies.registry import strategies
from rayfcp.values import ClusterSpec, SequenceSpec
from rayfcp.values.devices import CPU
from tests.execute.cases import SEED, VOCAB, CaseTokens
from tests.execute.gloo import on_processes
from tests.execute.gloo_stages import pipes_of
from tests.execute.staged import StagedCase

LENGTHS = (400, 120, 33, 17, 60, 5, 200, 90)
SEQUENCES = tuple(SequenceSpec(id=at, num_tokens=n, num_targets=n - 1) for at, n in enumerate(LENGTHS))
LAYERS, STAGED_LAYERS, NUM_RANKS = (2,), (1, 1), 3
ACTIVATION_BYTES = 1_500_000

FLAT = tuple(name for name, info in strategies().items() if not info.needs_stages and name != "auto")
STAGED = tuple(name for name, info in strategies().items() if info.needs_stages)


class Message(NamedTuple):
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel: a collective (`what`), or messages that start together. `channel`: name and devices of its group."""

    channel: tuple[str, tuple[int, ...]]
    what: str = ""
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


Event = Launch | int
"""A launch, or a wait for the launch of this number."""


class Recorder(TorchDispatchMode):
    """Records launches and waits of this thread. Collectives are waited for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            (boxed,) = (each for each in args if isinstance(each, torch.ScriptObject) and "Group" in str(each._type()))
            name = func.overloadpacket.__name__
            assert name not in ("send", "recv_"), "a message outside a batch, for which NCCL makes a communicator"
            sizes = [each.numel() for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
            group = dist.ProcessGroup.unbox(boxed)
            self.events.append(self._launched(Launch(channel=_channel(group), what=f"{name} {sizes}")))
        return func(*args, **(kwargs or {}))

    def batch(self, operations: Sequence[dist.P2POp]) -> list["Batch"]:
        """In place of `dist.batch_isend_irecv`."""
        group = operations[0].group
        me, sent, received = dist.get_rank(), list[Message](), list[Message]()
        for each in operations:
            assert each.group is group
            peer = dist.get_global_rank(group, each.group_peer)
            if each.op is dist.isend:
                sent.append(Message(me, peer, each.tensor.nbytes))
            else:
                received.append(Message(peer, me, each.tensor.nbytes))
        launch = Launch(channel=_channel(group), sends=tuple(sent), receives=tuple(received))
        return [Batch(self, self._launched(launch))]

    def _launched(self, launch: Launch) -> int:
        self.events.append(launch)
        self._number += 1
        return self._number - 1


@dataclass(frozen=True)
class Batch:
    """Work of messages."""

    recorder: Recorder
    number: int

    def wait(self) -> None:
        self.recorder.events.append(self.number)

    def is_completed(self) -> bool:
        return False


def _channel(group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
    return group.group_desc, tuple(dist.get_process_group_ranks(group))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Events of all devices of a run: as they join, and in one step, its last sums included."""

    joining: list[list[Event]]
    step: list[list[Event]]


def _record_all(_number: int, _client: dist.Store, cases: Sequence[StagedCase]) -> list[Recorded]:
    """Events of each case."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known
    groups.DEVICES = {"cpu": replace(CPU, group_backend="fake")}
    found = []
    for case in cases:
        num_devices = case.plan.num_ranks * len(case.layers_of_stage)
        joining, step = zip(*(_record(case, device) for device in range(num_devices)), strict=True)
        found.append(Recorded(joining=list(joining), step=list(step)))
    return found


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Events inside."""
    recorder, batch = Recorder(), dist.batch_isend_irecv
    dist.batch_isend_irecv = recorder.batch
    with recorder:
        yield recorder.events
    dist.batch_isend_irecv = batch


def _record(case: StagedCase, device: int) -> tuple[list[Event], list[Event]]:
    """Of one device: as it joins, and in a step."""
    position = MeshPosition.of(device, num_ranks=case.plan.num_ranks, num_stages=len(case.layers_of_stage))
    with recording() as joining:
        world = join_process_groups(position=position, store=dist.HashStore, device=torch.device("cpu"), timeout_s=60)
    made = set(dist.distributed_c10d._world.pg_map)
    model = sharded_model(
        case.library, run=case.run, seed=SEED, world=world, layers_of_stage=case.layers_of_stage, empty=True
    )
    interpreter = Interpreter(
        transport=DistributedTransport(world.attend),
        kernel=pick_kernel("cpu"),
        model=model,
        pipes=pipes_of(world, dtype=case.run.dtype),
    )
    with recording() as step:
        done = interpreter.enqueue(case.programs[device], CaseTokens(case), loss=BatchLoss(loss=CrossEntropy()))
        totals(world, model, loss_sum=done.loss_sum)
    assert set(dist.distributed_c10d._world.pg_map) == made, "a group made in a step, whose communicator would be new"
    leave_process_groups(world)
    return joining, step


def planned(strategy: str, layers: tuple[int, ...]) -> StagedCase:
    """Two short layers a rank; with stages, in memory so scarce that sequences come in slices."""
    case = StagedCase(plan=None, sequences=SEQUENCES, layers_of_stage=layers, is_tied=len(layers) > 1)
    profile = profile_of(model_config(case.run, vocab_size=VOCAB), name="tiny")
    sizes: dict[str, Any] = {"num_ranks": NUM_RANKS, "bytes_per_element": 4, "reduce_every": "step"}
    memory_bytes = None
    if len(layers) > 1:
        sizes["layers_of_stage"] = layers
        states = [stage_state_bytes(profile, stage=at, gather_every="microbatch", **sizes) for at in range(len(layers))]
        memory_bytes = max(states) + ACTIVATION_BYTES
    cost = CostModel.from_profiles(
        profile, hardware_profile("cpu"), num_stages=len(layers), memory_bytes=memory_bytes, **sizes
    )
    cluster = ClusterSpec(num_ranks=NUM_RANKS, max_tokens_per_rank=300, num_stages=len(layers), layers_of_stage=layers)
    options = PlanConfig(primitives=("ring", "ulysses"), search_moves=1000)
    plan = plan_batch(SEQUENCES, cluster=cluster, cost=cost, strategy=strategy, options=options)
    return replace(case, plan=plan)


@cache
def recorded() -> dict[str, Recorded]:
    """Events of each strategy; of those with the same programs, recorded once."""
    cases = {name: planned(name, LAYERS) for name in FLAT} | {name: planned(name, STAGED_LAYERS) for name in STAGED}
    of_name = {name: tuple(program.instructions for program in case.programs) for name, case in cases.items()}
    distinct = {of_name[name]: case for name, case in cases.items()}
    found = dict(zip(distinct, on_processes(_record_all, list(distinct.values()), size=1)[0], strict=True))
    return {name: found[programs] for name, programs in of_name.items()}


def launches(events: Sequence[Event]) -> list[Launch]:
    return [each for each in events if isinstance(each, Launch)]


def ends(devices: Sequence[Sequence[Event]], *, fit: bool) -> bool:
    """True if all launches end. Kernels of one communicator run one after the other on a device, and with `fit` beside
    those of others; else all of a device run one after the other, in the host's order. A kernel ends when all of its
    messages, or all devices of its collective, have met; what follows a wait is launched when the awaited has ended."""
    todo = [deque(events) for events in devices]
    queues: dict[tuple[int, Any], deque[int]] = defaultdict(deque)
    parts: list[dict[int, set[Any]]] = [{} for _ in devices]
    number: Counter[Any] = Counter()

    def numbered(device: int, key: Any) -> tuple[Any, int]:
        number[device, key] += 1
        return key, number[device, key]

    def start() -> None:
        for device, events in enumerate(todo):
            while events and not (isinstance(events[0], int) and parts[device][events[0]]):
                event = events.popleft()
                if isinstance(event, Launch):
                    at, messages = len(parts[device]), (*event.sends, *event.receives)
                    keys = [(event.channel, each) for each in messages] or [(event.channel, event.what)]
                    parts[device][at] = {numbered(device, key) for key in keys}
                    queues[device, event.channel if fit else ""].append(at)

    moved = True
    while moved:
        moved = False
        start()
        running: Counter[Any] = Counter()
        heads = [(device, queue[0], queue) for (device, _), queue in queues.items() if queue]
        for device, at, _ in heads:
            running.update(parts[device][at])
        for device, at, queue in heads:
            met = {
                part
                for part in parts[device][at]
                if running[part] == (2 if isinstance(part[0][1], Message) else len(part[0][0][1]))
            }
            parts[device][at] -= met
            moved = moved or bool(met)
            if not parts[device][at]:
                queue.popleft()
    return not any(todo) and not any(queues.values())


def batches_with(peer: int, found: Sequence[Launch]) -> list[Counter[Message]]:
    """Messages to and from a peer by launch, without launches that have none."""
    by_launch = [Counter(each for each in (*launch.sends, *launch.receives) if peer in each[:2]) for launch in found]
    return [each for each in by_launch if each]


@pytest.mark.parametrize("strategy", [*FLAT, *STAGED])
def test_launches_meet(strategy: str) -> None:
    """Collectives of a communicator come in one order on all devices; a batch of messages meets one batch of each peer,
    whole."""
    devices = recorded()[strategy].step
    channels = {launch.channel for events in devices for launch in launches(events)}
    assert {name for name, _ in channels} >= {"shard", "attend"}
    for name, members in channels:
        of_channel = [[each for each in launches(devices[at]) if each.channel == (name, members)] for at in members]
        collectives = [[each.what for each in found if each.what] for found in of_channel]
        assert all(each == collectives[0] for each in collectives), name
        for (one, mine), (other, theirs) in itertools.combinations(zip(members, of_channel, strict=True), 2):
            assert batches_with(other, mine) == batches_with(one, theirs), (name, one, other)


def used(events: Sequence[Event]) -> set[tuple[Any, ...]]:
    """What a device needs connections for: kinds of collectives and peers, by channel."""
    found: set[tuple[Any, ...]] = set()
    for launch in launches(events):
        messages = {each[:2] for each in (*launch.sends, *launch.receives)}
        found |= {(launch.channel, each) for each in messages} or {(launch.channel, launch.what.split()[0])}
    return found


@pytest.mark.parametrize("strategy", [*FLAT, *STAGED])
def test_connections_are_opened_as_devices_join(strategy: str) -> None:
    """All that a step uses, and none between two devices on channels of collectives. Groups are made in one order."""
    run = recorded()[strategy]
    for device, (joining, step) in enumerate(zip(run.joining, run.step, strict=True)):
        opened = used(joining)
        assert used(step) <= opened
        for name, members in {channel for channel, _ in opened}:
            peers = set(members) - {device} if name in POINT_TO_POINT else set()
            pairs = {what for channel, what in opened if channel == (name, members) and isinstance(what, tuple)}
            assert pairs == {pair for peer in peers for pair in ((device, peer), (peer, device))}
    assert ends(run.joining, fit=False)


def in_turns(events: Sequence[Event]) -> Iterator[Event]:
    """The events with batches split as for HCCL, which refuses two messages to or from one device in a batch."""
    first = [0]  # launch of each batch's first turn
    for event in events:
        if isinstance(event, int):
            yield from range(first[event], first[event + 1])
            continue
        sends = _by_turns([(each.target, each) for each in event.sends])
        receives = _by_turns([(each.source, each) for each in event.receives])
        turns = [
            tuple(tuple(message for _, message in way) for way in turn)
            for turn in itertools.zip_longest(sends, receives, fillvalue=())
        ]
        assert all(len({each[:2] for each in way}) == len(way) for turn in turns for way in turn)
        yield from [replace(event, sends=turn[0], receives=turn[1]) for turn in turns] or [event]
        first.append(first[-1] + max(1, len(turns)))


@pytest.mark.parametrize("strategy", [*FLAT, *STAGED])
def test_messages_end_in_turns(strategy: str) -> None:
    devices = [list(in_turns(events)) for events in recorded()[strategy].step]
    assert ends(devices, fit=True) and (strategy in STAGED or ends(devices, fit=False))


@pytest.mark.parametrize("strategy", [*FLAT, *STAGED])
def test_kernels_end_when_those_of_all_communicators_fit(strategy: str) -> None:
    """`group_options` sees to that."""
    assert ends(recorded()[strategy].step, fit=True)


@pytest.mark.parametrize("strategy", FLAT)
def test_without_stages_kernels_end_one_at_a_time(strategy: str) -> None:
    """There is one order of the launches on all communicators of which each device has a subsequence."""
    assert ends(recorded()[strategy].step, fit=False)


def test_stages_need_kernels_of_two_communicators_at_once() -> None:
    assert not all(ends(recorded()[strategy].step, fit=False) for strategy in STAGED)


def test_orders_that_differ_are_found() -> None:
    """Two devices that start a gather and a message in different orders end if both fit, and only then; two gathers in
    different orders never do."""
    shard, attend = ("shard", (0, 1)), ("attend", (0, 1))
    gather, other = Launch(channel=shard, what="gather"), Launch(channel=shard, what="other")
    message = Message(0, 1, 8)
    send, receive = Launch(channel=attend, sends=(message,)), Launch(channel=attend, receives=(message,))
    crossed = [[gather, send], [receive, gather]]
    assert ends(crossed, fit=True) and not ends(crossed, fit=False)
    assert ends([[gather, send], [gather, receive]], fit=False)
    assert not ends([[gather, other], [other, gather]], fit=True)
    assert not ends([[gather, 0, send], [receive, 0, gather]], fit=True)
