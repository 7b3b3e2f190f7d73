"""Contents of weights that a run reads and does not train: one number per tensor, which does not depend on how tensors
are cut over devices or files.

The number of a tensor is the sum over its elements of (bits of the value in fp32) * f_0(i_0) * f_1(i_1) * ... modulo
2^64, with an odd pseudo-random factor for each index of each dimension. Parts add up to the whole. A change of one
element always changes the sum, since its factor is odd; of other changes at most one in 2^32 does not.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from rayfcp.config import Config, ConfigError
from rayfcp.config.models import ModelConfig
from rayfcp.execute.reports import ReadWeight
from rayfcp.values.state import Box

_MASK = (1 << 64) - 1
_STEP, _MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of SplitMix64 (Steele et al., 2014, figure 16)."""
_SHIFTS = (30, 27, 31)
SEED = "run.seed"
"""Key that stands for weights that are drawn from this seed."""
_CHUNK_ELEMENTS, _ON_ACCELERATORS = 1 << 18, 1 << 24
"""Elements whose products exist at a time: 2 MiB, which stay in a core's cache; or enough to hide launches."""
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def read_weight(name: str, values: Tensor, *, box: Box) -> ReadWeight:
    """Return the content of `values`, the part of the tensor `name` in `box`, which is not empty: floating-point
    numbers of any dtype. The same values have the same content in any dtype."""
    single = values.contiguous() if values.dtype in _BITS else values.float()
    bits = single.view(_BITS[single.dtype])
    if values.dtype == torch.float64:
        bits = bits + (values - single).view(torch.int64)  # 0 for the values of fp32
    factors = [
        _factors(start, count, dim=dim, device=bits.device)
        for dim, (start, count) in enumerate(zip(box.offsets, box.sizes, strict=True))
    ]
    rows = bits.reshape(-1, bits.shape[-1] if bits.ndim else 1)
    last = factors.pop() if factors else torch.ones(1, dtype=torch.int64, device=bits.device)
    size = max(1, (_CHUNK_ELEMENTS if bits.device.type == "cpu" else _ON_ACCELERATORS) // rows.shape[1])
    total = torch.cat([(part * last).sum(-1) for part in rows.split(size)]).view(bits.shape[:-1])
    for each in reversed(factors):
        total = (total * each).sum(-1)
    found = int(total.sum()) << (16 if single.dtype == torch.bfloat16 else 0)
    return ReadWeight(name=name, box=box, content=found & _MASK)


def _factors(start: int, count: int, *, dim: int, device: torch.device) -> Tensor:
    """Odd numbers for the indices `[start, start + count)` of a dimension, by SplitMix64."""
    index = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    mixed = index * _signed(_STEP) + _signed((dim + 1) * _MIX[0])
    for shift, factor in zip(_SHIFTS, (*_MIX, 1), strict=True):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return mixed | 1


def _signed(value: int) -> int:
    return (value + (1 << 63) & _MASK) - (1 << 63)


def contents_of(weights: Iterable[ReadWeight]) -> dict[str, str]:
    """Return the content of each whole tensor as 16 hex digits, keyed by name, from the parts that devices have read.

    Raises:
        ConfigError: Two devices have read other values for the same part.
    """
    parts: dict[tuple[str, Box], int] = {}
    for each in weights:
        if parts.setdefault((each.name, each.box), each.content) != each.content:
            raise ConfigError(
                f"model.path: {each.name} holds other values on one machine than on another; give all the same files"
            )
    found: dict[str, int] = {}
    for (name, _), content in parts.items():
        found[name] = found.get(name, 0) + content & _MASK
    return {name: f"{content:016x}" for name, content in sorted(found.items())}


def first_weights(model: ModelConfig, *, seed: int, read: Iterable[ReadWeight]) -> dict[str, str]:
    """Return the contents of the weights of `model` that are not trained, from the parts that devices have `read`: the
    seed if they are drawn, empty if all weights are trained."""
    if found := contents_of(read):
        return found
    is_drawn = model.init == "random" and (model.lora.rank is not None or model.freeze_vision)
    return {SEED: str(seed)} if is_drawn else {}


def check_contents(
    found: Mapping[str, str], known: Mapping[str, str], *, config: Config, key: str, log: Callable[[str], object]
) -> None:
    """Check that the weights which `key` names are those that a run began with, by the contents of their tensors; log
    the difference if the user accepts others.

    Raises:
        ConfigError: They differ; names the first such tensor.
    """
    changed = [name for name in sorted({*found, *known}) if found.get(name) != known.get(name)]
    if not changed:
        return
    value = config.loss.reference if key == "loss.reference" else config.model.path
    named = f"{SEED} is {config.run.seed}" if SEED in found else f"{key} is {value!r}"
    text = f"{named}, with other weights than the run began with ({changed[0]}, {len(changed)} in all)"
    if not config.checkpoint.accept_other_weights:
        raise ConfigError(
            f"{text}; give those, in any folder, or set checkpoint.accept_other_weights=true to go on with these"
        )
    log(f"{text}, accepted by checkpoint.accept_other_weights")
