"""The hosts' own tests and checkers on rayfcp's plans, read from public sources that are at hand.

`RAYFCP_HOST_SOURCES` is a folder with a git repository of each host, by the names below. Each host runs in a process of
its own: `python -m tests.adapters.sources --host slime --batches 1000`. Nothing of a host is kept.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.adapters.hosts import PLANNER, bins_of, lengths_of, padded, random_of

SOURCES = "RAYFCP_HOST_SOURCES"

Check = Callable[[int], object]
"""What a host itself demands of its batch of a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a host's code is. `files`: what is taken of it, of which the last are its tests; `needs`: modules that it
    imports; `names`: of its tests, in pytest's language: those of its own algorithms and classes are left out."""

    repository: str
    files: tuple[str, ...]
    set_up: Callable[[], Check]
    ref: str = "HEAD"
    needs: tuple[str, ...] = ()
    names: str = ""


def _slime() -> Check:
    from slime.utils import dp_schedule

    from rayfcp.adapters import slime

    host = dp_schedule.build_dp_schedule

    def build(args: Any, config: dict[str, int], *rest: Any, **keywords: Any) -> Any:
        """slime's own, with the sizes of its tests, which its arguments do not name."""
        group = config["microbatch_group_size_per_vp_stage"] if config["vpp_size"] > 1 else 1
        sizes = {"dp_size": config["dp_size"], "cp_size": config["cp_size"], "microbatch_group": group}
        slime.install(dp_schedule, planner=PLANNER, **sizes)
        return host(args, config, *rest, **keywords)

    dp_schedule.build_dp_schedule = build

    def check(number: int) -> None:
        tests, batch = sys.modules["test_dp_schedule"], bins_of(number, exceed=number % 3 == 0)
        config = tests.make_tp(batch.replicas, batch.cp_size, batch.group, batch.group)
        args = tests.make_args(
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=batch.capacity // batch.cp_size,
            balance_data=number % 2 == 0,
            balance_by_flops=number % 4 == 0,
        )
        count = len(batch.lengths)
        found = build(args, config, batch.lengths, global_batch_size=count, rollout_indices=list(range(count)))
        tests.assert_invariants(
            *found[:3],
            dp_size=batch.replicas,
            expected_global_sample_indices=range(count),
            total_lengths=batch.lengths,
            max_per_bin=batch.capacity,
        )

    return check


def _nemo_rl() -> Check:
    from nemo_rl.data.packing import algorithms

    from rayfcp.adapters import nemo_rl

    module: Any = types.SimpleNamespace()
    nemo_rl.install(module, planner=PLANNER)
    algorithms.get_packer = lambda algorithm, bin_capacity, **others: module.get_packer(
        algorithms.PackingAlgorithm[getattr(algorithm, "name", algorithm).upper()], bin_capacity=bin_capacity, **others
    )

    def check(number: int) -> None:
        batch = bins_of(number)
        packer = algorithms.get_packer("first_fit_shuffle", batch.capacity, bin_count_multiple=batch.replicas)
        bins = packer.pack(sequence_lengths=batch.lengths)
        assert sys.modules["test_algorithms"].validate_solution(batch.lengths, bins, batch.capacity)
        assert len(bins) % batch.replicas == 0

    return check


def _skyrl() -> Check:
    from skyrl.train.dataset import bin_packing

    from rayfcp.adapters import skyrl

    skyrl.install(bin_packing, planner=PLANNER)

    def check(number: int) -> None:
        batch, soft = bins_of(number, exceed=number % 2 == 0), number % 2 == 0
        multiple = {"min_bin_count": batch.replicas, "bin_count_multiple": batch.replicas}
        packer = bin_packing.make_seq_packer("balanced" if soft else "first_fit_decreasing", batch.capacity, **multiple)
        bins = packer.pack(batch.lengths)
        assert bin_packing.FirstFitDecreasing(batch.capacity, **multiple)._adjust_bin_count(bins) is bins

    return check


def _areal() -> Check:
    from areal.utils import seqpack

    from rayfcp.adapters import areal

    host = seqpack.ffd_allocate
    areal.install(seqpack, planner=PLANNER)

    def check(number: int) -> None:
        batch = bins_of(number)
        groups = seqpack.kk_allocate(batch.lengths, batch.capacity, min_groups=1, n_groups_divisor=batch.group)
        usual = host(batch.lengths, batch.capacity, 1, batch.group)
        assert len(groups) <= len(usual), "more groups than first fit"

    return check


def _verl() -> Check:
    import torch
    from tensordict import TensorDict
    from verl.utils import dynamic_cp_scheduler

    from rayfcp.adapters import verl

    verl.install(dynamic_cp_scheduler, planner=PLANNER)

    def check(number: int) -> None:
        rng = Random(number)
        ranks, most = rng.choice((2, 6, 8, 10, 14)), 128
        lengths = lengths_of(rng, longest=ranks * most, count=rng.choice((2, 17)))
        parts = [torch.arange(length) for length in lengths]
        columns = {"input_ids": torch.nested.as_nested_tensor(parts, layout=torch.jagged)}
        batch = TensorDict(columns, batch_size=[len(lengths)])
        scheduler, tokens = dynamic_cp_scheduler.DynamicCPScheduler(most, ranks, 1), 0
        for rank in range(ranks):
            group = types.SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
            for microbatch in scheduler.schedule(batch, group, tp_size=1):
                mask = microbatch[dynamic_cp_scheduler.DCP_PADDING_MASK]
                assert len(mask) <= most, "too many tokens"
                tokens += int((~mask).sum())
        assert tokens == sum(lengths)

    return check


def _megatron() -> Check:
    import torch
    from megatron.core.datasets import data_schedule, data_schedule_utils

    from rayfcp.adapters import megatron

    host = data_schedule.DefaultDynamicCPScheduler
    megatron.install(data_schedule, planner=PLANNER)
    flex = data_schedule.scheduler_map["default_dynamic_cp"]
    assert vars(host(8, 2, 2, 2)).items() <= vars(flex(8, 2, 2, 2)).items(), "attributes of the host are missing"
    data_schedule.DefaultDynamicCPScheduler = flex
    for name, value in (("tests.unit_tests.test_utilities", "Utils"), ("megatron.training.global_vars", "")):
        sys.modules[name] = types.ModuleType(name)  # of tests on GPUs alone
        setattr(sys.modules[name], value or "unset_global_variables", None)

    def check(number: int) -> None:
        rng, ranks = random_of(number)
        group, most = rng.choice((None, 2, 4)), 512
        lengths = lengths_of(rng, longest=ranks * most - 2 * ranks, count=(group or 1) * rng.choice((1, 9)))
        lengths = padded(lengths, 2 * ranks)
        rows = flex(most, 1, ranks, group).get_groups_and_subsamples(list(enumerate(lengths)))
        again = data_schedule_utils.align_sample_id_groups([list(row) for row in rows], group or 1)
        assert again == rows, "Megatron-LM splits microbatches"

        def sample(at: int) -> dict[str, Any]:
            tokens = torch.zeros(lengths[at], dtype=torch.int32)
            length = torch.tensor([lengths[at]], dtype=torch.int32)
            names = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), tokens)
            return {**names, "original_seq_len": length, "padded_seq_len": length}

        samples = {at: sample(at) for at in range(len(lengths))}
        tokens = 0.0
        for rank in range(ranks):
            packed = data_schedule_utils.build_packed_microbatches(
                samples, rows, rank, torch.device("cpu"), is_dynamic_cp=True
            )
            for row, microbatch in zip(rows, packed, strict=True):
                size = int(microbatch["local_cp_size"])
                assert row.count(row[rank]) == size and int(microbatch["cu_seqlens_padded"][-1]) <= size * most
                tokens += int(microbatch["cu_seqlens_padded"][-1]) / size
        assert round(tokens) == sum(lengths)

    return check


HOSTS = {
    "megatron": Source(
        repository="NVIDIA+Megatron-LM",
        ref="dev",
        files=("megatron/core", "tests/unit_tests/test_sequence_packing.py"),
        needs=("triton",),
        names="(scheduler or hdp) and not distributed and not compatible",
        set_up=_megatron,
    ),
    "verl": Source(
        repository="verl-project+verl",
        files=(
            "verl/utils/dynamic_cp_scheduler.py",
            "verl/utils/tensordict_utils.py",
            "verl/utils/py_functional.py",
            "verl/utils/metric",
            "tests/utils/test_dynamic_cp_scheduler.py",
        ),
        needs=("tensordict",),
        set_up=_verl,
    ),
    "slime": Source(
        repository="THUDM+slime",
        files=("slime/utils", "tests/test_dp_schedule.py"),
        set_up=_slime,
    ),
    "nemo-rl": Source(
        repository="NVIDIA-NeMo+RL",
        files=("nemo_rl/data/packing", "tests/unit/data/packing/test_algorithms.py"),
        names="not test_get_packer and not insufficient_sequences",
        set_up=_nemo_rl,
    ),
    "skyrl": Source(
        repository="NovaSky-AI+SkyRL",
        files=(
            "skyrl/train/dataset/bin_packing.py",
            "tests/backends/skyrl_train/distributed/test_bin_packing.py",
        ),
        names="not enum_value and not string_value and not case_insensitive",
        set_up=_skyrl,
    ),
    "areal": Source(
        repository="inclusionAI+AReaL",
        files=("areal/utils/seqpack.py", "areal/utils/logging.py", "tests/test_kk_allocate.py"),
        needs=("colorlog",),
        names="TestKKAllocate and not raises and not ffd_fallback and not equal_size and not upper_bound",
        set_up=_areal,
    ),
}


def repository_of(source: Source) -> Path | None:
    """Folder of a host's git repository; None if it is not at hand, or needs a module that is not."""
    folder = os.environ.get(SOURCES)
    if not folder or any(importlib.util.find_spec(module) is None for module in source.needs):
        return None
    path = Path(folder) / source.repository
    path = path / "repo" if (path / "repo").is_dir() else path
    return path if path.is_dir() else None


def checked(host: str, *, batches: int) -> subprocess.CompletedProcess[str]:
    """Run a host's checks in a process of its own."""
    command = [sys.executable, "-m", "tests.adapters.sources", "--host", host, "--batches", str(batches)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a host's tests with rayfcp's plans in it, and its checkers on random batches; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", choices=[*HOSTS], required=True)
    parser.add_argument("--batches", type=int, default=1000)
    options = parser.parse_args(arguments)
    source = HOSTS[options.host]
    repository = repository_of(source)
    if repository is None:
        parser.error(f"{SOURCES} has no {source.repository}, or one of {source.needs} is missing; give them")
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "-C", str(repository), "archive", source.ref, *source.files]
        packed = subprocess.run(archive, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        sys.path.insert(0, folder)
        check = source.set_up()
        test = Path(folder) / source.files[-1]
        plain = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-c", os.devnull, f"--rootdir={folder}"]
        failed = pytest.main([*plain, *(["-k", source.names] if source.names else []), str(test)])
        for number in range(options.batches):
            check(number)
        print(f"{options.host}: {options.batches} batches hold")  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
