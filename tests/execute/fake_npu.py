"""A stand-in for the `torch_npu` module: `npu_fusion_attention` and its gradient, in the TND layout, by dense softmax.

Follows the operators' documented contract (Ascend/op-plugin, `docs/context/torch_npu-npu_fusion_attention.md`): packed
heads `[T, N, D]`, `actual_seq_qlen` and `actual_seq_kvlen` as prefix sums of at most 1,024 sequences, sparse_mode 0
without a mask and 3 (right-down causal) with the compressed 2048 x 2048 mask in which True hides, softmax statistics in
fp32, `[T, N, 8]` by shape, but sequence after sequence `[N, S, 8]` by content, unless `softmax_layout` is "TND".
What the operators would refuse, or silently compute something else from, is refused here.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

MASK_SIZE = 2048
HIDDEN = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FAR = 2147483647
MOST_SEQUENCES, MOST_TOKENS, MOST_HEADS, MOST_DIMENSIONS = 1024, 1 << 20, 256, 768


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = FAR,
    next_tockens: int = FAR,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """attention_out `[T, N, D]`, softmax_max and softmax_sum `[T, N, 8]`, softmax_out (empty), seed, offset, numels."""
    _check_layout(softmax_layout)
    _check_call(query, key, value, head_num, input_layout, (pse, padding_mask, prefix), (keep_prob, inner_precise))
    _check_mask(atten_mask, sparse_mode, (pre_tockens, next_tockens))
    out = torch.zeros_like(query)
    largest, total = (torch.zeros(query[..., 0].numel(), 8) for _ in range(2))
    for rows, columns in _pieces(query, key, actual_seq_qlen, actual_seq_kvlen):
        scores = _scores(query[rows], key[columns], scale=scale, sparse_mode=sparse_mode)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        out[rows] = (weights / weights.sum(-1, keepdim=True) @ _wide(value[columns], head_num)).transpose(0, 1).to(out)
        places = slice(rows.start * head_num, rows.stop * head_num)
        largest[places] = top.reshape(-1, 1).float()
        total[places] = weights.sum(-1).reshape(-1, 1).float()
    shape = (*query.shape[:2], 8)
    return out, largest.view(shape), total.view(shape), torch.empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = FAR,
    next_tockens: int = FAR,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtype of the inputs, and an empty gradient of pse."""
    _check_layout(softmax_layout)
    _check_call(query, key, value, head_num, input_layout, (pse, padding_mask, prefix), (keep_prob, inner_precise))
    _check_mask(atten_mask, sparse_mode, (pre_tockens, next_tockens))
    if softmax_in is not None or softmax_max is None or softmax_sum is None or attention_in is None:
        raise ValueError("the statistics and the output of the forward pass must be given, the softmax not")
    for tensor in (dy, attention_in):
        _check_tensor(tensor, shape=query.shape, dtypes=(query.dtype,))
    for tensor in (softmax_max, softmax_sum):
        _check_tensor(tensor, shape=(*query.shape[:2], 8), dtypes=(torch.float32,))
        if not torch.equal(tensor, tensor[..., :1].expand_as(tensor)):
            raise ValueError("the eight numbers of a row must be one")
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (query, key, value))
    for rows, columns in _pieces(query, key, actual_seq_qlen, actual_seq_kvlen):
        scores = _scores(query[rows], key[columns], scale=scale_value, sparse_mode=sparse_mode)
        places = slice(rows.start * head_num, rows.stop * head_num)
        top, total = (
            each.view(-1, 8)[places].view(head_num, -1, 8)[..., :1].double() for each in (softmax_max, softmax_sum)
        )
        weights = (scores - top).exp() / total
        grad = _wide(dy[rows], head_num)
        through = grad @ _wide(value[columns], head_num).transpose(1, 2)
        share = (grad * _wide(attention_in[rows], head_num)).sum(-1, keepdim=True)
        slope = weights * (through - share) * scale_value
        dq[rows] = (slope @ _wide(key[columns], head_num)).transpose(0, 1).to(dq)
        dk[columns] = _narrow(slope.transpose(1, 2) @ _wide(query[rows], head_num), key.shape[1]).to(dk)
        dv[columns] = _narrow(weights.transpose(1, 2) @ grad, key.shape[1]).to(dv)
    return dq, dk, dv, torch.empty(0)


def _check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    absent: Sequence[object],
    neutral: tuple[float, int],
) -> None:
    if input_layout != "TND":
        raise ValueError(f"input_layout is {input_layout!r}, must be 'TND'")
    _check_tensor(query, shape=(len(query), head_num, query.shape[-1]), dtypes=DTYPES)
    for tensor in (key, value):
        _check_tensor(tensor, shape=(len(key), key.shape[1], query.shape[-1]), dtypes=(query.dtype,))
    if len(query) > MOST_TOKENS or head_num > MOST_HEADS or query.shape[-1] > MOST_DIMENSIONS:
        raise ValueError(f"query is {tuple(query.shape)}, must be at most {(MOST_TOKENS, MOST_HEADS, MOST_DIMENSIONS)}")
    if head_num % key.shape[1]:
        raise ValueError(f"{head_num} heads, must be a multiple of {key.shape[1]} heads of keys")
    if any(each is not None for each in absent) or neutral != (1.0, 0):
        raise ValueError("pse, padding_mask, prefix, dropout and inner_precise are not what is wanted here")


def _check_layout(softmax_layout: str) -> None:
    if softmax_layout:
        raise ValueError(f"softmax_layout is {softmax_layout!r}, which CANN takes from 8.3 on only")


def _check_tensor(tensor: Tensor, *, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes:
        raise ValueError(f"tensor is {tuple(tensor.shape)} {tensor.dtype}, must be {tuple(shape)} of {dtypes}")
    if not tensor.is_contiguous():
        raise ValueError("tensor is a strided view, must be contiguous")


def _check_mask(mask: Tensor | None, sparse_mode: int, windows: tuple[int, int]) -> None:
    if windows != (FAR, FAR):
        raise ValueError(f"windows are {windows}, they count in sparse_mode 0 and 4 only")
    if sparse_mode == 0:
        if mask is not None:
            raise ValueError("sparse_mode 0 would take this mask as it is for every sequence")
        return
    if sparse_mode != 3:
        raise ValueError(f"sparse_mode is {sparse_mode}, must be 0 or 3")
    if mask is None or mask.dtype not in (torch.bool, torch.uint8) or tuple(mask.shape) != (MASK_SIZE, MASK_SIZE):
        raise ValueError("sparse_mode 3 wants the compressed mask, [2048, 2048] in bool or uint8")
    if not torch.equal(mask.bool(), HIDDEN):
        raise ValueError("the compressed mask must be True above the diagonal and nowhere else")


def _pieces(
    query: Tensor, key: Tensor, ends_q: list[int] | None, ends_kv: list[int] | None
) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of each sequence."""
    for ends, tensor in ((ends_q, query), (ends_kv, key)):
        if not isinstance(ends, list) or not all(type(end) is int for end in ends):
            raise TypeError(f"actual sequence lengths are {ends!r}, must be a list of int")
        if len(ends) > MOST_SEQUENCES:
            raise ValueError(f"{len(ends)} sequences, must be at most {MOST_SEQUENCES}")
        if ends[-1] != len(tensor) or any(stop <= start for start, stop in pairwise([0, *ends])):
            raise ValueError(f"actual sequence lengths {ends} must be growing sums that end at {len(tensor)}")
    assert ends_q is not None and ends_kv is not None
    for (q0, q1), (k0, k1) in zip(pairwise([0, *ends_q]), pairwise([0, *ends_kv]), strict=True):
        yield slice(q0, q1), slice(k0, k1)


def _scores(query: Tensor, key: Tensor, *, scale: float, sparse_mode: int) -> Tensor:
    """`[N, queries, keys]` in fp64; sparse_mode 3 aligns the diagonal with the last query and the last key."""
    scores = _wide(query, query.shape[1]) @ _wide(key, query.shape[1]).transpose(1, 2) * scale
    if sparse_mode == 3:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(key) - len(query) + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _wide(tensor: Tensor, heads: int) -> Tensor:
    """`[T, n, D]` -> `[heads, T, D]` in fp64, each head repeated for its group."""
    return tensor.double().repeat_interleave(heads // tensor.shape[1], dim=1).transpose(0, 1)


def _narrow(grad: Tensor, heads: int) -> Tensor:
    """`[N, T, D]` -> `[T, heads, D]`, summed over each group."""
    return grad.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
