"""Images assigned to ranks: against brute force, by memory, by speed, and where tokens are."""

import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.bench.reprice import reprice
from rayfcp.cluster.facts.observing import own_seconds
from rayfcp.cost.encoder import EncoderCost
from rayfcp.cost.images import ImageColumns, homes_of
from rayfcp.plan import CostModel, imbalance, plan_batch
from rayfcp.plan.imbalance import rank_loads
from rayfcp.plan.vision.kernels.longest_first import ImageItems, longest_first
from rayfcp.values import Block, ClusterSpec, EncoderShare, Images, InfeasiblePlanError, SequenceSpec
from rayfcp.verify import check_plan
from tests.examples import examples
from tests.plan.helpers import UNIT
from tests.program.images import batches_with_images, seeing_cost

QUICK = EncoderCost(s_per_patch=1.0, s_per_pair=0.0)


def columns(seconds: list[int], *, holders: list[int]) -> ImageItems:
    order = sorted(range(len(seconds)), key=lambda at: -seconds[at])
    values = np.array([seconds[at] for at in order], np.float64)
    return ImageItems(
        values,
        np.ones(len(order)),
        np.array([holders[at] for at in order], np.int64),
        np.unique(-values, return_inverse=True)[1].astype(np.int64),
    )


def makespan(seconds: np.ndarray, ranks: np.ndarray, speeds: np.ndarray) -> float:
    return float((np.bincount(ranks, seconds, minlength=len(speeds)) / speeds).max())


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), min_size=7, max_size=7),
)
@examples(60)
def test_the_longest_rank_is_within_the_bound_of_longest_first(
    seconds: list[int], num_ranks: int, holders: list[int]
) -> None:
    images = columns(seconds, holders=[holder % num_ranks for holder in holders])
    speeds = np.ones(num_ranks)
    found = longest_first(images, speeds, np.full(num_ranks, np.inf))
    best = min(
        makespan(images.seconds, np.array(ranks), speeds)
        for ranks in itertools.product(range(num_ranks), repeat=len(seconds))
    )
    assert makespan(images.seconds, found, speeds) <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.lists(st.integers(0, 4), min_size=3, max_size=3))
@examples(60)
def test_no_rank_gets_more_than_it_has_memory_for(seconds: list[int], limits: list[int]) -> None:
    images = columns(seconds, holders=[at % 3 for at in range(len(seconds))])
    found = longest_first(images, np.ones(3), np.array(limits, np.float64))
    counts = np.bincount(found[found >= 0], minlength=3)
    assert (counts <= limits).all()
    assert (found < 0).sum() == max(len(seconds) - sum(limits), 0)


def test_equal_images_stay_with_their_tokens_and_others_come_in_long_runs() -> None:
    images = columns([5] * 12, holders=[0] * 8 + [2] * 4)
    found = longest_first(images, np.ones(4), np.full(4, np.inf))
    assert found.tolist() == [0, 0, 0, 1, 1, 1, 3, 3, 2, 2, 2, 3]


def test_a_fast_rank_gets_more() -> None:
    found = longest_first(columns([1] * 12, holders=[0] * 12), np.array([1.0, 3.0]), np.full(2, np.inf))
    assert np.bincount(found).tolist() == [3, 9]


def test_nothing_moves_where_work_weighs_nothing() -> None:
    holders = [2, 0, 1, 1, 2]
    found = longest_first(columns([0] * 5, holders=holders), np.ones(3), np.full(3, np.inf))
    assert found.tolist() == holders


@given(batches_with_images(), st.integers(1, 4), st.randoms(use_true_random=False))
@examples(40)
def test_columns_and_homes_count_every_row_once(batch: list[SequenceSpec], num_ranks: int, random) -> None:  # type: ignore[no-untyped-def]
    blocks = []
    for each in batch:
        cuts = sorted({0, each.num_tokens, *(random.randrange(each.num_tokens) for _ in range(3))})
        blocks += [
            Block(sequence=each.id, start=start, stop=stop, rank=random.randrange(num_ranks))
            for start, stop in itertools.pairwise(cuts)
        ]
    owner = {(each.sequence, token): each.rank for each in blocks for token in range(each.start, each.stop)}
    images = ImageColumns.of(batch)
    plain = [(each.id, start, stop) for each in batch for run in each.images for start, stop in run.ranges()]
    assert list(zip(images.sequence, images.start, images.start + images.tokens, strict=True)) == plain
    due: dict[tuple[int, int], int] = {}
    for number, (sequence, start, stop) in enumerate(plain):
        for token in range(start, stop):
            key = number, owner[sequence, token]
            due[key] = due.get(key, 0) + 1
    if not plain:
        return
    homes = homes_of(images, blocks)
    found: dict[tuple[int, int], int] = {}
    for number, rank, rows in zip(homes.image.tolist(), homes.rank.tolist(), homes.rows.tolist(), strict=True):
        found[number, rank] = found.get((number, rank), 0) + rows
    assert found == due
    assert homes.holder.tolist() == [owner[sequence, start] for sequence, start, _ in plain]
    ranks = np.array([random.randrange(num_ranks) for _ in plain])
    assert (images.encoders(images.shares(ranks)) == ranks).all()


def costing(**changes: float) -> CostModel:
    return replace(UNIT, encoder=replace(QUICK, **changes))


VIDEO = SequenceSpec(
    id=0, num_tokens=40, num_targets=39, images=(Images(start=0, num_tokens=4, num_patches=16, count=10, stride=4),)
)


def test_ours_spread_frames_and_baselines_keep_them_in_their_group() -> None:
    batch = [VIDEO, *(SequenceSpec(id=at, num_tokens=40, num_targets=39) for at in range(1, 4))]
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=40)
    ours = plan_batch(batch, cluster=cluster, cost=costing(), strategy="flex-ring").microbatches[0]
    theirs = plan_batch(batch, cluster=cluster, cost=costing(), strategy="static-cp").microbatches[0]
    assert sorted(share.last - share.first for share in ours.encoding) == [2, 2, 3, 3]
    home = next(group.ranks[0] for group in ours.groups if 0 in group.sequences)
    assert EncoderShare(rank=home, sequence=0, first=0, last=3) in ours.encoding
    assert ours.encoder_s == pytest.approx(48.0)
    (group,) = (each for each in theirs.groups if 0 in each.sequences)
    assert {share.rank for share in theirs.encoding} == set(group.ranks)
    assert theirs.encoder_s == pytest.approx(-(-10 // group.degree) * 16.0)
    assert ours.predicted_s > ours.encoder_s


def test_activations_of_images_make_room_by_more_microbatches() -> None:
    batch = [
        SequenceSpec(id=at, num_tokens=20, num_targets=19, images=(Images(start=0, num_tokens=16, num_patches=64),))
        for at in range(8)
    ]
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=80)
    counts = []
    for kept in (0.0, 0.5, 0.9):
        plan = plan_batch(batch, cluster=cluster, cost=costing(kept_tokens=kept), strategy="flex-ring")
        counts.append(len(plan.microbatches))
        for each in plan.microbatches:
            num_sequences = sum(len(group.sequences) for group in each.groups)
            assert num_sequences * (20 + 64 * kept) <= 2 * 80
    assert counts == sorted(counts) and counts[0] < counts[-1]


@pytest.mark.parametrize(
    ("kept", "working", "words"),
    [
        (6.0, 0.0, r"sequence 0 has an image of 16 patches, a rank has memory for the activations of 13; freeze"),
        (0.0, 6.0, r"sequence 0 has an image of 16 patches, a rank has memory for the activations of 13; freeze"),
        (
            2.5,
            0.0,
            r"sequence 0 has 40 tokens and 160 patches, .* as much memory as 440 tokens, .* have it for 320; fr",
        ),
        (1.7, 0.0, r"activations of images do not fit beside 10 tokens on each rank"),
    ],
)
def test_images_that_cannot_fit_are_named(kept: float, working: float, words: str) -> None:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=80)
    with pytest.raises(InfeasiblePlanError, match=words):
        plan_batch([VIDEO], cluster=cluster, cost=costing(kept_tokens=kept, working_tokens=working))


def test_stages_are_refused() -> None:
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=80, num_stages=2)
    with pytest.raises(ValueError, match=r"pipeline_stages is 2, must be 1 for .* vision encoder"):
        plan_batch([VIDEO], cluster=cluster, cost=seeing_cost(2))


@pytest.mark.parametrize("strategy", ["flex-ring", "flex-block", "static-cp", "auto"])
def test_a_plan_priced_anew_by_its_own_costs_is_itself(strategy: str) -> None:
    batch = [replace(VIDEO, id=at, num_tokens=40 + 10 * at, num_targets=39) for at in range(6)]
    batch += [SequenceSpec(id=at, num_tokens=30, num_targets=29) for at in range(6, 9)]
    cluster = ClusterSpec(num_ranks=3, max_tokens_per_rank=60)
    cost = costing(row_intra_s=1e-3, row_inter_s=2e-3, fixed_s=0.1, reduce_s=0.2, shard_s=0.1, exposed_s=0.05)
    plan = plan_batch(batch, cluster=cluster, cost=cost, strategy=strategy)
    assert len(plan.microbatches) > 1
    assert sum(each.encoder_s for each in plan.microbatches) < plan.predicted_s
    anew = reprice(plan, batch, cluster=cluster, cost=cost)
    assert anew.lower_bound_s == plan.lower_bound_s
    assert anew.predicted_s == pytest.approx(plan.predicted_s, rel=1e-12)
    check_plan(anew, batch, cluster=cluster, cost=cost)


def test_imbalance_of_the_encoder_and_what_ranks_take_for_images() -> None:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=40)
    cost = costing(fixed_s=0.5)
    plan = plan_batch([VIDEO], cluster=cluster, cost=cost, strategy="flex-ring")
    assert imbalance(plan, [VIDEO], cost=cost).encoder == pytest.approx(1 - 2.5 / 3)
    slow = imbalance(plan, [VIDEO], cost=cost, speed_of_rank=(0.5, 1.0, 1.0, 1.0)).encoder
    counts = {share.rank: share.last - share.first for share in plan.microbatches[0].encoding}
    loads = [counts[0] / 0.5, counts[1], counts[2], counts[3]]
    assert slow == pytest.approx(1 - sum(loads) / 4 / max(loads))
    assert imbalance(plan, [VIDEO], cost=UNIT).encoder is None
    seen, unseen = (np.array(own_seconds(rank_loads(plan, [VIDEO], cost=each), cost=each)) for each in (cost, UNIT))
    assert (seen - unseen).tolist() == pytest.approx([16.0 * counts[rank] + 0.5 for rank in range(4)])


def test_costs_with_an_encoder_go_through_json() -> None:
    cost = seeing_cost(4)
    assert CostModel.of_fields(json.loads(json.dumps(asdict(cost)))) == cost
    with pytest.raises(ValueError, match=r"encoder.s_per_patch is -1.0, must be finite and at least 0"):
        costing(s_per_patch=-1.0)
