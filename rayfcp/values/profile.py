"""Models and machines as numbers: what the cost model, the memory model and MFU are computed from."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfcp.values.layers import FULL, LayerKind, LayerKinds, attends, count_kinds
from rayfcp.values.mixers import AttentionProfile, LayerProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionProfile:
    """Shape of a vision encoder: a transformer over patches with full attention inside each image, and mergers.

    `patch_values` numbers make a patch; the MLP is of `ffn_size`, gated or not. A merger takes `merged_patches` patches
    to one token by two matrices, `merged_patches` x `hidden_size` -> `merger_size` -> the language model's hidden size;
    each of `num_mergers` gives every token features of its own (the first layers add those of all but one). `frozen`:
    it is not trained, so that there is no backward pass and none of its activations are kept.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    patch_values: int
    merged_patches: int
    merger_size: int
    num_mergers: int = 1
    gated: bool = False
    frozen: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer in matrices: attention and MLP."""
        return 4 * self.hidden_size**2 + (3 if self.gated else 2) * self.hidden_size * self.ffn_size

    @property
    def attention_flops_per_pair(self) -> float:
        """Forward FLOPs per (patch, patch) pair of an image, all layers: 2 products, 2 FLOPs each."""
        return 4.0 * self.num_layers * self.hidden_size

    def merger_parameters(self, token_size: int) -> int:
        """Parameters of one merger to tokens of a language model of hidden size `token_size`."""
        return self.merger_size * (self.merged_patches * self.hidden_size + token_size)

    def outer_parameters(self, token_size: int) -> int:
        """Parameters beside the layers: the patch embedding and all mergers."""
        return self.patch_values * self.hidden_size + self.num_mergers * self.merger_parameters(token_size)

    def num_parameters(self, token_size: int) -> int:
        """Parameters in matrices; norms and learned positions are left out."""
        return self.num_layers * self.layer_parameters + self.outer_parameters(token_size)

    def linear_flops_per_patch(self, token_size: int) -> float:
        """Forward FLOPs per patch outside attention: 2 per matmul parameter, a merger once for its patches."""
        mergers = self.num_mergers * self.merger_parameters(token_size) / self.merged_patches
        return 2.0 * (self.num_layers * self.layer_parameters + self.patch_values * self.hidden_size + mergers)


PACKED_BYTES, PACKED_NUMBERS = 9, 16
"""Bytes of so many numbers in four bits: two a byte, and a scale of four bytes for 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterProfile:
    """Adapters in all layers of a model whose own weights are frozen. `layer_parameters`: of one layer, all that is
    trained there; `token_elements`: numbers that they save for backward per token and layer. `packed_parameters`:
    frozen ones of a layer that are stored in four bits, and `largest_packed` of one matrix of them."""

    layer_parameters: int
    token_elements: int
    packed_parameters: int = 0
    largest_packed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Shape of a decoder-only transformer with a gated MLP. `head_norms`: queries and keys are normed before attention,
    head by head or together.

    With `num_experts` above 1 each layer has so many MLPs of `ffn_size` and a router, which sends a token to
    `experts_per_token` of them; `shared_ffn_size` is the width of the MLP that all tokens pass beside. A token's work
    counts the MLPs that it passes, memory and messages count all.

    `layers`: shapes of the layers where these are not all equal (`of_layers`); everything is counted from
    `every_layer`. Then `num_heads` and `num_kv_heads` divide those of all layers, and bound the degrees of groups that
    share out heads, `ffn_size` divides the width of all MLPs, `num_experts` and `shared_ffn_size` are the largest ones,
    and `head_norms` and `kind_of_layer` say what `layers` say.

    `vision`: the encoder of a VLM; parameters, FLOPs and bytes are of the language model alone. `adapter`: what is
    trained in place of the model's own weights; parameters and FLOPs include it.

    `kind_of_layer`: the kind of each layer; empty where all have full attention. `keeps_attention`: recomputed layers
    keep the output and the logsumexp of attention, so that its forward pass is not repeated. `compiled`: layers are
    compiled around their attention (`train.compile`), and save less for the backward pass. `fp32_residual`: activations
    between layers are in fp32 in a model of any dtype.

    `num_outputs`: of the head; the vocabulary if None. `head_fraction`: fraction of the run's tokens that the head runs
    on, those with targets.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied_embeddings: bool = False
    head_norms: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    shared_ffn_size: int = 0
    kind_of_layer: tuple[LayerKind, ...] = ()
    layers: tuple[LayerProfile, ...] = ()
    vision: VisionProfile | None = None
    keeps_attention: bool = False
    compiled: bool = False
    fp32_residual: bool = False
    adapter: AdapterProfile | None = None
    num_outputs: int | None = None
    head_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.layers:
            kinds = tuple(each.kind for each in self.layers)
            object.__setattr__(self, "kind_of_layer", () if set(kinds) == {FULL} else kinds)
        for name in ("kind_of_layer", "layers"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, must be empty or describe that of each "
                    f"of {self.num_layers} layers; correct the model's profile"
                )

    @classmethod
    def of_layers(cls, layers: Iterable[LayerProfile], **others: Any) -> "ModelProfile":
        """The model with these layers, and without `layers` where those are equal but for their kinds, as far as the
        fields can say that."""
        given = tuple(layers)
        attention = [each.attention for each in given if each.attention]
        widths = [each.ffn_size for each in given if each.ffn_size]
        most = max(given, key=lambda each: each.num_experts)
        shape: dict[str, Any] = {
            "num_layers": len(given),
            "hidden_size": given[0].hidden_size,
            "num_heads": math.gcd(*(each.num_heads for each in attention)) or 1,
            "num_kv_heads": math.gcd(*(each.num_kv_heads for each in attention)) or 1,
            "head_dim": max((each.head_dim for each in attention), default=1),
            "ffn_size": math.gcd(*widths),
            "head_norms": any(each.head_norms for each in attention),
            "num_experts": most.num_experts,
            "experts_per_token": most.experts_per_token,
            "shared_ffn_size": max(each.shared_ffn_size for each in given),
        }
        kinds = tuple(each.kind for each in given)
        equal = cls(**shape, **others, kind_of_layer=() if set(kinds) == {FULL} else kinds)
        return equal if equal.every_layer == given else cls(**shape, **others, layers=given)

    @property
    def every_layer(self) -> tuple[LayerProfile, ...]:
        """The shape of each layer."""
        if self.layers:
            return self.layers
        of_kind = {kind: self._equal_layer(kind) for kind in set(self.kind_of_layer) or {FULL}}
        return tuple(of_kind[kind] for kind in self.kind_of_layer or (FULL,) * self.num_layers)

    def _equal_layer(self, kind: LayerKind) -> LayerProfile:
        attention = AttentionProfile(
            kind=kind,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            head_norms=self.head_norms,
        )
        return LayerProfile(
            mixers=(attention.with_parameters(self.hidden_size),),
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            shared_ffn_size=self.shared_ffn_size,
        )

    def layers_of(self, layers_of_stage: Sequence[int]) -> tuple[tuple[LayerProfile, ...], ...]:
        """The layers of each stage."""
        every, ends = self.every_layer, [sum(layers_of_stage[: stage + 1]) for stage in range(len(layers_of_stage))]
        return tuple(every[stop - count : stop] for stop, count in zip(ends, layers_of_stage, strict=True))

    @property
    def layer_kinds(self) -> LayerKinds:
        """Weight of each kind in the mean over layers of visible pairs: the number of its layers, or, where a pair
        takes more FLOPs in some kinds than in others, in proportion to that; 0 for kinds without pairs. Empty where all
        layers have full attention, and nothing else."""
        weights: dict[LayerKind, int] = {}
        for layer in self.every_layer:
            weights[layer.kind] = weights.get(layer.kind, 0) + layer.pair_flops
        if weights.keys() == {FULL}:
            return ()
        unit = math.gcd(*(layer.pair_flops for layer in self.every_layer)) or 1
        return tuple(sorted((kind, weight // unit) for kind, weight in weights.items()))

    @property
    def attention_kinds(self) -> LayerKinds:
        """`layer_kinds` of attention alone; empty where it is full in all layers that attend."""
        weights: dict[LayerKind, int] = {}
        for kind, weight in self.layer_kinds:
            if attends(kind):
                weights[kind.mask] = weights.get(kind.mask, 0) + weight
        return () if weights.keys() <= {FULL} else tuple(sorted(weights.items()))

    def stage_kinds(self, layers_of_stage: Sequence[int]) -> tuple[LayerKinds, ...]:
        """Number of layers by kind in each stage, also where all have full attention."""
        return tuple(count_kinds(each.kind for each in layers) for layers in self.layers_of(layers_of_stage))

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 1

    @property
    def _adapters(self) -> int:
        """Parameters of one layer's adapters."""
        return self.adapter.layer_parameters if self.adapter else 0

    def parameters_of(self, layers: Iterable[LayerProfile]) -> int:
        """Parameters of layers in matrices, those of all experts and adapters."""
        return sum(each.parameters + self._adapters for each in layers)

    def linear_flops_of(self, layers: Iterable[LayerProfile]) -> int:
        """Forward FLOPs per token of layers outside attention: 2 per matmul parameter, and those of recurrences."""
        return sum(each.linear_flops + 2 * self._adapters for each in layers)

    @property
    def layer_matmul_parameters(self) -> int:
        """Parameters of one layer by which a token is multiplied, in the mean over layers, rounded."""
        return self.linear_flops_of(self.every_layer) // (2 * self.num_layers)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer in matrices, of the largest one."""
        return max(each.parameters for each in self.every_layer) + self._adapters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings, with those for single layers."""
        return self.vocab_size * (self.hidden_size + sum(each.input_size for each in self.layers))

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, which are the embedding's too if `tied_embeddings`."""
        return self.head_size * self.hidden_size

    @property
    def head_size(self) -> int:
        """Outputs of the head."""
        return self.vocab_size if self.num_outputs is None else self.num_outputs

    @property
    def head_flops_per_token(self) -> float:
        """Forward FLOPs of the output head divided by all tokens; it runs on `head_fraction` of them."""
        return 2.0 * self.head_parameters * self.head_fraction

    @property
    def num_parameters(self) -> int:
        """Parameters in matrices; norms are left out (under 0.1 %)."""
        outer = self.embedding_parameters + (0 if self.tied_embeddings else self.head_parameters)
        return self.parameters_of(self.every_layer) + outer

    @property
    def num_trained(self) -> int:
        """Parameters in matrices that are trained: all, or those of adapters."""
        return self.num_layers * self.adapter.layer_parameters if self.adapter else self.num_parameters

    def trained_of(self, layer: LayerProfile) -> int:
        """Parameters of a layer in matrices whose gradients are computed and reduced."""
        return self.adapter.layer_parameters if self.adapter else layer.parameters

    @property
    def linear_backward(self) -> float:
        """FLOPs of backward over those of forward, outside attention: gradients of inputs, and of trained weights."""
        if self.adapter is None:
            return 2.0
        return 1.0 + 2.0 * self.num_layers * self.adapter.layer_parameters / self.linear_flops_per_token

    def frozen_bytes(self, bytes_per_element: int) -> int:
        """Bytes of the weights that are not trained."""
        packed = self.num_layers * (self.adapter.packed_parameters if self.adapter else 0)
        plain = self.num_parameters - self.num_trained - packed
        return plain * bytes_per_element + packed * PACKED_BYTES // PACKED_NUMBERS

    @property
    def linear_flops_per_token(self) -> float:
        """Forward FLOPs per token outside attention: 2 per matmul parameter, output head included, and recurrences."""
        return float(self.linear_flops_of(self.every_layer)) + self.head_flops_per_token

    @property
    def attention_flops_per_pair(self) -> float:
        """Forward FLOPs per computed (query, key) pair, all layers: 2 products, 2 FLOPs each."""
        return float(sum(each.pair_flops for each in self.every_layer))

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of one token's keys and values, or of what travels in place of them, in one layer, the one that has
        most."""
        return max(each.moved_elements for each in self.every_layer) * bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A kind of device and its links. FLOP/s are dense peaks of `dtype_bytes`-wide numbers; efficiencies
    are the shares of peak reached by large kernels; bandwidths in bytes/s per rank and direction. `overlap`
    is the share of communication that can hide behind attention: 0 where the same cores do both.

    A kernel over n tokens reaches n / (n + half) of its efficiency: `attention_half_tokens` for the
    shorter side of one (query, key) block, `linear_half_tokens` for the tokens of a rank in a microbatch that pass
    one matrix: of all of them, or of those that an expert gets.
    `node_uplink_bandwidth`: all ranks of a node together, per direction (0: the sum of its ranks' own links).
    `collective_intra_s`, `collective_inter_s`: latency that each hop inside a node and between nodes adds to a gather
    or reduction of shards, which takes `latency_s` beside them (both 0: such collectives have no latency).
    `host_layer_s`: seconds in which the host enqueues a layer, forward and backward, beside the device (0: the device
    never waits for it); `host_round_s`: a further round of a layer's attention, or exchange of heads, in the same way.
    `source` names for every figure where it comes from.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    linear_efficiency: float
    attention_efficiency: float
    devices_per_node: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    latency_s: float
    microbatch_overhead_s: float
    dtype_bytes: int = 2
    overlap: float = 1.0
    attention_half_tokens: float = 0.0
    linear_half_tokens: float = 0.0
    node_uplink_bandwidth: float = 0.0
    collective_intra_s: float = 0.0
    collective_inter_s: float = 0.0
    host_layer_s: float = 0.0
    host_round_s: float = 0.0
    source: str = ""
