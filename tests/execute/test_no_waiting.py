"""Nothing in a step makes the host wait for its device: programs are enqueued, one number is read at the end."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayfcp.execute.interpreter import Interpreter
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.transport import Fabric
from rayfcp.models.build import random_model
from rayfcp.program import lower
from tests.execute.cases import CASES, SEED, Case, CaseTokens, library_config
from tests.execute.dense import run_ranks
from tests.execute.threads import InProcessTransport

WAITING = ("_local_scalar_dense", "nonzero", "item", "masked_select", "is_nonzero", "equal", "unique", "_to_cpu")
"""Operators whose results, or their shapes, the host reads from the device."""


class Waits(TorchDispatchMode):
    """Counts operators that would make an accelerator's host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in WAITING or (name == "index" and any(_is_mask(each) for each in args[1])):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def interpreters(case: Case, *, device: str = "cpu", **options: Any) -> list[Interpreter]:
    """One per rank, in one process."""
    first = random_model(library_config("float32"), dtype="float32", seed=SEED).to(device)
    fabric, kernel = Fabric(case.num_ranks), pick_kernel(device)
    return [
        Interpreter(
            transport=InProcessTransport(fabric, rank),
            kernel=kernel,
            model=copy.deepcopy(first),
            device=device,
            **options,
        )
        for rank in range(case.num_ranks)
    ]


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: f"{case.num_ranks}-ranks-{case.primitive}")
def test_a_step_reads_one_number(case: Case) -> None:
    """The sum of losses, after the last instruction: forward, backward and messages read nothing."""
    programs, ranks, found = lower(case.plan(), case.sequences), interpreters(case), []

    def work(rank: int) -> None:
        with Waits() as waits:
            ranks[rank].run(programs[rank], CaseTokens(case))
        found.append(waits.found)

    run_ranks(work, num_ranks=case.num_ranks, fabric=Fabric(case.num_ranks))
    assert found == [{"_local_scalar_dense": 1}] * case.num_ranks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_refuses_to_be_waited_for() -> None:
    """The host does not wait from the first instruction to the last, by the driver's own check."""
    case = CASES[0]

    def advanced(num_done: int) -> None:
        torch.cuda.set_sync_debug_mode("default" if num_done == len(program.instructions) else "error")

    program = lower(case.plan(), case.sequences)[0]
    (alone,) = interpreters(case, device="cuda", on_progress=advanced)
    try:
        alone.run(program, CaseTokens(case))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_waits_is_counted() -> None:
    """A wait is detected, so the test above is meaningful."""
    with Waits() as waits:
        float(torch.ones(()))
        torch.ones(3)[torch.tensor([True, False, True])]
        torch.ones(3).nonzero()
    assert waits.found == {"_local_scalar_dense": 1, "index": 1, "nonzero": 1}
