"""What a group costs a rank in one pass, forward or backward, apart by cause.

A group's passes by its primitive: rings that pass keys and values on, exchanges of tokens for heads.

The cost model: predicted seconds of groups and microbatches (Flexible Context Parallelism, section 4.3).

Unequal ranks: what a rank of speed s does itself (attention, linear layers, the fixed cost of a microbatch) takes it
1 / s of the usual time, what moves takes as long as ever.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rayfcp.cost.analytic import ATTENTION_BACKWARD, coefficients
from rayfcp.cost.encoder import EncoderCost, check_one_stage
from rayfcp.cost.pipeline import PipelineCost
from rayfcp.cost.stages import split_layers
from rayfcp.cost.work import seen_in_rings
from rayfcp.values import ClusterSpec, HardwareProfile, ModelProfile, Primitive, Windows
from rayfcp.values.arrays import Floats

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Arrays by degree, in s per cell, s per token of the whole group, and s.

    attention = cells x `attention_s_per_cell` + tokens x `attention_s_per_token`; moved = tokens x
    `moved_s_per_token` + `moved_s`; the pass takes attention + tokens x `linear_s_per_token` + `fixed_s` + moved
    - `hidden` x min(moved - tail, `cover` x attention, `steady` x attention + edges), with
    tail = tokens x `tail_s_per_token` + `tail_s`: of what moves, the tail has no attention left to hide behind;
    edges = tokens x `edges_s_per_token` + `edges_s`: what moves in rounds in which less does than in the steady ones,
    beside attention that it does not fill. Infinite `moved_s` where the primitive cannot have that degree.

    In every layer shards travel from its start on. What moves first, tokens x `first_s_per_token`, shares its ports
    with them and takes twice as long while they are under way: for `busy_s` less tokens x `before_s_per_token`, the
    linear work before attention. What moves behind attention, tokens x `last_s_per_token`, may still meet the rest of
    them. Both come on top of moved.
    """

    attention_s_per_cell: Seconds
    attention_s_per_token: Seconds
    linear_s_per_token: Seconds
    fixed_s: float | Seconds
    moved_s_per_token: Seconds
    moved_s: Seconds
    tail_s_per_token: Seconds
    tail_s: Seconds
    cover: Seconds
    steady: Seconds
    edges_s_per_token: Seconds
    edges_s: Seconds
    hidden: float
    busy_s: Seconds
    before_s_per_token: Seconds
    first_s_per_token: Seconds
    last_s_per_token: Seconds

    def at(self, speed: npt.ArrayLike) -> "Terms":
        """The same on a rank of so many times the usual speed: what it does itself, the fixed seconds included, takes
        1 / speed as long, what moves as long as ever."""
        if isinstance(speed, float) and speed == 1.0:
            return self
        per = np.asarray(speed, np.float64)
        return replace(
            self,
            attention_s_per_cell=self.attention_s_per_cell / per,
            attention_s_per_token=self.attention_s_per_token / per,
            linear_s_per_token=self.linear_s_per_token / per,
            fixed_s=self.fixed_s / per,
            before_s_per_token=self.before_s_per_token / per,
        )

    def seconds(
        self, cells: npt.ArrayLike, num_tokens: npt.ArrayLike, *, moved_tokens: npt.ArrayLike | None = None
    ) -> Seconds:
        """Of groups with so many cells and tokens, of which keys and values of `moved_tokens` travel (absent: of all);
        arguments broadcast against the degrees."""
        tokens = np.asarray(num_tokens, np.float64)
        moved = tokens if moved_tokens is None else np.asarray(moved_tokens, np.float64)
        attention_s = self.attention_s_per_cell * np.asarray(cells, np.float64) + self.attention_s_per_token * tokens
        first_s = self.first_s_per_token * moved
        left_s = self.busy_s - self.before_s_per_token * tokens
        later_s = np.clip(left_s - first_s - attention_s, 0.0, self.last_s_per_token * moved)
        moved_s = self.moved_s_per_token * moved + self.moved_s + np.clip(left_s, 0.0, first_s) + later_s
        exposed_s = moved_s
        if self.hidden:
            can_hide_s = moved_s - self.tail_s_per_token * moved - self.tail_s
            steady_s = self.steady * attention_s + self.edges_s_per_token * moved + self.edges_s
            exposed_s = moved_s - self.hidden * np.minimum(can_hide_s, np.minimum(self.cover * attention_s, steady_s))
        return np.asarray(attention_s + self.linear_s_per_token * tokens + self.fixed_s + exposed_s)

    def sums(self) -> tuple[tuple[Seconds, Seconds, Seconds], ...]:
        """Three of s per cell, s per token and s, of which a pass that meets no shards takes the largest: all that can
        hide hides, or as much as attention can hide, or as much as that of steady rounds can and all of the edges."""
        cell, token, hidden = self.attention_s_per_cell, self.attention_s_per_token, self.hidden
        always, alone_s = token + self.linear_s_per_token, np.asarray(self.fixed_s)
        covered, steady = hidden * self.cover, hidden * self.steady
        return (
            (
                cell,
                always + (1 - hidden) * self.moved_s_per_token + hidden * self.tail_s_per_token,
                alone_s + (1 - hidden) * self.moved_s + hidden * self.tail_s,
            ),
            ((1 - covered) * cell, always + self.moved_s_per_token - covered * token, alone_s + self.moved_s),
            (
                (1 - steady) * cell,
                always + self.moved_s_per_token - steady * token - hidden * self.edges_s_per_token,
                alone_s + self.moved_s - hidden * self.edges_s,
            ),
        )


def passed_on(cost: "CostModel", ranks: Seconds, *, across: npt.NDArray[np.bool_]) -> tuple[Terms, Terms]:
    """A ring's forward and backward, in which recomputed layers run d - 1 rounds more, as in forward."""
    each_s = np.where(across, cost.ring_inter_s_per_token, cost.ring_intra_s_per_token)
    hop_s = each_s * seen_in_rings(cost.windows, ranks) / ranks
    latency_s = np.where(ranks == 1, 0.0, cost.ring_s_per_round)
    half = 1 - 1 / (2 * ranks)
    cover = (ranks - 1) / ranks
    once_s = cost.passes_forward * latency_s
    again_s = max(1 - 2 * cost.passes_forward, 0.0) * latency_s
    forward_s, backward_s = (
        np.asarray((ranks - 1) * share * hop_s) for share in (cost.ring_forward, 1 - cost.ring_forward)
    )
    shared, shared_backward = _shared(cost, ranks, across=across, firsts=(forward_s, backward_s))
    return (
        dataclasses.replace(
            _computed(cost, ranks, attention=cost.attention_forward, linear=cost.linear_forward, half=half),
            **shared,
            moved_s_per_token=forward_s,
            moved_s=np.asarray((ranks - 1) * once_s),
            cover=np.asarray(cover),
            steady=np.asarray(cover),
            hidden=cost.overlap,
        ),
        dataclasses.replace(
            _computed(cost, ranks, attention=1 - cost.attention_forward, linear=1 - cost.linear_forward, half=half),
            **shared_backward,
            moved_s_per_token=backward_s,
            moved_s=np.asarray((ranks + (ranks > 2)) * once_s + (ranks - 1) * again_s),
            tail_s_per_token=np.asarray(np.where(ranks == 1, 0.0, cost.ring_returned * hop_s)),
            tail_s=np.asarray(once_s),
            **_backward_rounds(cost, ranks, hop_s=hop_s, once_s=once_s, again_s=again_s),
        ),
    )


def _backward_rounds(
    cost: "CostModel", ranks: Seconds, *, hop_s: Seconds, once_s: Seconds, again_s: float | Seconds
) -> dict[str, Any]:
    """What hides of a ring's backward pass. Gradients follow keys and values two rounds later: the first two of d
    rounds move keys and values, the last one gradients, those between both. Layers that are recomputed pass keys and
    values on as in forward. With windows rounds differ more than that, and only sums count."""
    again = max(1 - (1 + ATTENTION_BACKWARD) * cost.attention_forward, 0.0) / (1 - cost.attention_forward)
    kept, returned = cost.ring_forward, cost.ring_returned
    cover = np.where(ranks > 2, 1 - again / ranks, (ranks - 1) / ranks)
    told = (ranks > 2) & (not cost.windows)
    edges_s = ((ranks - 1) * (1 - 2 * kept - returned) + 2 * kept + returned) * hop_s
    return {
        "cover": np.asarray(cover),
        "steady": np.asarray(np.where(told, (1 - again) * (ranks - 3) / ranks, cover)),
        "edges_s_per_token": np.asarray(np.where(told, edges_s, 0.0)),
        "edges_s": np.asarray(np.where(told, 3 * once_s + (ranks - 1) * again_s, 0.0)),
        "hidden": cost.overlap,
    }


def exchanged(cost: "CostModel", ranks: Seconds, *, across: npt.NDArray[np.bool_]) -> tuple[Terms, Terms]:
    """Ulysses' forward and backward. Of a group over several nodes, as few as hold it but two at least, some node
    has no more than its share."""
    kept = 1 - cost.ulysses_kv_share
    copied = cost.ulysses_kv_share * np.maximum(ranks / cost.num_kv_heads, 1.0)
    grown = kept + copied
    nodes = np.where(across, np.maximum(np.ceil(ranks / cost.ranks_per_node), 2.0), 1.0)
    inside = ranks / np.minimum(nodes, ranks)
    intra_s = (inside - 1) / ranks * cost.ulysses_intra_s_per_token
    inter_s = (ranks - inside) / ranks * cost.ulysses_inter_s_per_token
    per_token = grown * np.maximum(intra_s, inter_s) / ranks
    splits = (cost.num_heads % ranks == 0) & ((cost.num_kv_heads % ranks == 0) | (ranks % cost.num_kv_heads == 0))
    known = (cost.ulysses_intra_s_per_token > 0 and cost.ulysses_inter_s_per_token > 0) | (ranks == 1)
    moved_s = np.where(splits & known, np.where(ranks > 1, cost.ulysses_s, 0.0), np.inf)
    forth = cost.passes_forward * (kept + 2 * copied) / (2 * grown) * per_token  # queries, keys, values
    back = cost.passes_forward * kept / (2 * grown) * per_token  # gradients of outputs
    first, second = (
        dataclasses.replace(
            _computed(cost, ranks, attention=attention, linear=linear, half=1 / (2 * ranks)),
            **among,
            last_s_per_token=np.asarray(cost.beside * share * per_token - among["first_s_per_token"]),
            moved_s_per_token=np.asarray(share * per_token),
            moved_s=np.asarray(share * moved_s),
        )
        for attention, linear, share, among in zip(
            (cost.attention_forward, 1 - cost.attention_forward),
            (cost.linear_forward, 1 - cost.linear_forward),
            (cost.passes_forward, 1 - cost.passes_forward),
            _shared(cost, ranks, across=across, firsts=(forth, back)),
            strict=True,
        )
    )
    return first, second


def _shared(
    cost: "CostModel", ranks: Seconds, *, across: npt.NDArray[np.bool_], firsts: tuple[Seconds, Seconds]
) -> Iterator[dict[str, Any]]:
    """Of both passes, how long shards travel and how long what moves first shares ports with them."""
    port = np.where(across, cost.busy_inter_share, 1.0) * cost.beside
    for busy_s, before, first in zip(
        (cost.busy_forward_s, cost.busy_backward_s), (cost.before_forward, cost.before_backward), firsts, strict=True
    ):
        yield {
            "busy_s": np.asarray(port * busy_s),
            "before_s_per_token": np.asarray(cost.beside * before * cost.linear_s_per_token / ranks),
            "first_s_per_token": np.asarray(cost.beside * first),
        }


def _computed(cost: "CostModel", ranks: Seconds, *, attention: float, linear: float, half: Seconds) -> Terms:
    """A pass with these shares of attention and linear layers in which nothing moves; `half` of the half tokens a
    rank."""
    per_cell, none = attention * cost.attention_s_per_cell, np.zeros_like(ranks)
    return Terms(
        attention_s_per_cell=np.asarray(per_cell / ranks),
        attention_s_per_token=np.asarray(per_cell * cost.attention_half_tokens * half),
        linear_s_per_token=np.asarray(linear * cost.linear_s_per_token / ranks),
        fixed_s=linear * cost.fixed_s,
        moved_s_per_token=none,
        moved_s=none,
        tail_s_per_token=none,
        tail_s=none,
        cover=none,
        steady=none,
        edges_s_per_token=none,
        edges_s=none,
        hidden=0.0,
        busy_s=none,
        before_s_per_token=none,
        first_s_per_token=none,
        last_s_per_token=none,
    )


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
        """Analytic coefficients (`rayfcp.cost.analytic`); of a rank's device of each of `num_stages` stages with
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


def speeds_of(cluster: ClusterSpec) -> Floats:
    """Of each rank."""
    return np.array(cluster.speed_of_rank or (1.0,) * cluster.num_ranks, np.float64)


def group_speeds(groups: Iterable[Sequence[int]], *, cluster: ClusterSpec) -> Floats:
    """Of each group's slowest rank: its ranks have equal work and wait for each other."""
    held = list(groups)
    if not cluster.speed_of_rank:
        return np.ones(len(held))
    return np.array([min(cluster.speed_of_rank[rank] for rank in ranks) for ranks in held], np.float64)


def idle_passes_s(cost: CostModel, *, cluster: ClusterSpec) -> Floats:
    """Seconds of forward and backward that every microbatch takes the slowest rank, also one without tokens."""
    slowest = float(speeds_of(cluster).min())
    return np.array([float(terms.fixed_s) / slowest for terms in cost.terms(1.0)])


def slowed(cost: CostModel, *, speed: float) -> CostModel:
    """The costs of ranks of that speed."""
    if speed == 1.0:
        return cost
    return cost.with_coefficients(
        attention_s_per_cell=cost.attention_s_per_cell / speed,
        linear_s_per_token=cost.linear_s_per_token / speed,
        fixed_s=cost.fixed_s / speed,
    )
