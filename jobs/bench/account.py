"""Account of a training step on H100s from the program itself, before and after each change; nothing is measured.

    python jobs/bench/account.py
    python jobs/bench/account.py --model llama3-8b --documents 8192 --tokens-per-rank 16384 --published 5762 6667

Batches of documents of one length are planned and lowered, and the program of the rank with the most pairs runs on
tensors without memory (`account_tally`): its launches, bytes and FLOPs are those of a run, for one and for two layers,
and follow for all. Seconds come from the constants below and the hardware's profile, so that they are **estimated**.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from account_tally import Flight, Tally, tally

from rayfcp import plan_lengths
from rayfcp.config import config_of_keys
from rayfcp.config.models import PlanConfig
from rayfcp.cost.analytic import model_flops
from rayfcp.execute.attention.schedule import make_schedule
from rayfcp.models.build import empty_model
from rayfcp.models.causal_lm import CausalLM
from rayfcp.models.describe import model_config
from rayfcp.models.library import with_layers
from rayfcp.plan import hardware_profile, model_profile
from rayfcp.program import Forward, RankProgram, lower
from rayfcp.values import HardwareProfile, ModelProfile

MEMORY_BYTES_PER_S = 2.8e12
"""Assumed: five sixths of the data sheet's 3.35 TB/s (H100 SXM5), as streaming kernels reach."""
FLASH_2 = 0.35
"""Share of peak of FlashAttention-2, and of torch's own flash kernels, which are the same, on H100 (Shah et al. 2024,
abstract). FlashAttention-3 and 4: the profile's `attention_efficiency`."""
LAUNCH_S = 10e-6
"""Assumed host time of an operator that is launched, with the Python and autograd around it."""
COMPILED_LAUNCH_S = 5e-6
"""Assumed host time of a launch in compiled code."""
ROUND_S = 200e-6
"""Assumed host time of posting a round's messages through `batch_isend_irecv`."""
END_S = 0.125
"""Assumed: loss and norm read back, the norm's and the update's launches over all parameters, the report, and the next
step's call."""
UPDATE_BYTES = 28
"""Per parameter that a rank holds: AdamW reads weight, gradient and two moments in fp32, and writes three."""
SHARDING_BYTES = 14
"""Per parameter and microbatch: bf16 weights gathered in two passes are copied out (read and write, 4 each); gradients
are copied in for the reduction, or added up, in fp32 (6)."""

Costs = Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a step runs with. `repeats`: recomputed layers repeat their attention; `compiled`: all of a layer but
    attention."""

    name: str
    is_newest: bool = False
    repeats: bool = True
    compiled: bool = False
    fused_merge: bool = False


SETUPS = (
    Setup(name="FlashAttention-2, eager"),
    Setup(name="+ FlashAttention-3 or 4", is_newest=True),
    Setup(name="+ kept attention outputs", is_newest=True, repeats=False),
    Setup(name="+ compiled layers", is_newest=True, repeats=False, compiled=True),
    Setup(name="+ fused merge", is_newest=True, repeats=False, compiled=True, fused_merge=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one step of a rank. `again_s`: recomputation; `exposed_s`: messages that nothing hides; `idle_s`: the device
    waits for the host; `end_s`: from the last gradient to the next step."""

    setup: str
    launches: float
    merge_gb: float
    product_s: float
    attention_s: float
    memory_s: float
    merge_s: float
    host_s: float
    idle_s: float
    exposed_s: float
    again_s: float
    end_s: float
    step_s: float
    tokens_per_s: float
    mfu: float


class Accountant:
    """Accounts of the steps of one model with one kind of documents.

    Args:
        primitives: as `plan.primitives`.
    """

    def __init__(
        self, model: str, *, hardware: str, ranks: int, document: int, tokens_per_rank: int, primitives: Sequence[str]
    ) -> None:
        self._model, self._hardware, self._ranks = model_profile(model), hardware_profile(hardware), ranks
        lengths = [document] * max(tokens_per_rank * ranks // document, 1)
        options = PlanConfig(primitives=tuple(primitives))
        self.plan = plan_lengths(lengths, model=model, hardware=hardware, ranks=ranks, options=options)
        programs = lower(self.plan, self.plan.sequences, reduce_every="step")
        self._runs = _passes(model, self._model, max(programs, key=_pairs))
        self.num_tokens = sum(lengths)

    def account(self, setup: Setup) -> Account:
        """The step with `setup`."""
        layers, again = self._model.num_layers, self.plan.recomputed_layers
        runs = [self._costs(*each, setup=setup) for each in self._runs[setup.fused_merge]]
        one, two, recomputed = runs
        layer, repeated = _less(two, one), _less(recomputed, one)
        rest, between = _less(one, layer), "fused" if setup.compiled else "eager"
        total = Costs({key: rest[key] + layers * layer[key] + again * repeated[key] for key in two})
        for kind in ("launches", "s", "host_s"):  # embedding and loss are not compiled
            total[f"between_{kind}"] = total[f"{between}_{kind}"] - rest[f"{between}_{kind}"] + rest[f"eager_{kind}"]
        repeated["between_s"], repeated["between_host_s"] = repeated[f"{between}_s"], repeated[f"{between}_host_s"]
        return self._summed(setup, total, again_s=again * _device_s(repeated))

    def _summed(self, setup: Setup, total: Costs, *, again_s: float) -> Account:
        model, count = self._model, len(self.plan.microbatches)
        sharding_s = SHARDING_BYTES * model.num_parameters * count / MEMORY_BYTES_PER_S
        exposed_s = total["exposed_s"] + count * _exposed_shards_s(model, self._hardware, ranks=self._ranks)
        end_s = END_S + UPDATE_BYTES * model.num_parameters / self._ranks / MEMORY_BYTES_PER_S
        host_s = total["host_s"] + total["between_host_s"]
        device_s = _device_s(total) + sharding_s
        idle_s = max(host_s - device_s - exposed_s, 0.0)
        step_s = device_s + exposed_s + idle_s + end_s
        flops = model_flops(model, self.plan.sequences)
        return Account(
            setup=setup.name,
            launches=total["launches"] + total["between_launches"],
            merge_gb=total["merge_bytes"] / 1e9,
            product_s=total["product_s"],
            attention_s=total["attention_s"],
            memory_s=total["inside_s"] + total["between_s"] + sharding_s,
            merge_s=total["merge_s"],
            host_s=host_s,
            idle_s=idle_s,
            exposed_s=exposed_s,
            again_s=again_s,
            end_s=end_s,
            step_s=step_s,
            tokens_per_s=self.num_tokens / self._ranks / step_s,
            mfu=flops / (self._ranks * self._hardware.peak_flops * step_s),
        )

    def _costs(self, found: Tally, flights: Sequence[Flight], *, setup: Setup) -> Costs:
        """Seconds and amounts of one run."""
        phases = ("forward", "backward", "again")[: 3 if setup.repeats else 2]
        costs = _seconds(found, phases, hardware=self._hardware, setup=setup)
        own = [each for each in flights if each.phase in phases]
        link_s, latency_s = 1 / self._hardware.intra_node_bandwidth, self._hardware.latency_s
        for each in own:
            beside = _seconds(each.beside, phases, hardware=self._hardware, setup=setup)
            beside["between_s"] = beside["eager_s"]
            costs["exposed_s"] += max(latency_s + each.num_bytes * link_s - _device_s(beside), 0.0)
        costs["host_s"] += ROUND_S * len(own)
        return costs


def _seconds(found: Tally, phases: Sequence[str], *, hardware: HardwareProfile, setup: Setup) -> Costs:
    amounts: Counter[str] = Counter()
    for (phase, kind), amount in found.items():
        amounts[kind] += amount if phase in phases else 0
    share = hardware.attention_efficiency if setup.is_newest else FLASH_2
    attention = amounts["attention"] + hardware.attention_half_tokens * amounts["per_query"]
    launches = amounts["launches"] + amounts["attention_launches"] + amounts["merge_launches"]
    return Costs(
        {
            "product_s": amounts["products"] / (hardware.peak_flops * hardware.linear_efficiency),
            "attention_s": attention / (hardware.peak_flops * share),
            "inside_s": amounts["attention_bytes"] / MEMORY_BYTES_PER_S,
            "merge_bytes": amounts["merge_bytes"],
            "merge_s": amounts["merge_bytes"] / MEMORY_BYTES_PER_S,
            "launches": launches,
            "host_s": LAUNCH_S * launches,
            "exposed_s": 0.0,
            **{f"{kind}_s": amounts[f"{kind}_bytes"] / MEMORY_BYTES_PER_S for kind in ("eager", "fused")},
            **{f"{kind}_launches": amounts[f"{kind}_launches"] for kind in ("eager", "fused")},
            "eager_host_s": LAUNCH_S * amounts["eager_launches"],
            "fused_host_s": COMPILED_LAUNCH_S * amounts["fused_launches"],
        }
    )


def _device_s(costs: Costs) -> float:
    return sum(costs[f"{kind}_s"] for kind in ("product", "attention", "inside", "merge", "between"))


def _less(costs: Costs, other: Costs) -> Costs:
    return Costs({key: costs[key] - other[key] for key in costs})


def _exposed_shards_s(model: ModelProfile, hardware: HardwareProfile, *, ranks: int) -> float:
    """Gathers and reductions that no layer hides: the embedding's and the first layer's weights before a pass, their
    gradients after it. A layer's own take a fraction of its time at these sizes."""
    first = model.layer_parameters + model.vocab_size * model.hidden_size
    moved = first * (hardware.dtype_bytes + 4) * (ranks - 1) / ranks
    return moved / hardware.intra_node_bandwidth


def _pairs(program: RankProgram) -> float:
    kinds = (kind for item in program.instructions if isinstance(item, Forward) for kind in item.kinds)
    return sum(
        call.num_pairs for kind in kinds for step in make_schedule(kind.attention).forward for call in step.calls
    )


def _passes(name: str, model: ModelProfile, program: RankProgram) -> dict[bool, list[tuple[Tally, list[Flight]]]]:
    """Tallies for one layer, two, and one that is recomputed; by whether merges are fused."""
    config = config_of_keys([f"model.name={name}", "model.dtype=bfloat16"])
    library = model_config(config.model, vocab_size=model.vocab_size)

    def made(num_layers: int) -> CausalLM:
        return empty_model(with_layers(library, num_layers), dtype="bfloat16").to(torch.bfloat16)

    run = partial(tally, program)
    run(made(1), recomputed_layers=0, fused_merge=False)  # row numbers and lengths go to the device once
    return {
        fused: [
            run(made(num_layers), recomputed_layers=again, fused_merge=fused)
            for num_layers, again in ((1, 0), (2, 0), (1, 1))
        ]
        for fused in (False, True)
    }


def main(argv: Sequence[str] | None = None) -> None:
    """A table for each length of documents."""
    args = _parser().parse_args(argv)
    made = partial(Accountant, args.model, hardware=args.hardware, ranks=args.ranks)
    found: dict[str, Any] = {}
    for document in args.documents:
        for primitives in (("ring", "ulysses"), ("ring",)):
            of = made(document=document, tokens_per_rank=args.tokens_per_rank, primitives=primitives)
            degrees = sorted({len(group.ranks) for each in of.plan.microbatches for group in each.groups})
            if len(primitives) == 1 and degrees == [1]:
                continue  # no rank needs another
            title = f"{document:,} tokens, {' or '.join(primitives)}: degrees {degrees}, "
            title += f"{len(of.plan.microbatches)} microbatches, {of.plan.recomputed_layers} layers recomputed"
            accounts = [of.account(setup) for setup in SETUPS]
            found[title] = [asdict(each) for each in accounts]
            sys.stdout.write(f"\n{args.model}, {title} (estimated)\n\n{_table(accounts)}\n")
            for rate in args.published:
                share = accounts[0].mfu * rate / accounts[0].tokens_per_s
                sys.stdout.write(f"published {rate:,.0f} tok/s/GPU: MFU {100 * share:.1f} % by this count of FLOPs\n")
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1), encoding="utf-8")


COLUMNS = (
    ("setup", "setup", "{}", 1),
    ("launches", "launches", "{:,.0f}", 1),
    ("merge_gb", "merge GB", "{:.1f}", 1),
    ("product_s", "products", "{:.2f}", 1),
    ("attention_s", "attention", "{:.2f}", 1),
    ("memory_s", "memory", "{:.2f}", 1),
    ("merge_s", "merge", "{:.3f}", 1),
    ("exposed_s", "exposed", "{:.3f}", 1),
    ("idle_s", "idle", "{:.2f}", 1),
    ("end_s", "end", "{:.2f}", 1),
    ("step_s", "step s", "{:.2f}", 1),
    ("again_s", "again", "{:.2f}", 1),
    ("host_s", "host", "{:.2f}", 1),
    ("tokens_per_s", "tok/s/GPU", "{:,.0f}", 1),
    ("mfu", "MFU %", "{:.1f}", 100),
)


def _table(accounts: Sequence[Account]) -> str:
    head = f"| {' | '.join(title for _, title, _, _ in COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"
    rows = (
        " | ".join(
            shown.format(value if isinstance(value := getattr(each, name), str) else times * value)
            for name, _, shown, times in COLUMNS
        )
        for each in accounts
    )
    return "\n".join([head, *(f"| {row} |" for row in rows)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--documents", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--tokens-per-rank", type=int, default=32768)
    parser.add_argument("--published", type=float, nargs="+", default=[], help="tokens/s per device of another system")
    parser.add_argument("--out", help="JSON with all figures")
    return parser


if __name__ == "__main__":
    main()
