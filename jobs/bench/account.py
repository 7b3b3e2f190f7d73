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
from rayfcp.compare.plan_lengths import PlannedBatch
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
END_S = 0.05
"""Assumed: between steps the device waits while the host reads loss, norm and the timing events of messages, reports,
and is called again."""
COPY_LAUNCHES = 3
"""Per parameter tensor, to copy weight and moments to the host."""
UPDATE_LAUNCHES = 10
"""Assumed, per parameter tensor: four for the norm, and as much time as six for AdamW on DTensors; none where norm and
update run for all local shards at once."""
UPDATE_BYTES = 28
"""Per parameter that a rank holds: AdamW reads weight, gradient and two moments in fp32, and writes three."""
SHARDING_BYTES = 14
"""Per parameter and microbatch: bf16 weights gathered in two passes are copied out (read and write, 4 each); gradients
are copied in for the reduction, or added up, in fp32 (6)."""

REPEATS = (True, False)
Costs = Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a step runs with. `repeats`: recomputed layers repeat their attention; `compiled`: all of a layer but
    attention; `in_triton`: merges of partial results, and the loss;
    `updates_at_once`: norm and update of all local shards."""

    name: str
    is_newest: bool = False
    repeats: bool = True
    compiled: bool = False
    in_triton: bool = False
    updates_at_once: bool = False


SETUPS = (
    Setup(name="FlashAttention-2, eager"),
    Setup(name="+ FlashAttention-3 or 4", is_newest=True),
    Setup(name="+ kept attention outputs", is_newest=True, repeats=False),
    Setup(name="+ compiled layers", is_newest=True, repeats=False, compiled=True),
    Setup(name="+ merge and loss in Triton", is_newest=True, repeats=False, compiled=True, in_triton=True),
    Setup(name="+ update at once", is_newest=True, repeats=False, compiled=True, in_triton=True, updates_at_once=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one step of a rank. `degrees`: of the plan's groups; `layers_again`, `again_s`: recomputed; `exposed_s`:
    messages that nothing hides; `idle_s`: the device waits for the host; `end_s`: from the last gradient to the next
    step."""

    setup: str
    degrees: str
    microbatches: int
    layers_again: int
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
    """Accounts of the steps of one model with one kind of documents; plans and tallies by whether layers repeat their
    attention.

    Args:
        primitives: as `plan.primitives`.
    """

    def __init__(
        self, model: str, *, hardware: str, ranks: int, document: int, tokens_per_rank: int, primitives: Sequence[str]
    ) -> None:
        self._model, self._hardware, self._ranks = model_profile(model), hardware_profile(hardware), ranks
        self._lengths = [document] * max(tokens_per_rank * ranks // document, 1)
        keys = {"model": model, "hardware": hardware, "ranks": ranks, "options": PlanConfig(primitives=primitives)}
        self.plans = {repeats: plan_lengths(self._lengths, keep_attention=not repeats, **keys) for repeats in REPEATS}
        self.runs = {repeats: _passes(model, self._model, _busiest(plan)) for repeats, plan in self.plans.items()}

    def account(self, setup: Setup) -> Account:
        """The step with `setup`."""
        layers, again = self._model.num_layers, self.plans[setup.repeats].recomputed_layers
        runs = self.runs[setup.repeats][setup.in_triton]
        one, two, recomputed = (self._costs(*each, setup=setup) for each in runs)
        layer, repeated = _less(two, one), _less(recomputed, one)
        rest, between = _less(one, layer), "fused" if setup.compiled else "eager"
        total = Costs({key: rest[key] + layers * layer[key] + again * repeated[key] for key in two})
        for kind in ("launches", "s", "host_s"):  # embedding and loss are not compiled
            total[f"between_{kind}"] = total[f"{between}_{kind}"] - rest[f"{between}_{kind}"] + rest[f"eager_{kind}"]
        repeated["between_s"], repeated["between_host_s"] = repeated[f"{between}_s"], repeated[f"{between}_host_s"]
        return self._summed(setup, total, again_s=again * _device_s(repeated))

    def _summed(self, setup: Setup, total: Costs, *, again_s: float) -> Account:
        model, plan = self._model, self.plans[setup.repeats]
        count, degrees = len(plan.microbatches), {len(each.ranks) for at in plan.microbatches for each in at.groups}
        sharding_s = SHARDING_BYTES * model.num_parameters * count / MEMORY_BYTES_PER_S
        exposed_s = total["exposed_s"] + count * _exposed_shards_s(model, self._hardware, ranks=self._ranks)
        each = COPY_LAUNCHES + (0 if setup.updates_at_once else UPDATE_LAUNCHES)
        tensors = (11 if model.head_norms else 9) * model.num_layers + 3
        end_s = (
            END_S + LAUNCH_S * each * tensors + UPDATE_BYTES * model.num_parameters / self._ranks / MEMORY_BYTES_PER_S
        )
        host_s = total["host_s"] + total["between_host_s"]
        device_s = _device_s(total) + sharding_s
        idle_s = max(host_s - device_s - exposed_s, 0.0)
        step_s = device_s + exposed_s + idle_s + end_s
        flops = model_flops(model, plan.sequences)
        return Account(
            setup=setup.name,
            degrees=", ".join(map(str, sorted(degrees))),
            microbatches=count,
            layers_again=plan.recomputed_layers,
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
            tokens_per_s=sum(self._lengths) / self._ranks / step_s,
            mfu=flops / (self._ranks * self._hardware.peak_flops * step_s),
        )

    def _costs(self, found: Tally, flights: Sequence[Flight], *, setup: Setup) -> Costs:
        """Seconds and amounts of one run."""
        costs = _seconds(found, hardware=self._hardware, setup=setup)
        link_s, latency_s = 1 / self._hardware.intra_node_bandwidth, self._hardware.latency_s
        for each in flights:
            beside = _seconds(each.beside, hardware=self._hardware, setup=setup)
            beside["between_s"] = beside["eager_s"]
            costs["exposed_s"] += max(latency_s + each.num_bytes * link_s - _device_s(beside), 0.0)
        costs["host_s"] += ROUND_S * len(flights)
        return costs


def _seconds(amounts: Tally, *, hardware: HardwareProfile, setup: Setup) -> Costs:
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


def _busiest(plan: PlannedBatch) -> RankProgram:
    """The program of the rank with the most pairs."""
    return max(lower(plan, plan.sequences), key=_pairs)


def _pairs(program: RankProgram) -> float:
    kinds = (kind for item in program.instructions if isinstance(item, Forward) for kind in item.kinds)
    return sum(
        call.num_pairs for kind in kinds for step in make_schedule(kind.attention).forward for call in step.calls
    )


def _passes(name: str, model: ModelProfile, program: RankProgram) -> dict[bool, list[tuple[Tally, list[Flight]]]]:
    """Tallies for one layer, two, and one that is recomputed; by whether kernels in Triton run."""
    config = config_of_keys([f"model.name={name}", "model.dtype=bfloat16"])
    library = model_config(config.model, vocab_size=model.vocab_size)

    def made(num_layers: int) -> CausalLM:
        return empty_model(with_layers(library, num_layers), dtype="bfloat16").to(torch.bfloat16)

    run = partial(tally, program)
    run(made(1), recomputed_layers=0, in_triton=False)  # row numbers and lengths go to the device once
    return {
        fused: [
            run(made(num_layers), recomputed_layers=again, in_triton=fused)
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
            accounts = [of.account(setup) for setup in SETUPS]
            if len(primitives) == 1 and {each.degrees for each in accounts} == {"1"}:
                continue  # no rank needs another
            title = f"{document:,} tokens, {' or '.join(primitives)}"
            found[title] = [asdict(each) for each in accounts]
            sys.stdout.write(f"\n{args.model}, {title} (estimated)\n\n{_table(accounts)}\n")
            for rate in args.published:
                share = accounts[0].mfu * rate / accounts[0].tokens_per_s
                sys.stdout.write(f"published {rate:,.0f} tok/s/GPU: MFU {100 * share:.1f} % by this count of FLOPs\n")
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1), encoding="utf-8")


COLUMNS = (
    ("setup", "setup", "{}", 1),
    ("degrees", "degrees", "{}", 1),
    ("microbatches", "microbatches", "{}", 1),
    ("layers_again", "layers again", "{}", 1),
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
