"""What the workers can hold: from devices and memory to the numbers that planners take."""

from collections import Counter
from collections.abc import Sequence

from rayfcp.cluster.facts import DeviceFacts
from rayfcp.cluster.measured import BYTES
from rayfcp.config import Config
from rayfcp.plan import max_tokens_per_rank
from rayfcp.values import ClusterSpec, ModelProfile

GIB = 1 << 30

CPU_MEMORY_SHARE = 0.8
"""Of a machine's memory that its workers may plan with together."""

ACCELERATOR_MEMORY_SHARE = 0.9
"""Of a device's memory; the rest is for its context, communicators and fragmentation."""


def cluster_spec(config: Config, model: ModelProfile, *, facts: Sequence[DeviceFacts], generation: int) -> ClusterSpec:
    """One rank per device, in the order of `facts`.

    Raises:
        InfeasiblePlanError: the model's states do not fit beside one token.
    """
    nodes = list(dict.fromkeys(fact.node_id for fact in facts))
    return ClusterSpec(
        num_ranks=len(facts),
        max_tokens_per_rank=tokens_that_fit(
            config, model, num_devices=len(facts), memory_bytes=device_memory(config, facts)
        ),
        node_of_rank=tuple(nodes.index(fact.node_id) for fact in facts),
        generation=generation,
    )


def configured_bound(config: Config, model: ModelProfile) -> int | None:
    """Tokens per rank on as many devices as the run may have, if `memory_gib_per_device` says what they hold.

    Raises:
        InfeasiblePlanError: the model's states do not fit beside one token.
    """
    memory_gib = config.cluster.memory_gib_per_device
    if memory_gib is None:
        return None
    return tokens_that_fit(config, model, num_devices=config.cluster.max_workers, memory_bytes=int(memory_gib * GIB))


def tokens_that_fit(config: Config, model: ModelProfile, *, num_devices: int, memory_bytes: int) -> int:
    """Tokens that one rank holds in a microbatch beside the model's states.

    Raises:
        InfeasiblePlanError: not even one.
    """
    return max_tokens_per_rank(
        model,
        num_devices=num_devices,
        memory_bytes=memory_bytes,
        recomputed_layers=config.train.recompute_layers,
        bytes_per_element=BYTES[config.model.dtype],
        reduce_every=config.train.reduce_every,
    )


def device_memory(config: Config, facts: Sequence[DeviceFacts]) -> int:
    """Bytes of the smallest device; CPU workers of one machine share its memory."""
    if config.cluster.memory_gib_per_device is not None:
        return int(config.cluster.memory_gib_per_device * GIB)
    sharing = Counter(fact.node_id for fact in facts if fact.device == "cpu")
    return min(
        int(fact.memory_bytes * CPU_MEMORY_SHARE) // sharing[fact.node_id]
        if fact.device == "cpu"
        else int(fact.memory_bytes * ACCELERATOR_MEMORY_SHARE)
        for fact in facts
    )
