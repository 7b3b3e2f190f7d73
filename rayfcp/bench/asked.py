"""What `rayfcp bench attention` is asked for, as plain values, and what stands where nothing is said."""

from dataclasses import asdict, dataclass
from typing import Any

from rayfcp.compare.names import PIPELINES, chosen, missing
from rayfcp.config import ConfigError

CONTENDERS = ("flex-ring", "flex-block", "static-cp", "ulysses", "ring", "bytescale", "wlb", "magi")
FEW = ("flex-ring", "flex-block", "static-cp", "ring")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured where nothing is said: minutes on an accelerator, seconds on a CPU.

    `context_tokens`, `block_lengths`: of the kernel by block length, tokens in all and of a block.
    """

    num_ranks: int
    tokens_per_rank: int
    model: str
    dtype: str
    rounds: int
    context_tokens: int
    block_lengths: tuple[int, ...]
    strategies: tuple[str, ...]


LARGE = Size(
    num_ranks=16,
    tokens_per_rank=16384,
    model="llama3-70b",
    dtype="bfloat16",
    rounds=3,
    context_tokens=32768,
    block_lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    strategies=CONTENDERS,
)
"""The heads of FCP with blocks (Zhao et al., 2026), Figure 3: 64 on 8, of 128 numbers."""

SMALL = Size(
    num_ranks=4,
    tokens_per_rank=256,
    model="llama3.2-1b",
    dtype="float32",
    rounds=1,
    context_tokens=1024,
    block_lengths=(64, 256, 1024),
    strategies=FEW,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One measurement. `device`: cpu, cuda or npu. `lengths`: file or `dist:NAME`; `max_seqlen`: longer ones are cut,
    if it is given. `model`, `hardware`: names or YAML paths. `block_tokens`: of flex-block, its own choice if absent.
    `rounds`: that are timed, after one that is not.

    Raises:
        ConfigError: a dtype that is not known, or a block longer than the context.
    """

    device: str
    num_ranks: int
    tokens_per_rank: int
    model: str
    hardware: str
    dtype: str
    rounds: int
    context_tokens: int
    block_lengths: tuple[int, ...]
    strategies: tuple[str, ...]
    lengths: str = "dist:long-tail"
    max_seqlen: int | None = None
    block_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ConfigError(f"--dtype is {self.dtype!r}, must be one of {', '.join(BYTES)}; choose one")
        too_long = [each for each in self.block_lengths if each > self.context_tokens]
        if too_long:
            raise ConfigError(
                f"--block-lengths has {too_long[0]}, must be at most --context-tokens ({self.context_tokens}); lower it"
            )

    @property
    def num_tokens(self) -> int:
        """Of all ranks."""
        return self.num_ranks * self.tokens_per_rank

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def contenders(names: tuple[str, ...]) -> tuple[str, ...]:
    """The strategies asked for, `all` spelt out; those that split layers have nothing to show in one layer.

    Raises:
        ConfigError: a name that is not known, or one that splits layers.

    >>> contenders(("flex-ring", "ring"))
    ('flex-ring', 'ring')
    """
    found = []
    for name in chosen(names):
        why = "it splits layers over pipeline stages" if name in PIPELINES else missing(name, num_stages=1)
        if why is None:
            found.append(name)
        elif name in names:
            raise ConfigError(
                f"--strategies has {name}, of which one layer's attention shows nothing ({why}); leave it out"
            )
    return tuple(found)
