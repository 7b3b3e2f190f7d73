"""Arguments of `rayfcp compare`, and their values. Nothing heavy is imported before they have been checked."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rayfcp.config import ConfigError
from rayfcp.config.constraints import PRESETS, UNCONSTRAINED, HostConstraints
from rayfcp.config.loading import describe, read_yaml
from rayfcp.cost.profiles import pick

if TYPE_CHECKING:
    from rayfcp.config import Config
    from rayfcp.values import ModelProfile, SequenceSpec

DEFAULT_STRATEGIES = ("flex-ring", "auto", "static-cp", "ulysses", "dynamic-cp")
"""Compared unless --strategies names others: rayfcp's own two, and what Megatron-LM and DeepSpeed offer. They take 11 s
of CPU for 512 sequences on 64 devices, all strategies minutes (2-core AMD EPYC VM, 2026-11-29)."""

STAGED_STRATEGIES = ("elastic-pipeline", "dapple")
"""Compared too if --stages is given."""

DEFAULT_BATCHES = 2
"""Global batches that are compared unless --batches says otherwise: planning takes time in proportion."""


def chosen(requested: Sequence[str]) -> tuple[str, ...]:
    """Return the requested strategies, each once, with `all` expanded.

    Raises:
        ConfigError: An unknown name; the message has the nearest known one.
    """
    from rayfcp.plan import strategy_names  # numpy is not needed for --help

    known = strategy_names()
    names: list[str] = []
    for name in requested:
        try:
            names += known if name == "all" else [pick(name, known, what="--strategies")]
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if not names:
        raise ConfigError("--strategies names none, must name at least one; e.g. flex-ring,static-cp or all")
    return tuple(dict.fromkeys(names))


def missing(name: str, *, num_stages: int) -> str | None:
    """Return why the strategy cannot be planned at all, None if it can."""
    from rayfcp.plan.strategies.registry import get

    if get(name).needs_stages and num_stages == 1:
        return f"{name} splits the layers over pipeline stages and --stages is 1; give it 2 or more"
    return None


ReduceEvery = Literal["microbatch", "step"]
Packing = Literal["joint", "bfd"]
Degrees = Literal["exact", "dp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of `rayfcp compare`.

    `lengths`: file or `dist:NAME`, or what `rows` come from: sequences drawn already, batch after batch. `model`,
    `hardware`: names or YAML paths. `frozen_vision`: the vision encoder is not trained. `keep_attention`: recomputed
    layers may keep their attention. None means `memory_gib` of the hardware, no fixed `max_tokens_per_rank`, and the
    best `recompute_layers`, `reduce_every` and (with stages) `gather_every` of each strategy. `packing`, `degrees`: as
    `plan.packing` and `plan.degrees` of a run; bfd and dp are the paper's two stages. `constraints`: of another trainer
    that executes the plans. `searched`: which of `stages` and `tensor_parallel`, here 1, are searched. `config`: the
    run whose data and model are compared, on which a written configuration builds; `profile`: its model, in place of
    `model`.
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
    keep_attention: bool = False
    reduce_every: ReduceEvery | None = None
    gather_every: ReduceEvery | None = None
    packing: Packing = "joint"
    degrees: Degrees = "exact"
    constraints: HostConstraints = UNCONSTRAINED
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    seed: int = 0
    searched: tuple[str, ...] = ()
    rows: "Sequence[int | SequenceSpec] | None" = field(default=None, repr=False)
    profile: "ModelProfile | None" = field(default=None, repr=False)
    config: "Config | None" = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, `auto` for what is searched and what each strategy chooses."""
        hidden = ("searched", "rows", "profile", "config")
        given = {name: getattr(self, name) for name in self.__slots__ if name not in hidden}
        chosen = [name for name in ("recompute_layers", "reduce_every", "gather_every") if given[name] is None]
        given |= {
            "strategies": list(self.strategies),
            "constraints": self.constraints.model_dump(exclude_defaults=True),
        }
        return given | dict.fromkeys((*chosen, *self.searched), "auto")


USAGE = "rayfcp compare [CONFIG] [key=value ...] --hardware NAME --devices D [options]"

EXAMPLES = """\
With CONFIG, a configuration of rayfcp train, lengths, model, batches and choices that it sets are those of that run,
whose data are tokenized unless they are prepared. Options replace them. Without CONFIG, give --lengths, --model and
--global-batch.

Lengths: a folder that rayfcp prepare wrote; a .jsonl file of numbers, or of rows with `length`, `num_tokens`,
`input_ids`, or text or messages, which the tokenizer of a Hugging Face folder in --model counts; one whole number per
line; a .json list, .npy, or .parquet with a column `length`, `num_tokens` or `input_ids`; or dist:NAME for a synthetic
distribution of text (lognormal, bimodal, long-tail, github, commoncrawl, wikipedia) or of videos with captions (msrvtt,
internvid, openvid; dist:msrvtt@1 takes 1 image per second). .json lists and .jsonl may hold rows with images:
  {"tokens": 9000, "pictures": [{"start": 24, "tokens": 256, "patches": 1024, "count": 30, "stride": 262}]}

Examples:
  rayfcp compare mine.yaml --hardware h100 --devices 64
  rayfcp compare --lengths rows.jsonl --model ./Qwen3-1.7B --hardware h100 --devices 8 --global-batch 32 \\
      --write-config advised.yaml
  rayfcp compare --lengths lengths.txt --model qwen3-8b --hardware h100 --devices 64 --global-batch 512 \\
      --max-seqlen 131072 --strategies all --html compare.html
  rayfcp compare --lengths dist:msrvtt --model qwen3-vl-8b --hardware ascend-910c --devices 64 \\
      --global-batch 512 --batches 1 --max-seqlen 131072 --strategies flex-ring,static-cp,ulysses
  rayfcp compare --lengths dist:github --model gpt-13b --hardware a800 --devices 32 --stages 4 \\
      --global-batch 512 --batches 1 --max-seqlen 98304 --strategies elastic-pipeline,seq1f1b,flexsp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare all arguments on `parser`; those that are not given are absent from the result."""
    parser.usage, parser.epilog, parser.argument_default = USAGE, EXAMPLES, argparse.SUPPRESS
    parser.add_argument(
        "overrides", metavar="CONFIG key=value", nargs="*", default=[], help="YAML file, and overrides of its keys"
    )
    needed = parser.add_argument_group("compared")
    needed.add_argument(
        "--lengths", metavar="FILE", help="sequence lengths: a file, prepared folder or dist:NAME (default: CONFIG's)"
    )
    needed.add_argument(
        "--model", metavar="NAME", help="model: name, Hugging Face folder, or YAML path (default: CONFIG's)"
    )
    needed.add_argument(
        "--freeze-vision", dest="frozen_vision", action="store_true", help="do not train the vision encoder"
    )
    needed.add_argument("--hardware", metavar="NAME", help="hardware profile: name or YAML path")
    needed.add_argument("--devices", type=positive, metavar="D", help="number of devices")
    for option, metavar, what in (
        ("--stages", "P|auto", "pipeline stages of strategies that use them"),
        ("--tensor-parallel", "T|auto", "tensor-parallel devices"),
    ):
        help_text = f"{what}; auto: search for the best (default: CONFIG's, or 1)"
        needed.add_argument(option, type=positive_or_auto, metavar=metavar, help=help_text)
    _add_batches(needed.add_argument)
    names, staged = ",".join(DEFAULT_STRATEGIES), ",".join(STAGED_STRATEGIES)
    needed.add_argument(
        "--strategies",
        type=names_of,
        metavar="A,B|all",
        help=f"strategies, separated by commas (default: {names}; with --stages also {staged})",
    )
    _add_memory(parser)
    _add_planning_and_output(parser)


def _add_batches(add: Callable[..., Any]) -> None:
    add("--global-batch", type=positive, metavar="B", help="sequences per global batch (default: CONFIG's)")
    add(
        "--batches",
        type=positive,
        metavar="K",
        help=f"number of global batches (default: {DEFAULT_BATCHES}, or as many as the lengths fill)",
    )
    add(
        "--max-seqlen",
        type=positive,
        metavar="L",
        help="cut longer sequences to L tokens (default: CONFIG's, or the longest)",
    )
    add("--seed", type=not_negative, metavar="S", help="seed of the draw (default: CONFIG's, or 0)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    either = memory.add_mutually_exclusive_group()
    either.add_argument(
        "--memory-gib", type=positive_number, metavar="G", help="memory per device (default: the hardware's)"
    )
    either.add_argument(
        "--max-tokens-per-rank",
        type=positive,
        metavar="M",
        help="tokens per rank and microbatch in place of the memory model; implies no recomputation and one gradient "
        "reduction per step unless set otherwise",
    )
    memory.add_argument(
        "--recompute-layers",
        type=count_or_auto,
        metavar="auto|N",
        help="layers with activation recomputation (default: auto, the best of none, half and all for each strategy; "
        "pipeline planners choose per stage and microbatch)",
    )
    memory.add_argument(
        "--keep-attention",
        action="store_true",
        help="recomputed layers may keep the output of attention instead of repeating it, where memory has room "
        "(default: they repeat it, as in the systems compared with; see train.recompute_attention)",
    )
    for option, what in (
        ("--reduce-every", "gradients are reduced"),
        ("--gather-every", "the parameters of pipeline stages are gathered"),
    ):
        memory.add_argument(
            option,
            choices=("auto", "step", "microbatch"),
            help=f"how often {what} (default: auto, the better for each strategy)",
        )


def _add_planning_and_output(parser: argparse.ArgumentParser) -> None:
    stages = parser.add_argument_group("planning")
    stages.add_argument(
        "--packing",
        choices=("joint", "bfd"),
        help="packing of flex-ring: joint search, or bfd, the paper's best-fit decreasing, which then packs static-cp "
        "and ulysses by length alone too, as is standard (default: joint)",
    )
    stages.add_argument(
        "--degrees",
        choices=("exact", "dp"),
        help="degrees of flex-ring: exact, or dp, the paper's dynamic program (default: exact)",
    )
    stages.add_argument(
        "--constraints",
        type=constraints_of,
        metavar="NAME|KEY=VALUE,...",
        help=f"of another trainer that executes the plans: {', '.join(PRESETS)}, keys of plan.constraints, or a name "
        "and keys that differ; shows what they cost (default: none)",
    )
    advice = parser.add_argument_group("configuration of the best layout and strategy")
    advice.add_argument("--write-config", metavar="FILE", help="write a configuration for rayfcp train")
    advice.add_argument(
        "--data", metavar="PATH", help="data of that configuration (default: the data compared, or a placeholder)"
    )
    out = parser.add_argument_group("output in addition to the table")
    out.add_argument("--json", metavar="OUT", help="write all figures as JSON")
    out.add_argument("--html", metavar="OUT", help="write a self-contained HTML page")


def names_of(text: str) -> tuple[str, ...]:
    """Parse names that are separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def constraints_of(text: str) -> HostConstraints:
    """Parse the name of a preset, keys with values, or a name followed by keys.

    >>> constraints_of("megatron,microbatch_multiple=4").microbatch_multiple
    4
    """
    name, *settings = re.split(r",(?=\s*\w+\s*=)", text)
    if "=" in name:
        name, settings = "", [name, *settings]
    elif name not in PRESETS:
        raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(PRESETS)}, or KEY=VALUE,...")
    given = PRESETS[name].model_dump() if name else {}
    try:
        for key, _, value in (setting.partition("=") for setting in settings):
            known = pick(key.strip(), HostConstraints.model_fields, what="constraint")
            given[known] = read_yaml(value, source=known)
        return HostConstraints.model_validate(given)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(describe(error)) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def positive_or_auto(text: str) -> int | None:
    """Parse a whole number of at least 1; None for `auto`."""
    return None if text == "auto" else positive(text)


def not_negative(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number


def count_or_auto(text: str) -> int | None:
    """Parse a whole number of at least 0; None for `auto`."""
    return None if text == "auto" else not_negative(text)
