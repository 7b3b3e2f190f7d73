"""A tiny model of a family that teaches itself, with all words: `python -m tests.models.self_taught [FAMILY ...]`."""

import copy
import runpy
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from rayfcp.config import ConfigError
from rayfcp.cost.fit import PassShape
from rayfcp.execute.kernels import pick_kernel
from rayfcp.execute.losses.base import Loss, Targets, Teacher
from rayfcp.execute.losses.cross_entropy import CrossEntropy
from rayfcp.execute.losses.distillation import Distillation
from rayfcp.models.attention_hook import IMPLEMENTATION
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import dropout_keys
from rayfcp.models.families import _NEEDED, CAUSAL_FAMILIES, check_family
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.library import VOCAB_SIZE, make_library_model, narrowed, text_of
from rayfcp.models.multimodal import text_part
from rayfcp.models.selfcheck import lone_context
from rayfcp.values.layers import count_kinds
from tests.models.families import disturb

TEACH = str(Path(__file__).resolve().parents[2] / "jobs" / "teach.py")
CURVES = {
    "logits_scaling": 8.0,
    "logit_scale": 0.25,
    "lm_head_multiplier": 0.5,
    "final_logit_softcapping": 2.0,
}
"""Keys that scale or cap logits, and values that show it."""
BOUND = 1e-6
_TOKENS, _CHUNK = 23, 9


@cache
def script() -> dict[str, Any]:
    """Names of `jobs/teach.py`, which takes few tokens at a time."""
    found = runpy.run_path(TEACH)
    found["logits_in_parts"].__globals__["CHUNK_TOKENS"] = _CHUNK
    return found


def with_curve(family: str) -> tuple[PreTrainedConfig, list[str]]:
    """The family's default configuration without dropout, with the values of `CURVES`; and those keys that it has."""
    config = text_part(CONFIG_MAPPING[family](**_NEEDED.get(family, {})))
    for name in dropout_keys(text_of(config)):
        setattr(config, name, 0.0)
    found = [name for name in CURVES if name in vars(text_of(config))]
    for name in found:
        setattr(text_of(config), name, CURVES[name])
    return config, found


def self_taught(config: PreTrainedConfig) -> tuple[float, float]:
    """Return the loss of a tiny model that is distilled from itself, and the largest difference of its
    log-probabilities, as evaluation and references compute them, from the library's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny = narrowed(config, 2)
        teacher = make_library_model(copy.deepcopy(tiny), attn_implementation="eager").float().eval()
        disturb(teacher)
        student = CausalLM(make_library_model(copy.deepcopy(tiny), attention=IMPLEMENTATION).float())
    student.model.load_state_dict(teacher.state_dict())
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, _TOKENS).astype(np.int32)
    words, logits = (torch.from_numpy(each) for each in script()["likeliest"](teacher, tokens, words=VOCAB_SIZE))
    ids = torch.from_numpy(tokens).long()

    def terms(loss: Loss, taught: Teacher | None = None) -> torch.Tensor:
        kinds = count_kinds(kinds_of_layers(text_of(tiny)))
        shape = PassShape(degree=1, lengths=(_TOKENS,), layer_kinds=kinds)
        targets = Targets.of(ids.roll(-1), loss=loss, teacher=taught)
        student(ids, torch.arange(_TOKENS), targets, lone_context(shape, kernel=pick_kernel("cpu")))
        return targets.terms

    with torch.no_grad():
        divergences = terms(Distillation(temperature=1.0, share=1.0), Teacher(words=words, logits=logits))
        want = F.cross_entropy(teacher(input_ids=ids[None], use_cache=False).logits[0], ids.roll(-1), reduction="none")
        return float(divergences.mean()), float((terms(CrossEntropy()) - want).abs().max())


def main(families: Sequence[str]) -> int:
    """Print a line for each family that is not its own teacher; 1 if one of them trains."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    num_right, wrong = 0, []
    for family in families or CAUSAL_FAMILIES:
        try:
            loss, _ = self_taught(with_curve(family)[0])
            problem = "" if abs(loss) < BOUND else f"has a loss of {loss:.3g}"
        except Exception as error:  # whatever a family's own code raises
            problem = f"fails with {type(error).__name__}"
        num_right += not problem
        if problem:
            try:
                check_family(family)
                wrong.append(family)
            except ConfigError as error:
                problem += f"; it does not train: {error}"
            sys.stdout.write(f"{family} {problem}\n")
    sys.stdout.write(f"{num_right} families are their own teachers, {len(wrong)} that train are not\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
