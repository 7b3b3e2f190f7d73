"""Real processes that meet over gloo: work on each, what each finds, and cases on them."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rayfcp.config.models import ModelConfig
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import MeshPosition, ProcessGroups, join_process_groups, leave_process_groups
from rayfcp.execute.parallel.transport import DistributedTransport
from rayfcp.models.build import compile_parts, sharded_model
from rayfcp.program import lower
from tests.execute.cases import ARCHITECTURE, SEED, Case, CaseTokens, Gradients, library_config

Found = dict[int, tuple[float, Gradients]]

FORKS = mp.get_context("forkserver")
"""Makes processes that need not import what all of them use: a server has, and they are its forks."""
FORKS.set_forkserver_preload(["tests.forks.preloaded"])


def listening_store() -> dist.TCPStore:
    """The store at which processes meet, on a free port of this machine; it lives as long as its object."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        return dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def client_of(port: int) -> dist.TCPStore:
    """Of the `listening_store` on this port."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def on_processes(work: Callable[..., Any], *given: Any, size: int) -> list[Any]:
    """Results of `work(number, client, *given)` in each of `size` processes; `client`: of their common store. None
    ends before all are done."""
    with TemporaryDirectory() as folder:
        store = listening_store()
        args = (store.port, folder, size, work, given)
        mp.start_processes(_process, args=args, nprocs=size, start_method="forkserver")
        return [torch.load(Path(folder) / f"{number}.pt", weights_only=False) for number in range(size)]


def _process(number: int, port: int, folder: str, size: int, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    client = client_of(port)
    torch.save(work(number, client, *given), Path(folder) / f"{number}.pt")
    wait_for_all(client, "done", number=number, size=size)


def wait_for_all(client: dist.Store, what: str, *, number: int, size: int) -> None:
    """Until all processes are here; `what`: another word each time."""
    client.set(f"{what}-{number}", "1")
    client.wait([f"{what}-{other}" for other in range(size)])


@contextmanager
def joined(position: MeshPosition, client: dist.Store, *, name: str) -> Iterator[ProcessGroups]:
    """Process groups of the devices that join under this name; left at the end."""
    store = dist.PrefixStore(name, client)
    device = torch.device("cpu")
    world = join_process_groups(position=position, store=lambda: store, device=device, timeout_s=60)
    yield world
    leave_process_groups(world)


def run_on_gloo(runs: Sequence[tuple[Case, str]]) -> Found:
    """Loss and whole gradients of each case in its dtype, from as many processes as the largest case needs."""
    return on_processes(_run_all, tuple(runs), size=max(case.num_ranks for case, _ in runs))[0]


def _run_all(rank: int, client: dist.Store, runs: Sequence[tuple[Case, str]]) -> Found:
    found: Found = {}
    for index, (case, dtype) in enumerate(runs):
        if rank < case.num_ranks:
            position = MeshPosition(rank=rank, num_ranks=case.num_ranks)
            with joined(position, client, name=f"{index}") as world:
                found[index] = _run(case, dtype, world)
    return found


def _run(case: Case, dtype: str, world: ProcessGroups) -> tuple[float, Gradients]:
    run = ModelConfig(dtype=dtype, architecture=ARCHITECTURE)
    model = sharded_model(library_config(dtype), run=run, seed=SEED, world=world)
    if case.compiled and world.position.rank == 0:
        compile_parts(model, backend="aot_eager")
    interpreter = Interpreter(transport=DistributedTransport(world.attend), kernel=pick_kernel("cpu"), model=model)
    program = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)[world.position.rank]
    done = interpreter.run(program, CaseTokens(case), loss_scale=1.0 / case.num_targets)
    total = torch.tensor(done.loss_sum, dtype=torch.float64)
    dist.all_reduce(total, group=world.control)
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()}
    return float(total) / case.num_targets, gradients
