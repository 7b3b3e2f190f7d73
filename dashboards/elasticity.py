"""The board Elasticity: which devices the run has, what it lost, and what it keeps against losses."""

from grafana_foundation_sdk.builders import dashboard

from dashboards.frame import Section, board
from dashboards.panels import ANY_IS_BAD, HIGH_IS_GOOD, Line, Panel, bars, chart, number, rows
from dashboards.queries import grown, of

UNSAVED = f"{of('step')} - {of('checkpoint_step')}"
PEAK = of("worker_memory_bytes", 'kind="peak"')


def elasticity() -> dashboard.Dashboard:
    about = "Devices that come and go, recoveries, copies in memory, checkpoints, memory."
    return board("Elasticity", about=about, sections=[_now(), _devices(), _losses(), _copies(), _memory()])


def _now() -> Section:
    return Section(title="Now", panels=(*_devices_now(), *_losses_now()))


def _devices_now() -> tuple[Panel, ...]:
    return (
        number("Devices", Line(expr=of("world_size")), unit="short", about="In use.", decimals=0),
        number(
            "Of those wanted",
            Line(expr=f"{of('world_size')} / {of('devices_wanted')}"),
            unit="percentunit",
            about="Devices in use over the most that cluster.num_workers allows.",
            steps=HIGH_IS_GOOD,
            decimals=0,
        ),
        number(
            "Standing by",
            Line(expr=of("devices_standing_by")),
            unit="short",
            about="Devices that are there and that no rank needs now.",
            decimals=0,
        ),
        number(
            "Recoveries",
            Line(expr=f"sum by (run) ({of('recoveries_total')})"),
            unit="short",
            about="Times that the run went on after a loss, since its start.",
            steps=ANY_IS_BAD,
            decimals=0,
        ),
    )


def _losses_now() -> tuple[Panel, ...]:
    return (
        number(
            "Steps done again",
            Line(expr=of("lost_steps_total")),
            unit="short",
            about="Finished steps that were executed again after a loss.",
            steps=ANY_IS_BAD,
            decimals=0,
        ),
        number(
            "Last recovery",
            Line(expr=of("recovery_seconds")),
            unit="s",
            about="From the notice of the loss to the dispatch of the next step.",
        ),
        number(
            "Steps since checkpoint",
            Line(expr=UNSAVED),
            unit="short",
            about="What is lost should all nodes go at once.",
            decimals=0,
        ),
        number(
            "Failed checkpoints",
            Line(expr=of("failed_checkpoints_total")),
            unit="short",
            about="More than checkpoint.max_failures in a row end the run.",
            steps=ANY_IS_BAD,
            decimals=0,
        ),
    )


def _devices() -> Section:
    return Section(
        title="Devices",
        panels=(
            chart(
                "Devices",
                Line(expr=of("world_size"), legend="{{run}} in use"),
                Line(expr=of("devices_standing_by"), legend="{{run}} standing by"),
                Line(expr=of("devices_wanted"), legend="{{run}} wanted"),
                unit="short",
                about="The run goes on with fewer and takes devices that appear at the next step.",
                dashed=".*wanted",
                stepped=True,
            ),
            bars(
                "Resizes",
                Line(expr=grown("resizes_total", by="run, direction"), legend="{{run}} {{direction}}"),
                about="Changes of the number of devices, up and down.",
                width=6,
            ),
            chart(
                "Goodput",
                Line(expr=of("goodput_ratio")),
                unit="percentunit",
                about="Time in steps that count over time since the start; each recovery takes from it.",
                width=6,
                ceiling=1,
            ),
        ),
    )


def _losses() -> Section:
    return Section(
        title="Losses",
        panels=(
            bars(
                "Recoveries by cause",
                Line(expr=grown("recoveries_total", by="run, cause"), legend="{{run}} {{cause}}"),
                about="What was lost: a process, a node, a rank that hung, an exchange that failed.",
            ),
            chart(
                "Time to recover",
                Line(expr=of("recovery_seconds")),
                unit="s",
                about="Of the last recovery.",
                width=6,
                stepped=True,
            ),
            bars(
                "Steps done again",
                Line(expr=grown("lost_steps_total")),
                about="None while nodes live; at most the interval of copies on other nodes otherwise.",
                width=6,
            ),
        ),
    )


def _copies() -> Section:
    return Section(
        title="Copies and checkpoints",
        panels=(
            chart(
                "Copies on other nodes",
                Line(expr=of("snapshot_seconds")),
                unit="s",
                about="From the start of a copy of all shards until other nodes have it; overlaps training.",
                width=6,
            ),
            chart(
                "Time of a checkpoint",
                Line(expr=of("checkpoint_seconds")),
                unit="s",
                about="From copy to commit; beside training.",
                width=6,
                stepped=True,
            ),
            chart(
                "Steps since the last checkpoint",
                Line(expr=UNSAVED),
                unit="short",
                about="A saw-tooth as high as checkpoint.every_steps. Higher: storage is slow or writes fail.",
                width=6,
                stepped=True,
            ),
            bars(
                "Checkpoints",
                Line(expr=grown("checkpoints_total"), legend="{{run}} written"),
                Line(expr=grown("failed_checkpoints_total"), legend="{{run}} failed"),
                about="Written whole, and failed.",
                width=6,
            ),
            chart(
                "Steps between copies",
                Line(expr=of("snapshot_interval_steps"), legend="{{run}} on nodes"),
                Line(expr=of("snapshot_away_interval_steps"), legend="{{run}} on other nodes"),
                unit="short",
                about="What the death of processes, and the loss of a node, may take (elastic.snapshot_every_steps).",
                stepped=True,
            ),
            chart(
                "Expected loss an hour",
                Line(expr=of("expected_lost_seconds_per_hour")),
                unit="s",
                about="Training time that copies cost and losses take, from measured times and rates of losses.",
                stepped=True,
            ),
        ),
    )


def _memory() -> Section:
    return Section(
        title="Memory",
        panels=(
            chart(
                "Fullest device",
                Line(expr=f"max by (run, kind) ({of('worker_memory_bytes')})", legend="{{run}} {{kind}}"),
                unit="bytes",
                about="Memory of the device that has most in use, by kind.",
            ),
            chart(
                "Emptiest device",
                Line(expr=f"min by (run, kind) ({of('worker_memory_bytes')})", legend="{{run}} {{kind}}"),
                unit="bytes",
                about="Far below the fullest, plans leave memory unused.",
            ),
            rows(
                "Peak memory by rank: $run",
                Line(expr=f"max by (rank) ({PEAK})", legend="{{rank}}"),
                unit="bytes",
                axis="rank",
                about="The most that each device has used.",
            ),
        ),
    )
