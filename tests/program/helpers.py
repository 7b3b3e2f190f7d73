"""Plans for the tests of programs."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch
from rayfcp.program import Forward, HeadProgram, RankProgram
from rayfcp.values import (
    BatchPlan,
    Block,
    ClusterSpec,
    Group,
    Layout,
    MicrobatchPlan,
    Primitive,
    Round,
    SequenceSpec,
    Transfer,
)
from tests.masks import specs

SHORT_SEARCH = PlanConfig(search_moves=1000, primitives=("ring",))
"""Plans need not be good here: their programs are what is tested."""


def short_sequences(seed: int) -> list[SequenceSpec]:
    """One to three."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 4))]
    return specs(lengths)


def cost_model(num_ranks: int, *, ring_s_per_round: float = 1e-3) -> CostModel:
    """Qwen3-1.7B on CPUs with a network that makes large rings expensive, so that degrees differ."""
    cost = CostModel.from_profiles(
        model_profile("qwen3-1.7b"),
        hardware_profile("cpu"),
        num_ranks=num_ranks,
        bytes_per_element=4,
        reduce_every="step",
    )
    return cost.with_coefficients(ring_s_per_round=ring_s_per_round)


@cache
def random_plan(seed: int, *, num_ranks: int) -> tuple[BatchPlan, list[SequenceSpec], ClusterSpec]:
    """A plan of a long-tailed batch under a tight memory bound."""
    rng = random.Random(seed)
    lengths = [min(4000, 1 + int(rng.lognormvariate(4, 1.5))) for _ in range(rng.randrange(1, 20))]
    sequences = specs(lengths)
    bound = max(max(lengths) // num_ranks + 1, sum(lengths) // num_ranks // rng.randrange(1, 4) + 1)
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=bound)
    cost = cost_model(num_ranks, ring_s_per_round=rng.choice([0.0, 1e-2, 1.0]))
    return plan_batch(sequences, cluster=cluster, cost=cost, options=SHORT_SEARCH), sequences, cluster


def short_plan(seed: int, *, num_ranks: int, kind: str) -> tuple[BatchPlan, list[SequenceSpec]]:
    """Microbatches of sequences of at most 40 tokens: groups (`g`), blocks strewn over them and fetched from their
    owners (`s`), groups that may share out heads (`x`)."""
    plan, sequences, _ = random_plan(seed % 40, num_ranks=num_ranks)
    sequences = [replace(each, num_tokens=1 + each.num_tokens % 40) for each in sequences]
    if kind == "g":
        return plan, sequences
    return scattered(plan, sequences, seed=seed) if kind == "s" else with_primitives(plan, seed), sequences


def with_primitives(plan: BatchPlan, seed: int) -> BatchPlan:
    """The plan with a primitive drawn for each group."""
    rng = random.Random(seed)
    microbatches = tuple(
        replace(each, groups=tuple(replace(group, primitive=rng.choice(list(Primitive))) for group in each.groups))
        for each in plan.microbatches
    )
    return replace(plan, microbatches=microbatches)


def scattered(plan: BatchPlan, sequences: list[SequenceSpec], *, seed: int) -> BatchPlan:
    """The first microbatch with its sequences cut anywhere and dealt to any ranks of their groups.

    Keys and values go from their owner to every rank of the group that has queries of the sequence, all
    blocks of an owner in one transfer, in rotating rounds: sizes differ, and some transfers are missing.
    """
    rng = random.Random(seed)
    first, blocks = plan.microbatches[0], list[Block]()
    for group in first.groups:
        for sequence in group.sequences:
            length = sequences[sequence].num_tokens
            cuts = sorted({0, length, *(rng.randrange(length) for _ in range(rng.randrange(9)))})
            for start, stop in itertools.pairwise(cuts):
                blocks.append(Block(sequence=sequence, start=start, stop=stop, rank=rng.choice(group.ranks)))
    queried = {(block.rank, block.sequence) for block in blocks}
    rounds = []
    for turn in range(1, plan.num_ranks):
        transfers = []
        for source in range(plan.num_ranks):
            target = (source + turn) % plan.num_ranks
            due = [at for at, each in enumerate(blocks) if each.rank == source and (target, each.sequence) in queried]
            if due:
                transfers.append(Transfer(blocks=tuple(due), source=source, target=target))
        rounds.append(Round(transfers=tuple(transfers)))
    layout = Layout(blocks=tuple(blocks), rounds=tuple(rounds))
    return replace(plan, microbatches=(replace(first, layout=layout), *plan.microbatches[1:]))


def forwards(program: RankProgram) -> list[Forward]:
    return [item for item in program.instructions if isinstance(item, Forward)]


def cluster_of(plan: BatchPlan, **changes: object) -> ClusterSpec:
    given = {"num_ranks": plan.num_ranks, "num_stages": plan.num_stages, "max_tokens_per_rank": 10**6, **changes}
    return ClusterSpec(**given)  # type: ignore[arg-type]


def heads_of(programs: Sequence[RankProgram]) -> list[tuple[int, Forward, HeadProgram]]:
    """(rank, forward, program) of all parts in Ulysses groups."""
    return [
        (program.rank, item, item.attention)
        for program in programs
        for item in program.instructions
        if isinstance(item, Forward) and isinstance(item.attention, HeadProgram)
    ]


def one_group(lengths: list[int], ranks: tuple[int, ...]) -> tuple[BatchPlan, list]:
    """A plan of one Ulysses group and, on the first rank that is left, nothing."""
    sequences = specs(lengths)
    group = Group(ranks=ranks, sequences=tuple(range(len(lengths))), primitive=Primitive.ULYSSES)
    microbatch = MicrobatchPlan(groups=(group,), group_s=(1.0,), predicted_s=1.0)
    plan, _, _ = random_plan(0, num_ranks=max(ranks) + 1)
    return replace(plan, microbatches=(microbatch,), recomputed_layers=1, predicted_s=1.0, lower_bound_s=0.0), sequences
