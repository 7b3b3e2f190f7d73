"""Which strategies a comparison knows, and what those are that cannot take part yet.

What a comparison is asked for, as plain values.

The arguments of `rayfcp compare`. Nothing heavy is imported before they are known to be sound.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayfcp.config import ConfigError
from rayfcp.cost.profiles import pick
from rayfcp.plan import strategy_names
from rayfcp.plan.strategies.registry import get


def chosen(asked: Sequence[str]) -> tuple[str, ...]:
    """The strategies asked for, each once, `all` spelt out.

    Raises:
        ConfigError: a name that is not known; the message has the nearest.
    """
    known = strategy_names()
    names: list[str] = []
    for name in asked:
        try:
            names += known if name == "all" else [pick(name, known, what="--strategies")]
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if not names:
        raise ConfigError("--strategies names none, must name at least one; e.g. flex-ring,static-cp or all")
    return tuple(dict.fromkeys(names))


def missing(name: str, *, num_stages: int) -> str | None:
    """Why the strategy cannot be planned at all, if so."""
    if get(name).needs_stages and num_stages == 1:
        return f"{name} splits the layers over pipeline stages and --stages is 1; give it 2 or more"
    return None


ReduceEvery = Literal["microbatch", "step"]
Packing = Literal["joint", "bfd"]
Degrees = Literal["exact", "dp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The arguments of `rayfcp compare`.

    `lengths`: file or `dist:NAME`. `model`, `hardware`: names or YAML paths. `frozen_vision`: the model's vision
    encoder is not trained. None: `memory_gib` of the hardware, no fixed `max_tokens_per_rank`, the best
    `recompute_layers`, `reduce_every` and (with stages) `gather_every` for each strategy.
    `packing`, `degrees`: as `plan.packing` and `plan.degrees` of a run; bfd and dp are the paper's two stages.
    """

    lengths: str
    model: str
    frozen_vision: bool = False
    hardware: str
    devices: int
    stages: int = 1
    tensor_parallel: int = 1
    global_batch: int
    batches: int
    max_seqlen: int
    memory_gib: float | None = None
    max_tokens_per_rank: int | None = None
    recompute_layers: int | None = None
    reduce_every: ReduceEvery | None = None
    gather_every: ReduceEvery | None = None
    packing: Packing = "joint"
    degrees: Degrees = "exact"
    strategies: tuple[str, ...] = ("all",)
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """The fields by name, `auto` for what each strategy chooses."""
        given = {name: getattr(self, name) for name in self.__slots__}
        for name in ("recompute_layers", "reduce_every", "gather_every"):
            given[name] = "auto" if given[name] is None else given[name]
        return {**given, "strategies": list(self.strategies)}


EXAMPLES = """\
Lengths: one whole number a line, a .json list, .npy, or .parquet with a column `length`; or dist:NAME for a synthetic
distribution of text (lognormal, bimodal, long-tail, github, commoncrawl, wikipedia) or of videos with captions (msrvtt,
internvid, openvid; dist:msrvtt@1 takes 1 picture a second). A .json list may hold rows with pictures beside numbers:
  {"tokens": 9000, "pictures": [{"start": 24, "tokens": 256, "patches": 1024, "count": 30, "stride": 262}]}

Examples:
  rayfcp compare --lengths dist:msrvtt --model qwen3-vl-8b --hardware ascend-910c --devices 64 \\
      --global-batch 512 --batches 1 --max-seqlen 131072 --strategies flex-ring,static-cp,ulysses --seed 0
  rayfcp compare --lengths lengths.txt --model qwen3-8b --hardware ascend-910c --devices 64 \\
      --global-batch 512 --batches 3 --max-seqlen 131072 --strategies all --seed 0 --html compare.html
  rayfcp compare --lengths dist:github --model gpt-13b --hardware a800 --devices 32 --stages 4 \\
      --global-batch 512 --batches 1 --max-seqlen 98304 --strategies elastic-pipeline,seq1f1b,flexsp --seed 0
  rayfcp compare --lengths dist:github --model llama3-8b --hardware h100 --devices 16 \\
      --global-batch 128 --batches 2 --max-seqlen 65536 --strategies flex-ring,static-cp,ulysses --seed 0
  rayfcp compare --lengths dist:github --model qwen3-8b --hardware h100 --devices 16 --stages auto \\
      --tensor-parallel auto --global-batch 128 --batches 1 --max-seqlen 65536 \\
      --strategies flex-ring,elastic-pipeline --write-config config.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares all arguments on `parser`."""
    parser.epilog = EXAMPLES
    needed = parser.add_argument_group("what is compared")
    needed.add_argument("--lengths", required=True, metavar="FILE", help="tokens of sequences, a file or dist:NAME")
    needed.add_argument("--model", required=True, metavar="NAME", help="model profile, by name or YAML path")
    needed.add_argument("--freeze-vision", action="store_true", help="its vision encoder is not trained")
    needed.add_argument("--hardware", required=True, metavar="NAME", help="hardware profile, by name or YAML path")
    needed.add_argument("--devices", required=True, type=positive, metavar="D", help="devices of the cluster")
    needed.add_argument(
        "--stages",
        type=positive_or_auto,
        default=1,
        metavar="P|auto",
        help="pipeline stages of those that have any; auto searches for the best (default: 1)",
    )
    needed.add_argument(
        "--tensor-parallel",
        type=positive_or_auto,
        default=1,
        metavar="T|auto",
        help="devices that share each layer; auto searches for the best (default: 1)",
    )
    needed.add_argument("--global-batch", required=True, type=positive, metavar="B", help="sequences in a global batch")
    needed.add_argument("--batches", required=True, type=positive, metavar="K", help="global batches")
    needed.add_argument("--max-seqlen", required=True, type=positive, metavar="L", help="longer sequences are cut to L")
    needed.add_argument(
        "--strategies", default="all", metavar="A,B", help="names with commas between them (default: all)"
    )
    needed.add_argument("--seed", type=not_negative, default=0, metavar="S", help="of the draw (default: 0)")
    _add_memory(parser)
    _add_stages(parser)
    _add_advice(parser)
    out = parser.add_argument_group("where the results go, beside the table")
    out.add_argument("--json", metavar="OUT", help="file for all figures")
    out.add_argument("--html", metavar="OUT", help="file for one page to look at")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    either = memory.add_mutually_exclusive_group()
    either.add_argument(
        "--memory-gib", type=positive_number, metavar="G", help="memory of a device (default: the hardware's own)"
    )
    either.add_argument(
        "--max-tokens-per-rank",
        type=positive,
        metavar="M",
        help="tokens that a rank holds in a microbatch, in place of the memory model; nothing is recomputed then and "
        "gradients are reduced each step, unless said otherwise",
    )
    memory.add_argument(
        "--recompute-layers",
        type=count_or_auto,
        metavar="auto|N",
        help="layers whose activations are recomputed (default: auto, the best of none, half and all, per strategy; "
        "planners of pipeline stages choose their own, for each stage and microbatch)",
    )
    memory.add_argument(
        "--reduce-every",
        choices=("auto", "step", "microbatch"),
        help="when gradients are reduced (default: auto, the better of both, per strategy)",
    )
    memory.add_argument(
        "--gather-every",
        choices=("auto", "step", "microbatch"),
        help="when the parameters of pipeline stages are gathered (default: auto, the better of both, per strategy)",
    )


def _add_advice(parser: argparse.ArgumentParser) -> None:
    advice = parser.add_argument_group("a configuration to train with, of the best layout and strategy")
    advice.add_argument("--write-config", metavar="FILE", help="for rayfcp train")
    advice.add_argument("--data", metavar="PATH", help="what it reads (default: a place to fill in)")


def _add_stages(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_argument_group("how plans are made")
    stages.add_argument(
        "--packing",
        choices=("joint", "bfd"),
        default="joint",
        help="of flex-ring: joint search, or bfd, the paper's best-fit decreasing; bfd packs static-cp and ulysses by "
        "length alone too, as is standard (default: joint)",
    )
    stages.add_argument(
        "--degrees",
        choices=("exact", "dp"),
        default="exact",
        help="of flex-ring: exact, or dp, the paper's dynamic programme (default: exact)",
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def positive_or_auto(text: str) -> int | None:
    """A whole number of at least 1; None for `auto`."""
    return None if text == "auto" else positive(text)


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number


def count_or_auto(text: str) -> int | None:
    """A whole number of at least 0; None for `auto`."""
    return None if text == "auto" else not_negative(text)
