"""Seconds in which a recurrent layer passes states over n ranks: as implemented, and by other schemes.

    python jobs/bench/scan.py [--hardware h100] [--degrees 2 8 64 256] [--tokens 2048] [--json FILE]

Simulated, on nodes of the hardware's profile: one sequence over n ranks, a part on each, through one layer, forward and
backward. `states`: the scan as implemented, with a token a rank, so that nothing hides it; `exposed`: seconds more than
as many tokens in sequences that are not cut, where a rank has `--tokens`, and as a share of these layers' own seconds,
matrices included. Beside it formulas of messages alone on the same links, in which products of transitions are free:
`heads`: shares of heads are not cut by columns; `gather`: all-gather of T and U; `ring`: the state passes from rank to
rank; `tree`: recursive doubling.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rayfcp.plan import hardware_profile, model_profile
from rayfcp.program import lower
from rayfcp.simulate import simulate
from rayfcp.simulate.scans import recurrences
from rayfcp.values import (
    BatchPlan,
    Group,
    HardwareProfile,
    LayerProfile,
    MicrobatchPlan,
    ModelProfile,
    Primitive,
    RecurrenceProfile,
    SequenceSpec,
    SpanKind,
)
from rayfcp.values.mixers import STATE_BYTES

MODELS = ("qwen3-next-80b-a3b", "nemotron-h-8b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Messages of `degree` ranks on nodes of the hardware."""

    hardware: HardwareProfile
    degree: int

    def to_all(self, size: float, *, count: int | None = None) -> float:
        """Seconds of `size` bytes from each rank to each of `count` others (all), those of its node first."""
        count = self.degree - 1 if count is None else count
        inside = min(count, min(self.degree, self.hardware.devices_per_node) - 1)
        across = count - inside
        moved_s = (inside / self.hardware.intra_node_bandwidth, across / self.hardware.inter_node_bandwidth)
        return self.hardware.latency_s + size * max(moved_s)

    def hop(self, size: float, *, distance: int) -> float:
        """Seconds of a message to the rank so far away."""
        near = distance < self.hardware.devices_per_node
        bandwidth = self.hardware.intra_node_bandwidth if near else self.hardware.inter_node_bandwidth
        return self.hardware.latency_s + size / bandwidth


def schemes_s(mixer: RecurrenceProfile, links: Links) -> dict[str, float]:
    """Seconds of messages, forward and backward, of one part a rank."""
    transition, state = (float(STATE_BYTES * each) for each in mixer.state_elements)
    degree, both = links.degree, transition + state
    folders = min(degree, mixer.num_heads)  # each has a head at least; with fewer than ranks their ports are full
    most = -(-mixer.num_heads // folders) / mixer.num_heads
    steps = [2**step for step in range(math.ceil(math.log2(degree)))]
    nodes = -(-degree // links.hardware.devices_per_node)
    near, far = (links.hop(state, distance=each) for each in (1, links.hardware.devices_per_node))
    return {
        "heads": links.to_all(most * both) + 3 * links.to_all(most * state),
        "gather": links.to_all(both) + links.to_all(state),
        "ring": 2 * ((degree - nodes) * near + (nodes - 1) * far),
        "tree": 2 * sum(links.hop(both, distance=each) for each in steps),
    }


def recurrent_layer(name: str) -> tuple[LayerProfile, RecurrenceProfile]:
    """A model's first layer with a recurrence."""
    layer = next(each for each in model_profile(name).every_layer if recurrences(each))
    return layer, recurrences(layer)[0]


def layer_s(layer: LayerProfile, hardware: HardwareProfile, *, degree: int, tokens: int, cut: bool) -> float:
    """Simulated seconds of the recurrence of one layer, forward and backward, of one sequence over all ranks (`cut`)
    or one on each."""
    model = ModelProfile.of_layers([layer], name="one layer", vocab_size=1)
    count = 1 if cut else degree
    groups = tuple(
        Group(ranks=tuple(range(degree)) if cut else (at,), sequences=(at,), primitive=Primitive.ULYSSES)
        for at in range(count)
    )
    sequences = [
        SequenceSpec(id=at, num_tokens=tokens * degree // count, num_targets=1, layer_kinds=model.layer_kinds)
        for at in range(count)
    ]
    plan = BatchPlan(
        strategy="by hand",
        num_ranks=degree,
        generation=0,
        microbatches=(MicrobatchPlan(groups=groups, group_s=(1.0,) * count, predicted_s=1.0),),
        recomputed_layers=0,
        predicted_s=1.0,
        lower_bound_s=0.0,
        reason="",
    )
    spans = simulate(lower(plan, sequences), model=model, hardware=hardware, detail=True).spans
    found_s = 0.0
    for way in ("forward", "backward"):
        rounds = [span for span in spans if span.label.startswith(f"{way} 0 round") and span.kind in ROUNDS]
        found_s += max(span.stop_s for span in rounds) - min(span.start_s for span in rounds)
    return found_s


ROUNDS = (SpanKind.ATTENTION, SpanKind.TRANSFER, SpanKind.WAIT)


def rows(hardware: HardwareProfile, *, degrees: list[int], tokens: int) -> Iterator[dict[str, float | str]]:
    """A row for each layer and degree; seconds."""
    instant = replace(hardware, linear_half_tokens=0.0)
    for name in MODELS:
        layer, mixer = recurrent_layer(name)
        for degree in degrees:
            states_s, alone_s = (layer_s(layer, instant, degree=degree, tokens=1, cut=cut) for cut in (True, False))
            cut_s, whole_s = (layer_s(layer, hardware, degree=degree, tokens=tokens, cut=cut) for cut in (True, False))
            linear_s = 6.0 * layer.matmul_parameters * tokens / (hardware.peak_flops * hardware.linear_efficiency)
            yield {
                "layer": name,
                "degree": degree,
                "states": states_s - alone_s,
                "exposed": cut_s - whole_s,
                "share": (cut_s - whole_s) / (whole_s + linear_s),
                **schemes_s(mixer, Links(hardware=hardware, degree=degree)),
            }


def main() -> None:
    """Print the table, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = list(rows(hardware_profile(args.hardware), degrees=args.degrees, tokens=args.tokens))
    names = ("states", "exposed", "heads", "gather", "ring", "tree")
    sys.stdout.write(f"{'layer':20}{'n':>5}{''.join(f'{name:>9}' for name in names)}{'share':>8}  (us)\n")
    for row in found:
        figures = "".join(f"{1e6 * float(row[name]):9.0f}" for name in names)
        sys.stdout.write(f"{row['layer']:20}{row['degree']:5}{figures}{float(row['share']):8.1%}\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
