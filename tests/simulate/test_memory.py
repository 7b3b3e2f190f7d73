"""Plans that fill the memory that the planner believes in, beside what the simulator counts from their programs."""

from typing import Any, Literal

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from rayfcp.config.constraints import HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.cost.memory import (
    forward_state_bytes,
    forward_token_bytes,
    forward_tokens_per_rank,
    largest_degree,
    max_tokens_per_rank,
    state_bytes,
    token_bytes,
)
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import (
    AdapterProfile,
    ClusterSpec,
    LayerKind,
    ModelProfile,
    Primitive,
    SequenceSpec,
)
from rayfcp.verify import check_plan
from tests.cost.test_layers import DELTA, SHAPES, attention, layer, model_of
from tests.examples import examples

HARDWARE = hardware_profile("h100")
SHARED = {"few": layer(attention(num_kv_heads=1)), "narrow": layer(attention(kind=LayerKind(window=300)), ffn_size=256)}
SHAPES.update(SHARED)
TIGHT = 0.93
"""Share of the memory for tokens that a full plan uses at least. The largest of unlike layers is convex in the times
that keys and values are replicated; `CostModel.kv_growth` is the chord up to one rank for each head."""

Every = Literal["microbatch", "step"]


def two_of(num_tokens: int, model: ModelProfile) -> list[SequenceSpec]:
    """Each fills a microbatch, of which the first leaves gradients that are not reduced yet."""
    return [
        SequenceSpec(id=at, num_tokens=num_tokens, num_targets=num_tokens - 1, layer_kinds=model.layer_kinds)
        for at in range(2)
    ]


NAMES = st.lists(st.sampled_from([*SHAPES]), min_size=2, max_size=6)
FIELDS = st.fixed_dictionaries(
    {
        "tied_embeddings": st.booleans(),
        "keeps_attention": st.booleans(),
        "fp32_residual": st.booleans(),
        "compiled": st.booleans(),
        "adapter": st.sampled_from([None, AdapterProfile(layer_parameters=50_000, token_elements=64)]),
    }
)


@examples(80)
@given(
    names=NAMES,
    model=FIELDS,
    num_ranks=st.sampled_from([1, 2, 4, 8]),
    primitive=st.sampled_from([*Primitive]),
    recomputed=st.sampled_from([0.0, 0.5, 1.0]),
    element=st.sampled_from([2, 4]),
    every=st.tuples(*2 * [st.sampled_from(["microbatch", "step"])]),
    tokens=st.integers(2400, 6000),
)
def test_a_full_plan_peaks_at_its_budget(
    names: list[str],
    model: dict[str, Any],
    num_ranks: int,
    primitive: Primitive,
    recomputed: float,
    element: int,
    every: tuple[Every, Every],
    tokens: int,
) -> None:
    """The simulator counts bytes by the ranges that programs keep and read where parameters are gathered once a step,
    and by tokens and degrees elsewhere. Recurrent layers are planned with a state for every 1,024 tokens and with no
    more ranks than heads; whole sequences keep no states."""
    recurrent = bool({"delta", "both", "mixer"} & {*names})
    assume(num_ranks <= DELTA.num_heads or not recurrent)
    shape, again = model_of(names, **model), int(recomputed * len(names))
    traffic = {"bytes_per_element": element, "reduce_every": every[0], "gather_every": every[1]}
    by_heads = primitive is Primitive.ULYSSES and num_ranks > 1
    base = state_bytes(shape, num_devices=num_ranks, **traffic)
    each = token_bytes(shape, recomputed_layers=again, bytes_per_element=element, by_heads=by_heads)
    memory = base + tokens * each
    sizes = {"num_devices": num_ranks, "memory_bytes": memory, "recomputed_layers": again, "by_heads": by_heads}
    assert max_tokens_per_rank(shape, **sizes, **traffic) == tokens
    cost = CostModel.from_profiles(shape, HARDWARE, num_ranks=num_ranks, recomputed_layers=again, **traffic)
    assume(np.isfinite(cost.terms(num_ranks, primitive=primitive)[0].moved_s))
    room = int(cost.room(tokens, degree=num_ranks, primitive=primitive))
    cluster, sequences = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=tokens), two_of(room, shape)
    options = PlanConfig(primitives=(primitive.value,), constraints=HostConstraints(degrees=(num_ranks,)))
    plan = plan_batch(sequences, cluster=cluster, cost=cost, options=options)
    check_plan(plan, sequences, cluster=cluster, cost=cost)
    programs = lower(plan, sequences, reduce_every=every[0])
    timeline = simulate(programs, model=shape, hardware=HARDWARE, gather_every=every[1], bytes_per_element=element)
    peak = max(timeline.peak_memory_bytes)
    assert base + (0.5 if recurrent else TIGHT) * (memory - base) <= peak <= memory


@examples(40)
@given(
    names=NAMES,
    model=FIELDS,
    num_ranks=st.sampled_from([1, 2, 4, 8]),
    primitive=st.sampled_from([*Primitive]),
    every=st.sampled_from(["microbatch", "step"]),
    tokens=st.integers(2400, 6000),
)
def test_a_full_evaluation_peaks_at_its_budget(
    names: list[str], model: dict[str, Any], num_ranks: int, primitive: Primitive, every: Every, tokens: int
) -> None:
    """Budgets hold for all degrees; the largest of those that share out heads needs most."""
    shape, degree = model_of(names, **model), largest_degree(model_of(names), num_ranks)
    settings = {"bytes_per_element": 2, "gather_every": every}
    base = forward_state_bytes(shape, layers_of_stage=(len(names),), stage=0, num_ranks=num_ranks, **settings)
    memory = base + tokens * forward_token_bytes(shape, bytes_per_element=2, degree=degree)
    assert forward_tokens_per_rank(shape, num_devices=num_ranks, memory_bytes=memory, **settings) == tokens
    cost = CostModel.from_profiles(shape, HARDWARE, num_ranks=num_ranks, reduce_every="step", **settings).forward_only()
    assume(np.isfinite(cost.terms(num_ranks, primitive=primitive)[0].moved_s))
    cluster, sequences = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=tokens), two_of(num_ranks * tokens, shape)
    options = PlanConfig(primitives=(primitive.value,), constraints=HostConstraints(degrees=(num_ranks,)))
    plan = plan_batch(sequences, cluster=cluster, cost=cost, options=options)
    programs = lower(plan, sequences, forward_only=True)
    peak = max(simulate(programs, model=shape, hardware=HARDWARE, **settings).peak_memory_bytes)
    assert peak <= memory
    if primitive is Primitive.ULYSSES and degree == num_ranks:
        assert base + TIGHT * (memory - base) <= peak
