"""Models whose layers differ: equal ones give the same figures either way, and sums by hand and brute force agree."""

import dataclasses
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfcp.config import ConfigError
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import attention_flops, model_flops, ring_bytes
from rayfcp.cost.bound import lower_bound
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.cost.layers import names_of
from rayfcp.cost.memory import LayersBytes, layer_bytes, state_bytes, token_bytes
from rayfcp.cost.model import CostModel
from rayfcp.cost.stages import layer_work, split_by_cost
from rayfcp.plan import hardware_profile, model_profile, plan_batch
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.values import (
    AttentionProfile,
    ClusterSpec,
    LayerKind,
    LayerProfile,
    ModelProfile,
    Primitive,
    RecurrenceProfile,
    RecurrentKind,
    SequenceSpec,
)
from rayfcp.verify import check_plan

HARDWARE = hardware_profile("h100")
HIDDEN = 512


def attention(**fields: Any) -> AttentionProfile:
    found = AttentionProfile(**{"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64} | fields)
    return found.with_parameters(HIDDEN)


def layer(*mixers: Any, **fields: Any) -> LayerProfile:
    return LayerProfile(**{"mixers": mixers, "hidden_size": HIDDEN, "ffn_size": 1024} | fields)


DELTA = RecurrenceProfile(
    kind=RecurrentKind(halo=3),
    parameters=4 * HIDDEN**2,
    num_heads=4,
    key_dim=64,
    value_dim=64,
    transition_size=64**2,
    conv_channels=768,
)
MLA = attention(num_kv_heads=1, head_dim=96, latent_size=128, rope_size=32)
SHAPES = {
    "dense": layer(attention()),
    "experts": layer(attention(), ffn_size=256, num_experts=8, experts_per_token=2, shared_ffn_size=256),
    "window": layer(attention(kind=LayerKind(window=100), num_kv_heads=4)),
    "gated": layer(attention(gated=True, head_norms=True)),
    "delta": layer(DELTA),
    "both": layer(attention(), DELTA),
    "mixer": layer(DELTA, ffn_size=0),
    "mlp": layer(mlp_matrices=2),
    "latent": layer(MLA),
}
NAMES = st.lists(st.sampled_from([*SHAPES]), min_size=4, max_size=8)


def model_of(names: list[str], **fields: Any) -> ModelProfile:
    return ModelProfile.of_layers([SHAPES[name] for name in names], name="mixed", vocab_size=4096, **fields)


def cost_of(model: ModelProfile, num_ranks: int = 4, **fields: Any) -> CostModel:
    return CostModel.from_profiles(
        model, HARDWARE, **{"num_ranks": num_ranks, "bytes_per_element": 2, "reduce_every": "step"} | fields
    )


def batch_of(lengths: list[int], model: ModelProfile) -> list[SequenceSpec]:
    kinds = model.layer_kinds
    return [
        SequenceSpec(id=at, num_tokens=each, num_targets=each - 1, layer_kinds=kinds) for at, each in enumerate(lengths)
    ]


EQUAL = [
    model_profile("qwen3-1.7b"),
    model_profile("qwen3-30b-a3b"),
    dataclasses.replace(model_profile("gpt-oss-20b"), keeps_attention=True),
]


@pytest.mark.parametrize("model", EQUAL, ids=lambda each: each.name)
def test_equal_layers_written_one_by_one_give_the_same_figures(model: ModelProfile) -> None:
    apart = dataclasses.replace(model, layers=model.every_layer)
    assert ModelProfile.of_layers(
        model.every_layer, name=model.name, vocab_size=model.vocab_size, keeps_attention=model.keeps_attention
    ) == dataclasses.replace(model, tied_embeddings=False)
    for recomputed in (0, 7, model.num_layers):
        settings = {"num_ranks": 8, "recomputed_layers": recomputed}
        assert cost_of(apart, **settings) == cost_of(model, **settings)
        assert token_bytes(apart, recomputed_layers=recomputed, bytes_per_element=2) == token_bytes(
            model, recomputed_layers=recomputed, bytes_per_element=2
        )
    both = [cost_of(each, num_stages=2, memory_bytes=1 << 38).pipeline for each in (model, apart)]
    assert both[0] and both[1] and both[1].share == pytest.approx(both[0].share)
    assert dataclasses.replace(both[1], share=both[0].share, linear_share=(), attention_share=()) == (
        dataclasses.replace(both[0], linear_share=(), attention_share=())
    )
    sequences = batch_of([4000, 900, 12000, 64], model)
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=6000)
    plans = [plan_batch(sequences, cluster=cluster, cost=cost_of(each)) for each in (model, apart)]
    assert plans[0] == plans[1]
    one, other = (simulate(lower(plans[0], sequences), model=each, hardware=HARDWARE) for each in (model, apart))
    assert (one.iteration_s, one.model_flops, one.peak_memory_bytes) == (
        other.iteration_s,
        other.model_flops,
        other.peak_memory_bytes,
    )


@given(names=NAMES, num_stages=st.integers(1, 4))
def test_stages_by_cost_are_the_best_of_all(names: list[str], num_stages: int) -> None:
    model = model_of(names)
    work, head = layer_work(model), 2.0 * model.head_parameters

    def slowest(ends: tuple[int, ...]) -> float:
        bounds = [0, *ends, len(work)]
        stages = [sum(work[start:stop]) for start, stop in pairwise(bounds)]
        return max(*stages[:-1], stages[-1] + head) if len(stages) > 1 else stages[0] + head

    split = split_by_cost(model, num_stages)
    assert len(split) == num_stages and sum(split) == len(names) and min(split) >= 1
    ends = tuple(sum(split[: stage + 1]) for stage in range(num_stages - 1))
    if model.layers:
        every = combinations(range(1, len(work)), num_stages - 1)
        assert slowest(ends) == pytest.approx(min(slowest(each) for each in every))


@given(names=NAMES, recomputed=st.integers(0, 4))
def test_parameters_flops_and_bytes_are_sums_over_layers(names: list[str], recomputed: int) -> None:
    model, own = model_of(names), [SHAPES[name] for name in names]
    assert model.num_parameters == sum(each.parameters for each in own) + 2 * 4096 * HIDDEN
    assert model.every_layer == tuple(own)
    sequences = batch_of([700, 130], model)
    pairs = sum(
        each.pair_flops * each.kind.visible_pairs(length, length)
        for shape in own
        for each in shape.mixers
        for length in (700, 130)
    )
    assert attention_flops(model, sequences) == pytest.approx(3.0 * pairs)
    linear = 830 * (sum(each.linear_flops for each in own) + 2 * 4096 * HIDDEN)
    assert model_flops(model, sequences) == pytest.approx(3.0 * (pairs + linear))
    stages = LayersBytes.of(model, layers_of_stage=(2, len(names) - 2), bytes_per_element=2)
    sizes = [layer_bytes(model, each, bytes_per_element=2) for each in own]
    assert [*stages.of_stage(0), *stages.of_stage(1)] == sizes
    assert stages.layers(10, 10) == [10 * sum(each.whole for each in part) for part in (sizes[:2], sizes[2:])]
    freed = [each.freed(10, 10, later=0) for each in sizes]
    assert stages.freed(10, 10, later=0) == min(freed)
    kept = sum(each.whole for each in sizes) - sum(each.freed(1, 1, later=0) for each in sizes[:recomputed])
    assert token_bytes(model, recomputed_layers=recomputed, bytes_per_element=2) >= kept


def test_a_stage_gathers_its_two_largest_neighbours() -> None:
    model = model_of(["dense", "experts", "experts", "mlp"])
    each = {"num_devices": 1, "bytes_per_element": 2, "reduce_every": "microbatch"}
    few = state_bytes(model, **each)  # type: ignore[arg-type]
    all_ = state_bytes(model, gather_every="step", **each)  # type: ignore[arg-type]
    assert all_ - few == 2 * (SHAPES["dense"].parameters + SHAPES["mlp"].parameters)


def test_states_of_recurrent_layers_take_the_same_time_whatever_the_tokens() -> None:
    """Two of four layers have a state of 4 x 64 x 64 numbers and a T as large. Three sequences over 3 ranks, of which
    one folds two of four heads; over 8 each folds half a head, with all of T."""
    cost = cost_of(model_of(["delta", "dense", "delta", "mlp"]), num_ranks=8).with_coefficients(shard_s=0.0)
    bare, state_bytes_ = cost.without_states(), 2 * 4 * 4 * 64 * 64
    cut_s = 2 * DELTA.summary_flops, 2 * DELTA.part_flops
    rate = HARDWARE.peak_flops * HARDWARE.linear_efficiency
    for primitive, parts in ((Primitive.RING, 3 * 2), (Primitive.ULYSSES, 1)):
        for degree, forward, backward, rounds in ((1, 0, 0, 0), (2, 2, 1, 2), (3, 4.5, 3, 3), (8, 4, 2, 3)):
            if primitive is Primitive.ULYSSES and degree == 3:
                continue
            halo, port = 2 * 2 * 768 * 3 if rounds else 0, (degree - 1) / degree / HARDWARE.intra_node_bandwidth
            messages_s = [
                2 * rounds * HARDWARE.latency_s + parts * (count * state_bytes_ + halo) * port
                for count in (forward, backward)
            ]
            for tokens in (1e3, 1e6):
                mine, plain = (
                    each.passes_s(tokens**2, tokens, degree=degree, primitive=primitive, num_sequences=3)
                    for each in (cost, bare)
                )
                due = [
                    one + tokens * flops / rate / degree * (degree > 1)
                    for one, flops in zip(messages_s, cut_s, strict=True)
                ]
                layers_s, head_s, backward_s = (float(one - other) for one, other in zip(mine, plain, strict=True))
                found = [layers_s, backward_s]
                assert head_s == 0.0
                assert found == pytest.approx(due, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("name", ["nemotron-h-8b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize(("degree", "count", "tokens"), [(2, 8, 2048), (8, 16, 4096), (16, 32, 4096), (32, 32, 4096)])
def test_groups_that_cut_many_recurrent_sequences_take_what_is_predicted(
    name: str, degree: int, count: int, tokens: int
) -> None:
    """Ports are taken by shards of all experts in one of the models, and have time left in the other."""
    model = model_profile(name)
    cost = cost_of(model, num_ranks=32, reduce_every="microbatch")
    shape = PassShape(degree=degree, lengths=(tokens,) * count, layer_kinds=model.layer_kinds)
    plan, sequences = pass_plan(shape, num_ranks=32, recomputed_layers=0)
    group_s = cost.group_s(shape.num_pairs, count * tokens, degree=degree, num_sequences=count)
    simulated_s = simulate(lower(plan, sequences), model=model, hardware=HARDWARE).iteration_s
    assert simulated_s == pytest.approx(cost.microbatch_s(float(group_s), last=True), rel=0.12)


def test_latents_travel_in_place_of_keys_and_values_and_are_expanded_where_they_come() -> None:
    model = model_of(["latent"] * 3 + ["mlp"])
    assert (model.num_heads, model.num_kv_heads) == (8, 1)
    forward, _, returned = ring_bytes(model, again=0, bytes_per_element=2)
    assert (forward, returned) == (3 * 2 * (128 + 32), 3 * 4 * (128 + 32))
    per_token = 3 * 2 * 128 * 8 * (96 - 32 + 64)
    assert cost_of(model).expansion_s_per_token == pytest.approx(
        per_token / (HARDWARE.peak_flops * HARDWARE.linear_efficiency)
    )
    sequences, cost = batch_of([4096], model), cost_of(model)
    cluster = ClusterSpec(num_ranks=4, max_tokens_per_rank=1300)  # of four ranks with all latents 1024 each
    hardware = dataclasses.replace(HARDWARE, attention_half_tokens=0.0, linear_half_tokens=0.0)
    moved = {"ring": (128 + 32) * (2 * 2 + 4), "ulysses": 2 * 2 * (8 * (96 + 64) / 4 + 128 + 32)}
    expanded_s = {"ring": 3 * 4096 * (1 + 3) * cost.expansion_s_per_token, "ulysses": 0.0}
    alone = plan_batch(sequences, cluster=ClusterSpec(num_ranks=1, max_tokens_per_rank=4096), cost=cost)
    whole_s = sum(simulate(lower(alone, sequences), model=model, hardware=hardware).loads.compute_s[0])
    for primitive in ("ring", "ulysses"):
        plan = plan_batch(sequences, cluster=cluster, cost=cost, options=PlanConfig(primitives=(primitive,)))
        loads = simulate(lower(plan, sequences), model=model, hardware=hardware).loads
        assert sum(map(sum, loads.sent_bytes)) == pytest.approx(3 * 4096 * 3 * moved[primitive])
        assert sum(loads.compute_s[0]) == pytest.approx(whole_s + expanded_s[primitive], rel=1e-6)


@settings(max_examples=12)
@given(
    names=NAMES,
    lengths=st.lists(st.integers(2, 3000), min_size=1, max_size=6),
    stages=st.sampled_from([1, 2]),
    again=st.sampled_from([0, 3]),
    keeps=st.booleans(),
)
def test_plans_are_proved_and_take_no_less_than_the_bound(
    names: list[str], lengths: list[int], stages: int, again: int, keeps: bool
) -> None:
    model = model_of(names, keeps_attention=keeps)
    sequences = batch_of(lengths, model)
    cluster = ClusterSpec(num_ranks=2, num_stages=stages, max_tokens_per_rank=2048)
    recomputed = again if stages == 1 else 0  # elsewhere the planner chooses
    cost = cost_of(model, num_ranks=2, num_stages=stages, memory_bytes=1 << 31, recomputed_layers=recomputed)
    for strategy in ("flex-ring", "ulysses", "flex-block") if stages == 1 else ("elastic-pipeline",):
        plan = plan_batch(sequences, cluster=cluster, cost=cost, strategy=strategy)
        check_plan(plan, sequences, cluster=cluster, cost=cost)
        layers = cost.pipeline.layers_of_stage if cost.pipeline else ()
        timeline = simulate(lower(plan, sequences), model=model, hardware=HARDWARE, layers_of_stage=layers)
        assert timeline.iteration_s >= plan.lower_bound_s * (1 - 1e-9)
        if stages == 1:
            bound = lower_bound(sequences, cluster=cluster, cost=cost, primitives=[*Primitive], placed_freely=True)
            assert bound <= timeline.iteration_s * (1 + 1e-9)
        assert CostModel.of_fields(dataclasses.asdict(cost)) == cost


PUBLISHED = {
    "deepseek-v3": (671.0, 37.0),
    "qwen3-next-80b-a3b": (80.0, None),
    "nemotron-h-8b": (8.1, 8.1),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
}
"""Billions of parameters, and of those that a token passes; of model cards."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_have_the_published_parameters(name: str) -> None:
    model, (total, active) = model_profile(name), PUBLISHED[name]
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.01)
    if active:
        passed = sum(each.matmul_parameters for each in model.every_layer) + model.head_parameters
        embedded = model.embedding_parameters if name in ("deepseek-v3", "nemotron-h-8b") else 0
        assert (passed + embedded) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_pattern_repeats_names_and_groups() -> None:
    assert names_of("a*2 (b c*2)*2") == ("a", "a", "b", "c", "c", "b", "c", "c")
    for wrong in ("", "a*", "*2", "(a", "a)", "a*b", "a+b"):
        with pytest.raises(ConfigError, match=r"layers\.pattern is"):
            names_of(wrong)


ONE = {"attention": {"num_heads": 8, "head_dim": 64}, "ffn_size": 64}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 8}, "num_heads is given beside layers"),
    ({"layers": 3}, "layers"),
    ({"layers": {"shapes": {"one": ONE}, "pattern": "two"}}, "layers.pattern names 'two', must be one of one"),
    ({"layers": {"shapes": {"one": ONE | {"ffn": 3}}, "pattern": "one"}}, "ffn is no field; did you mean ffn_size?"),
    (
        {"layers": {"shapes": {"one": {"attention": {"num_heads": 8}}}, "pattern": "one"}},
        "layers.shapes.one.attention.head_dim is missing",
    ),
    (
        {"layers": {"shapes": {"one": ONE | {"experts_per_token": 2}}, "pattern": "one"}},
        "experts_per_token is 2, must be at most num_experts (1)",
    ),
]


@pytest.mark.parametrize(("changes", "line"), WRONG)
def test_wrong_layers_are_told_in_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    from rayfcp.config.loading import write_yaml

    fields = {"hidden_size": 512, "vocab_size": 100, "layers": {"shapes": {"one": ONE}, "pattern": "one*2"}}
    path = tmp_path / "mine.yaml"
    path.write_text(write_yaml(fields))
    assert model_profile(str(path)).num_layers == 2
    path.write_text(write_yaml(fields | changes))
    with pytest.raises(ConfigError) as error:
        model_profile(str(path))
    assert line in str(error.value) and "\n" not in str(error.value)
