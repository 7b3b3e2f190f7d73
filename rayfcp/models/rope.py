"""Rotary positions of a run's model, set in the library's configuration, which models, checkpoints and exports share.

What a token gets must not depend on the call that it is in: pieces of a sequence, and other sequences beside it, would
change it. The types here are functions of the position alone. The library's longrope chooses one of two tables by the
longest position of a call; here the run's longest sequence chooses one for all of it.
"""

import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.config.adapting import RopeConfig
from rayfcp.models.layers import layer_configs
from rayfcp.models.library import text_of

_EXTENDED_LAYERS = "full_attention"
"""Layers that are extended where each type has positions of its own: windows are not longer than before."""

_ORIGINAL = "original_max_position_embeddings"


def set_rope(config: PreTrainedConfig, rope: RopeConfig, *, max_seqlen: int | None) -> None:
    """Give the language model of `config` the positions of `rope`, in place, and one table where it has longrope.

    `max_seqlen`: the run's longest sequence; without it tables stay as they are.

    Raises:
        ConfigError: The family has no rotary positions, not these, or other numbers of frequencies.
    """
    text = text_of(config)
    if rope.type is not None:
        _replace(text, rope, max_seqlen=max_seqlen or 0)
    for parameters in _each(text):
        if max_seqlen and parameters.get("rope_type") == "longrope":
            is_long = max_seqlen > parameters[_ORIGINAL]
            table = parameters["long_factor" if is_long else "short_factor"]
            parameters.update(short_factor=table, long_factor=table)


def has_rope(text: Any) -> bool:
    """Whether the language model has rotary positions that `model.rope` can replace."""
    return bool(getattr(text, "rope_parameters", None))


def original_positions(text: Any) -> int:
    """Positions of a language model before it was extended."""
    extended = next(_each(text), {})
    found = getattr(text, _ORIGINAL, None) or extended.get(_ORIGINAL) or text.max_position_embeddings
    return int(found)


def _each(text: Any) -> Iterator[dict[str, Any]]:
    """Parameters of the layers that may be extended: of all, or by type, those with full attention."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if not any(isinstance(value, dict) for value in parameters.values()):
        yield parameters
    elif isinstance(own := parameters.get(_EXTENDED_LAYERS), dict):
        yield own


def _replace(text: Any, rope: RopeConfig, *, max_seqlen: int) -> None:
    what = f"model.rope.type is {rope.type!r}, {text.model_type}"
    own = next(_each(text), None) if has_rope(text) else None
    if own is None:
        raise ConfigError(f"{what} has no rotary positions that it could replace; leave model.rope out")
    if own is not text.rope_parameters and rope.truncate is not None:
        raise ConfigError(f"model.rope.truncate is {rope.truncate}, {text.model_type} ignores it; leave it out")
    original = rope.original_max_position_embeddings or original_positions(text)
    # Parts of the rotation that are the family's, such as a share of the head or the axes of images.
    kept = {"rope_theta", "partial_rotary_factor", *text.ignore_keys_at_rope_validation}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in rope.given.items()}
    values["rope_theta"] = values.pop("theta", own.get("rope_theta"))
    values.pop(_ORIGINAL, None)
    if rope.type in ("yarn", "llama3", "longrope"):
        values[_ORIGINAL] = original
    for name in [name for name in own if name not in kept]:
        del own[name]
    own.update(values, rope_type=rope.type)
    if hasattr(text, _ORIGINAL):  # where a family has it, the library takes this one
        setattr(text, _ORIGINAL, original)
    reach = math.floor(original * rope.factor) if rope.factor is not None else max_seqlen
    text.max_position_embeddings = max(text.max_position_embeddings, reach)
    _check_tables(text, own)
    try:
        text.validate_rope()
    except (KeyError, ValueError) as error:
        first = " ".join(str(error).split())
        raise ConfigError(f"{what} does not run with it ({first}); choose another type") from error


def _check_tables(text: Any, parameters: dict[str, Any]) -> None:
    """
    Raises:
        ConfigError: longrope has not one factor for each frequency.
    """
    own = layer_configs(text)[-1]  # where types of layers differ, the last one has full attention
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    due = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        table = parameters.get(name)
        if table is not None and len(table) != due:
            raise ConfigError(
                f"model.rope.{name} has {len(table)} entries, must have one for each of the model's {due} frequencies; "
                "correct it"
            )
