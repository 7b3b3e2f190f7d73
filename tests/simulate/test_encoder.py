"""Images in the simulator: closed forms, bounds, and what a frozen encoder leaves out."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfcp.config.models import PlanConfig
from rayfcp.cost.memory import state_bytes
from rayfcp.plan import CostModel, max_tokens_per_rank, model_flops, plan_batch
from rayfcp.program import lower
from rayfcp.simulate import Timeline, simulate
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, Images, ModelProfile, SequenceSpec, SpanKind
from tests.examples import examples
from tests.program.images import VISION, batches_with_images
from tests.simulate.helpers import MODEL, machine

SEEING = replace(MODEL, vision=replace(VISION, num_layers=5, hidden_size=32, num_heads=2, ffn_size=64, merger_size=128))
FROZEN = replace(SEEING, vision=replace(SEEING.vision, frozen=True))


def planned(
    batch: list[SequenceSpec], *, model: ModelProfile, hardware: HardwareProfile, cluster: ClusterSpec, strategy: str
) -> tuple[BatchPlan, Timeline]:
    cost = CostModel.from_profiles(
        model, hardware, num_ranks=cluster.num_ranks, bytes_per_element=2, reduce_every="step"
    )
    options = PlanConfig(search_moves=500, primitives=("ring", "ulysses"))
    plan = plan_batch(batch, cluster=cluster, cost=cost, strategy=strategy, options=options)
    programs = lower(plan, batch)
    return plan, simulate(programs, model=model, hardware=hardware, speed_of_rank=cluster.speed_of_rank)


IMAGES = [
    SequenceSpec(id=0, num_tokens=30, num_targets=29, images=(Images(start=2, num_tokens=16, num_patches=64),)),
    SequenceSpec(
        id=1,
        num_tokens=40,
        num_targets=39,
        images=(Images(start=0, num_tokens=4, num_patches=16, count=3, stride=6),),
    ),
]


@pytest.mark.parametrize("model", [SEEING, FROZEN], ids=["trained", "frozen"])
def test_one_rank_takes_what_the_images_cost(model: ModelProfile) -> None:
    """Nothing travels and nothing is gathered, so that the encoder adds its computation alone."""
    hardware = machine(attention_half_tokens=7.0, linear_half_tokens=5.0)
    cluster = ClusterSpec(num_ranks=1, max_tokens_per_rank=400)
    plan, seen = planned(IMAGES, model=model, hardware=hardware, cluster=cluster, strategy="ring")
    bare = [replace(each, images=()) for each in IMAGES]
    _, unseen = planned(bare, model=MODEL, hardware=hardware, cluster=cluster, strategy="ring")
    vision = model.vision
    assert vision is not None
    linear_s = vision.linear_flops_per_patch(64) / (1e9 * 0.5) * (64 + 3 * 16 + 5)
    pairs = 64 * (64 + 7) + 3 * 16 * (16 + 7)
    attention_s = vision.attention_flops_per_pair / (1e9 * 0.25) * pairs
    due_s = linear_s + attention_s if vision.frozen else 3 * linear_s + 3.5 * attention_s
    assert seen.iteration_s - unseen.iteration_s == pytest.approx(due_s)
    assert plan.microbatches[0].encoder_s == pytest.approx(due_s)
    assert plan.predicted_s == pytest.approx(seen.iteration_s)
    encoded = [span for span in seen.spans if span.kind is SpanKind.ENCODE]
    assert len(encoded) == (1 if vision.frozen else 2)
    assert sum(span.duration_s for span in encoded) == pytest.approx(due_s)
    assert seen.model_flops == pytest.approx(model_flops(model, IMAGES))


@given(
    batches_with_images(max_sequences=4),
    st.integers(1, 4),
    st.sampled_from(("flex-ring", "flex-block", "static-cp", "ring")),
    st.sampled_from((SEEING, FROZEN)),
    st.sampled_from((0.0, 30.0)),
    st.booleans(),
)
@examples(40)
def test_nothing_is_faster_than_the_bound_and_spans_have_no_gaps(
    batch: list[SequenceSpec], num_ranks: int, strategy: str, model: ModelProfile, half: float, unequal: bool
) -> None:
    hardware = machine(attention_half_tokens=half, linear_half_tokens=half)
    total = sum(each.num_tokens for each in batch)
    speeds = tuple(1.0 + rank / 2 for rank in range(num_ranks)) if unequal else ()
    cluster = ClusterSpec(
        num_ranks=num_ranks, max_tokens_per_rank=-(-4 * total // num_ranks) + 200, speed_of_rank=speeds
    )
    plan, timeline = planned(batch, model=model, hardware=hardware, cluster=cluster, strategy=strategy)
    assert plan.predicted_s >= plan.lower_bound_s * (1 - 1e-9)
    assert timeline.iteration_s >= plan.lower_bound_s * (1 - 1e-9)
    assert timeline.model_flops == pytest.approx(model_flops(model, batch))
    for rank in range(num_ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert spans[0].start_s == 0.0
        assert spans[-1].stop_s == pytest.approx(timeline.iteration_s)
        for before, after in pairwise(spans):
            assert after.start_s == pytest.approx(before.stop_s)


VIDEO = [
    SequenceSpec(
        id=0,
        num_tokens=400,
        num_targets=399,
        images=(Images(start=0, num_tokens=16, num_patches=64, count=20, stride=20),),
    ),
    *(SequenceSpec(id=at, num_tokens=400, num_targets=399) for at in range(1, 4)),
]


def test_features_travel_once_each_way_and_balance_is_told() -> None:
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=2000)
    rows = {}
    for model in (SEEING, FROZEN):
        plan, timeline = planned(VIDEO, model=model, hardware=machine(), cluster=cluster, strategy="flex-ring")
        assert {share.rank for share in plan.microbatches[0].encoding} == {0, 1, 2, 3}
        assert timeline.imbalance.encoder == pytest.approx(0.0)
        rows[model.vision.frozen] = sum(timeline.sent_bytes)
        assert sum(timeline.sent_bytes) == pytest.approx(sum(timeline.received_bytes))
        degrees = plan.degrees
        assert degrees == {1: 4}, "nothing else travels"
    moved = 15 * 16 * 2 * 64 * 2  # frames, tokens, mergers, hidden size, bytes
    assert rows == {True: moved, False: 2 * moved}
    plan, timeline = planned(VIDEO, model=SEEING, hardware=machine(), cluster=cluster, strategy="static-cp")
    (group,) = (group for group in plan.microbatches[0].groups if 0 in group.sequences)
    assert timeline.imbalance.encoder == pytest.approx(1 - group.degree / 4)


def test_memory_of_images_lives_from_encode_to_backward() -> None:
    cluster = ClusterSpec(num_ranks=1, max_tokens_per_rank=2000)
    peaks = {}
    for model in (SEEING, FROZEN):
        _, timeline = planned(VIDEO[:1], model=model, hardware=machine(), cluster=cluster, strategy="ring")
        (samples,) = timeline.memory
        base = samples[0][1]
        assert samples[-1][1] == base
        peaks[model.vision.frozen] = max(size for _, size in samples) - base
        assert np.all(np.diff([at_s for at_s, _ in samples]) >= 0)
    assert peaks[False] > peaks[True]


@pytest.mark.parametrize("model", [SEEING, FROZEN], ids=["trained", "frozen"])
def test_layers_that_stay_gathered_count_for_the_encoder_too(model: ModelProfile) -> None:
    cluster, hardware = ClusterSpec(num_ranks=2, max_tokens_per_rank=800), machine()
    plan, _ = planned(VIDEO, model=model, hardware=hardware, cluster=cluster, strategy="flex-ring")
    assert len(plan.microbatches) > 1
    programs = lower(plan, VIDEO)
    again, once = (
        simulate(programs, model=model, hardware=hardware, gather_every=every) for every in ("microbatch", "step")
    )
    assert once.iteration_s <= again.iteration_s
    vision = model.vision
    assert vision is not None
    more = 2 * ((model.num_layers - 2) * model.layer_parameters + (vision.num_layers - 2) * vision.layer_parameters)
    for samples, others in zip(once.memory, again.memory, strict=True):
        assert [size for _, size in samples] == [size + more for _, size in others]
    sizes: dict[str, Any] = {"recomputed_layers": 0, "bytes_per_element": 2, "reduce_every": "step"}
    tokens = {
        every: max_tokens_per_rank(model, num_devices=2, memory_bytes=size, gather_every=every, **sizes)
        for every, size in (("microbatch", 1 << 30), ("step", (1 << 30) + more))
    }
    assert tokens["step"] == tokens["microbatch"]


@pytest.mark.parametrize("strategy", ["flex-ring", "flex-block", "static-cp", "ring"])
@pytest.mark.parametrize("model", [SEEING, FROZEN], ids=["trained", "frozen"])
def test_what_is_planned_into_memory_stays_in_it(model: ModelProfile, strategy: str) -> None:
    batch = [replace(VIDEO[0], id=at) for at in range(6)] + [replace(VIDEO[1], id=at) for at in range(6, 9)]
    sizes: dict[str, Any] = {"recomputed_layers": 0, "bytes_per_element": 2, "reduce_every": "step"}
    memory = state_bytes(model, num_devices=2, bytes_per_element=2, reduce_every="step") + 8_000_000
    room = max_tokens_per_rank(model, num_devices=2, memory_bytes=memory, **sizes)
    cluster = ClusterSpec(num_ranks=2, max_tokens_per_rank=room)
    plan, timeline = planned(batch, model=model, hardware=machine(), cluster=cluster, strategy=strategy)
    assert max(timeline.peak_memory_bytes) <= memory
    bare = [replace(each, images=()) for each in batch]
    text, _ = planned(bare, model=model, hardware=machine(), cluster=cluster, strategy=strategy)
    assert (len(plan.microbatches) > len(text.microbatches)) != bool(model.vision and model.vision.frozen)


def test_a_model_that_does_not_see_is_named() -> None:
    cluster = ClusterSpec(num_ranks=1, max_tokens_per_rank=100)
    cost = CostModel.from_profiles(SEEING, machine(), num_ranks=1, bytes_per_element=2, reduce_every="step")
    plan = plan_batch(IMAGES, cluster=cluster, cost=cost, strategy="ring")
    with pytest.raises(ValueError, match="model small has no vision encoder; give the model's profile"):
        simulate(lower(plan, IMAGES), model=MODEL, hardware=machine())
