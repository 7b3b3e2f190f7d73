"""List the families of the installed transformers library that run:
`python -m rayfcp.models.families [--dtype bfloat16] [--json PATH] [FAMILY]`.

Each family's default configuration, with dropout set to 0, passes what a run checks before its first step; a tiny model
of it is run both ways (`rayfcp.models.selfcheck`). A family that runs may still be refused for a configuration of its
own, e.g. one with dropout.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from rayfcp.config import ConfigError
from rayfcp.models.build import DTYPES
from rayfcp.models.describe import check_runs, check_text_only, dropout_keys, profile_of
from rayfcp.models.library import text_of
from rayfcp.models.multimodal import check_text_alone, text_part
from rayfcp.models.selfcheck import check_supported
from rayfcp.telemetry.progress import Terminal

CAUSAL_FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every `model_type` with a causal language model."""


_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_ROTATED = {"rope_type": "default", "rope_theta": 10000.0}
_NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 10,
        "rope_parameters": {"sliding_attention": _ROTATED, "full_attention": None},
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS | {"num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": _HEADS,
    "nemotron": _HEADS,
}
"""Keys for which families have no default that makes a model, as their published models have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """A family, and why it does not run; `reason` is empty if it does."""

    family: str
    reason: str = ""

    @property
    def runs(self) -> bool:
        return not self.reason


def family_config(family: str) -> PreTrainedConfig:
    """Return the default configuration of the family's text model, with dropout set to 0.

    Raises:
        ConfigError: The family has no such configuration, or runs refuse it by its keys.
    """
    try:
        whole = CONFIG_MAPPING[family](**_NEEDED.get(family, {}))
    except Exception as error:  # whatever a family's own code raises
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"model: {family} has no default configuration ({type(error).__name__}: {first})") from error
    config = text_part(whole)
    check_text_only(config, given=f"model_type is {family!r}")
    if whole is not config:
        check_text_alone(whole, config)
    for name in dropout_keys(text_of(config)):
        setattr(config, name, 0.0)
    check_runs(config)
    return config


def check_family(family: str, *, dtype: str = "float32") -> None:
    """
    Raises:
        ConfigError: Models of this `model_type` with its default configuration do not run in `dtype`.
    """
    config = family_config(family)
    profile_of(config, name=family)
    check_supported(config, dtype=dtype)


def results(families: Sequence[str], *, dtype: str) -> Iterator[FamilyResult]:
    """Check one family after the other."""
    for family in families:
        try:
            check_family(family, dtype=dtype)
        except ConfigError as error:
            yield FamilyResult(family=family, reason=" ".join(str(error).split()))
        else:
            yield FamilyResult(family=family)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of families on stdout; 2 if one of those that are asked for is unknown."""
    parser = argparse.ArgumentParser(prog="python -m rayfcp.models.families", description="Families that run.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types; all with a causal model if absent")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="model.dtype of the runs (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    options = parser.parse_args(arguments)
    unknown = sorted({*options.families} - {*CAUSAL_FAMILIES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})
    if unknown:
        names = ", ".join(map(repr, unknown))
        sys.stderr.write(f"FAMILY is {names}, must have a causal language model in transformers; correct it\n")
        return 2
    found = with_progress(options.families or CAUSAL_FAMILIES, dtype=options.dtype)
    width = max(len(each.family) for each in found)
    lines = [f"{each.family:{width}}  {each.reason or 'runs'}" for each in found]
    count, version = sum(each.runs for each in found), transformers.__version__
    lines.append(f"{count} of {len(found)} families run in {options.dtype} on {version}")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


def with_progress(families: Sequence[str], *, dtype: str) -> list[FamilyResult]:
    """Results, with a bar on a terminal and a line for each elsewhere, on stderr."""
    found: list[FamilyResult] = []
    with Terminal(len(families)) as terminal:
        for result in results(families, dtype=dtype):
            found.append(result)
            if not terminal.move(len(found), [result.family]):
                terminal.log(f"{len(found)}/{len(families)} {result.family}: {'runs' if result.runs else 'refused'}")
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of families that are made on the way
    transformers.logging.set_verbosity_error()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(main())
