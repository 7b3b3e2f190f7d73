"""Sequences of a trainer's batches, and the microbatches of a rank that a plan makes of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from rayfcp.config.models import PlanConfig
from rayfcp.data.masks import LOSS_MASKS, MASK_COLUMNS, read_masks
from rayfcp.data.rows import IGNORED
from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.kernels import AttentionKernel
from rayfcp.execute.parallel.groups import all_gather
from rayfcp.execute.parallel.transport import Transport
from rayfcp.models.attention_hook import KEYWORD, Carried
from rayfcp.plan import CostModel, plan_batch
from rayfcp.program import Forward, Load, check_progress, lower
from rayfcp.values import ClusterSpec, LayerKinds, SequenceSpec

_READ = {"input_ids", "labels", "shift_labels", *MASK_COLUMNS}
_DERIVED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""What collators of flattened batches give besides positions, for kernels of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Tokens that attend to one another, each int64 `[tokens]`; `targets` are the tokens that follow, or -100."""

    input_ids: Tensor
    positions: Tensor
    targets: Tensor

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input_ids, self.positions, self.targets


_PADDING = (torch.tensor([0]), torch.tensor([0]), torch.tensor([IGNORED]))
"""A rank without tokens runs one token that no target weighs, since all ranks run the same passes."""


def sequences_of(batch: Mapping[str, Any]) -> list[TokenSequence]:
    """Return the sequences of a collated batch `[rows, tokens]`: the documents of its rows without padding, as
    `rayfcp.data.masks` reads them. A document's first token is not a target, nor are tokens that a mask keeps out of
    the loss; `shift_labels` are used as they are.

    Raises:
        ValueError: The batch has no labels, inputs that would not reach the model, or masks that cannot be read.
    """
    unknown = sorted(set(batch) - _READ - _DERIVED)
    if unknown:
        raise ValueError(f"batch: the collator gives {', '.join(unknown)}, which a plan cannot cut; remove the columns")
    if "labels" not in batch and "shift_labels" not in batch:
        raise ValueError(
            "batch: the collator gives no labels; add them to the data set, or use "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    tokens = batch["input_ids"]
    if "shift_labels" in batch and (beside := [name for name in LOSS_MASKS if name in batch]):
        raise ValueError(f"batch: the collator gives {beside[0]} beside shift_labels; remove one of both")
    masks = {name: batch[name] for name in MASK_COLUMNS if name in batch}
    if "position_ids" in masks and masks["position_ids"].ndim == 2:
        masks["position_ids"] = masks["position_ids"].expand(len(tokens), -1)
    for name, mask in masks.items():
        if mask.shape != tokens.shape:
            raise ValueError(
                f"batch: {name} is {tuple(mask.shape)}, must be {tuple(tokens.shape)} as input_ids; separate documents "
                "by position_ids that begin at 0 in each"
            )
    return [sequence for row in range(len(tokens)) for sequence in _sequences_of_row(batch, masks, row=row)]


def _sequences_of_row(batch: Mapping[str, Any], masks: Mapping[str, Tensor], *, row: int) -> Iterator[TokenSequence]:
    input_ids = batch["input_ids"][row]
    try:
        documents = read_masks({name: mask[row].numpy() for name, mask in masks.items()}, num_tokens=len(input_ids))
    except ValueError as error:
        raise ValueError(f"batch: row {row}: {error}") from error
    given = masks.get("position_ids")
    for start, stop in documents.ranges:
        if "shift_labels" in batch:
            targets = batch["shift_labels"][row][start:stop]
        else:
            labels = batch["labels"][row]
            if documents.in_loss is not None:
                labels = labels.where(torch.from_numpy(documents.in_loss), IGNORED)
            targets = torch.cat([labels[start + 1 : stop], torch.tensor([IGNORED])])
        positions = torch.arange(stop - start) if given is None else given[row][start:stop]
        yield TokenSequence(input_ids=input_ids[start:stop], positions=positions, targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCollator:
    """Gives the sequences of samples, each collated alone by the trainer's own collator, so that none is padded."""

    collator: Callable[[list[Any]], Mapping[str, Any]]

    def __call__(self, samples: list[Any]) -> list[TokenSequence]:
        return [sequence for sample in samples for sequence in sequences_of(self.collator([sample]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A rank's part of a microbatch: which slices of `sequences` it loads, and how attention runs."""

    load: Load
    forward: Forward
    sequences: Sequence[TokenSequence]

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.load.pieces)

    def inputs(self, *, transport: Transport, kernel: AttentionKernel) -> dict[str, Any]:
        """Keyword arguments of the model; `labels` are shifted already, which `shift_labels` says."""
        held = [
            tuple(column[piece.start : piece.stop] for column in self.sequences[piece.sequence].columns)
            for piece in self.load.pieces
        ]
        columns = zip(*(held or [_PADDING]), strict=True)
        input_ids, positions, targets = (torch.cat(column)[None] for column in columns)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.full_like(input_ids, bool(held)),
            "position_ids": positions,
            "labels": targets,
            "shift_labels": targets,
            "use_cache": False,
            KEYWORD: Carried(AttentionContext.of(self.forward, transport=transport, kernel=kernel), positions[0]),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlanner:
    """Plans batches on every rank, with the same result. `cluster`, `cost`, `strategy`, `options`: as of `plan_batch`.

    `transport` and `kernel` are of this rank's attention. `channels`: the group of the transport, which does not keep
    it alive, and `control`, over all ranks on CPUs; empty if there is one rank.
    """

    cluster: ClusterSpec
    cost: CostModel
    strategy: str
    options: PlanConfig
    layer_kinds: LayerKinds
    transport: Transport
    kernel: AttentionKernel
    channels: Mapping[str, dist.ProcessGroup]

    def plan(self, sequences: Sequence[TokenSequence], *, forward_only: bool = False) -> list[Microbatch]:
        """This rank's microbatches of a global batch; none if it is empty. All ranks must call it. `forward_only`: no
        backward passes follow.

        Raises:
            ValueError: Another rank has other sequences, or plans with other options.
            InfeasiblePlanError: There is no plan; names the constraint that binds.
        """
        self._check_agreement(sequences)
        if not sequences:
            return []
        specs = [
            SequenceSpec(
                id=number,
                num_tokens=len(each.input_ids),
                num_targets=num_targets([each]),
                layer_kinds=self.layer_kinds,
            )
            for number, each in enumerate(sequences)
        ]
        plan = plan_batch(
            specs,
            cluster=self.cluster,
            cost=self.cost.forward_only() if forward_only else self.cost,
            strategy=self.strategy,
            options=self.options,
        )
        programs = lower(plan, specs, forward_only=forward_only)
        check_progress(programs, forward_only=forward_only)
        instructions = programs[self.transport.rank].instructions
        loads = [item for item in instructions if isinstance(item, Load)]
        forwards = [item for item in instructions if isinstance(item, Forward)]
        return [
            Microbatch(load=load, forward=forward, sequences=sequences)
            for load, forward in zip(loads, forwards, strict=True)
        ]

    def inputs(self, microbatch: Microbatch) -> dict[str, Any]:
        """Keyword arguments of the model for a microbatch."""
        return microbatch.inputs(transport=self.transport, kernel=self.kernel)

    def _check_agreement(self, sequences: Sequence[TokenSequence]) -> None:
        """Compare hashes: ranks with different plans would wait for one another for ever, and slices of a sequence that
        differs between ranks would be trained on together."""
        if self.cluster.num_ranks == 1:
            return
        digest = xxhash.xxh3_64(repr((self.cluster, self.cost, self.strategy, self.options)).encode())
        for column in (column for each in sequences for column in each.columns):
            digest.update(column.numpy().tobytes())
        own = torch.tensor([digest.intdigest() - 2**63])
        found = own.new_empty(self.cluster.num_ranks)
        all_gather(found, own, group=self.channels["control"])
        others = (found != found[0]).nonzero().flatten().tolist()
        if others:
            raise ValueError(
                f"batch: ranks {', '.join(map(str, others))} have other sequences or options than rank 0; give all "
                "ranks the same data set in the same order, and the same arguments of enable_flexible_cp"
            )


def num_targets(sequences: Sequence[TokenSequence]) -> int:
    """Number of tokens that enter the loss."""
    return sum(int((each.targets != IGNORED).sum()) for each in sequences)
