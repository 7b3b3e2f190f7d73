"""`rayfcp plan`: the plan of one global batch, without starting anything, with or without the run's data."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from rayfcp.cluster.actors.planner import RunPlanner, sequences_of, step_passes
from rayfcp.cluster.dataset import described_model, open_dataset
from rayfcp.cluster.driver.preparing import check_runnable, prepared_data
from rayfcp.cluster.facts.capacity import GIB, as_run_on, cluster_spec, device_memory
from rayfcp.cluster.facts.devices import DeviceFacts, check_layout
from rayfcp.cluster.facts.measured import analytic_cost, cost_of_layout
from rayfcp.compare.lengths import draw_batches
from rayfcp.config import Config, ConfigError
from rayfcp.config.models import NO_MODEL
from rayfcp.cost.analytic import device_hardware, device_model
from rayfcp.cost.profiles import MODELS
from rayfcp.data import tokenizer_of
from rayfcp.execute.devices.backend import backend_of, device_kind
from rayfcp.plan import CostModel, hardware_profile, model_flops, model_profile, render_grid
from rayfcp.values import BatchPlan, ClusterSpec, HardwareProfile, ModelProfile, SequenceSpec
from rayfcp.values.devices import AUTO, CUDA, DEVICES, device_of_hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    """A batch planned on `cluster.num_workers` devices of a named kind, with unmeasured costs."""

    config: Config
    model: ModelProfile
    hardware: HardwareProfile
    cluster: ClusterSpec
    cost: CostModel
    sequences: tuple[SequenceSpec, ...]
    plan: BatchPlan

    @classmethod
    def of(
        cls, config: Config, *, lengths: str, hardware: str | None = None, model: str | None = None, step: int = 1
    ) -> "OfflinePlan":
        """Plan step `step` (from 1) of lengths drawn from a file or `dist:NAME` and cut to `data.max_seqlen`.
        `hardware`, `model`: named profiles, in place of the configured ones.

        Raises:
            ConfigError: names that are not known, or a layout that cannot run.
            InfeasiblePlanError: the model or the longest sequence does not fit.
        """
        check_layout(config)
        if hardware is None and config.cluster.device == AUTO:
            raise ConfigError("cluster.device is 'auto', must be said for a cluster that is not here; give --hardware")
        shape = model_of(config, model)
        machine = hardware_profile(hardware or DEVICES[config.cluster.device].base_hardware)
        _check_shape(config, shape, machine)
        facts = _devices(config, machine)
        device, shape = facts[0].device, as_run_on(facts, shape)
        cluster = cluster_spec(config, shape, facts=facts, generation=0)
        cost = analytic_cost(
            config,
            shape,
            device=device,
            cluster=cluster,
            memory_bytes=device_memory(config, facts),
            hardware=_with_all_reduces(machine, shape, tensor_parallel=config.cluster.tensor_parallel),
        )
        *_, sequences = draw_batches(
            lengths,
            num_batches=step,
            global_batch=config.data.global_batch_sequences,
            max_seqlen=config.data.max_seqlen,
            seed=config.run.seed,
            model=shape,
        )
        plan, _ = RunPlanner(config, shape, device=device).plan(sequences, cluster=cluster, cost=cost)
        return cls(
            config=config, model=shape, hardware=machine, cluster=cluster, cost=cost, sequences=sequences, plan=plan
        )

    @property
    def step_s(self) -> float:
        """Predicted time of a step, without optimizer and checkpoints."""
        return step_passes(self.config, self.model) * self.plan.predicted_s

    @property
    def mfu(self) -> float:
        """Predicted MFU of all devices in use, without optimizer and checkpoints."""
        peak = self.cluster.num_devices * self.hardware.peak_flops
        return model_flops(self.model, self.sequences) / (self.step_s * peak)

    def describe(self) -> str:
        """Return the cluster, the predicted step, and the plan as a time x rank grid."""
        cluster, hardware, num_tokens = self.cluster, self.hardware, sum(each.num_tokens for each in self.sequences)
        return (
            f"{self.model.name} on {cluster.num_devices} x {hardware.name} ({hardware.memory_bytes / GIB:.0f} GiB) on "
            f"{len(set(cluster.node_of_rank))} nodes: {cluster.num_ranks} ranks of {cluster.num_stages} stages x "
            f"{cluster.tensor_parallel} devices, {cluster.max_tokens_per_rank:,} tokens per rank and microbatch "
            f"at most\n{len(self.sequences)} sequences, {num_tokens:,} tokens: predicted "
            f"{num_tokens / self.step_s:,.0f} tokens/s, MFU {self.mfu:.0%}\n"
            f"{render_grid(self.plan, self.sequences)}"
        )


def model_of(config: Config, name: str | None = None) -> ModelProfile:
    """Shape of the run's model, or of the named one; a missing folder is looked up by its name.

    Raises:
        ConfigError: the shape is unknown.
    """
    return dataclasses.replace(_shape(config, name), keeps_attention=not config.train.recompute_attention)


def _shape(config: Config, name: str | None) -> ModelProfile:
    if name is not None:
        return _named(name, config)
    path = config.model.path
    if path is not None and not Path(path).exists():
        known = Path(path).name.lower()
        if known not in MODELS:
            raise ConfigError(
                f"model.path is {path!r}, which is not here, and no named model; name one of its shape in --model"
            )
        return _named(known, config)
    if path is None and config.model.name is not None:
        return _named(config.model.name, config)
    declared = config.model.architecture.vocab_size  # known without the tokenizer's files
    return described_model(config, vocab_size=declared or tokenizer_of(config.data).vocab_size)[1]


def _named(name: str, config: Config) -> ModelProfile:
    model = model_profile(name)
    has_adapters = config.model.lora.rank is not None
    vision = model.vision and dataclasses.replace(model.vision, frozen=config.model.freeze_vision or has_adapters)
    adapter = None
    if has_adapters:
        named = config.changed(model={**NO_MODEL, "name": name})
        adapter = described_model(named, vocab_size=model.vocab_size)[1].adapter
    model = dataclasses.replace(model, vision=vision, adapter=adapter)
    is_reward = config.loss.type == "reward"
    return dataclasses.replace(model, num_outputs=1, tied_embeddings=False) if is_reward else model


def _check_shape(config: Config, model: ModelProfile, hardware: HardwareProfile) -> None:
    layout = config.cluster
    if layout.pipeline_stages > model.num_layers:
        raise ConfigError(
            f"cluster.pipeline_stages is {layout.pipeline_stages}, must be at most the model's {model.num_layers} "
            "layers; lower it"
        )
    if config.train.recompute_layers > model.num_layers:
        raise ConfigError(
            f"train.recompute_layers is {config.train.recompute_layers}, the model has {model.num_layers} layers; "
            "lower it"
        )
    for what, bound in (
        ("key/value heads of the model", model.num_kv_heads),
        ("devices of a node", hardware.devices_per_node),
    ):
        if bound % layout.tensor_parallel:
            raise ConfigError(
                f"cluster.tensor_parallel is {layout.tensor_parallel}, must divide the {bound} {what}; lower it"
            )


def _devices(config: Config, hardware: HardwareProfile) -> list[DeviceFacts]:
    """Devices of the maximum number of workers, node after node."""
    known = device_of_hardware(hardware.name)
    device = known.name if known else CUDA.name  # which of the accelerators makes no difference to a preview
    return [
        DeviceFacts(
            node_id=f"node {number // hardware.devices_per_node}",
            device=device,
            memory_bytes=hardware.memory_bytes,
            peak_flops=hardware.peak_flops,
            compiles=config.compiles_layers(by_default=DEVICES[device].compiles),
        )
        for number in range(config.cluster.max_workers)
    ]


def _with_all_reduces(hardware: HardwareProfile, model: ModelProfile, *, tensor_parallel: int) -> HardwareProfile:
    """`hardware` whose linear layers include the all-reduces of tensor parallelism."""
    slowed = device_hardware(hardware, device_model(model, tensor_parallel), tensor_parallel=tensor_parallel)
    return dataclasses.replace(hardware, linear_efficiency=slowed.linear_efficiency)


def plan_step(config: Config, *, step: int) -> str:
    """The plan of step `step` (from 1) on `cluster.num_workers` ranks as a time x rank grid.

    Costs are those that the run measured (`profile.json` in its directory) with the same parallel layout, else those of
    the device's named profile, which also gives the memory of a device that this machine lacks.
    """
    check_runnable(config)
    data = open_dataset(config, data_dir=prepared_data(config, log=lambda _: None))
    model, sequences = data.model, sequences_of(data.sampler.batch(step), layer_kinds=data.model.layer_kinds)
    device = device_kind(config.cluster.device)
    memory_bytes = (
        backend_of(device).total_memory_bytes(device) or hardware_profile(DEVICES[device].base_hardware).memory_bytes
    )
    compiles = config.compiles_layers(by_default=DEVICES[device].compiles)
    here = DeviceFacts(node_id="here", device=device, memory_bytes=memory_bytes, peak_flops=None, compiles=compiles)
    facts = [here] * config.cluster.max_workers
    model = as_run_on(facts, model)
    cluster = cluster_spec(config, model, facts=facts, generation=0)
    guess = analytic_cost(config, model, device=device, cluster=cluster, memory_bytes=device_memory(config, facts))
    cost = cost_of_layout(Path(config.run_dir) / "profile.json", cluster) or guess
    plan, _ = RunPlanner(config, model, device=device).plan(sequences, cluster=cluster, cost=cost)
    return render_grid(plan, sequences)
