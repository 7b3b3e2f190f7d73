"""Encodings through plans, programs and text, and the proof that finds what is wrong with them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.plan import plan_batch
from rayfcp.program import Encode, Load, RankProgram, lower
from rayfcp.values import BatchPlan, ClusterSpec, EncoderShare, Images, SequenceSpec
from rayfcp.verify import check_plan, check_programs
from tests.examples import examples
from tests.program.images import batches_with_images, seeing_cost

OPTIONS = PlanConfig(search_moves=500, primitives=("ring", "ulysses"))
STRATEGIES = ("flex-ring", "flex-block", "static-cp", "ulysses", "ring", "bytescale", "magi", "auto")


def planned(
    batch: list[SequenceSpec], *, num_ranks: int, strategy: str, parts: int, frozen: bool = False
) -> tuple[BatchPlan, ClusterSpec]:
    """Plan with memory for about one of `parts` parts of the batch."""
    longest, total = max(each.num_tokens for each in batch), sum(each.num_tokens for each in batch)
    room = max(-(-longest // num_ranks), -(-total // (num_ranks * parts))) * 3 // 2 + 20
    cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=room)
    cost = seeing_cost(num_ranks, frozen=frozen)
    return plan_batch(batch, cluster=cluster, cost=cost, strategy=strategy, options=OPTIONS), cluster


@given(batches_with_images(), st.integers(1, 4), st.sampled_from(STRATEGIES), st.integers(1, 3), st.booleans())
@examples(20)
def test_every_strategys_plan_is_proven_and_prints(
    batch: list[SequenceSpec], num_ranks: int, strategy: str, parts: int, frozen: bool
) -> None:
    if strategy == "ulysses" and num_ranks == 3:
        num_ranks = 4  # divides the heads
    plan, cluster = planned(batch, num_ranks=num_ranks, strategy=strategy, parts=parts, frozen=frozen)
    check_plan(plan, batch, cluster=cluster, cost=seeing_cost(num_ranks, frozen=frozen))
    programs = tuple(lower(plan, batch))
    assert arrivals(programs, batch) == {
        (each.id, token): 1 for each in batch for run in each.images for a, b in run.ranges() for token in range(a, b)
    }
    if strategy not in ("flex-ring", "flex-block", "auto"):
        assert_in_their_groups(plan)


def arrivals(programs: tuple[RankProgram, ...], batch: list[SequenceSpec]) -> dict[tuple[int, int], int]:
    """Followed token by token: how often each token of a image gets the feature that was made of it."""
    ranges = {each.id: [span for run in each.images for span in run.ranges()] for each in batch}
    by_microbatch: dict[int, list[tuple[Load, Encode]]] = {}
    for program in programs:
        loads = {item.microbatch: item for item in program.instructions if isinstance(item, Load)}
        for item in program.instructions:
            if isinstance(item, Encode):
                by_microbatch.setdefault(item.microbatch, []).append((loads[item.microbatch], item))
    found: dict[tuple[int, int], int] = {}
    for parts in by_microbatch.values():
        made = [
            [
                (run.sequence, token)
                for run in item.images
                for number in range(run.first, run.last)
                for token in range(*ranges[run.sequence][number])
            ]
            for _, item in parts
        ]
        for load, item in parts:
            loaded = [(p.sequence, token) for p in load.pieces for token in range(p.start, p.stop)]
            due = [loaded[row] for start, stop in item.rows for row in range(start, stop)]
            ways = [(item.features.rank, [there], [here]) for there, here in item.features.kept]
            for index, step in enumerate(item.features.rounds):
                if step.receive:
                    sent = parts[step.receive.peer][1].features.rounds[index].send
                    assert sent and sent.peer == item.features.rank
                    ways.append((step.receive.peer, list(sent.ranges), list(step.receive.ranges)))
            for source, there, here in ways:
                left = [made[source][row] for start, stop in there for row in range(start, stop)]
                right = [due[row] for start, stop in here for row in range(start, stop)]
                assert left == right
                for token in right:
                    found[token] = found.get(token, 0) + 1
    return found


def assert_in_their_groups(plan: BatchPlan) -> None:
    for microbatch in plan.microbatches:
        ranks = {sequence: group.ranks for group in microbatch.groups for sequence in group.sequences}
        assert all(share.rank in ranks[share.sequence] for share in microbatch.encoding)


def changed(item: Encode, rng: random.Random) -> Encode | None:
    """One thing of an encode is another."""
    features = item.features
    kinds = []
    if item.images:
        at = rng.randrange(len(item.images))
        run = item.images[at]
        for new in (
            replace(run, last=run.last + 1),
            replace(run, first=run.first + 1, last=run.last + 1),
            replace(run, num_patches=run.num_patches + 4),
            replace(run, sequence=run.sequence + 1),
        ):
            kinds.append(replace(item, images=(*item.images[:at], new, *item.images[at + 1 :])))
        kinds.append(replace(item, images=item.images + item.images[:1]))
        kinds.append(replace(item, images=item.images[1:]))
    if item.rows:
        start, stop = item.rows[-1]
        kinds.append(replace(item, rows=(*item.rows[:-1], (start + 1, stop + 1))))
        kinds.append(replace(item, rows=item.rows[1:]))
    if features.kept:
        kinds.append(replace(item, features=replace(features, kept=features.kept[1:])))
    for at, step in enumerate(features.rounds):
        without = [replace(step, send=None)] if step.send else []
        without += [replace(step, receive=None)] if step.receive else []
        for new_step in without:
            rounds = (*features.rounds[:at], new_step, *features.rounds[at + 1 :])
            kinds.append(replace(item, features=replace(features, rounds=rounds)))
    if features.rounds:
        kinds.append(replace(item, features=replace(features, rounds=features.rounds[:-1])))
    return rng.choice(kinds) if kinds else None


@given(batches_with_images(), st.integers(1, 3), st.sampled_from(("flex-ring", "flex-block", "ring")), st.integers())
@examples(30)
def test_one_change_of_an_encode_is_found(batch: list[SequenceSpec], num_ranks: int, strategy: str, seed: int) -> None:
    rng = random.Random(seed)
    plan, _ = planned(batch, num_ranks=num_ranks, strategy=strategy, parts=2)
    programs = lower(plan, batch)
    check_programs(programs, batch)
    numbers = [at for at, items in enumerate(programs.encodes) if items]
    if not numbers:
        return
    number, rank = rng.choice(numbers), rng.randrange(num_ranks)
    items = programs.encodes[number]
    one = changed(items[rank], rng)
    put = [one] if one else []
    others_encode = len(numbers) > 1  # programs may also encode nothing at all
    for other in ((*items[:rank], *put, *items[rank + 1 :]), *([()] if others_encode else [])):
        encodes = (*programs.encodes[:number], other, *programs.encodes[number + 1 :])
        with pytest.raises(ValueError):
            check_programs(programs.replaced(encodes=encodes), batch)


IMAGE = SequenceSpec(id=0, num_tokens=9, num_targets=8, images=(Images(start=1, num_tokens=4, num_patches=16),))


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((), "plan encodes no images"),
        (
            (EncoderShare(rank=0, sequence=0, first=0, last=1), EncoderShare(rank=1, sequence=0, first=0, last=1)),
            "token 0 of sequence 0 is on rank 0 and again on rank 1",
        ),
        ((EncoderShare(rank=0, sequence=0, first=0, last=2),), r"encodes images \[0, 2\) of sequence 0, must be"),
        ((EncoderShare(rank=0, sequence=3, first=0, last=1),), r"encodes images \[0, 1\) of sequence 3"),
    ],
)
def test_a_plan_that_encodes_not_once_is_refused(shares: tuple[EncoderShare, ...], words: str) -> None:
    plan, cluster = planned([IMAGE], num_ranks=2, strategy="ring", parts=1)
    wrong = replace(plan, microbatches=(replace(plan.microbatches[0], encoding=shares),))
    with pytest.raises(ValueError, match=words):
        check_plan(wrong, [IMAGE], cluster=cluster, cost=seeing_cost(2))


def test_the_last_microbatch_encodes_too() -> None:
    """Gradients are summed over ranks in its backward pass."""
    text = SequenceSpec(id=1, num_tokens=2000, num_targets=1999)
    cluster = ClusterSpec(num_ranks=1, max_tokens_per_rank=2000)
    plan = plan_batch([IMAGE, text], cluster=cluster, cost=seeing_cost(1), strategy="flex-ring")
    assert [bool(each.encoding) for each in plan.microbatches] == [True, False]
    (program,) = lower(plan, [IMAGE, text])
    assert [type(item).__name__ for item in program.instructions] == ["Load", "Encode", "Forward", "Backward"] * 2
    assert plan.microbatches[1].encoder_s > 0
