"""The cost model: predicted seconds of groups, microbatches and batches (Flexible Context Parallelism, section 4.3).

The derivation, term by term, is in docs/cost_model.md.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from rayfcp.cost.analytic import EXPANSION_BACKWARD, coefficients, stage_hardware
from rayfcp.cost.encoder import GATHERED_FORWARD, EncoderCost, check_one_stage
from rayfcp.cost.kernels.group_time import Terms, head_s, overlapped_s
from rayfcp.cost.memory import kv_growth
from rayfcp.cost.pipeline import PipelineCost
from rayfcp.cost.scans import HeadsCost, ScanCost
from rayfcp.cost.stages import check_layers, split_layers
from rayfcp.cost.terms import beside_shards, ring_terms, ulysses_terms, with_head
from rayfcp.values import ClusterSpec, HardwareProfile, LayerKinds, ModelProfile, Primitive
from rayfcp.values.arrays import Floats

PARTS = ("pipeline", "layer_kinds", "scan", "encoder")
"""Fields of a cost model that are no numbers."""

Amount = TypeVar("Amount", float, Floats)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of forward and backward together, analytic or measured; all finite and at least 0.

    Computation: `attention_s_per_pair` (alpha1 of Eq. 8) for a (query, key) pair that is computed, in the mean over
    `layer_kinds`, those that attend; `linear_s_per_token` (alpha2); `fixed_s` (beta1) for a microbatch.
    `attention_half_tokens`: attention over pieces of n tokens takes 1 + that / n as long per pair. A sequence of L
    tokens is one piece on one rank or under Ulysses, L x that / 2 pairs more, shared by the ranks; a ring of degree d
    cuts it, L x that x (1 - 1 / 2d) pairs more on every rank.

    Ring: the keys and values of a token and their gradients pass one hop in `ring_intra_s_per_token` inside a node of
    `ranks_per_node` ranks, else in `ring_inter_s_per_token` (alpha3 / v of Eq. 9); `ring_s_per_round` is the latency of
    a hop (beta2). `overlap` in [0, 1] is the share of the shorter of attention and ring that hides behind the other: 1
    in Eq. 10, 0 where the cores that compute also move the bytes.

    Ulysses: the queries, keys, values, outputs of a token and their gradients pass a port in
    `ulysses_intra_s_per_token` or, between nodes, `ulysses_inter_s_per_token`; keys and values are `ulysses_kv_share`
    of it and grow with the degree beyond `num_kv_heads`; `ulysses_s`: latency of all exchanges. Degrees that do not
    divide the heads take infinitely long, and so do degrees above 1 where seconds per token are 0: unknown is not free.

    `expansion_s_per_token`: expanding what came of a token as a latent to keys and values of all heads, forward, beside
    the token's own linear layers. `scan`: of recurrent layers.

    Shares of the forward pass: `attention_forward` of attention, `linear_forward` of linear layers (the head whole) and
    of the fixed cost, `ring_forward` of what a ring moves, `passes_forward` of latencies and exchanges;
    `linear_backward`: seconds of linear layers in backward, without recomputation, over those in forward;
    `ring_returned`: share of gradients on their way home in what a ring moves.

    Run-ahead: ranks meet in every layer of either pass to gather and reduce shards, a layer late. A rank that is fast
    in forward begins backward up to the share `ahead` of the slowest backward earlier, less `ahead_s`, the collectives
    of a layer (`makespan_s`).

    Shards: traffic of sharded parameters and gradients takes `shard_s` in a microbatch and `reduce_s` more in the last
    one of a step; of these nothing hides `exposed_s` (the first gathers) and `reduce_exposed_s` (the last reductions).
    With several stages (`pipeline`) these are of the stage that has most of them; everything else is of all layers
    together. `encoder`: of a VLM.

    Of the traffic that is not exposed, the shares `shard_forward` and `reduce_forward` go beside the forward pass (both
    0: not known). `head_s_per_token` of `linear_s_per_token` and the share `fixed_outer` of `fixed_s` hide no traffic:
    the head, and what a microbatch takes before it gathers. Of that traffic, `shard_waits_s` and `reduce_waits_s` are
    latency of collectives, in which links are idle. While shards pass, they fill the links inside a node for the share
    `shards_inside` of the time, those between nodes for `shards_across`. `before_attention`: share of a layer's linear
    work that comes before its messages in forward, and after them in backward. `beside_forward_s`, `beside_backward_s`,
    and `waits_forward_s`, `waits_backward_s` of these: traffic that groups share links with, which only models of
    `in_step` have.

    Memory: a rank of a group that shares out heads over a times as many ranks as there are key and value heads holds a
    times the keys and values. Each token then takes 1 + (a - 1) x `kv_growth` of the memory of a token (`room`). 0 with
    stages, whose bytes are counted (`PipelineCost.layer_bytes`).

    `uplink_ranks`: number of ranks that a node's uplink carries at the rate that one alone has between nodes; 0 if
    it carries all of them. Groups of one microbatch queue for it (`rayfcp.cost.uplinks`).

    Host: it enqueues all layers in `host_s`, and every further round of a ring and every exchange of heads in
    `host_s_per_round`, beside the device; 0 unless passes show it or the hardware profile has it.

    `recomputed_layers` run forward again in backward, with `keeps_attention` without their attention, rounds and
    exchanges.
    """

    attention_s_per_pair: float
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
    linear_backward: float = 2.0
    recomputed_layers: int = 0
    keeps_attention: bool = False
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
    ahead: float = 0.0
    ahead_s: float = 0.0
    shard_forward: float = 0.0
    reduce_forward: float = 0.0
    head_s_per_token: float = 0.0
    fixed_outer: float = 0.0
    shards_inside: float = 1.0
    shards_across: float = 1.0
    shard_waits_s: float = 0.0
    reduce_waits_s: float = 0.0
    before_attention: float = 1.0
    beside_forward_s: float = 0.0
    beside_backward_s: float = 0.0
    waits_forward_s: float = 0.0
    waits_backward_s: float = 0.0
    pipeline: PipelineCost | None = None
    expansion_s_per_token: float = 0.0
    layer_kinds: LayerKinds = ()
    scan: ScanCost | HeadsCost | None = None
    encoder: EncoderCost | None = None
    host_s: float = 0.0
    host_s_per_round: float = 0.0
    kv_growth: float = 0.0
    uplink_ranks: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in PARTS and not (math.isfinite(value) and value >= 0):
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
        """Analytic coefficients (`rayfcp.cost.analytic`); of a rank's device of each of `num_stages` stages with
        `memory_bytes` (absent: the profile's).

        Raises:
            ValueError: layers that do not make up the stages, or several stages of a VLM.
            InfeasiblePlanError: a stage's states alone do not fit its devices.
        """
        layers = tuple(layers_of_stage) or split_layers(model.num_layers, num_stages)
        check_layers(model, layers)
        hardware = stage_hardware(hardware, num_ranks=num_ranks, num_stages=num_stages)
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
        if num_stages == 1:
            found["kv_growth"] = kv_growth(
                model, recomputed_layers=recomputed_layers, bytes_per_element=bytes_per_element
            )
        else:
            found["pipeline"] = PipelineCost.from_profiles(
                model, hardware, layers_of_stage=layers, memory_bytes=memory_bytes, **sizes, **traffic
            )
        scan = ScanCost.from_profiles(model, hardware, bytes_per_element=bytes_per_element)
        return cls(**found, layer_kinds=model.attention_kinds, scan=scan)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "CostModel":
        """Return the cost model of the fields that `dataclasses.asdict` gives, also after a round trip through JSON.

        Raises:
            ValueError: unknown or missing fields, as in a file of another version.
        """
        try:
            found = TypeAdapter(cls).validate_python(fields)
        except ValidationError as error:
            wrong = sorted({".".join(map(str, each["loc"])) for each in error.errors()})
        else:
            given, known = to_jsonable_python(fields), to_jsonable_python(found)
            names = sorted(given.keys() | known.keys())
            wrong = [each for each in names if (each in given, given.get(each)) != (each in known, known.get(each))]
            if not wrong:
                return found
        raise ValueError(f"fields of the cost model are of another version ({', '.join(wrong)}); measure again")

    def with_coefficients(self, **measured: float) -> "CostModel":
        """The same model with measured coefficients in place of those named. The head and expanded latents keep their
        share of linear layers."""
        linear_s = measured.get("linear_s_per_token")
        if linear_s is None or self.linear_s_per_token <= 0:
            return dataclasses.replace(self, **measured)  # type: ignore[arg-type]
        pipeline, scale = self.pipeline, linear_s / self.linear_s_per_token
        if pipeline:
            pipeline = dataclasses.replace(pipeline, head_s_per_token=pipeline.head_s_per_token * scale)
        others: dict[str, Any] = {"pipeline": pipeline, "expansion_s_per_token": self.expansion_s_per_token * scale}
        others["head_s_per_token"] = self.head_s_per_token * scale
        return dataclasses.replace(self, **(others | measured))

    def forward_only(self) -> "CostModel":
        """The cost model of passes that are not followed by a backward pass, and recompute and reduce nothing.

        Every coefficient is multiplied by its share of the forward pass. The shares stay, so that planners, which share
        out forward and backward together, weigh attention, linear layers and messages as a forward pass does. Layers
        are gathered once instead of twice.
        """
        linear, passes, ring = self.linear_forward, self.passes_forward, self.ring_forward
        scaled = self.with_coefficients(
            attention_s_per_pair=self.attention_forward * self.attention_s_per_pair,
            linear_s_per_token=linear * self.linear_s_per_token,
            fixed_s=linear * self.fixed_s,
            ring_intra_s_per_token=ring * self.ring_intra_s_per_token,
            ring_inter_s_per_token=ring * self.ring_inter_s_per_token,
            ring_s_per_round=passes * self.ring_s_per_round,
            ulysses_intra_s_per_token=passes * self.ulysses_intra_s_per_token,
            ulysses_inter_s_per_token=passes * self.ulysses_inter_s_per_token,
            ulysses_s=passes * self.ulysses_s,
            host_s=linear * self.host_s,
            host_s_per_round=linear * self.host_s_per_round,
            expansion_s_per_token=self.expansion_s_per_token / (1 + EXPANSION_BACKWARD),
            head_s_per_token=self.head_s_per_token / (1 + self.linear_backward),
            shard_forward=linear if self.shard_forward else 0.0,
            reduce_forward=0.0,
            shard_s=GATHERED_FORWARD * self.shard_s,
            shard_waits_s=GATHERED_FORWARD * self.shard_waits_s,
            reduce_s=0.0,
            reduce_exposed_s=0.0,
            reduce_waits_s=0.0,
        )
        encoder = None if self.encoder is None else self.encoder.forward_only()
        scan = None if self.scan is None else self.scan.forward_only()
        return dataclasses.replace(scaled, recomputed_layers=0, encoder=encoder, scan=scan, kv_growth=0.0)

    def without_states(self) -> "CostModel":
        """The cost model of groups whose recurrent layers move nothing, for lower bounds, and exchanges of heads."""
        return self if self.scan is None else dataclasses.replace(self, scan=None)

    def in_step(self, *, last: bool = False) -> "CostModel":
        """The cost model of groups beside the shards of their microbatch, the `last` one of a step or another.

        Pipelines and recurrent layers wait for shards in ways of their own.
        """
        if self.pipeline or self.scan or not self.shard_forward + self.reduce_forward:
            return self
        every = np.array((max(self.shard_s - self.exposed_s, 0.0), self.shard_waits_s))
        once = last * np.array((max(self.reduce_s - self.reduce_exposed_s, 0.0), self.reduce_waits_s))
        forward = self.shard_forward * every + self.reduce_forward * once
        backward = np.maximum(every + once - forward, 0.0)
        (forward_s, waits_forward_s), (backward_s, waits_backward_s) = forward.tolist(), backward.tolist()
        return dataclasses.replace(
            self,
            beside_forward_s=forward_s,
            beside_backward_s=backward_s,
            waits_forward_s=waits_forward_s,
            waits_backward_s=waits_backward_s,
        )

    def compute_s(self, pairs: Amount, num_tokens: Amount) -> Amount:
        """Seconds of attention and linear layers on one rank without the fixed cost (Eq. 8): a lower bound on the sum
        over d ranks."""
        return self.attention_s_per_pair * (pairs + self.attention_half_tokens * num_tokens / 2) + (
            self.linear_s_per_token * num_tokens
        )

    def group_s(
        self,
        pairs: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        *,
        degree: npt.ArrayLike,
        primitive: Primitive = Primitive.RING,
        crosses: npt.ArrayLike | None = None,
        speed: npt.ArrayLike = 1.0,
        num_sequences: npt.ArrayLike = 1,
    ) -> Floats:
        """Seconds of a group that is alone in a microbatch, forward and backward (Eq. 8-10); arguments broadcast.

        T = T_cp + T_cm - overlap x min(T_cpa, T_cma), where a rank computes 1 / d of the pairs and tokens and all
        traffic is attention's. Grows with pairs and tokens, and is at least compute / d + fixed. `crosses`: the group
        spans nodes (absent: where its degree is above `ranks_per_node`). `speed`: of its slowest rank, for which the
        others wait (`ClusterSpec.speed_of_rank`).
        """
        passes_s = self.passes_s(
            pairs,
            num_tokens,
            degree=degree,
            primitive=primitive,
            crosses=crosses,
            speed=speed,
            num_sequences=num_sequences,
        )
        return np.asarray(sum(passes_s))

    def passes_s(
        self,
        pairs: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        *,
        degree: npt.ArrayLike,
        primitive: Primitive = Primitive.RING,
        crosses: npt.ArrayLike | None = None,
        speed: npt.ArrayLike = 1.0,
        num_sequences: npt.ArrayLike = 1,
        moved_tokens: npt.ArrayLike | None = None,
    ) -> tuple[Floats, Floats, Floats]:
        """Seconds of a group's layers forward, of its head, and of its backward; their sum is `group_s`.
        `moved_tokens`: tokens whose messages take as long alone as those of the group take beside others (absent: all
        of its tokens)."""
        passes = self.terms(degree, primitive=primitive, crosses=crosses, speed=speed)
        forward_s, backward_s = (
            each.seconds(pairs, num_tokens, num_sequences=num_sequences, moved_tokens=moved_tokens) for each in passes
        )
        outer_s = np.broadcast_to(head_s(passes[0], np.asarray(num_tokens, np.float64)), forward_s.shape)
        return forward_s - outer_s, outer_s, backward_s

    def kv_share(self, heads: int) -> float:
        """Share of a token's keys and values on each of `heads` ranks that share out heads; beyond the number of
        key and value heads these are replicated."""
        return max(1 / heads, 1 / self.num_kv_heads)

    def room(self, max_tokens: int, *, degree: npt.ArrayLike, primitive: Primitive) -> Floats:
        """Return the most tokens of groups of `degree` ranks that hold `max_tokens` each; fewer where they share out
        heads and replicate keys and values (`kv_growth`)."""
        ranks = np.asarray(degree, np.float64)
        if primitive is not Primitive.ULYSSES:
            return ranks * max_tokens
        times = np.maximum(ranks / self.num_kv_heads, 1.0)
        return np.asarray(ranks * np.floor(max_tokens / (1 + self.kv_growth * (times - 1))))

    def exchanges_s(self, num_tokens: npt.ArrayLike, *, degree: int, crosses: npt.ArrayLike | None = None) -> Floats:
        """Seconds in which ranks exchange their tokens for heads and back, forward and backward, `num_tokens` together;
        infinite where they cannot share out the heads."""
        tokens = np.asarray(num_tokens, np.float64)
        passes = self.without_states().terms(degree, primitive=Primitive.ULYSSES, crosses=crosses)
        return np.asarray(sum(each.moved_s_per_token * tokens + each.moved_s for each in passes), np.float64)

    def terms(
        self,
        degree: npt.ArrayLike,
        *,
        primitive: Primitive = Primitive.RING,
        crosses: npt.ArrayLike | None = None,
        speed: npt.ArrayLike = 1.0,
    ) -> tuple[Terms, Terms]:
        """Forward and backward of groups by degree; arguments as of `group_s`."""
        ranks = np.asarray(degree, np.float64)
        across = np.asarray(ranks > self.ranks_per_node if crosses is None else crosses)
        terms_of = ulysses_terms if primitive is Primitive.ULYSSES else ring_terms
        passes = with_head(self, terms_of(self, ranks, crosses=across), ranks=ranks)
        if self.beside_forward_s or self.beside_backward_s:
            by_heads = primitive is Primitive.ULYSSES
            passes = beside_shards(self, passes, ranks=ranks, crosses=across, by_heads=by_heads)
        if isinstance(speed, float) and speed == 1.0:
            return passes
        return passes[0].at_speed(speed), passes[1].at_speed(speed)

    def microbatch_s(self, makespan_s: float, *, last: bool) -> float:
        """Seconds of a microbatch whose groups take `makespan_s` together: traffic of shards hides behind that, layer
        by layer, save the first gathers and, in the `last` one of a step, the last reductions."""
        exposed_s = self.exposed_s + (self.reduce_exposed_s if last else 0.0)
        traffic_s = self.shard_s + (self.reduce_s if last else 0.0)
        return float(overlapped_s(makespan_s, traffic_s, exposed_s, self.overlap))

    def makespan_s(self, passes_s: npt.ArrayLike, *, filled_s: float = 0.0) -> float:
        """Seconds of a microbatch of groups with these `[pass, group]` (`CostModel.passes_s`): the slowest layers
        forward, the slowest head and the slowest backward, less what ranks run ahead, but no less than any group takes,
        nor than the head and `filled_s`, in which messages and shards fill an uplink (`rayfcp.cost.uplinks`).

        Ranks wait for each other in each layer of either pass, and so between layers and head.
        A rank may begin a layer of backward when all have begun the layer before, have brought home its gradients, and
        have gathered its parameters since. So a rank that is slow in backward may be ahead of the last one to begin by
        a layer of its own less these collectives. In forward, layers differ less between groups, and all ranks are
        taken to be equally far.
        """
        passes = np.asarray(passes_s, np.float64)
        slowest_s = passes.max(axis=1)
        ahead_s = max(self.ahead * float(slowest_s[-1]) - self.ahead_s, 0.0)
        filled_s += float(slowest_s[1]) if filled_s else 0.0
        return max(float(passes.sum(axis=0).max()), float(slowest_s.sum()) - ahead_s, filled_s)

    def batch_s(self, makespans_s: list[float]) -> float:
        """Seconds of a step whose longest microbatch comes last, so that it hides the reduction."""
        *others, longest = sorted(makespans_s)
        return sum(self.microbatch_s(each, last=False) for each in others) + self.microbatch_s(longest, last=True)


def speeds_of(cluster: ClusterSpec) -> Floats:
    """Speed of each rank; 1 where the cluster does not know."""
    return np.array(cluster.speed_of_rank or (1.0,) * cluster.num_ranks, np.float64)


def group_speeds(groups: Iterable[Sequence[int]], *, cluster: ClusterSpec) -> Floats:
    """Speed of each group's slowest rank, for which the others wait: they have equal work."""
    speeds = cluster.speed_of_rank
    return np.array([min(speeds[rank] for rank in ranks) if speeds else 1.0 for ranks in groups], np.float64)


def idle_passes_s(cost: CostModel, *, cluster: ClusterSpec) -> Floats:
    """Seconds of the slowest rank in a microbatch without tokens, as of `CostModel.passes_s`."""
    forward, backward = cost.terms(1.0, speed=float(speeds_of(cluster).min()))
    outer_s = float(forward.head_s)
    forward_s, backward_s = (max(float(each.fixed_s), float(each.host_s)) for each in (forward, backward))
    return np.array([forward_s - outer_s, outer_s, backward_s])


def slowed(cost: CostModel, *, speed: float) -> CostModel:
    """The cost model of ranks of that speed."""
    if speed == 1.0:
        return cost
    return cost.with_coefficients(
        attention_s_per_pair=cost.attention_s_per_pair / speed,
        linear_s_per_token=cost.linear_s_per_token / speed,
        fixed_s=cost.fixed_s / speed,
    )
