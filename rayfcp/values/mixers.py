"""Shapes of single layers, for models whose layers are not all equal: what mixes tokens, and the MLP."""

from dataclasses import dataclass

from rayfcp.values.layers import FULL, LayerKind, RecurrentKind, TokenwiseKind

STATE_BYTES = 4
"""Bytes of a number of a recurrent state, on the wire too: bf16 messages lose three digits of the gradients."""

CHUNK_TOKENS = 64
"""Tokens of a chunk of recurrent kernels, inside which they compute as attention does."""

_NONE, _RECURRENT = TokenwiseKind(), RecurrentKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerProfile:
    """What mixes the tokens of a layer, nothing by default. `parameters`: of its matrices, all of which a token
    passes."""

    kind: LayerKind = _NONE
    parameters: int = 0

    @property
    def pair_flops(self) -> float:
        """Forward FLOPs of a visible (query, key) pair."""
        return 0.0

    @property
    def token_flops(self) -> float:
        """Forward FLOPs of a token beside matrices and pairs."""
        return 0.0

    @property
    def expansion_flops(self) -> float:
        """Forward FLOPs on each rank that attends to a key which travelled as a latent."""
        return 0.0

    @property
    def moved_elements(self) -> int:
        """Numbers of a token that travel in rounds."""
        return 0

    @property
    def state_elements(self) -> tuple[int, int]:
        """Numbers of a part's transition T and of a state, U or S."""
        return 0, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProfile(MixerProfile):
    """Softmax attention. `head_dim`: of queries and keys, `value_dim`: of values. `latent_size` above 0: multi-head
    latent attention (DeepSeek-V2, Section 2.1), where a token's latent and its shared rotated key of `rope_size`
    travel in place of keys and values of all heads. `head_norms`: as of `ModelProfile`."""

    kind: LayerKind = FULL
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    latent_size: int = 0
    rope_size: int = 0
    head_norms: bool = False

    @property
    def pair_flops(self) -> float:
        return 2.0 * self.num_heads * (self.head_dim + self.value_dim)

    @property
    def expansion_flops(self) -> float:
        return 2.0 * self.latent_size * self.num_heads * (self.head_dim - self.rope_size + self.value_dim)

    @property
    def moved_elements(self) -> int:
        if self.latent_size:
            return self.latent_size + self.rope_size
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceProfile(MixerProfile):
    """A recurrence with a state of `num_heads` x `key_dim` x `value_dim`.

    `transition_size`: numbers of a head's T: `key_dim`^2 where it is a matrix (delta rules), `key_dim` where it is
    diagonal, 1 where it is a scalar. `conv_channels`: of the causal convolution before it, 0 without one.
    """

    kind: LayerKind = _RECURRENT
    num_heads: int
    key_dim: int
    value_dim: int
    transition_size: int
    conv_channels: int = 0

    @property
    def token_flops(self) -> float:
        """In chunks: scores of keys and values inside, as of `CHUNK_TOKENS` / 2 keys, and the state read and written;
        a delta rule solves a triangular system beside, and a part that is cut makes its T."""
        inside = CHUNK_TOKENS * (self.key_dim + self.value_dim)
        state = 4.0 * self.key_dim * self.value_dim
        is_delta = self.transition_size > self.key_dim
        solved = CHUNK_TOKENS * (2.0 * self.key_dim + self.value_dim) if is_delta else 0.0
        return self.num_heads * (inside + state + solved)

    @property
    def state_elements(self) -> tuple[int, int]:
        return self.num_heads * self.transition_size, self.num_heads * self.key_dim * self.value_dim

    @property
    def is_delta(self) -> bool:
        """True if T is a matrix."""
        return self.transition_size > self.key_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: its mixer, and an MLP or `num_experts` of them as of `ModelProfile`. Without an MLP `ffn_size` is 0.
    `mlp_matrices`: of an MLP, 3 where it is gated, else 2."""

    mixer: MixerProfile
    ffn_size: int
    num_experts: int = 1
    experts_per_token: int = 1
    shared_ffn_size: int = 0
    mlp_matrices: int = 3
