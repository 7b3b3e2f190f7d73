"""The board Balance: do all ranks have as much to do, and which do not."""

from grafana_foundation_sdk.builders import dashboard

from dashboards.frame import Section, board
from dashboards.panels import GREEN, HIGH_IS_BAD, RED, YELLOW, Line, Panel, chart, histogram, number, rows
from dashboards.queries import EVENTS, RUN, of, recorded

OVER_USUAL = recorded("run_rank:rayfcp_worker_busy_seconds:over_median")
GAP = ((None, GREEN), (1.2, YELLOW), (1.5, RED))
SPEED = ((None, RED), (0.8, GREEN))
NO_PICTURES = "no pictures"
"""Text in panels of models without a vision encoder."""

ON_CPUS = " On CPUs alone: accelerators do not tell waits from work."


def balance() -> dashboard.Dashboard:
    about = "How evenly plans share out work, memory and messages, and how evenly ranks carry them out."
    return board("Balance", about=about, sections=[_now(), _pictures(), _plans(), _ranks(), _degrees()])


def _now() -> Section:
    return Section(title="Now", panels=(*_imbalances(), *_ranks_now()))


def _imbalances() -> tuple[Panel, ...]:
    resources = {
        "compute": "FLOPs of all kinds",
        "attention": "FLOPs of attention",
        "memory": "tokens, which activations follow",
        "communication": "bytes sent",
    }
    return tuple(
        number(
            f"Imbalance: {resource}",
            Line(expr=of("imbalance_ratio", f'resource="{resource}"')),
            unit="percentunit",
            about=f"Of the last plan, by {what}: (max - mean) / max over ranks. 0 is even.",
            steps=HIGH_IS_BAD,
        )
        for resource, what in resources.items()
    )


def _ranks_now() -> tuple[Panel, ...]:
    return (
        number(
            "Bubbles",
            Line(expr=of("bubble_ratio")),
            unit="percentunit",
            about=f"Share of rank time spent waiting for other ranks, in the last step.{ON_CPUS}",
            steps=HIGH_IS_BAD,
        ),
        number(
            "Gap to bound",
            Line(expr=of("gap_ratio")),
            unit="none",
            about="Predicted step over what no plan can beat; 1 is the best there is.",
            steps=GAP,
            decimals=3,
        ),
        number(
            "Slowest rank",
            Line(expr=f"min by (run) ({of('worker_speed_ratio')})"),
            unit="none",
            about=f"Lowest speed of a rank over that of a usual one, from what steps measured.{ON_CPUS}",
            steps=SPEED,
            decimals=2,
        ),
        number(
            "Busiest rank",
            Line(expr=f"max by (run) ({OVER_USUAL})"),
            unit="none",
            about=f"Own time of the busiest rank in the last step, over the median rank's.{ON_CPUS}",
            steps=GAP,
            decimals=2,
        ),
    )


def _pictures() -> Section:
    encode_s = f"max by (run) ({of('worker_encode_seconds')})"
    return Section(
        title="Pictures",
        panels=(
            number(
                "Imbalance: encoder",
                Line(expr=of("imbalance_ratio", 'resource="encoder"')),
                unit="percentunit",
                about="Of the last plan, by seconds of the vision encoder: (max - mean) / max over ranks. 0 is even.",
                width=8,
                steps=HIGH_IS_BAD,
                empty=NO_PICTURES,
            ),
            number(
                "Slowest encoder",
                Line(expr=encode_s),
                unit="s",
                about="The vision encoder of the rank that took longest for it in the last step: forward "
                "passes, and handing out their features.",
                width=8,
                empty=NO_PICTURES,
            ),
            number(
                "Encoder's share of the step",
                Line(expr=f"{encode_s} / max by (run) ({of('step_seconds')})"),
                unit="percentunit",
                about="Of the slowest encoder, in the last step. Its backward passes run with the model's and are not "
                "in it.",
                width=8,
                empty=NO_PICTURES,
            ),
            rows(
                "Encoder time by rank: $run",
                Line(expr=f"max by (rank) ({of('worker_encode_seconds')})", legend="{{rank}}"),
                unit="s",
                axis="rank",
                about="How long each device's vision encoder took in the last step. A row that stays bright beside "
                "dark ones has more pictures than they, or is slow.",
                empty=NO_PICTURES,
            ),
        ),
    )


def _plans() -> Section:
    return Section(
        title="Plans",
        panels=(
            chart(
                "Imbalance by resource",
                Line(expr=recorded("run_resource:rayfcp_imbalance_ratio:avg5m"), legend="{{run}} {{resource}}"),
                unit="percentunit",
                about="(max - mean) / max over ranks, mean of five minutes. What is even in one resource need not be "
                "in another: plans make the time even.",
                steps=HIGH_IS_BAD,
            ),
            chart(
                "Bubbles",
                Line(expr=of("bubble_ratio")),
                unit="percentunit",
                about="Share of rank time spent waiting for other ranks. Far above the imbalance of compute, ranks are "
                "slower than their plan says, or the network is.",
                width=6,
            ),
            chart(
                "Gap to bound",
                Line(expr=of("gap_ratio")),
                unit="none",
                about="Predicted step over its proven lower bound.",
                width=6,
                floor=1,
            ),
        ),
    )


def _ranks() -> Section:
    by_rank = "{{rank}}"
    return Section(
        title="Ranks",
        panels=(
            rows(
                "Step time by rank: $run",
                Line(expr=f"max by (rank) ({of('worker_step_seconds')})", legend=by_rank),
                unit="s",
                axis="rank",
                about="How long each device took for the last step, waiting for others included.",
            ),
            rows(
                "Busy time by rank: $run",
                Line(expr=f"max by (rank) ({of('worker_busy_seconds')})", legend=by_rank),
                unit="s",
                axis="rank",
                about="Each device's time without waiting. A row that stays bright is a straggler; single bright cells "
                f"are long sequences.{ON_CPUS}",
            ),
            chart(
                "Busiest ranks",
                Line(expr=f"topk(5, {OVER_USUAL})", legend="{{run}} rank {{rank}}"),
                unit="none",
                about="Own time over that of the median rank, the five highest.",
            ),
            chart(
                "Slowest ranks",
                Line(expr=f"bottomk(5, {of('worker_speed_ratio')})", legend="{{run}} rank {{rank}}"),
                Line(expr=of("straggler_threshold_ratio"), legend="{{run}} reported below"),
                unit="none",
                about="Speed over that of a usual rank, the five lowest; plans give them less work.",
                dashed=".*reported below",
            ),
        ),
    )


def _degrees() -> Section:
    counted = f"sum by (le) (increase(rayfcp_context_parallel_degree_bucket{{{RUN}}}[{EVENTS}]))"
    mean = " / ".join(
        f"sum by (run) (rate(rayfcp_context_parallel_degree_{part}{{{RUN}}}[{EVENTS}]))" for part in ("sum", "count")
    )
    return Section(
        title="Degrees",
        panels=(
            histogram(
                "Context-parallel degrees",
                Line(expr=counted, legend="{{le}}"),
                axis="degree",
                about="Groups by the number of ranks that share them.",
            ),
            chart(
                "Mean degree",
                Line(expr=mean),
                unit="none",
                about="Ranks per group. Rises with the share of long sequences.",
                width=6,
            ),
            chart(
                "Microbatches",
                Line(expr=of("num_microbatches")),
                unit="short",
                about="Of the last step; memory sets the least.",
                width=6,
                stepped=True,
            ),
        ),
    )
