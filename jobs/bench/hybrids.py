"""Simulated steps of models whose layers differ: rayfcp against static context parallelism, and what travels in each.

    python jobs/bench/hybrids.py [--models nemotron-h-8b ...] [--devices 64 256] [--lengths github ...] [--json FILE]

Each batch is planned and simulated three ways: `heads`, static CP as Megatron-LM has it, where ranks exchange tokens
for heads around recurrent layers; `scans`, static CP that passes states instead; and flex-ring, which passes states
too. The degree of static CP is the best by prediction for each batch, recomputation and how often gradients are reduced
are those that `rayfcp compare` chooses. Models that do not fit the devices (`SHARED`) have a fixed number of tokens a
rank in place of the memory model; there is no expert parallelism, so that every layer is gathered whole.

    python jobs/bench/hybrids.py --latent [--models deepseek-v3] [--tokens 8192] [--degrees 2 8 32]

One sequence over a group of each degree, latents that travel against keys and values of all heads, in rings and in
Ulysses groups: seconds of all attention layers (without shards), and bytes that a rank sends.

    python jobs/bench/hybrids.py --remap [--models qwen3-next-80b-a3b nemotron-h-8b]

Tokens per rank below which moving hidden states from the zig-zag layout of attention to a contiguous one and back, for
each recurrent layer or for each run of layers between attention, takes fewer bytes than the states of a second part on
each rank (`docs/cost_model.md`).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

from rayfcp.compare.arguments import Inputs
from rayfcp.compare.comparison import case_of
from rayfcp.compare.layouts import LayoutCandidate, LayoutSearch, ParallelLayout
from rayfcp.compare.planning import OPTIONS
from rayfcp.compare.results import Entry
from rayfcp.compare.settings import Setting
from rayfcp.cost.fit import PassShape, pass_plan
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.simulate import simulate_plan
from rayfcp.values import AttentionProfile, ModelProfile, Primitive, RecurrenceProfile
from rayfcp.values.mixers import STATE_BYTES

MODELS = ("qwen3-next-80b-a3b", "nemotron-h-8b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b")
LENGTHS = ("github", "commoncrawl", "long-tail", "bimodal")
SHARED = {"deepseek-v3": 16_384}
"""Tokens a rank of models that do not fit the devices, since each gathers all experts of a layer; all layers are
recomputed then. Only their seconds mean something."""


class PassingStates(LayoutCandidate):
    """A layout on which every strategy passes the states of recurrent layers."""

    def settings_for(self, strategy: str) -> tuple[Setting, ...]:  # noqa: ARG002
        return self.settings


WAYS = (
    ("heads", "static-cp", LayoutCandidate),
    ("scans", "static-cp", PassingStates),
    ("flex", "flex-ring", LayoutCandidate),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A batch the three ways; None where no plan was found."""

    model: str
    devices: int
    lengths: str
    entries: dict[str, Entry | None]

    def ratio(self, other: str) -> float | None:
        """Seconds of another way over those of flex-ring."""
        one, two = (self.entries[name] for name in (other, "flex"))
        return one.iteration_s / two.iteration_s if one and two and one.iteration_s and two.iteration_s else None

    def text(self) -> str:
        """A line of the table."""
        ours, theirs = self.entries["flex"], self.entries["heads"]
        times = [_number(each.iteration_s if each else None, ".3f") for each in self.entries.values()]
        ratios = [_number(self.ratio(name), ".2f") for name in ("heads", "scans")]
        rest = [
            _number(theirs.mfu if theirs else None, ".1%"),
            _number(ours.mfu if ours else None, ".1%"),
            _number(ours.gap if ours else None, ".2f"),
            *(_degrees(each) for each in (theirs, ours)),
        ]
        return " | ".join(("", self.model, str(self.devices), self.lengths, *times, *ratios, *rest, "")).strip()

    def as_json(self) -> dict[str, Any]:
        own = {name: entry.as_json(best_baseline_s=None) if entry else None for name, entry in self.entries.items()}
        return {"model": self.model, "devices": self.devices, "lengths": self.lengths, "entries": own}


HEADER = """| model | H100s | lengths | heads, s | scans, s | flex-ring, s | heads / flex | scans / flex | MFU heads \
| MFU flex | gap | degrees heads | degrees flex |
|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|"""


LATENT_HEADER = """| tokens/rank | degree | primitive | latents, s | expanded, s | ratio | latents, GB | expanded, GB |
|--:|--:|---|--:|--:|--:|--:|--:|"""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _degrees(entry: Entry | None) -> str:
    counts = sorted((entry.degrees if entry and entry.degrees else {}).items(), key=lambda each: -int(each[0]))
    return " ".join(f"{degree}x{count:g}" for degree, count in counts) or "-"


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    for model in arguments.models:
        for devices in arguments.devices:
            for lengths in arguments.lengths:
                inputs = Inputs(
                    lengths=f"dist:{lengths}",
                    model=model,
                    hardware=arguments.hardware,
                    devices=devices,
                    global_batch=arguments.sequences * devices,
                    batches=arguments.batches,
                    max_seqlen=arguments.max_seqlen,
                    max_tokens_per_rank=SHARED.get(model),
                    recompute_layers=model_profile(model).num_layers if model in SHARED else None,
                    seed=arguments.seed,
                )
                yield Row(model=model, devices=devices, lengths=lengths, entries=dict(_entries(inputs)))


def _entries(inputs: Inputs) -> Iterator[tuple[str, Entry | None]]:
    case, layout = case_of(inputs, options=OPTIONS), ParallelLayout(num_stages=1, tensor_parallel=1)
    for way, strategy, view in WAYS:
        candidate = view(layout, inputs=inputs, case=case)
        (trial,) = LayoutSearch(strategy, [candidate], log=lambda _: None, check=False).run()
        if trial.entry is None:
            sys.stderr.write(f"{inputs.model}, {inputs.devices} devices, {way}: {trial.reason}\n")
        yield way, trial.entry


def expanded(model: ModelProfile) -> ModelProfile:
    """The model with keys and values of all heads in place of latents; their projection is a linear layer then."""

    def widened(mixer: Any) -> Any:
        if not (isinstance(mixer, AttentionProfile) and mixer.latent_size):
            return mixer
        return replace(mixer, latent_size=0, rope_size=0, num_kv_heads=mixer.num_heads)

    layers = [replace(each, mixers=tuple(map(widened, each.mixers))) for each in model.every_layer]
    return replace(model, layers=tuple(layers), num_kv_heads=model.num_heads)


def attention_alone(model: ModelProfile) -> ModelProfile:
    """The model without experts and MLPs, whose shards would hide what attention takes."""
    layers = [
        replace(each, ffn_size=0, num_experts=1, experts_per_token=1, shared_ffn_size=0) for each in model.every_layer
    ]
    return replace(model, layers=tuple(layers), vocab_size=1)


def latent_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """The tables of `--latent`."""
    hardware = hardware_profile(arguments.hardware)
    for name in arguments.models:
        plain = model_profile(name)
        if not any(each.expansion_flops for each in plain.every_layer):
            continue
        models = [attention_alone(plain), expanded(attention_alone(plain))]
        yield f"\n{name}\n\n{LATENT_HEADER}"
        for tokens, degree, primitive in product(arguments.tokens, arguments.degrees, Primitive):
            shape = PassShape(degree=degree, lengths=(tokens * degree,), primitive=primitive)
            plan, sequences = pass_plan(shape, num_ranks=degree, recomputed_layers=0)
            lines = [simulate_plan(plan, sequences, model=each, hardware=hardware) for each in models]
            latent_s, whole_s = (each.iteration_s for each in lines)
            moved = [f"{max(each.sent_bytes) / 1e9:.2f}" for each in lines]
            cells = (f"{latent_s:.3f}", f"{whole_s:.3f}", f"{whole_s / latent_s:.2f}", *moved)
            yield " | ".join(("", f"{tokens:,}", str(degree), primitive.value, *cells, "")).strip()


def remap_tokens(model: ModelProfile, *, bytes_per_element: int) -> float:
    """Tokens per rank below which remapping moves fewer bytes in a recurrent layer than the second part of each rank.

    A second part moves |T| + 2 |U| forward and 2 |U| backward. A remap moves a token's hidden state to the contiguous
    layout and back, forward and backward; of a zig-zag layout all but every d-th half slice, nearly all tokens.
    """
    mixers = [mixer for each in model.every_layer for mixer in each.mixers if isinstance(mixer, RecurrenceProfile)]
    transition, state = (STATE_BYTES * each for each in mixers[0].state_elements)
    return (transition + 4 * state) / (4 * model.hidden_size * bytes_per_element)


def layers_of_run(model: ModelProfile) -> float:
    """Recurrent layers between two layers of attention, in the mean over places where there are any."""
    kinds = [each.kind for each in model.every_layer if each.kind.recurrence or each.attention]
    runs = [
        len(list(run)) for is_recurrent, run in groupby(kinds, key=lambda kind: bool(kind.recurrence)) if is_recurrent
    ]
    return sum(runs) / len(runs)


def remap_lines(models: Sequence[str]) -> Iterator[str]:
    """What `--remap` prints of the models with recurrent layers."""
    for name in models:
        model = model_profile(name)
        if any(each.kind.recurrence for each in model.every_layer):
            tokens, layers = remap_tokens(model, bytes_per_element=2), layers_of_run(model)
            yield (
                f"{name}: a remap moves fewer bytes below {tokens:,.0f} tokens per rank if it is for one layer, below "
                f"{layers * tokens:,.0f} if for {layers:.1f} between layers of attention"
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latent", action="store_true")
    parser.add_argument("--remap", action="store_true")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--devices", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--lengths", nargs="+", default=LENGTHS)
    parser.add_argument("--sequences", type=int, default=4, help="of a batch, per device (default: 4)")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--max-seqlen", type=int, default=131_072)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 32_768], help="per rank, of --latent")
    parser.add_argument("--degrees", nargs="+", type=int, default=[2, 8, 32], help="of --latent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args(argv)
    if arguments.latent or arguments.remap:
        for line in latent_lines(arguments) if arguments.latent else remap_lines(arguments.models):
            print(line, flush=True)  # noqa: T201
        return
    print(HEADER, flush=True)  # noqa: T201
    found = []
    for row in rows(arguments):
        print(row.text(), flush=True)  # noqa: T201
        found.append(row.as_json())
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
