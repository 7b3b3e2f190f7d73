"""Shapes of single layers, for models whose layers are not all equal: what mixes tokens, and the MLP."""

import dataclasses
from dataclasses import dataclass
from typing import Self

from rayfcp.values.layers import FULL, HybridKind, LayerKind, RecurrentKind, TokenwiseKind

STATE_BYTES = 4
"""Bytes of a number of a recurrent state, on the wire too: bf16 messages lose three digits of the gradients."""

CHUNK_TOKENS = 64
"""Tokens of a chunk of recurrent kernels, inside which they compute as attention does."""

PART_TOKENS = 1024
"""Tokens that a part of a cut sequence is taken to have at least, for the memory of its states."""

_NONE, _RECURRENT = TokenwiseKind(), RecurrentKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerProfile:
    """What mixes the tokens of a layer, nothing by default. `parameters`: of its matrices, all of which a token
    passes."""

    kind: LayerKind = _NONE
    parameters: int = 0

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs of a visible (query, key) pair."""
        return 0

    @property
    def token_flops(self) -> int:
        """Forward FLOPs of a token beside matrices and pairs."""
        return 0

    @property
    def expansion_flops(self) -> int:
        """Forward FLOPs on each rank that attends to a key which travelled as a latent."""
        return 0

    @property
    def moved_elements(self) -> int:
        """Numbers of a token that travel in rounds."""
        return 0

    @property
    def exchanged_elements(self) -> tuple[int, int]:
        """Numbers of a token's queries and of its outputs, which ranks that share out heads exchange beside
        `moved_elements`."""
        return 0, 0

    @property
    def state_elements(self) -> tuple[int, int]:
        """Numbers of a part's transition T and of a state, U or S."""
        return 0, 0

    @property
    def halo_elements(self) -> int:
        """Numbers that a causal convolution needs from before a part."""
        return 0

    def output_parameters(self, hidden_size: int) -> int:  # noqa: ARG002  of mixers that have outputs
        """Parameters of the matrix behind the mixing."""
        return 0

    @property
    def saved_elements(self) -> int:
        """Numbers of a token that backward needs, in the precision of activations."""
        return 0

    @property
    def normed_elements(self) -> int:
        """Numbers of a token that are normed inside, head by head or together."""
        return 0

    @property
    def saved_statistics(self) -> int:
        """Numbers of a token that backward needs in fp32."""
        return 0

    @property
    def kept_elements(self) -> int:
        """Those of `saved_elements` that a recomputed layer keeps which does not mix tokens again."""
        return 0

    @property
    def kept_statistics(self) -> int:
        """Those of `saved_statistics` that it keeps."""
        return 0

    @property
    def lent_elements(self) -> int:
        """Those of `moved_elements` that later layers use again, so that a recomputed layer keeps them."""
        return 0

    @property
    def working_elements(self) -> int:
        """Numbers of a token in fp32 that only the microbatch which computes has."""
        return 0

    @property
    def expanded_elements(self) -> int:
        """Numbers of a token's keys and values where it attends, made from what travels; 0 where these travel."""
        return 0

    def over(self, count: int) -> Self:
        """The part on one of `count` tensor-parallel devices."""
        return dataclasses.replace(self, parameters=self.parameters // count)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProfile(MixerProfile):
    """Softmax attention. `head_dim`: of queries and keys, `value_dim`: of values. `gated`: outputs are multiplied by a
    gate, as wide as they. `head_norms`: as of `ModelProfile`.

    `latent_size` above 0: multi-head latent attention (DeepSeek-V2, Section 2.1), where a token's latent and its shared
    rotated key of `rope_size` travel in place of keys and values of all heads, so that `num_kv_heads` is 1; queries
    come from a latent of `query_latent_size`, or from the token itself where that is 0.

    `key_matrices`: those to keys and values: 2, or 1 where a key is also the value before norms and rotation, or 0
    where an earlier layer's keys and values are used, which has `lends_keys` and keeps them when it is recomputed.
    """

    kind: LayerKind = FULL
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    latent_size: int = 0
    query_latent_size: int = 0
    rope_size: int = 0
    head_norms: bool = False
    gated: bool = False
    key_matrices: int = 2
    lends_keys: bool = False

    def with_parameters(self, hidden_size: int) -> "AttentionProfile":
        """The same with `parameters` counted: matrices to queries, keys, values and gate, and from outputs."""
        queries, outputs = self.exchanged_elements
        source = self.query_latent_size or hidden_size
        found = source * queries + (1 + self.gated) * hidden_size * outputs
        found += hidden_size * self.moved_elements * self.key_matrices // 2
        found += hidden_size * self.query_latent_size + self.expansion_flops // 2
        return dataclasses.replace(self, parameters=found)

    @property
    def pair_flops(self) -> int:
        return 2 * self.num_heads * (self.head_dim + self.value_dim)

    @property
    def expansion_flops(self) -> int:
        return 2 * self.latent_size * self.num_heads * (self.head_dim - self.rope_size + self.value_dim)

    @property
    def moved_elements(self) -> int:
        if self.latent_size:
            return self.latent_size + self.rope_size
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def exchanged_elements(self) -> tuple[int, int]:
        return self.num_heads * self.head_dim, self.num_heads * self.value_dim

    def output_parameters(self, hidden_size: int) -> int:
        return hidden_size * self.num_heads * self.value_dim

    @property
    def saved_elements(self) -> int:
        gates = 2 * self.gated * self.num_heads * self.value_dim
        return sum(self.exchanged_elements) + self.moved_elements + self.query_latent_size + gates

    @property
    def normed_elements(self) -> int:
        heads = self.head_norms * (self.num_heads + self.num_kv_heads) * self.head_dim
        return heads + self.latent_size + self.query_latent_size

    @property
    def saved_statistics(self) -> int:
        return self.num_heads

    @property
    def kept_elements(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def kept_statistics(self) -> int:
        return self.num_heads

    @property
    def lent_elements(self) -> int:
        return self.lends_keys * self.moved_elements

    @property
    def expanded_elements(self) -> int:
        return sum(self.exchanged_elements) if self.latent_size else 0

    def over(self, count: int) -> "AttentionProfile":
        return dataclasses.replace(
            self,
            parameters=self.parameters // count,
            num_heads=self.num_heads // count,
            num_kv_heads=self.num_kv_heads // count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceProfile(MixerProfile):
    """A recurrence with a state of `num_heads` x `key_dim` x `value_dim`, or, with `key_dim` 0, a convolution alone.

    `transition_size`: numbers of a head's T: `key_dim`^2 where it is a matrix (delta rules), `key_dim` where it is
    diagonal, 1 where it is a scalar, 0 where it is a constant. `conv_channels`: of the causal convolution before it, 0
    without one. `gated`: outputs are normed and multiplied by a gate.
    """

    kind: LayerKind = _RECURRENT
    num_heads: int
    key_dim: int
    value_dim: int
    transition_size: int
    conv_channels: int = 0
    gated: bool = True

    @property
    def is_delta(self) -> bool:
        """True if T is a matrix."""
        return self.transition_size > self.key_dim

    @property
    def token_flops(self) -> int:
        """In chunks: scores of keys and values inside, as of `CHUNK_TOKENS` / 2 keys, and the state read and written;
        a delta rule solves a triangular system beside."""
        if not self.key_dim:
            return 0
        inside = CHUNK_TOKENS * (self.key_dim + self.value_dim)
        state = 4 * self.key_dim * self.value_dim
        solved = CHUNK_TOKENS * (2 * self.key_dim + self.value_dim) if self.is_delta else 0
        return self.num_heads * (inside + state + solved)

    @property
    def state_elements(self) -> tuple[int, int]:
        return self.num_heads * self.transition_size, self.num_heads * self.key_dim * self.value_dim

    @property
    def halo_elements(self) -> int:
        return self.conv_channels * self.kind.recurrence.halo if self.kind.recurrence else 0

    @property
    def key_elements(self) -> int:
        """Numbers of a token's queries and keys."""
        if self.conv_channels:
            return max(self.conv_channels - self.num_heads * self.value_dim, 0)
        return 2 * self.num_heads * self.key_dim

    @property
    def num_key_heads(self) -> int:
        """Heads of queries and keys, which heads of values share."""
        return max(self.key_elements // (2 * self.key_dim or 1), 1)

    @property
    def part_flops(self) -> int:
        """Backward FLOPs of a token of a cut sequence that make the gradient of the state before its part."""
        return 2 * self.num_heads * self.key_dim * self.value_dim

    @property
    def summary_flops(self) -> int:
        """Forward FLOPs of a token of a cut sequence for T, U and P: of delta rules those of a kernel whose values are
        wider by the keys, of others the products that make U."""
        if self.is_delta:
            wider = 2 * CHUNK_TOKENS * self.key_dim + 4 * self.key_dim**2
            return self.token_flops + self.num_heads * wider
        return 2 * self.num_heads * self.key_dim * self.value_dim

    @property
    def gates(self) -> int:
        """Numbers of a token's decays and, of delta rules, of its rates in one head."""
        return 2 if self.is_delta else self.transition_size

    def exchanged_by_heads(self, degree: int) -> tuple[float, float]:
        """Numbers of a token's inputs, as they are before the convolution, and of its outputs on each of `degree` ranks
        that share out heads; queries and keys are replicated beyond their number of heads."""
        inputs = self.num_heads * ((1 + self.gated) * self.value_dim + self.gates) / degree
        outputs = self.num_heads * self.value_dim / degree
        return inputs + self.key_elements / min(degree, self.num_key_heads), outputs

    def output_parameters(self, hidden_size: int) -> int:
        return hidden_size * self.num_heads * self.value_dim

    @property
    def saved_elements(self) -> int:
        """Inputs and outputs of the convolution, or queries, keys and values; of delta rules `kept_elements`, and the
        inverse of each chunk's triangular system; outputs and their gate, normed and multiplied."""
        inputs = 2 * self.conv_channels or self.num_heads * (2 * self.key_dim + self.value_dim)
        solved = self.num_heads * CHUNK_TOKENS * self.is_delta
        return inputs + self.kept_elements + solved + self.num_heads * (1 + 2 * self.gated) * self.value_dim

    @property
    def kept_elements(self) -> int:
        """Of delta rules P, with which gradients of states are made."""
        return self.num_heads * self.key_dim * self.is_delta

    @property
    def normed_elements(self) -> int:
        return self.gated * self.num_heads * self.value_dim

    @property
    def saved_statistics(self) -> int:
        return 2 * self.num_heads + self.kept_statistics

    @property
    def kept_statistics(self) -> int:
        """T and the state before a part, and so nothing is sent again."""
        return -(-sum(self.state_elements) // PART_TOKENS)

    @property
    def working_elements(self) -> int:
        """Queries, keys and widened values of kernels, scores inside a chunk, and the gradients of all."""
        return 2 * self.num_heads * (3 * self.key_dim + self.value_dim + CHUNK_TOKENS)

    def over(self, count: int) -> "RecurrenceProfile":
        return dataclasses.replace(
            self,
            parameters=self.parameters // count,
            num_heads=self.num_heads // count,
            conv_channels=self.conv_channels // count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: its mixers, side by side, and an MLP or `num_experts` of them as of `ModelProfile`. Without an MLP
    `ffn_size` is 0. `mlp_matrices`: of an MLP, 3 where it is gated, else 2. `extra_norms`: beside one before the mixers
    and one before the MLP.

    `input_size`: of a second embedding of the token, for this layer alone (Gemma 3n and 4), which a gate takes in: that
    is a gated MLP of this width, part of `ffn_size` or `shared_ffn_size`, whose up-projection comes before all layers.
    """

    mixers: tuple[MixerProfile, ...]
    hidden_size: int
    ffn_size: int
    num_experts: int = 1
    experts_per_token: int = 1
    shared_ffn_size: int = 0
    mlp_matrices: int = 3
    extra_norms: int = 0
    input_size: int = 0

    @property
    def attention(self) -> AttentionProfile | None:
        """Its softmax attention."""
        return next((each for each in self.mixers if isinstance(each, AttentionProfile)), None)

    @property
    def kind(self) -> LayerKind:
        """Kind of its mixers."""
        recurrence = next((each.kind.recurrence for each in self.mixers if each.kind.recurrence), None)
        if self.attention is None:
            return recurrence or _NONE
        own = self.attention.kind
        return HybridKind(window=own.window, chunk=own.chunk, halo=recurrence.halo) if recurrence else own

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 1

    @property
    def active_ffn_size(self) -> int:
        """Width of all MLPs that a token passes."""
        return self.experts_per_token * self.ffn_size + self.shared_ffn_size

    @property
    def matmul_parameters(self) -> int:
        """Parameters by which a token is multiplied."""
        return self._around_experts + self.mlp_matrices * self.hidden_size * self.active_ffn_size

    @property
    def parameters(self) -> int:
        """Parameters in matrices, those of all experts."""
        width = self.num_experts * self.ffn_size + self.shared_ffn_size
        return self._around_experts + self.mlp_matrices * self.hidden_size * width

    @property
    def _around_experts(self) -> int:
        router = self.num_experts * self.hidden_size if self.has_experts else 0
        return sum(each.parameters for each in self.mixers) + router

    @property
    def before_parameters(self) -> int:
        """Parameters that a token passes before it mixes with others."""
        return sum(each.parameters - each.output_parameters(self.hidden_size) for each in self.mixers)

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs of a visible (query, key) pair."""
        return sum(each.pair_flops for each in self.mixers)

    @property
    def token_flops(self) -> int:
        """Forward FLOPs of a token beside matrices and pairs."""
        return sum(each.token_flops for each in self.mixers)

    @property
    def linear_flops(self) -> int:
        """Forward FLOPs of a token beside pairs."""
        return 2 * self.matmul_parameters + self.token_flops

    @property
    def idle_flops(self) -> int:
        """Forward FLOPs of a token in the experts that it does not pass."""
        return 2 * (self.parameters - self.matmul_parameters)

    @property
    def expansion_flops(self) -> int:
        return sum(each.expansion_flops for each in self.mixers)

    @property
    def moved_elements(self) -> int:
        """Numbers of a token that travel in rounds of attention."""
        return sum(each.moved_elements for each in self.mixers)

    @property
    def exchanged_elements(self) -> int:
        """Numbers of a token that ranks which share out heads exchange: queries, what travels, outputs."""
        return sum(sum(each.exchanged_elements) for each in self.mixers) + self.moved_elements

    def over(self, count: int) -> "LayerProfile":
        """The part on one of `count` tensor-parallel devices."""
        return dataclasses.replace(
            self,
            mixers=tuple(each.over(count) for each in self.mixers),
            ffn_size=self.ffn_size // count,
            shared_ffn_size=self.shared_ffn_size // count,
        )
