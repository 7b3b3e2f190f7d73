"""What an advice is asked for beside a comparison, and the systems that it is measured by."""

from dataclasses import dataclass
from typing import Any

from rayfcp.compare.inputs import Inputs
from rayfcp.compare.layouts import Layout
from rayfcp.compare.names import OURS, PIPELINES
from rayfcp.config import ConfigError

STATIC, DAPPLE, ULYSSES = "static-cp", "dapple", "ulysses"

PASSED_ON = frozenset({*OURS, *PIPELINES, STATIC})
"""Strategies that are searched with stages; the others' systems have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`stages`, `tensor_parallel`: None where they are searched; `inputs` has 1 there. `data`: what the run reads, if
    that is known."""

    inputs: Inputs
    stages: int | None = None
    tensor_parallel: int | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        if self.inputs.max_tokens_per_rank is not None:
            raise ConfigError(
                f"--max-tokens-per-rank is {self.inputs.max_tokens_per_rank}, must not be given where layouts are "
                "compared, for each holds other numbers of tokens; give --memory-gib"
            )

    @property
    def searched(self) -> str:
        """What was not given, in words."""
        parts = ["pipeline stages"] * (self.stages is None) + ["devices a layer"] * (self.tensor_parallel is None)
        return " and ".join(parts) + " searched" if parts else ""

    def as_json(self) -> dict[str, Any]:
        """The inputs by name, `auto` for what is searched."""
        asked = {"stages": self.stages, "tensor_parallel": self.tensor_parallel}
        return self.inputs.as_json() | {name: "auto" if value is None else value for name, value in asked.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A system whose best layout the advice is measured by. `staged`: it has pipeline stages."""

    name: str
    strategies: tuple[str, ...]
    staged: bool


RIVALS = (
    Rival(name="Megatron-LM", strategies=(STATIC, DAPPLE), staged=True),
    Rival(name="DeepSpeed", strategies=(ULYSSES,), staged=False),
)
"""One degree for all with 1F1B over stages; one degree over heads with parameters sharded over all ranks (ZeRO), which
DeepSpeed does not combine with stages. Both are taken to share out embedding and head."""


def suits(strategy: str, layout: Layout) -> bool:
    """Whether a strategy is looked at on a layout."""
    if layout.num_stages == 1:
        return strategy not in PIPELINES
    return strategy in PASSED_ON
