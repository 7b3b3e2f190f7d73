"""Models and machines as numbers: what the cost model, the memory model and MFU are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfcp.values.layers import FULL, LayerKind, LayerKinds, count_kinds


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

    `vision`: the encoder of a VLM; parameters, FLOPs and bytes are of the language model alone. `adapter`: what is
    trained in place of the model's own weights; parameters and FLOPs include it.

    `kind_of_layer`: the kind of each layer; empty where all have full attention. `keeps_attention`: recomputed layers
    keep the output and the logsumexp of attention, so that its forward pass is not repeated. `compiled`: layers are
    compiled around their attention (`train.compile`), and save less for the backward pass.

    `num_outputs`: of the head; the vocabulary if None.
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
    vision: VisionProfile | None = None
    keeps_attention: bool = False
    compiled: bool = False
    adapter: AdapterProfile | None = None
    num_outputs: int | None = None

    def __post_init__(self) -> None:
        if len(self.kind_of_layer) not in (0, self.num_layers):
            raise ValueError(
                f"kind_of_layer has {len(self.kind_of_layer)} entries, must be empty or name the kind of each of "
                f"{self.num_layers} layers; correct the model's profile"
            )

    @property
    def layer_kinds(self) -> LayerKinds:
        """Number of layers by kind; empty where all have full attention."""
        return () if set(self.kind_of_layer) <= {FULL} else count_kinds(self.kind_of_layer)

    def stage_kinds(self, layers_of_stage: Sequence[int]) -> tuple[LayerKinds, ...]:
        """Number of layers by kind in each stage, also where all have full attention."""
        found, first = [], 0
        for count in layers_of_stage:
            found.append(count_kinds(self.kind_of_layer[first : first + count] or [FULL] * count))
            first += count
        return tuple(found)

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 1

    @property
    def active_ffn_size(self) -> int:
        """Width of all MLPs that a token passes in a layer."""
        return self.experts_per_token * self.ffn_size + self.shared_ffn_size

    @property
    def layer_matmul_parameters(self) -> int:
        """Parameters of one layer by which a token is multiplied."""
        return self._around_experts + 3 * self.hidden_size * self.active_ffn_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer in matrices, those of all experts."""
        return self._around_experts + 3 * self.hidden_size * (self.num_experts * self.ffn_size + self.shared_ffn_size)

    @property
    def _around_experts(self) -> int:
        """Parameters of one layer's attention, router and adapters."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        attention += self.adapter.layer_parameters if self.adapter else 0
        return attention + (self.num_experts * self.hidden_size if self.has_experts else 0)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, which are the embedding's too if `tied_embeddings`."""
        return self.head_size * self.hidden_size

    @property
    def head_size(self) -> int:
        """Outputs of the head."""
        return self.vocab_size if self.num_outputs is None else self.num_outputs

    @property
    def num_parameters(self) -> int:
        """Parameters in matrices; norms are left out (under 0.1 %)."""
        outer = self.embedding_parameters + (0 if self.tied_embeddings else self.head_parameters)
        return self.num_layers * self.layer_parameters + outer

    @property
    def num_trained(self) -> int:
        """Parameters in matrices that are trained: all, or those of adapters."""
        return self.num_layers * self.adapter.layer_parameters if self.adapter else self.num_parameters

    @property
    def trained_layer_parameters(self) -> int:
        """Parameters of one layer in matrices whose gradients are computed and reduced."""
        return self.adapter.layer_parameters if self.adapter else self.layer_parameters

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
        """Forward FLOPs per token outside attention: 2 per matmul parameter, output head included."""
        return 2.0 * (self.num_layers * self.layer_matmul_parameters + self.head_parameters)

    @property
    def attention_flops_per_pair(self) -> float:
        """Forward FLOPs per computed (query, key) pair, all layers: 2 products, 2 FLOPs each."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A kind of device and its links. FLOP/s are dense peaks of `dtype_bytes`-wide numbers; efficiencies
    are the shares of peak reached by large kernels; bandwidths in bytes/s per rank and direction. `overlap`
    is the share of communication that can hide behind attention: 0 where the same cores do both.

    A kernel over n tokens reaches n / (n + half) of its efficiency: `attention_half_tokens` for the
    shorter side of one (query, key) block, `linear_half_tokens` for the tokens of a rank in a microbatch.
    `node_uplink_bandwidth`: all ranks of a node together, per direction (0: the sum of its ranks' own links).
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
    source: str = ""
