"""Keys and values of multi-head latent attention, made from the latents that travel in their place.

Of a token there are a latent c, `[1, latent]`, and a rotated key r, `[1, rope]`, which all heads share. Head h has the
key `[U_h c, r]` and the value `V_h c`; row blocks U_h and V_h make up the up-projection. With gradients dk and dv of
keys and values, `dc = sum over h of U_h^T dk_h[:nope] + V_h^T dv_h`, `dr = sum over h of dk_h[nope:]`, and those of U_h
and V_h are sums over the tokens to whose keys this rank attends: partial sums, as those of all weights.

Source: DeepSeek-V2 (2024), Section 2.1.
"""

import torch
from torch import Tensor

from rayfcp.execute.attention.schedule import accumulator_dtype
from rayfcp.execute.devices.backend import backend_of


class Latents:
    """Expansion by an up-projection `[heads, nope + value_dim, latent]`, in the dtype of the latents, and the way back;
    sums up the gradient of the up-projection in fp32 at least. `nope_dim`: the part of a key that is not rotated."""

    def __init__(self, up: Tensor, *, nope_dim: int) -> None:
        self._up, self._nope_dim = up, nope_dim
        self._matrix = up.flatten(0, 1)
        self._gradient: Tensor | None = None

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[tokens, heads, nope + rope]` and values `[tokens, heads, value_dim]`, a strided view."""
        both = torch.mm(latent.squeeze(1), self._matrix.t()).unflatten(1, self._up.shape[:2])
        nope, value = both.split([self._nope_dim, self._up.shape[1] - self._nope_dim], dim=2)
        return torch.cat([nope, rope.expand(-1, len(self._up), -1)], dim=2), value

    def collapse(self, latent: Tensor, rope: Tensor, *, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the latents and rotated keys whose keys and values have the gradients `dk` and `dv`."""
        both = torch.cat([dk[..., : self._nope_dim], dv], dim=2).flatten(1)
        if self._up.requires_grad:
            if self._gradient is None:
                self._gradient = torch.zeros_like(self._matrix, dtype=accumulator_dtype(both.dtype))
            backend_of(both.device).add_product(self._gradient, left=both.t(), right=latent.squeeze(1))
        d_rope = dk[..., self._nope_dim :].sum(1, keepdim=True, dtype=accumulator_dtype(rope.dtype))
        return torch.mm(both, self._matrix).unsqueeze(1), d_rope

    @property
    def gradient(self) -> Tensor | None:
        """The up-projection's, through all that has collapsed; None if it is not trained."""
        if not self._up.requires_grad:
            return None
        if self._gradient is None:
            return torch.zeros_like(self._up)
        return self._gradient.to(self._up.dtype).view_as(self._up)
