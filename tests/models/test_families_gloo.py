"""The same families on real processes over gloo, in shards: loss, logits and gradients are the library's own."""

import pytest
import torch.distributed as dist

from rayfcp.execute.parallel.groups import MeshPosition
from tests.execute.gloo import joined, on_processes
from tests.models.families import Result, assert_same, by_library
from tests.models.in_shards import result_in_shards
from tests.models.test_families import CASES, library

TWO, THREE = CASES[1], CASES[2]
FAMILIES = {
    "llama3": THREE,
    "qwen3, tied": THREE,
    "mistral": THREE,
    "gemma": TWO,
    "gemma3": THREE,
    "gemma4, keys shared": TWO,
    "qwen3_moe": THREE,
    "qwen2_moe, shared experts": TWO,
    "deepseek_v3": TWO,
    "youtu, yarn": TWO,
    "apertus, whose activation has weights": TWO,
}
NUM_PROCESSES = THREE.num_ranks


@pytest.fixture(scope="module")
def found() -> dict[str, Result]:
    """Results by family."""
    return on_processes(_run_all, size=NUM_PROCESSES)[0]


def _run_all(rank: int, client: dist.Store) -> dict[str, Result]:
    found = {}
    for case in (TWO, THREE):
        if rank < case.num_ranks:
            position = MeshPosition(rank=rank, num_ranks=case.num_ranks)
            with joined(position, client, name=f"{case.num_ranks}") as world:
                for what in [name for name, each in FAMILIES.items() if each is case]:
                    found[what] = result_in_shards(library(what), case, world)
    return found


@pytest.mark.parametrize("what", FAMILIES)
def test_in_shards_as_the_library_computes_them(what: str, found: dict[str, Result]) -> None:
    assert_same(found[what], by_library(library(what), FAMILIES[what]), what=what)
