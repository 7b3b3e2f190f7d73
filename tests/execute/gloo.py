"""Cases on real processes over gloo."""

import socket
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rayfcp.config.models import ModelConfig
from rayfcp.execute.groups import Place, join_world, leave_world
from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.sharding import ShardedModel
from rayfcp.execute.transport import DistributedTransport
from rayfcp.models.build import sharded_model
from rayfcp.models.compiling import compile_parts
from rayfcp.program import lower
from tests.execute.cases import ARCHITECTURE, SEED, Case, CaseTokens, Gradients, library_config

Found = dict[tuple[int, str], tuple[float, Gradients]]


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


def run_on_gloo(cases: Sequence[Case], *, dtypes: Sequence[str]) -> Found:
    """(case index, dtype) -> loss and whole gradients, from as many processes as the largest case needs."""
    with TemporaryDirectory() as folder:
        store = listening_store()
        size = max(case.num_ranks for case in cases)
        mp.spawn(_process, args=(store.port, tuple(cases), tuple(dtypes), folder), nprocs=size)
        return torch.load(Path(folder) / "found.pt", weights_only=True)


def _process(rank: int, port: int, cases: Sequence[Case], dtypes: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    found: Found = {}
    for dtype in dtypes:
        for index, case in enumerate(cases):
            if rank < case.num_ranks:
                store = dist.PrefixStore(f"{dtype}-{index}", client)
                found[index, dtype] = _run(case, dtype, rank=rank, store=store)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    client.set(f"done-{rank}", "1")
    client.wait([f"done-{other}" for other in range(max(case.num_ranks for case in cases))])


def _run(case: Case, dtype: str, *, rank: int, store: dist.Store) -> tuple[float, Gradients]:
    device = torch.device("cpu")
    place = Place(rank=rank, num_ranks=case.num_ranks)
    world = join_world(place=place, store=lambda: store, device=device, timeout_s=60)
    run = ModelConfig(dtype=dtype, architecture=ARCHITECTURE)
    model = sharded_model(library_config(dtype), run=run, seed=SEED, world=world)
    if case.compiled:
        compile_parts(model, backend="aot_eager")
    interpreter = Interpreter(
        transport=DistributedTransport(world.channels.attend), kernel=pick_kernel("cpu"), model=ShardedModel(model)
    )
    program = lower(case.plan(), case.sequences, reduce_every=case.reduce_every)[rank]
    done = interpreter.run(program, CaseTokens(case), loss_scale=1.0 / case.num_targets)
    total = torch.tensor(done.loss_sum, dtype=torch.float64)
    dist.all_reduce(total, group=world.channels.control)
    gradients = {name: parameter.grad.full_tensor().clone() for name, parameter in model.named_parameters()}
    leave_world(world)
    return float(total) / case.num_targets, gradients
