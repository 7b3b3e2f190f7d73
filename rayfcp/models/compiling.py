"""Compiles what stands between attention: norms and MLPs of each layer, and the final norm."""

from torch import nn

from rayfcp.config.models import TrainConfig
from rayfcp.models.causal_lm import CausalLM


def as_configured(model: CausalLM, train: TrainConfig) -> CausalLM:
    """The model, compiled if the run says so."""
    if train.compile:
        compile_parts(model)
    return model


def compile_parts(model: CausalLM, *, backend: str = "inductor") -> int:
    """Let `torch.compile` fuse the parts of `model` that have no attention in them, in place; how many they are.

    Names of parameters stay, and so do hooks of layers, so that it does not matter whether the model is sharded.
    Numbers of tokens are symbols: a batch of another length compiles nothing. Parts that choose experts stay as they
    are, since what they compute depends on the data.
    """
    parts = [child for layer in model.layers for child in layer.children() if _is_plain(child)]
    final = getattr(model.decoder, "norm", None)
    if model.stage.is_last and isinstance(final, nn.Module):
        parts.append(final)
    for part in parts:
        part.compile(backend=backend, dynamic=True)
    return len(parts)


def _is_plain(part: nn.Module) -> bool:
    names = [type(each).__name__.lower() for each in part.modules()]
    return not any(word in name for name in names for word in ("attention", "expert", "sparsemoe", "router"))
