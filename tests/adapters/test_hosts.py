"""Plans for other trainers: each host's demands on random batches, the same plan in any process, errors in one line.

`python -m tests.adapters.many` checks more batches, `python -m tests.adapters.sources` runs the hosts' own checks.
"""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rayfcp.adapters import areal, nemo_rl, skyrl, slime
from rayfcp.adapters.megatron import FlexScheduler, install
from rayfcp.adapters.planning import HostPlanner
from rayfcp.adapters.torchtitan import FlexRows
from tests.adapters import sources
from tests.adapters.hosts import HOSTS, PLANNER, WORLD_SIZES, Documents, megatron, slime_bins

BATCHES = {"torchtitan": 3}
"""Of each host, as many as there are world sizes, but for what takes longer."""


@pytest.mark.parametrize("host", HOSTS)
def test_plans_keep_what_the_host_demands(host: str) -> None:
    for number in range(BATCHES.get(host, len(WORLD_SIZES))):
        assert HOSTS[host](number)


@pytest.mark.parametrize("host", sources.HOSTS)
def test_own_checks_of_hosts(host: str) -> None:
    if sources.repository_of(sources.HOSTS[host]) is None:
        pytest.skip(f"{sources.SOURCES} has no {sources.HOSTS[host].repository}, or a module that it needs is missing")
    done = sources.checked(host, batches=18)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_plans_are_the_same_in_another_process() -> None:
    code = (
        "import json; from tests.adapters.hosts import *; "
        "print(json.dumps([megatron(8, PLANNER), megatron(17, PLANNER), slime_bins(3, PLANNER)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert json.loads(done.stdout) == [megatron(8), megatron(17), slime_bins(3)]


def test_light_import_without_the_hosts() -> None:
    names = "areal, bins, megatron, nemo_rl, skyrl, slime, torchtitan, verl"
    code = (
        f"import sys; from rayfcp.adapters import {names}; "
        "found = {'torch', 'ray', 'transformers', 'numba'} & set(sys.modules); sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 10, 14, 18, 20, 64])
def test_few_sequences_fill_all_ranks(ranks: int, sequences: int) -> None:
    scheduler = FlexScheduler(4096, 1, ranks, None, planner=PLANNER)
    rows = scheduler.get_groups_and_subsamples([(at, 2 * ranks) for at in range(sequences)])
    assert all(ids for row in rows for ids in row)


def test_no_sequences_make_no_microbatches() -> None:
    assert FlexScheduler(4096, 1, 2, None, planner=PLANNER).get_groups_and_subsamples([]) == []
    assert skyrl.FlexPacker(100, planner=PLANNER).pack([]) == []


def test_degrees_that_slice_unevenly_are_left_out() -> None:
    """Megatron-LM pads to 2 x 10 for 10 ranks, of which 2 x 4 slices are not equal."""
    scheduler = FlexScheduler(1024, 1, 10, None, planner=PLANNER)
    long = scheduler.get_groups_and_subsamples([(at, 3020) for at in range(6)])
    assert {row.count(ids) for row in long for ids in row} == {10}
    even = scheduler.get_groups_and_subsamples([(at, 3040) for at in range(6)])
    assert {row.count(ids) for row in even for ids in row} <= {2, 4, 10}


class _Host:
    """Megatron-LM's scheduler as far as `install` sees it."""

    def __init__(self, *sizes: Any, min_cp_size: int = 1, **others: Any) -> None:
        raise AssertionError("the plan needs nothing of it")

    def run(self, sequences: list[tuple[int, int]]) -> Any:
        return self.get_groups_and_subsamples(sequences)  # type: ignore[attr-defined]


def test_installed_scheduler_runs_as_the_host_does() -> None:
    module = SimpleNamespace(DefaultDynamicCPScheduler=_Host, scheduler_map={})
    planner = install(module, model="qwen3-1.7b", hardware="h100")
    scheduler = module.scheduler_map["default_dynamic_cp"](4096, 2, 1, None, max_num_seqs=None, min_cp_size=2)
    assert isinstance(scheduler, _Host)
    assert scheduler.run([(5, 6144), (9, 2048)]) == [[[5, 9], [5, 9]]]
    planner.observe(0.5)


def test_replicas_are_balanced_over_rows() -> None:
    """Hosts whose replicas meet only once a step run bin i on replica i % replicas."""
    lengths = [12000, 9000, 7000, 6000, 5000, 4000, 3000, 2000]
    bins = skyrl.FlexPacker(12000, min_bin_count=8, bin_count_multiple=2, planner=PLANNER).pack(lengths)
    tokens = [sum(lengths[at] for each in bins[replica::2] for at in each) for replica in range(2)]
    assert max(tokens) <= 1.2 * min(tokens)


def test_static_microbatches_of_slime_are_its_own() -> None:
    sizes: dict[str, Any] = {"max_per_bin": None, "micro_batch_size": 2, "planner": PLANNER}
    found = slime.pack([5, 6, 7, 8, 9], args=None, use_dynamic_batch_size=False, **sizes)
    assert found == [[0, 1], [2, 3], [4]]


def _too_long_for_megatron() -> object:
    return FlexScheduler(1024, 1, 4, None, planner=PLANNER).get_groups_and_subsamples([(0, 64), (1, 8192)])


def _too_few_for_stages() -> object:
    return FlexScheduler(1024, 1, 4, 2, planner=PLANNER).get_groups_and_subsamples([(0, 64)])


def _too_few_in_a_group() -> object:
    """One rank runs 5 sequences of one microbatch each, which is no multiple of 2."""
    return FlexScheduler(1024, 1, 1, 2, 1, planner=PLANNER).get_groups_and_subsamples([(at, 100) for at in range(5)])


def _too_long_for_a_bin() -> object:
    return nemo_rl.FlexPacker(1024, bin_count_multiple=2, planner=PLANNER).pack([64, 2048])


def _too_few_for_bins() -> object:
    return areal.allocate([64, 64], 1024, min_groups=4, planner=PLANNER)


def _rank_beyond_the_world() -> object:
    stream = Documents(0, longest=10)
    return FlexRows(stream, dp_world_size=2, dp_rank=2, num_tokens_per_batch=10, rows_per_step=1, planner=PLANNER)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_too_long_for_megatron, "sequence 1 has 8192 tokens, 4 ranks hold at most 4096"),
        (_too_few_for_stages, "asks for 2 microbatches or more"),
        (_too_few_in_a_group, "max_num_seqs is 1, no plan was found for 5 sequences on 1 ranks in a multiple of 2"),
        (_too_long_for_a_bin, "sequence 1 has 2048 tokens, a bin holds at most 1024"),
        (_too_few_for_bins, "there are 2 sequences, must be at least 4"),
        (_rank_beyond_the_world, "dp_rank is 2, must be below"),
        (lambda: FlexScheduler(1024, 1, 4, None, min_cp_size=8, planner=PLANNER), "min_cp_size is 8"),
        (lambda: FlexScheduler(1024, 1, 4, None, hardware="h100"), "model is None"),
        (lambda: skyrl.FlexPacker(10, bin_count_multiple=0, planner=PLANNER), "bin_count_multiple is 0"),
        (lambda: HostPlanner(model="qwen9-1b", hardware="h100"), "did you mean"),
        (lambda: HostPlanner(model="qwen3-1.7b", hardware="h900"), "did you mean 'h"),
        (lambda: HostPlanner(model="qwen3-1.7b", hardware="h100", tensor_parallel=3), "tensor_parallel is 3"),
        (lambda: HostPlanner(model="qwen3-1.7b", hardware="h100", pipeline_parallel=99), "pipeline_parallel is 99"),
    ],
)
def test_errors_are_one_line(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value) and "\n" not in str(raised.value)
