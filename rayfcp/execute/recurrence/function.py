"""Differentiable linear recurrences over ranks."""

from torch import Tensor

from rayfcp.execute.attention.function import AttentionContext
from rayfcp.execute.kernels.recurrence import Gated, pick_recurrence
from rayfcp.program.scan import ScanProgram
from rayfcp.values import RecurrentKind


def linear_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    *,
    context: AttentionContext,
    kind: RecurrentKind,
    scale: float = 1.0,
) -> Tensor:
    """Outputs of a recurrence over this rank's tokens, differentiable; see `Gated` for what it computes.

    Args:
        query: `[tokens, key_heads, dk]`, tokens in the order of the program's load.
        key: as `query`; `key_heads` divides `heads`.
        value: `[tokens, heads, dv]`, in the dtype of `query` and `key`.
        log_decay: `[tokens, heads]`, or `[tokens, heads, dk]`; at most 0, in any dtype.
        beta: `[tokens, heads]` for delta rules, which have a key of norm 1; None for gated linear attention, Mamba-2
            and lightning attention.
        context: of the layer.
        kind: of the layer; the context has its program.
        scale: factor of the outputs.

    Returns:
        `[tokens, heads, dv]` in the dtype of `value`. Every rank of the plan must call the same number of times forward
        and backward, once in a layer.

    Raises:
        ValueError: the tensors do not have the program's tokens, or their shapes or dtypes disagree.
    """
    scan = context.scan_of(kind)
    inputs = Gated(query=query, key=key, value=value, log_decay=log_decay, beta=beta, scale=scale)
    _check(inputs, scan)
    kernel = pick_recurrence(value.device.type)
    lengths = tuple(stop - start for start, stop in (each.rows for each in scan.segments))
    if not scan.chains:
        return kernel(inputs, lengths=lengths, state=None)[0]
    raise NotImplementedError("sequences that are cut")


def _check(inputs: Gated, scan: ScanProgram) -> None:
    query, key, value, log_decay, *_ = inputs.tensors
    tokens = {len(each) for each in inputs.tensors}
    if tokens != {scan.num_tokens}:
        raise ValueError(
            f"recurrence: tensors have {sorted(tokens)} tokens, the program of rank {scan.rank} loads "
            f"{scan.num_tokens}; pass the tokens that the program loads, in its order"
        )
    heads, dk = value.shape[1], key.shape[2]
    gates = {(*value.shape[:2],), (*value.shape[:2], dk)}
    beta = (*value.shape[:2],) if inputs.beta is None else tuple(inputs.beta.shape)
    if (
        query.shape != key.shape
        or heads % key.shape[1]
        or tuple(log_decay.shape) not in gates
        or beta != value.shape[:2]
    ):
        raise ValueError(
            f"recurrence: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, log_decay "
            f"{tuple(log_decay.shape)}, beta {beta}; want query and key [tokens, key_heads, dk], value [tokens, heads, "
            "dv] with heads a multiple of key_heads, log_decay [tokens, heads] or [tokens, heads, dk], beta [tokens, "
            "heads]"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"recurrence: query is {query.dtype}, key {key.dtype}, value {value.dtype}, must be one dtype; cast them"
        )
