"""Capacity of the workers: token budgets and cluster specs from devices and their memory."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rayfcp.cluster.facts.devices import DeviceFacts, layers_of_stage, strategy_on, with_stages
from rayfcp.cluster.facts.measured import BYTES
from rayfcp.config import Config
from rayfcp.cost.analytic import device_model
from rayfcp.cost.memory import ACCELERATOR_MEMORY_SHARE, LayersBytes, forward_tokens_per_rank, stage_state_bytes
from rayfcp.elastic.facts import Fit
from rayfcp.plan import max_tokens_per_rank
from rayfcp.plan.strategies.registry import slices
from rayfcp.values import ClusterSpec, InfeasiblePlanError, ModelProfile, Primitive
from rayfcp.values.devices import DEVICES

GIB = 1 << 30

CPU_MEMORY_SHARE = 0.8
"""Share of a machine's memory for its workers together."""


def as_run_on(facts: Sequence[DeviceFacts], model: ModelProfile) -> ModelProfile:
    """The model as these devices hold it: with compiled layers if all of them compile."""
    return replace(model, compiled=bool(facts) and all(each.compiles for each in facts))


def cluster_spec(config: Config, model: ModelProfile, *, facts: Sequence[DeviceFacts], generation: int) -> ClusterSpec:
    """Cluster of as many ranks as the devices make, in the order of `facts`: all ranks of one stage, with their
    tensor-parallel devices, then those of the next. Surplus devices at the end are not used.

    Raises:
        InfeasiblePlanError: the model's states do not fit beside one token.
    """
    cluster = config.cluster
    num_ranks = len(facts) // (cluster.pipeline_stages * cluster.tensor_parallel)
    used = facts[: num_ranks * cluster.pipeline_stages * cluster.tensor_parallel]
    nodes = list(dict.fromkeys(fact.node_id for fact in used))
    model, memory_bytes = as_run_on(used, model), device_memory(config, used)
    max_tokens = tokens_that_fit(config, model, num_ranks=num_ranks, memory_bytes=memory_bytes)
    return ClusterSpec(
        num_ranks=num_ranks,
        max_tokens_per_rank=max_tokens,
        forward_tokens_per_rank=_forward_tokens(
            config, model, num_ranks=num_ranks, memory_bytes=memory_bytes, least=max_tokens
        ),
        node_of_rank=tuple(nodes.index(fact.node_id) for fact in used[:: cluster.tensor_parallel]),
        num_stages=cluster.pipeline_stages,
        tensor_parallel=cluster.tensor_parallel,
        generation=generation,
        layers_of_stage=layers_of_stage(config, model),
    )


def _forward_tokens(config: Config, model: ModelProfile, *, num_ranks: int, memory_bytes: int, least: int) -> int:
    """Token budget of evaluation, at least that of training; 0, for the same, where stages bound the chunks of plans,
    where images need memory that no budget of tokens counts, and without evaluation."""
    if not config.eval.sets or config.cluster.pipeline_stages > 1 or model.vision is not None:
        return 0
    found = forward_tokens_per_rank(
        device_model(model, config.cluster.tensor_parallel),
        num_devices=num_ranks,
        memory_bytes=memory_bytes,
        bytes_per_element=BYTES[config.model.dtype],
        gather_every=config.train.gather_every,
    )
    return max(found, least)


def configured_bound(config: Config, model: ModelProfile) -> int | None:
    """Token budget per rank on the maximum number of devices, None without `memory_gib_per_device`. Devices that are
    not known yet are counted as ones that compile layers.

    Raises:
        InfeasiblePlanError: the model's states do not fit beside one token.
    """
    memory_gib = config.cluster.memory_gib_per_device
    if memory_gib is None:
        return None
    num_ranks = config.cluster.max_workers // (config.cluster.pipeline_stages * config.cluster.tensor_parallel)
    known = DEVICES.get(config.cluster.device)
    model = replace(model, compiled=config.compiles_layers(by_default=known is None or known.compiles))
    return tokens_that_fit(config, model, num_ranks=num_ranks, memory_bytes=int(memory_gib * GIB))


def layouts_that_fit(
    config: Config, model: ModelProfile, *, facts: Sequence[DeviceFacts], longest_tokens: int
) -> tuple[Fit, ...]:
    """Fewest ranks that hold the model's states and the longest sequence, for each number of stages up to the
    configured one; one more than the maximum if that is too few."""
    found = []
    for num_stages in range(config.cluster.pipeline_stages, 0, -1):
        fewest = 1
        if facts:
            most = max(config.cluster.max_workers // (num_stages * config.cluster.tensor_parallel), 1)
            holds = partial(
                _holds,
                config=with_stages(config, num_stages),
                model=as_run_on(facts, model),
                memory_bytes=device_memory(config, facts),
                longest_tokens=longest_tokens,
            )
            fewest += bisect_left(range(1, most + 1), True, key=holds)
        found.append(Fit(num_stages=num_stages, min_ranks=fewest))
    return tuple(found)


def _holds(num_ranks: int, *, config: Config, model: ModelProfile, memory_bytes: int, longest_tokens: int) -> bool:
    try:
        tokens = tokens_that_fit(config, model, num_ranks=num_ranks, memory_bytes=memory_bytes)
    except InfeasiblePlanError:
        return False
    stages = config.cluster.pipeline_stages
    return slices(strategy_on(config, stages), num_stages=stages) or num_ranks * tokens >= longest_tokens


def tokens_that_fit(config: Config, model: ModelProfile, *, num_ranks: int, memory_bytes: int) -> int:
    """Tokens of a microbatch that one rank holds beside the model's states, with `memory_bytes` on each device.

    With several stages: of a single microbatch that keeps only the inputs of layers; the plan decides how many are in
    flight and what they keep.

    Raises:
        InfeasiblePlanError: not even one token.
    """
    own, train, size = device_model(model, config.cluster.tensor_parallel), config.train, BYTES[config.model.dtype]
    stages, by_heads = layers_of_stage(config, model), Primitive.ULYSSES.value in config.plan.primitives
    if not stages:
        return max_tokens_per_rank(
            own,
            num_devices=num_ranks,
            memory_bytes=memory_bytes,
            recomputed_layers=train.recompute_layers,
            bytes_per_element=size,
            reduce_every=train.reduce_every,
            gather_every=train.gather_every,
            by_heads=by_heads,
        )
    fixed = [
        stage_state_bytes(
            own,
            layers_of_stage=stages,
            stage=stage,
            num_ranks=num_ranks,
            bytes_per_element=size,
            reduce_every=train.reduce_every,
            gather_every=train.gather_every,
        )
        for stage in range(len(stages))
    ]
    sizes = LayersBytes.of(own, layers_of_stage=stages, bytes_per_element=size)
    kept = [sum(each.kept + by_heads * each.exchanged for each in sizes.of_stage(p)) for p in range(len(stages))]
    tokens = [each + sizes.head + sizes.computing(1, 1) for each in kept]
    fits = [(memory_bytes - have) // per_token for have, per_token in zip(fixed, tokens, strict=True)]
    if min(fits) < 1:
        stage = fits.index(min(fits))
        raise InfeasiblePlanError(
            f"memory per device is {memory_bytes / GIB:.3g} GiB, stage {stage} of model {model.name} on {num_ranks} "
            f"ranks needs {(fixed[stage] + tokens[stage]) / GIB:.3g} GiB for its states and one token; add devices or "
            "memory, or set train.reduce_every=microbatch and train.gather_every=microbatch"
        )
    return min(fits)


def device_memory(config: Config, facts: Sequence[DeviceFacts]) -> int:
    """Memory of the smallest device; CPU workers of one machine share its memory."""
    if config.cluster.memory_gib_per_device is not None:
        return int(config.cluster.memory_gib_per_device * GIB)
    sharing = Counter(fact.node_id for fact in facts if DEVICES[fact.device].is_host)
    return min(
        int(fact.memory_bytes * CPU_MEMORY_SHARE) // sharing[fact.node_id]
        if DEVICES[fact.device].is_host
        else int(fact.memory_bytes * ACCELERATOR_MEMORY_SHARE)
        for fact in facts
    )
