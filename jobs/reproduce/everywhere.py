"""Static baselines whose every rank encodes all pictures of its group, as the systems themselves do.

Megatron-LM (`LLaVAModel.forward`) and MindSpeed-MM, its relative for Ascend devices (`VLMModel.forward`), run the
vision encoder on whole samples and cut the embeddings along the sequence afterwards, so that the ranks of a group, of
rings or of all-to-all, all do the same: d times the encoder's work at degree d. Degree and setting are tuned for that.
Copies of activations count no memory here, which favours these baselines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from rayfcp.baselines.static_cp import best_static, divisors
from rayfcp.compare.lengths import Batch
from rayfcp.compare.results import timeline_of
from rayfcp.compare.settings import Setting
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel
from rayfcp.plan.assembly import columns_of
from rayfcp.plan.strategies.registry import Proposal, Propose
from rayfcp.plan.vision.encoding import with_images
from rayfcp.program import Encode, Programs, ReshuffleProgram, lower
from rayfcp.values import (
    BatchPlan,
    ClusterSpec,
    Group,
    Images,
    InfeasiblePlanError,
    MicrobatchPlan,
    Primitive,
    SequenceSpec,
)

PRIMITIVES = {"static-cp": Primitive.RING, "ulysses": Primitive.ULYSSES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The plan that is fastest by prediction, and under which setting."""

    plan: BatchPlan
    setting: Setting


def everywhere_s(
    strategy: str,
    batch: Batch,
    *,
    settings: Sequence[Setting],
    options: PlanConfig,
) -> float | None:
    """Simulated seconds of the best degree and setting; None where none holds the longest sequence."""
    found = tuned(strategy, batch, settings=settings, options=options)
    if found is None:
        return None
    programs = lower(found.plan, batch, reduce_every=found.setting.reduce_every)
    programs = encoded_everywhere(programs, found.plan)
    return timeline_of(programs, setting=found.setting).iteration_s


def tuned(strategy: str, batch: Batch, *, settings: Sequence[Setting], options: PlanConfig) -> Tuned | None:
    """Over all degrees and settings."""
    primitive, best = PRIMITIVES[strategy], None
    for setting, degree in product(settings, divisors(settings[0].cluster.num_ranks) if settings else ()):
        if best is not None and degree * _encoder_s(batch, setting=setting) >= best.plan.predicted_s:
            continue
        propose = with_images(_of_degree(degree, primitive), spread=False)
        try:
            found = propose(batch, cluster=setting.cluster, cost=setting.cost, options=options)
        except InfeasiblePlanError:
            continue
        plan = _plan(strategy, tuple(_priced(found.microbatches, batch, cost=setting.cost)), setting=setting)
        if best is None or plan.predicted_s < best.plan.predicted_s:
            best = Tuned(plan=plan, setting=setting)
    return best


def _encoder_s(batch: Batch, *, setting: Setting) -> float:
    """Encoder's time of all images, shared out over all ranks."""
    work_s = sum(_passes_s(run, setting.cost).sum() for each in batch for run in each.images)
    return float(work_s) / setting.cluster.num_ranks


def encoded_everywhere(programs: Programs, plan: BatchPlan) -> Programs:
    """The programs with the pictures of a group on each of its ranks; features stay where they are."""
    of_rank = [{rank: group for group in microbatch.groups for rank in group.ranks} for microbatch in plan.microbatches]
    encodes = [
        [_of_group(item, groups.get(rank), items) for rank, item in enumerate(items)]
        for groups, items in zip(of_rank, programs.encodes, strict=True)
    ]
    return programs.replaced(encodes=encodes)


def _of_group(item: Encode, group: Group | None, encoded: Sequence[Encode]) -> Encode:
    ranks = group.ranks if group else ()
    pictures = tuple(each for rank in ranks for each in encoded[rank].images)
    stays = ReshuffleProgram(
        rank=item.features.rank, num_ranks=item.features.num_ranks, num_tokens=0, num_placed=0, kept=(), rounds=()
    )
    return replace(item, images=pictures, features=stays)


def _of_degree(degree: int, primitive: Primitive) -> Propose:
    def propose(
        sequences: Sequence[SequenceSpec], *, cluster: ClusterSpec, cost: CostModel, options: PlanConfig
    ) -> Proposal:
        if not np.isfinite(cost.terms(degree, primitive=primitive)[0].moved_s):
            raise InfeasiblePlanError(f"heads do not permit degree {degree}")
        found = best_static(
            columns_of(sequences, cost=cost),
            degrees=[degree],
            primitive=primitive,
            cluster=cluster,
            cost=cost,
            options=options,
        )
        if found is None:
            raise InfeasiblePlanError(f"the longest sequence does not fit {degree} ranks")
        return Proposal(microbatches=found.microbatches, reason=f"degree {degree}")

    return propose


def _priced(microbatches: Sequence[MicrobatchPlan], batch: Batch, *, cost: CostModel) -> Iterator[MicrobatchPlan]:
    """Microbatches with the encoder's seconds of the slowest group, each of whose ranks encodes all of its images."""
    encoder, by_id = cost.encoder, {each.id: each for each in batch}
    assert encoder is not None, "the model sees"
    for number, microbatch in enumerate(microbatches):
        passes_s = [
            sum((_passes_s(run, cost) for run in _runs(group, by_id)), np.zeros(2)) for group in microbatch.groups
        ]
        computed_s = float(np.sum(np.max(passes_s, axis=0) + encoder.fixed_passes_s))
        last = number == len(microbatches) - 1
        encoder_s = encoder.microbatch_s(computed_s, moved_s=0.0, overlap=cost.overlap, last=last)
        predicted_s = microbatch.predicted_s - microbatch.encoder_s + encoder_s
        yield replace(microbatch, encoder_s=encoder_s, predicted_s=predicted_s)


def _passes_s(run: Images, cost: CostModel) -> npt.NDArray[np.float64]:
    """Forward and backward seconds of the pictures of a run."""
    assert cost.encoder is not None, "the model sees"
    return run.count * np.ravel(cost.encoder.passes_s([run.num_patches]))


def _runs(group: Group, by_id: dict[int, SequenceSpec]) -> Iterator[Images]:
    for sequence in group.sequences:
        yield from by_id[sequence].images


def _plan(strategy: str, microbatches: tuple[MicrobatchPlan, ...], *, setting: Setting) -> BatchPlan:
    return BatchPlan(
        strategy=strategy,
        num_ranks=setting.cluster.num_ranks,
        generation=setting.cluster.generation,
        microbatches=microbatches,
        recomputed_layers=setting.recomputed_layers,
        predicted_s=sum(each.predicted_s for each in microbatches),
        lower_bound_s=0.0,
        reason="each rank encodes all pictures of its group",
    )
