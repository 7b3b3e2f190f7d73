"""What each host demands of its plans, restated from its source, and random batches to check that on.

A check takes the number of a batch, plans it through the adapter as the host would, and returns the plan.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from rayfcp.adapters import areal, nemo_rl, skyrl, slime, verl
from rayfcp.adapters.megatron import BalancedScheduler, FlexScheduler, Rows
from rayfcp.adapters.planning import HostPlanner
from rayfcp.adapters.torchtitan import FlexRows

PLANNER = HostPlanner(model="qwen3-1.7b", hardware="h100")
WORLD_SIZES = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 32, 36, 40, 48, 56, 62, 64)
"""10, 14, 18 and 20 among them: sizes where Megatron-LM's own planner can fail."""


def random_of(number: int) -> tuple[Random, int]:
    """Random numbers of a batch, and its world size."""
    return Random(number), WORLD_SIZES[number % len(WORLD_SIZES)]


def lengths_of(rng: Random, *, longest: int, count: int) -> list[int]:
    """Lengths up to `longest` of one of four families: with a long tail, of two kinds, even, and all alike."""
    family = rng.randrange(4)
    scale = rng.uniform(0.01, 0.5) * longest
    draw: Callable[[], float] = (
        lambda: rng.lognormvariate(math.log(scale), 1.2),
        lambda: rng.choice((0.05, 0.9)) * longest * rng.uniform(0.8, 1.1),
        lambda: rng.uniform(1, longest),
        lambda: scale,
    )[family]
    return [min(max(int(draw()), 1), longest) for _ in range(count)]


def groups_of(row: Sequence[list[int]]) -> list[tuple[range, list[int]]]:
    """CP groups of a row as Megatron-LM finds them: ranks in a row with the same sequences."""
    found, first = [], 0
    while first < len(row):
        size = sum(row[first][0] in ids for ids in row)  # as `build_packed_microbatches` counts
        ranks = range(first, first + size)
        assert all(row[rank] == row[first] for rank in ranks), f"ranks {ranks} of {row} are no group"
        found.append((ranks, row[first]))
        first += size
    return found


def check_rows(rows: Rows, tokens: dict[int, int], *, num_ranks: int, most: int, min_cp_size: int = 1) -> None:
    """Invariants of Megatron-LM's dynamic context parallelism; `tokens` by id, padded."""
    sizes = {1 << each for each in range(int(math.log2(num_ranks)))} | {num_ranks}
    placed: Counter[int] = Counter()
    for row in rows:
        assert len(row) == num_ranks
        assert all(row), "a rank is idle"
        groups = groups_of(row)
        for ranks, ids in groups:
            size = len(ranks)
            assert size in sizes and size >= min_cp_size and ranks[0] % size == 0, f"no group has {ranks}"
            assert sum(tokens[each] for each in ids) <= size * most, "too many tokens"
            placed.update(ids)
        degrees = [len(ranks) for ranks, _ in groups]
        assert degrees == sorted(degrees, reverse=True), "align_sample_id_groups asks for falling degrees"
    assert placed == Counter(tokens.keys()), "each sequence is in one group"


def padded(lengths: Sequence[int], multiple: int) -> list[int]:
    return [-(-each // multiple) * multiple for each in lengths]


def megatron(number: int, planner: HostPlanner = PLANNER) -> Rows:
    """Megatron-LM's development branch: padded lengths, virtual stages, bounds on degrees and sequences."""
    rng, ranks = random_of(number)
    group, cp_size = rng.choice((None, 1, 2, 4)), rng.choice((1, 2))
    most = rng.choice((1024, 4096, 8192)) * 2
    smallest = rng.choice((1, 1, 2, ranks // 2 if ranks & (ranks - 1) == 0 else 1))
    most_sequences = rng.choice((None, None, None, 3, 16))
    count = (group or 1) * rng.choice((1, 2, 16, 50))  # as many microbatches of one sequence would be a plan
    lengths = lengths_of(rng, longest=ranks * most - 2 * ranks, count=count)
    tokens = {7 * at: each for at, each in enumerate(padded(lengths, 2 * ranks))}
    scheduler = FlexScheduler(
        most, cp_size, ranks // cp_size, group, most_sequences, min_cp_size=smallest, planner=planner
    )
    rows = scheduler.get_groups_and_subsamples(list(tokens.items()))
    check_rows(rows, tokens, num_ranks=ranks, most=most, min_cp_size=smallest)
    assert len(rows) % (group or 1) == 0
    for ranks_of_group, ids in (each for row in rows for each in groups_of(row)):
        size = len(ranks_of_group)
        assert size == 1 or not any(tokens[each] % (2 * size) for each in ids), "slices are uneven"
        assert most_sequences is None or len(ids) <= most_sequences
    return rows


def megatron_main(number: int, planner: HostPlanner = PLANNER) -> Rows:
    """Megatron-LM's main branch: another signature, which also asks for lengths."""
    rng, ranks = random_of(number)
    most = rng.choice((1024, 4096, 8192))
    lengths = lengths_of(rng, longest=ranks * most - 2 * ranks, count=rng.choice((1, 9, 100)))
    tokens = dict(enumerate(padded(lengths, 2 * ranks)))
    scheduler = BalancedScheduler(most, SimpleNamespace(size=lambda: ranks), planner=planner)
    found, rows = scheduler.get_groups_and_subsamples(list(tokens.items()), SimpleNamespace())
    check_rows(rows, tokens, num_ranks=ranks, most=most)
    assert found == [[[tokens[each] for each in ids] for ids in row] for row in rows]
    return rows


def dynamic_verl(number: int, planner: HostPlanner = PLANNER) -> Rows:
    """verl: lengths arrive unpadded; each group pads its own to 2 x degree x tensor-parallel."""
    rng, ranks = random_of(number)
    most = 2 * rng.choice((512, 2048, 4096))
    lengths = lengths_of(rng, longest=ranks * most, count=rng.choice((2, 30, 120)))
    module = SimpleNamespace()
    verl.install(module, planner=planner)
    scheduler = module.get_megatron_dynamic_cp_scheduler_cls()(
        max_seqlen_per_dp_cp_rank=most, cp_size=1, dp_size=ranks, microbatch_group_size_per_vp_stage=None
    )
    rows: Rows = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    check_rows(rows, dict(enumerate(lengths)), num_ranks=ranks, most=most)
    for ranks_of_group, ids in (each for row in rows for each in groups_of(row)):
        size = len(ranks_of_group)
        tokens = padded([lengths[each] for each in ids], size * (2 if size > 1 else 1))
        assert sum(tokens) <= size * most, "too many tokens after padding"
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """Sizes of a batch for hosts with static context parallelism."""

    lengths: list[int]
    capacity: int
    replicas: int
    cp_size: int
    group: int


def bins_of(number: int, *, exceed: bool = False) -> Bins:
    """A batch with a plan: a sequence alone in a bin is one, and there are as many as bins need."""
    rng, ranks = random_of(number)
    cp_size = rng.choice([each for each in (1, 2, 4) if ranks % each == 0])
    replicas, group = ranks // cp_size, rng.choice((1, 1, 2))
    capacity = cp_size * rng.choice((512, 4096, 16384))
    count = replicas * group * rng.choice((1, 2, 5))
    lengths = padded(lengths_of(rng, longest=capacity, count=count), 2 * cp_size)
    if exceed:
        lengths[rng.randrange(count)] = 3 * capacity
    return Bins(lengths=lengths, capacity=capacity, replicas=replicas, cp_size=cp_size, group=group)


def check_bins(bins: list[list[int]], lengths: Sequence[int], *, capacity: int, multiple: int) -> None:
    assert sorted(at for each in bins for at in each) == list(range(len(lengths))), "each sequence is in one bin"
    assert all(bins), "a bin is empty"
    assert all(len(each) == 1 or sum(lengths[at] for at in each) <= capacity for each in bins), "too many tokens"
    assert len(bins) % multiple == 0


def slime_bins(number: int, planner: HostPlanner = PLANNER) -> list[list[int]]:
    """slime: sizes are those of its arguments; samples that are too long stand alone."""
    batch = bins_of(number, exceed=number % 3 == 0)
    args = SimpleNamespace(
        actor_num_nodes=1,
        actor_num_gpus_per_node=batch.replicas * batch.cp_size * 4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=batch.cp_size,
        virtual_pipeline_model_parallel_size=2 if batch.group > 1 else None,
        microbatch_group_size_per_vp_stage=None,
    )
    found = slime.pack(
        batch.lengths,
        args=args,
        use_dynamic_batch_size=True,
        max_per_bin=batch.capacity,
        micro_batch_size=None,
        planner=planner,
    )
    check_bins(found, batch.lengths, capacity=batch.capacity, multiple=batch.replicas * batch.group)
    return found


def nemo_rl_bins(number: int, planner: HostPlanner = PLANNER) -> list[list[int]]:
    """NeMo-RL: as `shard_by_batch_size` makes its packer."""
    batch, module = bins_of(number), SimpleNamespace()
    nemo_rl.install(module, planner=planner, cp_size=batch.cp_size)
    packer: Any = module.get_packer(
        algorithm="modified_first_fit_decreasing",
        bin_capacity=batch.capacity,
        collect_metrics=False,
        min_bin_count=batch.replicas * batch.group,
        bin_count_multiple=batch.replicas,
    )
    found: list[list[int]] = packer.pack(sequence_lengths=batch.lengths)
    check_bins(found, batch.lengths, capacity=batch.capacity, multiple=batch.replicas)
    assert len(found) >= batch.replicas * batch.group
    return found


def nemo_rl_ranks(number: int, planner: HostPlanner = PLANNER) -> Rows:
    """NeMo-RL's dynamic context parallelism: plans by rank agree on groups."""
    rng, ranks = random_of(number)
    most = 4096
    lengths = padded(lengths_of(rng, longest=ranks * most - 2 * ranks, count=rng.choice((1, 20, 80))), 2 * ranks)
    plans = nemo_rl.rank_plans(lengths, dp_size=ranks // 2, cp_size=2, max_tokens_per_rank=most, planner=planner)
    rows = [[list(microbatch.sequences) for microbatch in row] for row in zip(*plans, strict=True)]
    check_rows(rows, dict(enumerate(lengths)), num_ranks=ranks, most=most)
    for row in zip(*plans, strict=True):
        for rank, each in enumerate(row):
            assert rank == each.first_rank + each.cp_rank and each.cp_rank < each.cp_size
            assert row[each.first_rank].sequences == each.sequences and row[each.first_rank].cp_rank == 0
    return rows


def skyrl_bins(number: int, planner: HostPlanner = PLANNER) -> list[list[int]]:
    """SkyRL: unpadded lengths; one packer refuses long sequences, the other lets them stand alone."""
    batch = bins_of(number, exceed=number % 2 == 0)
    packer = skyrl.FlexPacker(
        batch.capacity,
        min_bin_count=batch.replicas,
        bin_count_multiple=batch.replicas,
        cp_size=batch.cp_size,
        pad_to=2 * batch.cp_size,
        exceed=number % 2 == 0,
        planner=planner,
    )
    found = packer.pack(batch.lengths)
    check_bins(found, batch.lengths, capacity=batch.capacity, multiple=batch.replicas)
    return found


def areal_groups(number: int, planner: HostPlanner = PLANNER) -> list[list[int]]:
    """AReaL: as few groups as its arguments allow; trajectories have no bound, and a group for each rank."""
    batch = bins_of(number)
    bound = batch.capacity if number % 2 else 10**12
    groups = batch.replicas if number % 2 == 0 else 1
    found = areal.allocate(batch.lengths, bound, min_groups=groups, n_groups_divisor=batch.group, planner=planner)
    check_bins(found, batch.lengths, capacity=bound, multiple=batch.group)
    assert len(found) >= groups
    assert number % 2 or len(found) == math.ceil(groups / batch.group) * batch.group
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A tokenized document; its only token is its number."""

    input_ids: Sequence[int]


class Documents(Iterator[Document]):
    """An endless stream of documents that can be read again from a place."""

    def __init__(self, seed: int, *, longest: int) -> None:
        self._seed, self._longest, self.at = seed, longest, 0

    def __next__(self) -> Document:
        self.at += 1
        rng = Random(1000 * self._seed + self.at)
        return Document(input_ids=[self.at] * min(int(rng.lognormvariate(math.log(self._longest / 9), 1)) + 1, 9999))

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


def torchtitan_rows(number: int, planner: HostPlanner = PLANNER) -> list[list[list[int]]]:
    """torchtitan: rows of all ranks hold the documents of the stream in turn, but those that are too long."""
    rng, _ = random_of(number)
    ranks, steps, row_tokens = rng.choice((1, 2, 3, 8)), rng.choice((1, 2)), rng.choice((256, 1024))

    def rows_of(rank: int) -> FlexRows[Document]:
        return FlexRows(
            Documents(number, longest=row_tokens),
            dp_world_size=ranks,
            dp_rank=rank,
            num_tokens_per_batch=row_tokens,
            rows_per_step=steps,
            planner=planner,
        )

    found = []
    for rank in range(ranks):
        rows = rows_of(rank)
        found += [[document.input_ids[0] for document in next(rows)] for _ in range(steps)]
        state, then = rows.state_dict(), next(rows)
        again = rows_of(rank)
        again.load_state_dict(state)
        assert next(again) == then
    stream, kept = Documents(number, longest=row_tokens), []
    while len(kept) < sum(map(len, found)):
        document = next(stream)
        if len(document.input_ids) <= row_tokens:
            kept.append(document)
    assert sorted(at for row in found for at in row) == [each.input_ids[0] for each in kept], "documents in turn"
    tokens = {each.input_ids[0]: len(each.input_ids) for each in kept}
    assert all(sum(tokens[at] for at in row) <= row_tokens for row in found)
    return [found]


HOSTS: dict[str, Callable[..., list[Any]]] = {
    "megatron": megatron,
    "megatron-main": megatron_main,
    "verl": dynamic_verl,
    "slime": slime_bins,
    "nemo-rl": nemo_rl_bins,
    "nemo-rl-dcp": nemo_rl_ranks,
    "skyrl": skyrl_bins,
    "areal": areal_groups,
    "torchtitan": torchtitan_rows,
}
