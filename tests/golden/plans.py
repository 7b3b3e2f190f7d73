"""Hashes of the plans and programs of 200 small batches: `python -m tests.golden.plans` writes plans.json again.

A change that is meant to keep plans leaves the file as it is. Plans are hashed with all digits of their floats, which
are the same on every x86 CPU: planning adds, multiplies, divides and takes roots, which IEEE 754 rounds in one way, and
numba fuses none of these. (AVX2 and FMA switched off in numpy, numba, OpenBLAS and libm changed no hash.) A plan of
`flexsp` also depends on the version of HiGHS. Programs are hashed as text, without the hash of their plan.
"""

import argparse
import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayfcp.config.constraints import UNCONSTRAINED, HostConstraints
from rayfcp.config.models import PlanConfig
from rayfcp.plan import CostModel, hardware_profile, model_profile, plan_batch, strategy_names
from rayfcp.plan.strategies.registry import get
from rayfcp.program import lower, to_text
from rayfcp.values import ClusterSpec, Images, InfeasiblePlanError, ModelProfile, SequenceSpec
from tests.masks import kinds

FILE = Path(__file__).with_name("plans.json")
COUNT = 200
LONGEST = 40_000
MODELS = (
    *("qwen3-1.7b", "llama3-8b", "gpt-oss-20b", "chunks", "deepseek-v3", "qwen3-30b-a3b", "qwen3-vl-4b"),
    *("qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "internvl3-2b"),
)
"""Full attention, windows, chunks, latents, experts, images, recurrence."""
HOSTS: tuple[dict[str, object], ...] = (
    {"degrees": "powers_of_two", "placement": "aligned"},
    {"degrees": (1, 2, 4), "placement": "contiguous"},
    {"all_ranks": True, "microbatch_multiple": 2},
    {"num_microbatches": 3},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The arguments of one plan."""

    name: str
    strategy: str
    sequences: list[SequenceSpec]
    cluster: ClusterSpec
    cost: CostModel
    options: PlanConfig

    def hashes(self) -> dict[str, str]:
        """Return the hashes of plan and programs, or why there is no plan."""
        try:
            plan = plan_batch(
                self.sequences, cluster=self.cluster, cost=self.cost, strategy=self.strategy, options=self.options
            )
        except InfeasiblePlanError as error:
            return {"infeasible": str(error)}
        programs = lower(plan, self.sequences).replaced(plan_hash="")
        return {"plan": plan.plan_hash, "programs": _digest("\n".join(map(to_text, programs)))}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def drawn(number: int) -> Case:
    """Return the case of a number: each strategy with each model in turn, the rest at random."""
    rng, names = random.Random(number), strategy_names()
    strategy = names[number % len(names)]
    staged = get(strategy).needs_stages or rng.random() < 0.2
    model = _model(rng.choice([each for each in MODELS if not (staged and "vl" in each)]))
    num_stages = rng.choice((2, 3, 4)) if staged else 1
    num_ranks = rng.choice((1, 2, 3, 4, 5, 8, 12, 16)) if num_stages == 1 else rng.choice((1, 2, 3, 4, 6))
    most, shared = (9 if strategy == "flexsp" else 24), strategy == "flex-ring" and rng.random() < 0.3
    sequences = [_sequence(rng, at, model=model, shared=shared) for at in range(rng.randint(1, most))]
    hardware = hardware_profile(rng.choice(("h100", "a800", "ascend-910c", "gpu-x", "cpu")))
    hardware = dataclasses.replace(hardware, devices_per_node=rng.choice((1, 2, 4, 8)))
    cost = CostModel.from_profiles(
        model,
        hardware,
        num_ranks=num_ranks,
        num_stages=num_stages,
        recomputed_layers=rng.choice((0, model.num_layers)) if num_stages == 1 else 0,
        bytes_per_element=hardware.dtype_bytes,
        reduce_every=rng.choice(("microbatch", "step")),
        gather_every=rng.choice(("microbatch", "step")),
        memory_bytes=10**15,
    )
    longest, total = max(each.num_tokens for each in sequences), sum(each.num_tokens for each in sequences)
    room = max(-(-longest // num_ranks), -(-total // (num_ranks * rng.randint(1, 4)))) + rng.choice((0, 64, 4_096))
    room += 30_000 if any(each.images for each in sequences) else 0
    cluster = ClusterSpec(
        num_ranks=num_ranks,
        num_stages=num_stages,
        max_tokens_per_rank=room,
        speed_of_rank=tuple(rng.choice((1.0, 1.0, 0.5)) for _ in range(num_ranks)) if rng.random() < 0.3 else (),
        node_of_rank=tuple(rng.randrange(3) for _ in range(num_ranks * num_stages)) if rng.random() < 0.3 else (),
    )
    name = f"{number:03} {strategy}, {model.name}, {len(sequences)} sequences, {num_ranks} ranks x {num_stages}"
    return Case(
        name=name, strategy=strategy, sequences=sequences, cluster=cluster, cost=cost, options=_options(rng, strategy)
    )


def _model(name: str) -> ModelProfile:
    if name != "chunks":
        return model_profile(name)
    model = model_profile("llama3-8b")
    return dataclasses.replace(model, name=name, kind_of_layer=kinds(-8192, -8192, -8192, 0) * (model.num_layers // 4))


def _sequence(rng: random.Random, number: int, *, model: ModelProfile, shared: bool) -> SequenceSpec:
    """Draw a long tail by divisions alone, which every machine rounds alike; some in units if `shared`."""
    length = min(LONGEST, 1 + int(300 / (1.002 - rng.random())))
    images: tuple[Images, ...] = ()
    if model.vision is not None and rng.random() < 0.6:
        images = (Images(start=3, num_tokens=64, num_patches=256, count=rng.randint(1, 6), stride=70),)
        length = max(length, images[0].stop + 8)
    return SequenceSpec(
        id=number,
        num_tokens=length,
        num_targets=rng.choice((length - 1, length // 3)),
        layer_kinds=model.layer_kinds,
        images=images,
        unit=rng.choice((None, 0, 1)) if shared else None,
    )


def _options(rng: random.Random, strategy: str) -> PlanConfig:
    constrained = strategy in ("flex-ring", "auto") and rng.random() < 0.5
    return PlanConfig(
        packing=rng.choice(("joint", "joint", "bfd")),
        degrees=rng.choice(("exact", "exact", "dp")),
        primitives=("ring", "ulysses") if get(strategy).primitive or rng.random() < 0.7 else ("ring",),
        search_moves=rng.choice(("auto", 2_000)),
        constraints=HostConstraints.model_validate(rng.choice(HOSTS)) if constrained else UNCONSTRAINED,
    )


def written() -> dict[str, dict[str, str]]:
    """Return the file: the hashes of each case by name."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="name the cases that differ, and write nothing")
    arguments = parser.parse_args(argv)
    found = {case.name: case.hashes() for case in map(drawn, range(COUNT))}
    if arguments.check:
        differing = [name for name, hashes in found.items() if written().get(name) != hashes]
        sys.stdout.write("".join(f"{name}\n" for name in differing))
        return bool(differing)
    lines = [f"{json.dumps(name)}: {json.dumps(hashes)}" for name, hashes in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
