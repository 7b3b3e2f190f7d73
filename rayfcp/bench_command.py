"""`rayfcp bench attention`: its arguments, and what it prints."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rayfcp.compare.arguments import not_negative, positive
from rayfcp.config import ConfigError

if TYPE_CHECKING:
    from rayfcp.bench.request import Asked

TEXT = "measure one device, without a cluster"
ATTENTION = "run all ranks' attention of real plans on one device, against one kernel"

EPILOG = """\
Every strategy plans one batch. The programs of all its ranks run one after the other on this device, messages between
them included, and are checked against one kernel over the whole sequences. What is not given is chosen by the device:
seconds of work on a CPU, minutes on an accelerator. Times are the device's own: of one thread on a CPU, of events else.

  imbalance   what the mean rank idles while it waits for the slowest; planned: as the cost model foresaw it
  efficiency  seconds of the one kernel over those of all ranks together: what cutting costs
  MFU/single  the same with the ranks that wait: MFU of attention over the one kernel's, as if messages were free
  error       largest difference from the one kernel

Examples:  rayfcp bench attention
           rayfcp bench attention --device cuda --ranks 32 --tokens-per-rank 32768 --block-tokens 4096 --json bench.json
"""


class WrongResultError(Exception):
    """What some strategy computed is not what one kernel computes; the message names it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `rayfcp bench attention` takes."""
    parser.epilog = EPILOG
    batch = parser.add_argument_group("the batch, and who plans it")
    batch.add_argument("--ranks", type=positive, metavar="N", help="ranks that share the batch")
    batch.add_argument("--tokens-per-rank", type=positive, metavar="T", help="tokens of the batch over ranks")
    batch.add_argument("--lengths", default="dist:long-tail", metavar="FILE", help="a file or dist:NAME, as in compare")
    batch.add_argument("--max-seqlen", type=positive, metavar="L", help="longer sequences are cut to L")
    batch.add_argument("--strategies", metavar="A,B", help="names with commas between them")
    batch.add_argument("--block-tokens", type=positive, metavar="T", help="of flex-block (default: its own choice)")
    batch.add_argument("--seed", type=not_negative, default=0, metavar="S", help="of lengths and tensors (default: 0)")
    device = parser.add_argument_group("the device, and what it computes")
    device.add_argument("--device", choices=("auto", "cpu", "cuda", "npu"), default="auto", help="(default: auto)")
    device.add_argument("--model", metavar="NAME", help="whose heads, by name or YAML path")
    device.add_argument("--dtype", metavar="NAME", help="bfloat16, float16, float32 or float64")
    device.add_argument("--hardware", metavar="NAME", help="that plans are made for, by name or YAML path")
    device.add_argument("--rounds", type=positive, metavar="R", help="times that each is timed")
    device.add_argument("--context-tokens", type=positive, metavar="T", help="of the kernel by block length, in all")
    device.add_argument("--block-lengths", metavar="B,C", help="tokens of a block there, with commas between them")
    parser.add_argument("--json", metavar="OUT", help="file for all figures")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, write the file.

    Raises:
        ConfigError: arguments that cannot be used.
        WrongResultError: after all that, a strategy's result differs from the kernel's.
    """
    if arguments.json is not None and Path(arguments.json).is_dir():
        raise ConfigError(f"--json is {arguments.json!r}, a folder; give the path of a file")
    from rayfcp.bench.attention import bench_attention
    from rayfcp.bench.results import format_found
    from rayfcp.compare.command import Progress

    asked = asked_of(arguments)
    with Progress(1 + len(asked.block_lengths) + len(asked.strategies) * (2 + asked.rounds)) as progress:
        found = bench_attention(asked, say=progress)
    sys.stdout.write(f"{format_found(found)}\n")
    if arguments.json is not None:
        _write(arguments.json, text=json.dumps(found.as_json(), indent=1) + "\n")
    if found.wrong:
        told = ", ".join(f"{each.strategy} (off by {each.error:.2g})" for each in found.wrong)
        raise WrongResultError(f"not what one kernel computes in {asked.dtype}: {told}")


def asked_of(arguments: argparse.Namespace) -> "Asked":
    """The arguments as a value; what is not given depends on the device.

    Raises:
        ConfigError: arguments that cannot be used.
    """
    from rayfcp.bench.alone import base_hardware
    from rayfcp.bench.request import LARGE, SMALL, Asked, contenders
    from rayfcp.execute.devices.device import device_kind, resolve_device
    from rayfcp.execute.kernels import KernelUnavailableError, pick_kernel

    kind = device_kind(arguments.device)
    try:
        pick_kernel(kind)  # first: it says what to install
    except KernelUnavailableError as error:
        raise ConfigError(
            str(error).replace("cluster.device=", "--device ").replace("cluster.device", "--device")
        ) from error
    size = SMALL if kind == "cpu" else LARGE
    names = arguments.strategies.split(",") if arguments.strategies else size.strategies
    return Asked(
        device=kind,
        num_ranks=arguments.ranks or size.num_ranks,
        tokens_per_rank=arguments.tokens_per_rank or size.tokens_per_rank,
        model=arguments.model or size.model,
        hardware=arguments.hardware or base_hardware(resolve_device(kind)),
        dtype=arguments.dtype or size.dtype,
        lengths=arguments.lengths,
        max_seqlen=arguments.max_seqlen,
        strategies=contenders(tuple(name.strip() for name in names if name.strip())),
        block_tokens=arguments.block_tokens,
        rounds=arguments.rounds or size.rounds,
        context_tokens=arguments.context_tokens or size.context_tokens,
        block_lengths=_lengths(arguments.block_lengths) or size.block_lengths,
        seed=arguments.seed,
    )


def _lengths(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(positive(word.strip()) for word in text.split(",")) if text else ()
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--block-lengths has {error}; e.g. 512,4096") from None


def _write(path: str, *, text: str) -> None:
    from rayfcp.telemetry.files import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"--json {path!r} cannot be written: {error.strerror}; give another path") from error
