"""Layers whose MLP is many experts, of which each token takes a few: what a configuration says of them, what runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from rayfcp.config import ConfigError

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Families name them differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`ffn_size`: the width of one, of `count`; each token takes `per_token`. Beside their 3 matrices a layer has
    `num_parameters` in all for experts and their router."""

    count: int
    per_token: int
    ffn_size: int
    num_parameters: int


def num_experts(config: PreTrainedConfig) -> int:
    """Of a layer; 0 if the model has none."""
    return max(int(getattr(config, name, None) or 0) for name in _COUNTS)


def check_experts(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: a loss of the router is asked for, or the number of experts of a token is not said.
    """
    if num_experts(config) and getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"model: {config.model_type} asks for an auxiliary loss of its router (output_router_logits=True), which "
            "is not computed; set output_router_logits to false in its config.json"
        )
    if num_experts(config) and not getattr(config, "num_experts_per_tok", None):
        raise ConfigError(f"model: {config.model_type} has no num_experts_per_tok, from which costs are computed")


def experts_of(config: PreTrainedConfig, layers: Iterable[dict[str, Tensor]]) -> Experts | None:
    """Of `layers`, each the parameters of one by name; none if there are no experts.

    Raises:
        ConfigError: layers differ, or experts are modules of their own and not parts of one parameter.
    """
    count = num_experts(config)
    if not count:
        return None
    first, *others = ({name: tuple(each.shape) for name, each in layer.items()} for layer in layers)
    if any(other != first for other in others):
        raise ConfigError(
            f"model: {config.model_type} has layers with experts and layers without, only equal layers run; choose "
            "another model"
        )
    stacked = {name: shape for name, shape in first.items() if len(shape) == 3 and shape[0] == count}
    if not stacked:
        raise ConfigError(
            f"model: {config.model_type} has no layers of {count} stacked experts, only such run; choose another, "
            "such as qwen3_moe"
        )
    each = sum(rows * columns for _, rows, columns in stacked.values())
    router = count * config.hidden_size
    return Experts(
        count=count,
        per_token=config.num_experts_per_tok,
        ffn_size=round(each / (3 * config.hidden_size)),
        num_parameters=count * each + router,
    )


def keywords_of(config: PreTrainedConfig, *, dtype: str) -> dict[str, Any]:
    """For the library's model: grouped products of matrices know no fp64."""
    return {"experts_implementation": "eager"} if dtype == "float64" and num_experts(config) else {}
