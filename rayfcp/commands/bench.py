"""`rayfcp bench attention`: arguments and output."""

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfcp.commands import CommandFailedError
from rayfcp.compare.arguments import names_of, not_negative, positive
from rayfcp.config import ConfigError
from rayfcp.values.devices import AUTO, DEVICES

if TYPE_CHECKING:
    from rayfcp.bench.request import BenchRequest

EPILOG = """\
Every strategy plans one batch. The programs of all its ranks run one after the other on this device, including their
messages, and are checked against one kernel over the whole sequences. Defaults depend on the device: seconds of work on
a CPU, minutes on an accelerator. Times are device times: of one thread on a CPU, of events on an accelerator.

  imbalance   idle share of the mean rank, which waits for the slowest; planned: as the cost model predicts it
  efficiency  seconds of the single kernel over those of all ranks together: the cost of cutting
  MFU/single  the same including waiting ranks: MFU of attention over the single kernel's, with free communication
  error       largest difference from the single kernel

Examples:  rayfcp bench attention
           rayfcp bench attention --device cuda --ranks 32 --tokens-per-rank 32768 --block-tokens 4096 --json bench.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rayfcp bench attention`; those of `BenchRequest` have its names."""
    parser.epilog = EPILOG
    batch = parser.add_argument_group("batch and strategies")
    batch.add_argument("--ranks", dest="num_ranks", type=positive, metavar="N", help="number of ranks")
    batch.add_argument("--tokens-per-rank", type=positive, metavar="T", help="tokens of the batch, divided by ranks")
    batch.add_argument("--lengths", metavar="FILE", help="a file or dist:NAME, as in compare (default: dist:long-tail)")
    batch.add_argument("--max-seqlen", type=positive, metavar="L", help="cut longer sequences to L tokens")
    batch.add_argument("--strategies", type=names_of, metavar="A,B", help="strategies, separated by commas")
    batch.add_argument(
        "--block-tokens", type=positive, metavar="T", help="block size of flex-block (default: its own choice)"
    )
    batch.add_argument("--seed", type=not_negative, metavar="S", help="seed of lengths and tensors (default: 0)")
    device = parser.add_argument_group("device and shapes")
    device.add_argument("--device", choices=(AUTO, *DEVICES), default=AUTO, help="device to measure (default: auto)")
    device.add_argument("--model", metavar="NAME", help="model profile whose heads are used: name or YAML path")
    device.add_argument("--dtype", metavar="NAME", help="bfloat16, float16, float32 or float64")
    device.add_argument("--hardware", metavar="NAME", help="hardware profile of the plans: name or YAML path")
    device.add_argument("--rounds", type=positive, metavar="R", help="timed repetitions")
    device.add_argument(
        "--context-tokens", type=positive, metavar="T", help="total tokens of the kernel timings by block length"
    )
    device.add_argument(
        "--block-lengths",
        type=lambda text: tuple(map(positive, names_of(text))),
        metavar="B,C",
        help="block lengths of these timings, separated by commas",
    )
    parser.add_argument("--json", metavar="OUT", help="write all figures as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, write the file.

    Raises:
        ConfigError: Arguments that cannot be used.
        CommandFailedError: A strategy's result differs from the single kernel's.
    """
    if arguments.json is not None and Path(arguments.json).is_dir():
        raise ConfigError(f"--json is {arguments.json!r}, a folder; give the path of a file")
    from rayfcp.bench.attention import bench_attention
    from rayfcp.bench.results import format_found
    from rayfcp.compare.command import Progress, write_output

    request = request_of(arguments)
    with Progress(1 + len(request.block_lengths) + len(request.strategies) * (2 + request.rounds)) as progress:
        report = bench_attention(request, log=progress)
    sys.stdout.write(f"{format_found(report)}\n")
    if arguments.json is not None:
        write_output("--json", arguments.json, text=json.dumps(report.as_json(), indent=1) + "\n")
    if report.wrong:
        wrong = ", ".join(f"{each.strategy} (off by {each.error:.2g})" for each in report.wrong)
        raise CommandFailedError(f"results differ from the single kernel in {request.dtype}: {wrong}")


def request_of(arguments: argparse.Namespace) -> "BenchRequest":
    """Return the arguments as a value, with defaults for the device.

    Raises:
        ConfigError: Arguments that cannot be used.
    """
    from rayfcp.bench.alone import base_hardware
    from rayfcp.bench.request import LARGE, BenchRequest, bench_strategies
    from rayfcp.execute.devices.backend import device_kind, resolve_device
    from rayfcp.execute.kernels import KernelUnavailableError, pick_kernel

    kind = device_kind(arguments.device)
    try:
        pick_kernel(kind)  # first: its error names the package to install
    except KernelUnavailableError as error:
        raise ConfigError(
            str(error).replace("cluster.device=", "--device ").replace("cluster.device", "--device")
        ) from error
    defaults = BenchRequest() if DEVICES[kind].is_host else LARGE
    given: dict[str, Any] = {
        field.name: value for field in fields(BenchRequest) if (value := getattr(arguments, field.name)) is not None
    }
    given |= {"device": kind, "hardware": arguments.hardware or base_hardware(resolve_device(kind))}
    given["strategies"] = bench_strategies(given.get("strategies", defaults.strategies))
    return replace(defaults, **given)
