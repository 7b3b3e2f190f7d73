"""Stand-ins for `fla.ops` of flash-linear-attention and for `causal_conv1d`, computed on the CPU.

Names, order and defaults of arguments are those of their sources. What the kernels would refuse, or compute something
else from, is refused.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Results = tuple[Tensor, Tensor]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> Results:
    assert g.shape == beta.shape == v.shape[:3] and v.shape[2] % q.shape[2] == 0 and output_final_state
    return _sequences(q, k, v, gates=(g, beta), scale=scale, state=initial_state, offsets=(cu_seqlens, cu_seqlens_cpu))


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> Results:
    assert g.shape == (*v.shape[:3], q.shape[3]) and beta.shape == v.shape[:3] and v.shape[2] % q.shape[2] == 0
    assert output_final_state and k.shape[3] <= 256
    return _sequences(q, k, v, gates=(g, beta), scale=scale, state=initial_state, offsets=(cu_seqlens, cu_seqlens_cpu))


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Results:
    assert g is not None and g.shape == v.shape[:3] == q.shape[:3] and output_final_state
    return _sequences(q, k, v, gates=(g,), scale=scale, state=initial_state, offsets=(cu_seqlens, cu_seqlens_cpu))


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Results:
    assert q.shape == k.shape == g.shape and v.shape[:3] == q.shape[:3] and output_final_state
    return _sequences(q, k, v, gates=(g,), scale=scale, state=initial_state, offsets=(cu_seqlens, cu_seqlens_cpu))


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`x`: `[1, channels, rows]`, here with channels that lie together."""
    assert x.stride(1) == 1 and x.shape[1] % 8 == 0 and 2 <= weight.shape[1] <= 4 and x.dtype is not torch.float64
    assert bias is None or bias.dtype == weight.dtype
    padded = F.pad(x.to(weight.dtype), (weight.shape[1] - 1, 0))
    out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))
    return (F.silu(out) if activation else out).to(x.dtype)


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: tuple[Tensor, ...],
    scale: float | None,
    state: Tensor | None,
    offsets: tuple[Tensor | None, Tensor | None],
) -> Results:
    """Token by token in fp32, as the documentation of each function says."""
    cuts, on_host = offsets
    assert cuts is not None and on_host is not None and cuts.dtype == torch.int64 and cuts.tolist() == on_host.tolist()
    assert scale is not None and q.dtype == k.dtype == v.dtype != torch.float64 and len(q) == 1
    assert state is None or (state.dtype == torch.float32 and len(state) == len(cuts) - 1)
    times = v.shape[2] // q.shape[2]
    query, key = (each[0].float().repeat_interleave(times, dim=1) for each in (q, k))
    decay, value = gates[0][0].float().exp(), v[0].float()
    decay = decay.unsqueeze(-1) if decay.dim() == 2 else decay
    outs, finals = [], []
    for sequence, (start, stop) in enumerate(pairwise(cuts.tolist())):
        assert start < stop
        own = value.new_zeros(v.shape[2], q.shape[3], v.shape[3]) if state is None else state[sequence]
        for at in range(start, stop):
            own = decay[at].unsqueeze(-1) * own
            written = value[at]
            if len(gates) > 1:
                written = gates[1][0, at].float().unsqueeze(-1) * (written - torch.einsum("hkv,hk->hv", own, key[at]))
            own = own + key[at].unsqueeze(-1) * written.unsqueeze(-2)
            outs.append(scale * torch.einsum("hkv,hk->hv", own, query[at]))
        finals.append(own)
    return torch.stack(outs).to(v.dtype).unsqueeze(0), torch.stack(finals)
