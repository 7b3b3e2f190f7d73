"""Which trainers can run on plans, and the cluster and the cost model that plans are made with."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, Trainer

from rayfcp.cost.memory import ACCELERATOR_MEMORY_SHARE, FP32_BYTES, GIB, state_bytes, token_bytes
from rayfcp.models.describe import check_runs, profile_of
from rayfcp.models.selfcheck import check_supported
from rayfcp.plan import CostModel
from rayfcp.plan.strategies.registry import get
from rayfcp.values import ClusterSpec, HardwareProfile, InfeasiblePlanError, ModelProfile
from rayfcp.values.devices import DEVICES

_REPLACED = (
    *("_get_dataloader", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "get_batch_samples"),
    *("training_step", "compute_loss", "evaluation_loop", "prediction_step"),
)
"""Methods that are replaced, or whose work a plan divides."""

_KNOWN = ("transformers.trainer", "trl.trainer.sft_trainer")
"""Modules whose versions of these methods are known to fit."""


def causal_lm(trainer: Trainer) -> PreTrainedModel:
    """Return the library's model, without what wraps it."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[no-any-return]


def check_trainer(trainer: Trainer, *, strategy: str) -> None:
    """
    Raises:
        ValueError: The trainer, its model or the strategy does something that does not run on plans; names it and the
            remedy. A `ConfigError` if it is the model.
    """
    for obstacles in (_of_processes, _of_batches, _of_losses):
        for is_met, what in obstacles(trainer):
            if is_met:
                raise ValueError(f"enable_flexible_cp: {what}")
    if get(strategy).needs_stages:
        raise ValueError(
            f"enable_flexible_cp: strategy is {strategy!r}, which needs pipeline stages; use flex-ring, flex-block or "
            "auto"
        )
    model = causal_lm(trainer)
    of_library: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    if not isinstance(model, of_library):
        raise ValueError(
            f"enable_flexible_cp: the model is a {type(model).__name__}, must be the causal language model that the "
            "library has for its configuration; load it with AutoModelForCausalLM"
        )
    check_runs(model.config)
    check_supported(model.config)


def _of_processes(trainer: Any) -> Iterator[tuple[bool, str]]:
    """How processes share the work."""
    args, accelerator = trainer.args, trainer.accelerator
    wrapping = "use DDP, or FSDP with fsdp_config={'fsdp_version': 2}"
    yield trainer.is_deepspeed_enabled, f"DeepSpeed is enabled, which is not supported; {wrapping}"
    yield trainer.is_fsdp_enabled and not accelerator.is_fsdp2, f"FSDP is of version 1; {wrapping}"
    at_load = getattr(trainer, "is_distributed_loading_by_transformers", False)
    yield at_load, f"the model is sharded as it is loaded (distributed_config); leave that out, and {wrapping}"
    device = accelerator.device.type
    yield device not in DEVICES, f"the device is {device}, must be one of {', '.join(DEVICES)}; set use_cpu=True"
    yield args.n_gpu > 1, f"one process has {args.n_gpu} devices (DataParallel); start a process for each with torchrun"
    is_split = accelerator.parallelism_config is not None or trainer.get_tp_size() > 1
    yield is_split, "parallelism_config or tensor parallelism is set, and plans use all processes; leave it out"
    yield accelerator.mixed_precision == "fp16", "fp16 is set, kernels run in bfloat16 or float32; set bf16=True"
    yield args.torch_compile, "torch_compile is set, layers that exchange do not compile; set torch_compile=False"
    checkpointing = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    yield (
        bool(checkpointing.get("use_reentrant")),
        "gradient checkpointing is reentrant; set gradient_checkpointing_kwargs={'use_reentrant': False}",
    )


def _of_batches(trainer: Any) -> Iterator[tuple[bool, str]]:
    """Which samples make up a batch."""
    args = trainer.args
    for name in _REPLACED:
        home = next(each for each in type(trainer).__mro__ if name in vars(each))
        yield (
            home.__module__ not in _KNOWN,
            f"{home.__module__}.{home.__qualname__} has a {name} of its own, which plans replace or divide; remove it",
        )
    strategy = str(getattr(args, "train_sampling_strategy", ""))
    yield strategy.endswith("batch_rebalance"), f"train_sampling_strategy is {strategy}; leave it out, plans balance"
    yield args.accelerator_config.split_batches, "accelerator_config.split_batches is set; leave it out"
    yield args.auto_find_batch_size, "auto_find_batch_size is set; leave it out, and set max_tokens_per_rank instead"
    packs = getattr(args, "packing", False) or getattr(args, "eval_packing", None)
    yield (
        bool(packs and args.packing_strategy == "wrapped"),
        "packing with packing_strategy='wrapped' lets documents attend to one another; set packing=False, plans pack",
    )


def _of_losses(trainer: Any) -> Iterator[tuple[bool, str]]:
    """Losses and metrics that are no sums over tokens."""
    args = trainer.args
    yield trainer.compute_loss_func is not None, "compute_loss_func is given, which would see slices; leave it out"
    yield args.label_smoothing_factor > 0, "label_smoothing_factor is set, which is not computed; set it to 0"
    noise = trainer.neftune_noise_alpha
    yield noise is not None, "neftune_noise_alpha is set, whose noise depends on the length of a row; leave it out"
    of_logits = trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None
    yield of_logits, "metrics of logits are requested, which stay in slices on their ranks; leave compute_metrics out"
    yield (
        not trainer.model_accepts_loss_kwargs,
        f"{type(causal_lm(trainer)).__name__} takes no num_items_in_batch; choose another model",
    )


def recomputed_layers(trainer: Trainer, *, num_layers: int) -> int:
    """Return how many layers gradient checkpointing runs again."""
    args = trainer.args
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    checkpoints = getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing
    return num_layers if checkpoints or getattr(fsdp, "activation_checkpointing", False) else 0


def describe(
    trainer: Trainer, hardware: HardwareProfile, *, max_tokens_per_rank: int | None
) -> tuple[ModelProfile, ClusterSpec, CostModel]:
    """Return the model's shape, the processes as ranks, and analytic costs.

    Raises:
        ConfigError: The library cannot create the model's layers.
        InfeasiblePlanError: The memory model leaves no token.
    """
    accelerator, model = trainer.accelerator, causal_lm(trainer)
    profile = profile_of(model.config, name=model.config.model_type)
    settings: dict[str, Any] = {
        "recomputed_layers": recomputed_layers(trainer, num_layers=profile.num_layers),
        "bytes_per_element": 2 if accelerator.mixed_precision == "bf16" else model.dtype.itemsize,
        "reduce_every": "step",
        "gather_every": "microbatch" if trainer.is_fsdp_enabled else "step",  # DDP gathers nothing
    }
    cost = CostModel.from_profiles(profile, hardware, num_ranks=accelerator.num_processes, **settings)
    nodes = _nodes(trainer)
    tokens = max_tokens_per_rank or _tokens_per_rank(profile, hardware, trainer=trainer, **settings)
    cluster = ClusterSpec(num_ranks=accelerator.num_processes, max_tokens_per_rank=tokens, node_of_rank=nodes)
    return profile, cluster, replace(cost, ranks_per_node=max(Counter(nodes).values()))


def _nodes(trainer: Trainer) -> tuple[int, ...]:
    """Return the node of each rank, numbered by its first one."""
    accelerator = trainer.accelerator
    first = torch.tensor([accelerator.process_index - accelerator.local_process_index], device=accelerator.device)
    return tuple(accelerator.gather(first).tolist())


def _tokens_per_rank(
    model: ModelProfile,
    hardware: HardwareProfile,
    *,
    trainer: Trainer,
    recomputed_layers: int,
    **settings: Any,
) -> int:
    """Return the tokens that fit beside the states: sharded by FSDP, whole with DDP. The library's loss keeps all
    logits, and in fp32 their probabilities and gradients; TRL's loss and Liger's take them in parts."""
    memory_bytes = int(ACCELERATOR_MEMORY_SHARE * hardware.memory_bytes)
    element = settings["bytes_per_element"]
    sharing = trainer.accelerator.num_processes if trainer.is_fsdp_enabled else 1
    fixed_bytes = state_bytes(model, num_devices=sharing, **settings)
    per_token = token_bytes(model, recomputed_layers=recomputed_layers, bytes_per_element=element)
    if type(trainer).compute_loss is Trainer.compute_loss and not trainer.args.use_liger_kernel:
        per_token += (element + 3 * FP32_BYTES) * model.vocab_size
    tokens = (memory_bytes - fixed_bytes) // per_token
    if tokens < 1:
        raise InfeasiblePlanError(
            f"memory of {hardware.name} is {memory_bytes / GIB:.3g} GiB, {model.name} on {sharing} devices needs "
            f"{(fixed_bytes + per_token) / GIB:.3g} GiB for its states and one token; use FSDP or more devices, or set "
            "max_tokens_per_rank if it fits"
        )
    return tokens
