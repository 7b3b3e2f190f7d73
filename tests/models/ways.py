"""Ways to run a batch by models of any family: rings, shared out heads, blocks, slices on pipeline stages."""

import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property

from transformers import PreTrainedConfig

from rayfcp.models.build import random_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.layers import kinds_of_layers
from rayfcp.models.stages import stages_of
from rayfcp.program import RankProgram, lower
from rayfcp.values import Primitive
from tests.execute.cases import SEED, Case
from tests.execute.cases import assert_same as assert_equal
from tests.execute.staged import StagedCase, run_in_process, typical_case
from tests.execute.test_block_equality import BlockCase, blocks
from tests.models.families import DTYPE, by_library, disturbed, exact, with_kinds

RING = Case(
    num_ranks=3,
    lengths=(61, 17, 1, 25, 7),
    microbatches=((((2, 0, 1), (0, 2)),), (((1, 2), (1, 3)), ((0,), (4,)))),
    recomputed=2,
)
WAYS = {
    "ring, recomputed": RING,
    "ring, attention kept": replace(RING, keeps=True),
    "ring of five": Case(num_ranks=5, lengths=(3, 71), microbatches=((((0, 1, 2, 3, 4), (0, 1)),),)),
    "ulysses": Case(
        num_ranks=4,
        lengths=(41, 7),
        microbatches=((((0, 1, 2, 3), (0, 1)),),),
        primitive=Primitive.ULYSSES,
        recomputed=1,
        keeps=True,
    ),
    "rings of runs": Case(
        num_ranks=4,
        lengths=(45, 17, 1, 9),
        microbatches=((((1, 0), (0, 2)),), (((1,), (1, 3)),)),
        recomputed=2,
        heads=2,
    ),
    "blocks": BlockCase(
        num_ranks=4, lengths=(60, 33), microbatches=(), options=blocks(block_tokens=8, num_buffers=2), recomputed=1
    ),
}


@dataclass(frozen=True, kw_only=True)
class StagedModel(StagedCase):
    """A case of `tests.execute.staged` with copies of these models of its stages."""

    config: PreTrainedConfig
    first: list[CausalLM]

    def models(self, dtype: str) -> list[CausalLM]:
        return copy.deepcopy(self.first)

    @cached_property
    def programs(self) -> tuple[RankProgram, ...]:
        kinds = kinds_of_layers(self.config)
        of_stage = [sorted(set(kinds[stage.start : stage.stop])) for stage in stages_of(self.layers_of_stage)]
        return lower(self.plan, self.sequences, reduce_every=self.reduce_every, kinds_of_stage=of_stage)


def _models(config: PreTrainedConfig, layers_of_stage: tuple[int, ...]) -> list[CausalLM]:
    """Those that `disturbed` makes, by stage."""
    whole = disturbed(config).state_dict()
    found = [
        random_model(copy.deepcopy(config), dtype=DTYPE, seed=SEED, stage=each) for each in stages_of(layers_of_stage)
    ]
    for model in found:
        model.load_state_dict({name: whole[name] for name in model.state_dict()})
    return found


def assert_stages_same(config: PreTrainedConfig, seed: int, *, layers_of_stage: tuple[int, ...]) -> None:
    """A typical case on two ranks: loss and gradients are the library's own."""
    case = typical_case(seed, num_ranks=2, layers_of_stage=layers_of_stage, is_tied=False)
    held = {each.name: getattr(case, each.name) for each in fields(case)}
    held["sequences"] = tuple(with_kinds(case.sequences, config))
    staged = StagedModel(config=config, first=_models(config, layers_of_stage), **held)
    with exact():
        loss, gradients, _ = run_in_process(staged, DTYPE)
    want = by_library(config, staged)
    assert_equal(loss, gradients, want=(want.loss, want.gradients), dtype=DTYPE, what=(config.model_type, seed))
