"""The cost model: predicted seconds of groups and microbatches (Flexible Context Parallelism, section 4.3)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rayfcp.plan.costs.analytic import coefficients
from rayfcp.plan.costs.encoder import EncoderCost, check_one_stage
from rayfcp.plan.costs.pipeline import PipelineCost
from rayfcp.plan.costs.primitives import exchanged, passed_on
from rayfcp.plan.costs.stages import split_layers
from rayfcp.plan.costs.terms import Seconds, Terms
from rayfcp.values import HardwareProfile, ModelProfile, Primitive, Windows

Amount = TypeVar("Amount", float, Seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients for forward and backward together, analytic or measured; all finite and at least 0.

    `attention_s_per_cell` is alpha1 of Eq. 8. The printed mask factor, alpha1 (1 + eta) L^2, is counted
    exactly instead: cells = L (L + 1) / 2 causal, L^2 full, so alpha1 stands for one computed cell and
    any mask has its own eta. `linear_s_per_token` is alpha2, `fixed_s` beta1 (a microbatch). One token's
    keys, values and their gradients pass one hop of a ring in `ring_intra_s_per_token` while the
    degree is at most `ranks_per_node`, else in `ring_inter_s_per_token` (alpha3 / v of Eq. 9);
    `ring_s_per_round` is the latency of a hop (beta2). `overlap` in [0, 1] is the share of the shorter of
    attention and ring that hides behind the other: 1 in Eq. 10, 0 where the cores that compute also move the bytes.
    `attention_half_tokens`: attention over pieces of n tokens takes 1 + that / n as long per cell. A causal
    sequence of L tokens is one piece on one rank or under Ulysses: L x that / 2 cells more, shared by the ranks.
    A ring of degree d cuts it: L x that x (1 - 1 / 2d) cells more on every rank.
    Ulysses: one token's queries, keys, values, outputs and their gradients pass a port in
    `ulysses_intra_s_per_token` or, between nodes, `ulysses_inter_s_per_token`; keys and values are
    `ulysses_kv_share` of it and grow with the degree beyond `num_kv_heads`; `ulysses_s`: latency of all exchanges.
    A degree that does not share out the heads takes for ever, and so does every degree above 1 where seconds per token
    are 0: what is not known is not free.

    Ranks meet in every layer of either pass to gather and reduce shards, so a microbatch takes its slowest
    forward and its slowest backward, whichever groups these are, less what ranks run ahead (`makespan_s`): they meet a
    layer late, and a rank that is fast forward begins backward up to the share `ahead` of the slowest backward earlier,
    less `ahead_s`, a layer's collectives. Forward, up to backward's first layer, has the share `attention_forward` of
    attention, `linear_forward` of linear layers (the head whole) and fixed cost, `ring_forward` of what a ring moves,
    `passes_forward` of latencies and exchanges; `ring_returned` of what a ring moves are gradients on their way home.
    Of what moves first in each layer, the share `beside` meets shards on their way: these keep ports inside nodes busy
    for `busy_forward_s` and `busy_backward_s`, less what the least linear work takes of that, those between nodes for
    `busy_inter_share` of it; `before_forward`, `before_backward`: of all linear work, what comes before the attention
    of its layer (`Terms`).

    `shard_s`: traffic of sharded parameters and gradients in a microbatch; `reduce_s`: traffic more in
    the last one of a step; of these nothing hides `exposed_s` (the first gathers) and `reduce_exposed_s` (the last
    reductions). With several stages (`pipeline`) these are of the stage that has most of them; everything else is of
    all layers together. `windows`: the model's kinds of layers; `attention_s_per_cell` is for a cell in their mean.
    `encoder`: of a model that sees.
    """

    attention_s_per_cell: float
    linear_s_per_token: float
    fixed_s: float
    ring_intra_s_per_token: float
    ring_inter_s_per_token: float
    ring_s_per_round: float
    ranks_per_node: int
    shard_s: float = 0.0
    reduce_s: float = 0.0
    exposed_s: float = 0.0
    reduce_exposed_s: float = 0.0
    recomputed_layers: int = 0
    overlap: float = 1.0
    attention_half_tokens: float = 0.0
    ulysses_intra_s_per_token: float = 0.0
    ulysses_inter_s_per_token: float = 0.0
    ulysses_kv_share: float = 0.0
    ulysses_s: float = 0.0
    num_heads: int = 1
    num_kv_heads: int = 1
    attention_forward: float = 2 / 7
    linear_forward: float = 1 / 3
    ring_forward: float = 1 / 4
    ring_returned: float = 1 / 2
    passes_forward: float = 1 / 2
    beside: float = 0.0
    busy_forward_s: float = 0.0
    busy_backward_s: float = 0.0
    busy_inter_share: float = 0.0
    before_forward: float = 0.0
    before_backward: float = 0.0
    ahead: float = 0.0
    ahead_s: float = 0.0
    pipeline: PipelineCost | None = None
    windows: Windows = ()
    encoder: EncoderCost | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("pipeline", "windows", "encoder") and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value}, must be finite and at least 0; measure it again")
        if self.overlap > 1.0:
            raise ValueError(f"overlap is {self.overlap}, must be at most 1; nothing hides more than all of it")

    @classmethod
    def from_profiles(
        cls,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        num_ranks: int,
        recomputed_layers: int = 0,
        bytes_per_element: int,
        reduce_every: Literal["microbatch", "step"],
        gather_every: Literal["microbatch", "step"] = "microbatch",
        num_stages: int = 1,
        layers_of_stage: Sequence[int] = (),
        memory_bytes: int | None = None,
    ) -> "CostModel":
        """Analytic coefficients (`rayfcp.plan.costs.analytic`); of a rank's device of each of `num_stages` stages with
        `memory_bytes` (absent: the profile's).

        Raises:
            ValueError: layers that do not make up the stages, or several stages of a model that sees.
            InfeasiblePlanError: a stage's states alone do not fit its devices.
        """
        layers = tuple(layers_of_stage) or split_layers(model.num_layers, num_stages)
        traffic: dict[str, Any] = {"reduce_every": reduce_every, "gather_every": gather_every}
        sizes: dict[str, Any] = {"num_ranks": num_ranks, "bytes_per_element": bytes_per_element}
        found: dict[str, Any] = coefficients(
            model, hardware, recomputed_layers=recomputed_layers, layers_of_stage=layers, **sizes, **traffic
        )
        if model.vision is not None:
            check_one_stage(model.name, num_stages=num_stages)
            found["encoder"] = EncoderCost.from_profiles(
                model, hardware, recomputed_layers=recomputed_layers, reduced=reduce_every == "microbatch", **sizes
            )
        if num_stages > 1:
            found["pipeline"] = PipelineCost.from_profiles(
                model,
                hardware,
                layers_of_stage=layers,
                num_stages=num_stages,
                memory_bytes=memory_bytes,
                **sizes,
                **traffic,
            )
        return cls(**found, windows=model.windows)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "CostModel":
        """From `dataclasses.asdict`, also when that went through JSON."""
        pipeline = fields.get("pipeline") and PipelineCost.of_fields(fields["pipeline"])
        encoder = fields.get("encoder") and EncoderCost.of_fields(fields["encoder"])
        windows = tuple(map(tuple, fields.get("windows", ())))
        return cls(**{**fields, "pipeline": pipeline, "encoder": encoder, "windows": windows})

    def with_coefficients(self, **measured: float) -> "CostModel":
        """The same model with measured coefficients in place of those named. The head keeps its share of linear
        layers."""
        pipeline, linear_s = self.pipeline, measured.get("linear_s_per_token")
        if pipeline and linear_s is not None and self.linear_s_per_token > 0:
            head_s = pipeline.head_s_per_token * (linear_s / self.linear_s_per_token)
            pipeline = dataclasses.replace(pipeline, head_s_per_token=head_s)
        return dataclasses.replace(self, **measured, pipeline=pipeline)  # type: ignore[arg-type]

    def compute_s(self, cells: Amount, num_tokens: Amount) -> Amount:
        """Seconds of attention and linear layers on one rank, without the fixed cost (Eq. 8); on d ranks the
        sum over them is at least that."""
        return self.attention_s_per_cell * (cells + self.attention_half_tokens * num_tokens / 2) + (
            self.linear_s_per_token * num_tokens
        )

    def group_s(
        self,
        cells: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        *,
        degree: npt.ArrayLike,
        primitive: Primitive = Primitive.RING,
        crosses: npt.ArrayLike | None = None,
        speed: npt.ArrayLike = 1.0,
    ) -> Seconds:
        """Seconds of a group that is alone in a microbatch, forward and backward (Eq. 8-10); arguments broadcast.

        A rank computes 1/d of the cells and tokens. T = T_cp + T_cm - overlap x min(T_cpa, T_cma): all
        traffic is attention's, T_cma = T_cm, so the result grows with cells and tokens and is at least
        compute / d + fixed. `crosses`: the group spans nodes (where absent, a degree above `ranks_per_node` does).
        `speed`: of its slowest rank (`ClusterSpec.speed_of_rank`).
        """
        forward_s, backward_s = self.passes_s(
            cells, num_tokens, degree=degree, primitive=primitive, crosses=crosses, speed=speed
        )
        return np.asarray(forward_s + backward_s)

    def passes_s(
        self,
        cells: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        *,
        degree: npt.ArrayLike,
        primitive: Primitive = Primitive.RING,
        crosses: npt.ArrayLike | None = None,
        speed: npt.ArrayLike = 1.0,
    ) -> tuple[Seconds, Seconds]:
        """Seconds of a group's forward and of its backward; their sum is `group_s`."""
        forward, backward = self.terms(degree, primitive=primitive, crosses=crosses, speed=speed)
        return forward.seconds(cells, num_tokens), backward.seconds(cells, num_tokens)

    def apart(self) -> "CostModel":
        """The same, but shards are in nobody's way: no group takes more."""
        return dataclasses.replace(self, beside=0.0)

    def kv_share(self, heads: int) -> float:
        """Of a token's keys and values, what each of `heads` ranks that share out heads holds: replicated beyond the
        number of key and value heads."""
        return max(1 / heads, 1 / self.num_kv_heads)

    def exchanges_s(self, num_tokens: npt.ArrayLike, *, degree: int, crosses: npt.ArrayLike | None = None) -> Seconds:
        """Seconds in which ranks exchange their tokens for heads and back, forward and backward, `num_tokens` together;
        infinite where they cannot share out the heads."""
        tokens = np.asarray(num_tokens, np.float64)
        passes = self.terms(degree, primitive=Primitive.ULYSSES, crosses=crosses)
        return np.asarray(sum(each.moved_s_per_token * tokens + each.moved_s for each in passes), np.float64)

    def terms(
        self,
        degree: npt.ArrayLike,
        *,
        primitive: Primitive = Primitive.RING,
        crosses: npt.ArrayLike | None = None,
        speed: npt.ArrayLike = 1.0,
    ) -> tuple[Terms, Terms]:
        """Forward and backward of groups by degree, for loops that price many.

        Ring: in each of d - 1 rounds one hop's keys and values pass a rank while it attends to the ones before; in
        backward their gradients follow, and the last hop brings them home when all attention is done.
        Ulysses: each rank exchanges (d - 1) / d of its tokens, of which what leaves the node has links of
        its own; nothing hides it. `speed`: of a group's slowest rank, for which its other ranks wait.
        """
        ranks = np.asarray(degree, np.float64)
        of = exchanged if primitive is Primitive.ULYSSES else passed_on
        forward, backward = of(
            self, ranks, across=np.asarray(ranks > self.ranks_per_node if crosses is None else crosses)
        )
        return forward.at(speed), backward.at(speed)

    def microbatch_s(self, makespan_s: float, *, last: bool) -> float:
        """Seconds of a microbatch whose groups take `makespan_s` together: sharded
        traffic hides behind that, layer by layer, save the first gathers and the last reductions."""
        exposed_s = self.exposed_s + (self.reduce_exposed_s if last else 0.0)
        traffic_s = max(self.shard_s + (self.reduce_s if last else 0.0) - exposed_s, 0.0)
        return makespan_s + traffic_s - self.overlap * min(traffic_s, makespan_s) + exposed_s

    def makespan_s(self, forward_s: npt.ArrayLike, backward_s: npt.ArrayLike) -> float:
        """Seconds of groups, forward and backward of each, that are a microbatch together: the slowest of both, less
        what ranks run ahead, but no less than any group takes.

        A rank may begin a layer of backward when all have begun the one before, have brought home the gradients of
        that before it, and have gathered its parameters since. So one that is slow backward may be ahead of the last
        one to begin by a layer of its own less these collectives. In forward, where layers differ less between groups,
        all are taken to be as far.
        """
        forward, backward = np.asarray(forward_s, np.float64), np.asarray(backward_s, np.float64)
        ahead_s = max(self.ahead * float(backward.max()) - self.ahead_s, 0.0)
        return max(float((forward + backward).max()), float(forward.max() + backward.max()) - ahead_s)

    def batch_s(self, makespans_s: list[float]) -> float:
        """Seconds of a step whose longest microbatch comes last, so that it hides the reduction."""
        *others, longest = sorted(makespans_s)
        return sum(self.microbatch_s(each, last=False) for each in others) + self.microbatch_s(longest, last=True)
