"""Plans for trainers that execute them: one model on one kind of device, at the pace of the steps that were measured.

The same calls in the same order give the same plans in every process, so that every rank of a host may plan. Planning
is compiled by numba on first use; `rayfcp warm-up` does that once for an installation.
"""

import dataclasses
import functools
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from rayfcp.adapters.profiles import ModelSource, profile_of
from rayfcp.config import ConfigError
from rayfcp.config.constraints import HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import device_hardware, device_model
from rayfcp.cost.placement import node_of_ranks
from rayfcp.cost.refit import GroupWork, Observation, Refit
from rayfcp.plan import CostModel, hardware_profile, plan_batch
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, ModelProfile, SequenceSpec, token_counts

SEARCH_MOVES = 1_000_000
"""Hosts plan while their ranks wait: 512 sequences on 64 ranks take 25 ms; with 300,000 11 ms, for steps 0.7 % longer
(`jobs/bench/megatron_planner.py`)."""

MOST_PLANS = 64
"""Plans that one observed time may cover; of hosts that report none, older plans are dropped."""

HardwareSource = HardwareProfile | str | os.PathLike[str]
"""A profile, or the name or YAML file of one."""


class HostPlanner:
    """A planner for a trainer of another project.

    A rank is the devices that together hold the model's layers for the same tokens: `tensor_parallel` x
    `pipeline_parallel` of them. Ranks in a row share a node as far as the hardware's nodes reach. `recomputed_layers`
    run forward twice. `primitives`: how the host's groups exchange what attention needs (`ring`, `ulysses`).
    `search_moves`: the effort of a search, in trials.

    Raises:
        ConfigError: An unknown model or hardware, or tensor parallelism that does not divide the model's heads.
    """

    def __init__(
        self,
        *,
        model: ModelSource,
        hardware: HardwareSource,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        recomputed_layers: int = 0,
        primitives: tuple[str, ...] = ("ring",),
        search_moves: int = SEARCH_MOVES,
    ) -> None:
        profile, machine = profile_of(model), _hardware(hardware)
        self.tensor_parallel = tensor_parallel
        self._stages = pipeline_parallel
        self._layer_kinds = profile.layer_kinds
        cost = _cost(
            _on_device(profile, tensor_parallel=tensor_parallel, stages=pipeline_parallel),
            machine,
            tensor_parallel=tensor_parallel,
            recomputed_layers=recomputed_layers,
        )
        self._refit = Refit.start(cost)
        self._options = PlanConfig.model_validate({"primitives": primitives, "search_moves": search_moves})
        self._running: deque[tuple[GroupWork, ...]] = deque(maxlen=MOST_PLANS)

    @property
    def cost(self) -> CostModel:
        """The cost model after all steps so far."""
        return self._refit.cost

    def plan(
        self,
        lengths: Sequence[int],
        *,
        num_ranks: int,
        max_tokens_per_rank: int,
        constraints: HostConstraints,
    ) -> BatchPlan:
        """Plan a batch of sequences of these lengths in tokens, padding included; ids are positions in `lengths`.

        Raises:
            InfeasiblePlanError: No plan keeps the constraints; names what binds.
            ValueError: No lengths, or one below 1.
        """
        sequences = [
            SequenceSpec(id=each, num_tokens=tokens, num_targets=tokens - 1, layer_kinds=self._layer_kinds)
            for each, tokens in enumerate(token_counts(lengths))
        ]
        cluster = ClusterSpec(num_ranks=num_ranks, max_tokens_per_rank=max_tokens_per_rank)
        options = self._options.model_copy(update={"constraints": constraints})
        plan = plan_batch(sequences, cluster=cluster, cost=self.cost, options=options)
        self._running.append(_slowest(plan, sequences, cluster=cluster, cost=self.cost))
        return plan

    def observe(self, step_s: float) -> None:
        """Learn from the seconds of forward and backward passes of all batches that were planned since the last call.

        Where several ranks plan, each must be told the same time after the same step, such as the maximum over ranks by
        an all-reduce: plans of ranks whose cost models differ would differ, and the ranks hang.

        Raises:
            ValueError: Nothing was planned since the last call, or the time is not positive and finite.
        """
        if not self._running:
            raise ValueError(f"step_s is {step_s}, nothing was planned since the last step; call observe once a step")
        groups = tuple(group for plan in self._running for group in plan)
        bubbles = len(self._running) * (self._stages - 1)
        share = len(groups) / (len(groups) + bubbles)
        self._refit = self._refit.after([Observation(groups=groups, seconds=step_s * share)])
        self._running.clear()

    def forget(self, *, before: int = 0) -> None:
        """Leave the last plan, or the one `before` so many, out of the next observation, as one of an evaluation, or
        one that does not run."""
        del self._running[-1 - before]


def _hardware(hardware: HardwareSource) -> HardwareProfile:
    return hardware if isinstance(hardware, HardwareProfile) else hardware_profile(os.fspath(hardware))


def _on_device(model: ModelProfile, *, tensor_parallel: int, stages: int) -> ModelProfile:
    """The part of a model on a device of the last stage, which has the head: the slowest."""
    for name, heads in (("attention", model.num_heads), ("key/value", model.num_kv_heads)):
        if tensor_parallel < 1 or heads % tensor_parallel:
            raise ConfigError(
                f"tensor_parallel is {tensor_parallel}, must divide the {heads} {name} heads of {model.name}; lower it"
            )
    if not 1 <= stages <= model.num_layers:
        raise ConfigError(
            f"pipeline_parallel is {stages}, must be 1 to the {model.num_layers} layers of {model.name}; change it"
        )
    own = device_model(model, tensor_parallel)
    layers = -(-model.num_layers // stages)
    return dataclasses.replace(
        own, num_layers=layers, kind_of_layer=own.kind_of_layer[-layers:], layers=own.layers[-layers:]
    )


def _cost(own: ModelProfile, hardware: HardwareProfile, *, tensor_parallel: int, recomputed_layers: int) -> CostModel:
    """Cost model of a device; gradients are reduced once a step, which is the same for all plans. The host's bounds on
    tokens stand for memory, whatever the degree."""
    if hardware.devices_per_node % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel}, must divide the {hardware.devices_per_node} devices of a node of "
            f"{hardware.name}; lower it"
        )
    found = CostModel.from_profiles(
        own,
        device_hardware(hardware, own, tensor_parallel=tensor_parallel),
        num_ranks=1,
        recomputed_layers=min(recomputed_layers, own.num_layers),
        bytes_per_element=hardware.dtype_bytes,
        reduce_every="step",
        gather_every="step",
    )
    return dataclasses.replace(found, kv_growth=0.0)


def _slowest(
    plan: BatchPlan, sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel
) -> tuple[GroupWork, ...]:
    """The group of each microbatch that takes longest by prediction."""
    nodes = node_of_ranks(cluster, ranks_per_node=cost.ranks_per_node)
    slowest = []
    for microbatch in plan.microbatches:
        _, group = max(zip(microbatch.group_s, microbatch.groups, strict=True), key=lambda each: each[0])
        crosses = len({nodes[rank] for rank in group.ranks}) > 1
        slowest.append(GroupWork.of(group, [sequences[each] for each in group.sequences], crosses=crosses))
    return tuple(slowest)


def planner_for(
    *,
    planner: HostPlanner | None = None,
    model: ModelSource | None = None,
    hardware: HardwareSource | None = None,
    **settings: Any,
) -> HostPlanner:
    """Return `planner`, or else the one that this process has for these arguments of `HostPlanner`: hosts make their
    schedulers anew in each step, and what was learned from steps must outlive them.

    Raises:
        ConfigError: Neither is given, or as `HostPlanner` does.
    """
    if planner is not None:
        return planner
    if model is None or hardware is None:
        raise ConfigError(f"model is {model!r} and hardware {hardware!r}, must both be given; or give planner")
    return _shared(model=profile_of(model), hardware=_hardware(hardware), **settings)


_shared = functools.cache(HostPlanner)
