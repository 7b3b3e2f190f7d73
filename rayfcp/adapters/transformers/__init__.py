"""Flexible context parallelism for `transformers.Trainer` and TRL's `SFTTrainer`.

`enable_flexible_cp(trainer)` lets a trainer run on plans: every rank reads the same samples, plans the same batch, and
computes its slices of the sequences with `rayfcp.attention`. All else stays the trainer's own: DDP or FSDP2, mixed
precision, gradient checkpointing, optimizer, logs, callbacks, checkpoints.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from rayfcp.adapters.transformers.batches import BatchPlanner, Microbatch, SequenceCollator, TokenSequence, num_targets
from rayfcp.adapters.transformers.setup import causal_lm, check_trainer, describe
from rayfcp.config.models import PlanConfig
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.parallel.groups import new_channel
from rayfcp.execute.parallel.transport import DistributedTransport, LoneTransport
from rayfcp.models.attention_hook import IMPLEMENTATION, pass_contexts
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import decoder_layers, decoder_of, text_of
from rayfcp.plan import hardware_profile
from rayfcp.values.devices import CPU, DEVICES

logger = logging.getLogger(__name__)

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def enable_flexible_cp(
    trainer: AnyTrainer,
    *,
    hardware: str | None = None,
    strategy: str = "flex-ring",
    options: PlanConfig | None = None,
    max_tokens_per_rank: int | None = None,
) -> AnyTrainer:
    """Let `trainer` train and evaluate on plans; returns it. Every process must call it, before `train` and `evaluate`.

    A step takes `per_device_train_batch_size` x processes x `gradient_accumulation_steps` samples, in the order of the
    trainer's sampler. Loss and gradient norm are those of one process that takes the same samples; `eval_loss` is that
    of one process that evaluates `per_device_eval_batch_size` x processes samples at a time.

    Args:
        trainer: A `transformers.Trainer` or a `trl.SFTTrainer`, also of a class of yours that keeps its batches and
            losses.
        hardware: Name or YAML path of the profile that costs are computed from, the same on all ranks; by default the
            first one of the kind of device.
        strategy: As in `rayfcp.plan_batch`; one without pipeline stages.
        options: Of planning.
        max_tokens_per_rank: Most tokens of a rank in a microbatch; by default what the memory model leaves.

    Raises:
        ValueError: The trainer does something that does not run on plans; names it and the remedy. A `ConfigError` if
            it is the model.
        InfeasiblePlanError: The memory model leaves no token.
    """
    if isinstance(trainer, FlexibleCPTrainer):
        raise ValueError("enable_flexible_cp: the trainer is enabled already; call it once")
    if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
        raise ValueError(
            f"enable_flexible_cp: max_tokens_per_rank is {max_tokens_per_rank}, must be at least 1; raise it"
        )
    check_trainer(trainer, strategy=strategy)
    device: torch.device = trainer.accelerator.device
    machine = hardware_profile(hardware or DEVICES[device.type].base_hardware)
    model, cluster, cost = describe(trainer, machine, max_tokens_per_rank=max_tokens_per_rank)
    tokens = cluster.max_tokens_per_rank
    logger.info("%s on %d ranks of at most %d tokens; costs of %s", strategy, cluster.num_ranks, tokens, machine.name)
    channels = _channels(trainer) if cluster.num_ranks > 1 else {}
    library = causal_lm(trainer)
    pass_contexts(decoder_layers(decoder_of(library)), kinds=kinds_of_layers(text_of(library.config)))
    enabled: Any = trainer
    enabled.__class__ = type(type(trainer).__name__, (FlexibleCPTrainer, type(trainer)), {})
    enabled.batch_planner = BatchPlanner(
        cluster=cluster,
        cost=cost,
        strategy=strategy,
        options=options or PlanConfig(),
        layer_kinds=model.layer_kinds,
        transport=DistributedTransport(channels["attend"]) if channels else LoneTransport(),
        kernel=pick_kernel(device.type),
        channels=channels,
    )
    return trainer


def _channels(trainer: Trainer) -> dict[str, dist.ProcessGroup]:
    """Groups of all processes beside the one of DDP or FSDP."""
    timeout = timedelta(seconds=trainer.args.ddp_timeout)
    devices = {"attend": trainer.accelerator.device, "control": torch.device(CPU.name)}
    return {
        name: new_channel(name, device=device, timeout=timeout, communicators=2) for name, device in devices.items()
    }


def _whole_batches(accelerator: Accelerator, loader: DataLoader[Any], **_: Any) -> DataLoader[Any]:
    """In place of `Accelerator.prepare_data_loader`: every process gets whole batches, on its host."""
    config = accelerator.dataloader_config
    return prepare_data_loader(  # type: ignore[no-any-return]
        loader,
        num_processes=1,
        process_index=0,
        put_on_device=False,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )


class FlexibleCPTrainer(Trainer):
    """Methods of a trainer that runs on plans, before those of its own class."""

    batch_planner: BatchPlanner
    data_collator: Any

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *others: Any, **named: Any
    ) -> DataLoader[Any]:
        """Batches of all processes together, a list of sequences each."""
        accelerator, collator = self.accelerator, self.data_collator
        self.data_collator = SequenceCollator(collator=collator)
        accelerator.prepare_data_loader = functools.partial(_whole_batches, accelerator)
        try:
            return super()._get_dataloader(
                dataset, description, batch_size * accelerator.num_processes, *others, **named
            )
        finally:
            self.data_collator = collator
            del accelerator.prepare_data_loader  # the method of the class again

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[TokenSequence]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Inputs of the accumulation steps, of which the last runs the whole plan, and the number of targets."""
        batches = list(islice(epoch_iterator, num_batches))
        sequences = [sequence for batch in batches for sequence in batch]
        microbatches = self.batch_planner.plan(sequences)
        steps = [self._step(()) for _ in batches[1:]] + [self._step(microbatches) for _ in batches[:1]]
        return steps, self._num_items(sequences).to(device)

    def _step(self, microbatches: list[Microbatch] | tuple[()]) -> dict[str, Any]:
        """Input of an accumulation step; `input_ids` are of the size that the trainer's counters of tokens and FLOPs
        expect of this rank."""
        ids = torch.zeros(1, sum(each.num_tokens for each in microbatches), dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "microbatches": microbatches}

    def _num_items(self, sequences: list[TokenSequence]) -> Tensor:
        """What the sum of losses is divided by. Gradients are averaged over ranks, but are parts of one sum: with
        `average_tokens_across_devices` the trainer makes up for it, otherwise this does."""
        count = torch.tensor(float(max(num_targets(sequences), 1)))
        return count if self.args.average_tokens_across_devices else count / self.accelerator.num_processes

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Loss of all microbatches; gradients are reduced with the last."""
        loss, microbatches = torch.zeros((), device=self.args.device), inputs["microbatches"]
        with self._running():
            for left, each in zip(reversed(range(len(microbatches))), microbatches, strict=True):
                with self.accelerator.no_sync(model) if left else contextlib.nullcontext():
                    loss += super().training_step(model, self.batch_planner.inputs(each), num_items_in_batch)
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,  # noqa: ARG002  of outputs
    ) -> tuple[Tensor, None, None]:
        """Loss of a batch of all processes, a list of sequences; the same on each."""
        if not prediction_loss_only:
            raise ValueError(
                "prediction_step: logits are requested, which stay in slices on their ranks; set "
                "args.prediction_loss_only=True, or predict with a trainer of its own"
            )
        loss, num_items = torch.zeros((), device=self.args.device), self._num_items(inputs).to(self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager(), self._running():
            for each in self.batch_planner.plan(inputs, forward_only=True):
                given = self._prepare_inputs(self.batch_planner.inputs(each))
                part: Any = self.compute_loss(model, given, num_items_in_batch=num_items)
                loss += part
        return self.accelerator.reduce(loss, reduction="mean"), None, None

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """The model uses our attention, and its own again afterwards, so that it can generate.

        In the last batch of a loader, `Accelerator.gather_for_metrics` returns as many rows as that has samples; what
        is gathered in here has a row for each rank.
        """
        config, loader = causal_lm(self).config, self.accelerator.gradient_state.active_dataloader
        before, at_end = config._attn_implementation, getattr(loader, "end_of_dataloader", False)
        config._attn_implementation = IMPLEMENTATION
        if at_end:
            loader.end_of_dataloader = False
        try:
            yield
        finally:
            config._attn_implementation = before
            if at_end:
                loader.end_of_dataloader = True
