"""Microbatches of slime: how the samples of a training step share microbatches, and which replica runs which."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rayfcp.adapters import bins
from rayfcp.adapters.planning import HostPlanner, planner_for


def pack(
    step_lengths: Sequence[int],
    *,
    args: Any,
    use_dynamic_batch_size: bool,
    max_per_bin: int | None,
    micro_batch_size: int | None,
    balance_by_flops: bool = False,  # noqa: ARG001
    dp_size: int | None = None,
    cp_size: int | None = None,
    microbatch_group: int | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Return samples by microbatch, in the place of slime's `_pack_step_into_mbs`; see `install`.

    Their number is a multiple of replicas x microbatches of a group (of virtual pipeline stages), so that slime splits
    none; in the order of slime's round-robin each row is balanced. A microbatch has at most `max_per_bin` tokens, also
    with `balance_by_flops`; a longer sample is alone in one. Sizes that are not given are those of `args`, which are
    slime's. Without `use_dynamic_batch_size` microbatches have `micro_batch_size` samples in a row, as in slime.

    Raises:
        InfeasiblePlanError: Fewer samples than microbatches.
        ValueError: The bound is missing that `use_dynamic_batch_size` needs.
    """
    if not use_dynamic_batch_size:
        size, count = micro_batch_size or 1, len(step_lengths)
        return [list(range(first, min(first + size, count))) for first in range(0, count, size)]
    if max_per_bin is None:
        raise ValueError("max_per_bin is None, must be at least 1 with use_dynamic_batch_size; set max_tokens_per_gpu")
    degree = cp_size or args.context_parallel_size
    used = planner_for(**settings)
    return bins.pack(
        used,
        step_lengths,
        capacity=max_per_bin,
        num_replicas=dp_size or _dp_size(args),
        cp_size=degree,
        row_multiple=microbatch_group or _microbatch_group(args),
        pad_to=2 * degree if degree > 1 else 1,
        exceed=True,
    )


def _dp_size(args: Any) -> int:
    devices = args.actor_num_nodes * args.actor_num_gpus_per_node
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return int(devices // model)


def _microbatch_group(args: Any) -> int:
    """Microbatches in a group of virtual pipeline stages, as many as stages unless given."""
    if (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) == 1:
        return 1
    group = getattr(args, "microbatch_group_size_per_vp_stage", None)
    return int(group or args.pipeline_model_parallel_size)


def install(dp_schedule: Any, **settings: Any) -> HostPlanner:
    """Put `pack` in the place of `_pack_step_into_mbs` of the module `slime.utils.dp_schedule`.

    `settings`: `planner`, or arguments of `HostPlanner`; `dp_size`, `cp_size` and `microbatch_group`, where they are
    not those of slime's arguments. Returns the planner, whose `observe` takes the time of a step.
    """
    sizes = {key: settings.pop(key) for key in ("dp_size", "cp_size", "microbatch_group") if key in settings}
    planner = planner_for(**settings)
    dp_schedule._pack_step_into_mbs = partial(pack, planner=planner, **sizes)
    return planner
