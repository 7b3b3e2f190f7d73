"""A device that ran out of memory: what its program should have needed, and the keys that make it need less."""

import dataclasses

from rayfcp.cluster.facts.capacity import GIB, device_memory
from rayfcp.cluster.facts.devices import DeviceFacts
from rayfcp.cluster.facts.measured import BYTES, analytic_cost
from rayfcp.config import Config, ConfigError
from rayfcp.cost.analytic import device_model
from rayfcp.cost.memory import LayersBytes, ending_bytes, patch_bytes, stage_state_bytes
from rayfcp.cost.model import CostModel
from rayfcp.cost.refit import COEFFICIENTS
from rayfcp.program import Encode, Forward, HeadProgram, RankProgram
from rayfcp.program.ledger import Stage, forward_bytes, held_bytes, uses_of_program
from rayfcp.values import ClusterSpec, ModelProfile

LESS_MEMORY = 0.8
"""Share of the memory that plans with several stages may use after a device ran out of it."""

_CHANGED = (
    *("recomputed_layers", "keeps_attention", "attention_forward", "linear_forward"),
    *("ring_forward", "ring_returned", "passes_forward", "kv_growth"),
)
"""Fields of a cost model that follow from what is recomputed, beside its coefficients."""


def out_of_memory(
    error: BaseException, *, what: str, config: Config, model: ModelProfile, num_stages: int, facts: DeviceFacts
) -> ConfigError:
    """The allocator's error of a device as one for the user; `what` ran out of memory."""
    budget, train = device_memory(config, [facts]), config.train
    remedy = f"set cluster.memory_gib_per_device below {budget / GIB:.3g}, so that plans give a rank fewer tokens, or "
    if num_stages > 1:
        remedy += "add devices"
    else:
        remedy += f"train.recompute_layers above {train.recompute_layers} (of {model.num_layers})"
    # Without torch's advice about its allocator, which rayfcp has set.
    told = " ".join(str(error).split()).partition(" If reserved but unallocated")[0]
    return ConfigError(
        f"out of memory in {what}; plans may use {budget / GIB:.3g} GiB, the device has "
        f"{facts.memory_bytes / GIB:.3g} GiB; {remedy}, and start again ({told})"
    )


def more_recomputation(
    cost: CostModel, config: Config, *, model: ModelProfile, device: str, cluster: ClusterSpec
) -> CostModel | None:
    """Cost model of plans that need less memory for the same batches: with one stage, all layers run forward again in
    backward, attention included; with several stages, where plans choose layers, they may use `LESS_MEMORY`. Seconds
    change as in the unmeasured model. None if all layers are recomputed already.

    Tokens that ranks may hold stay as they are (`ClusterSpec.max_tokens_per_rank`): more recomputation would permit
    more, which filled the memory again.
    """
    if cost.pipeline is not None:
        budget = tuple(int(LESS_MEMORY * each) for each in cost.pipeline.budget_bytes)
        return dataclasses.replace(cost, pipeline=dataclasses.replace(cost.pipeline, budget_bytes=budget))
    if cost.recomputed_layers >= model.num_layers and not cost.keeps_attention:
        return None
    train = config.train.model_copy(update={"recompute_layers": model.num_layers, "recompute_attention": True})
    more, without = config.model_copy(update={"train": train}), dataclasses.replace(model, keeps_attention=False)
    before = analytic_cost(config, model, device=device, cluster=cluster)
    after = analytic_cost(more, without, device=device, cluster=cluster)
    scaled = {
        name: getattr(cost, name) * getattr(after, name) / getattr(before, name)
        for name in COEFFICIENTS
        if getattr(before, name) > 0
    }
    return dataclasses.replace(cost, **scaled, **{name: getattr(after, name) for name in _CHANGED})


def step_of(
    program: RankProgram, *, step: int, num_done: int, config: Config, model: ModelProfile, cluster: ClusterSpec
) -> str:
    """A step of which `num_done` instructions are done, and the memory that its plan counts on."""
    at = program.instructions[num_done : num_done + 1]
    where = f"{type(at[0]).__name__.lower()} of microbatch {at[0].microbatch}" if at else "the update"
    predicted = predicted_bytes(program, config=config, model=model, cluster=cluster)
    return (
        f"step {step}, rank {program.rank}, stage {program.stage}, {where}: its plan counts on "
        f"{predicted / GIB:.3g} GiB"
    )


def _forward_bytes(item: Forward, model: ModelProfile, size: int) -> int:
    return forward_bytes(
        item.attention.num_tokens,
        model,
        recomputed_layers=item.recomputed_layers,
        degree=item.attention.degree if isinstance(item.attention, HeadProgram) else 1,
        bytes_per_element=size,
    )


def predicted_bytes(program: RankProgram, *, config: Config, model: ModelProfile, cluster: ClusterSpec) -> int:
    """Peak of a device that runs `program`, by the memory model that its plan counted with."""
    own, train, size = device_model(model, cluster.tensor_parallel), config.train, BYTES[config.model.dtype]
    layers = cluster.layers_of_stage or (model.num_layers,)
    fixed = stage_state_bytes(
        own,
        layers_of_stage=layers,
        stage=program.stage,
        num_ranks=cluster.num_ranks,
        bytes_per_element=size,
        reduce_every=train.reduce_every,
        gather_every=train.gather_every,
    )
    if len(layers) > 1:
        stage = Stage(
            layers=LayersBytes.of(own, layers_of_stage=layers, bytes_per_element=size).of_stage(program.stage),
            is_last=program.stage + 1 == len(layers),
            num_kv_heads=own.num_kv_heads,
        )
        return fixed + int(held_bytes(uses_of_program(program), stage)[0].max(initial=0))
    held: dict[int, int] = {}  # by microbatch: one at a time has activations
    for item in program.instructions:
        if isinstance(item, Forward):
            held[item.microbatch] = held.get(item.microbatch, 0) + _forward_bytes(item, own, size)
        elif isinstance(item, Encode):
            patches = sum(run.count * run.num_patches for run in item.images)
            kept, working = patch_bytes(own, bytes_per_element=size)
            held[item.microbatch] = held.get(item.microbatch, 0) + patches * (kept + working)
    least = ending_bytes(own, num_devices=cluster.num_ranks, bytes_per_element=size, reduce_every=train.reduce_every)
    return max(fixed + max(held.values(), default=0), least)
