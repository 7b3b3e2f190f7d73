"""The board Planning: do plans come in time, are they right, and what do they choose."""

from grafana_foundation_sdk.builders import dashboard

from dashboards.frame import Section, board
from dashboards.panels import GREEN, HIGH_IS_BAD, RED, YELLOW, Line, Panel, bars, chart, number, shares
from dashboards.queries import grown, of, recorded

WAIT_SHARE = recorded("run:rayfcp_plan_wait:share5m")
LATE = ((None, GREEN), (0.02, YELLOW), (0.05, RED))


def planning() -> dashboard.Dashboard:
    about = "How long plans take, whether steps wait for them, how right they are, and what they choose."
    return board("Planning", about=about, sections=[_now(), _time(), _truth(), _choice()])


def _now() -> Section:
    return Section(title="Now", panels=(*_plan_times(), *_plan_quality()))


def _plan_times() -> tuple[Panel, ...]:
    return (
        number(
            "Prepare time",
            Line(expr=of("prepare_seconds")),
            unit="s",
            about="From lengths to serialized programs, on a planner, for the last step.",
            width=4,
        ),
        number(
            "Wait for plan",
            Line(expr=of("plan_wait_seconds")),
            unit="s",
            about="What the last step waited for its plan.",
            width=4,
        ),
        number(
            "Share spent waiting",
            Line(expr=WAIT_SHARE),
            unit="percentunit",
            about="Waits for plans over waits and steps, of five minutes. Above 5 % there is an alert.",
            width=4,
            steps=LATE,
        ),
    )


def _plan_quality() -> tuple[Panel, ...]:
    return (
        number(
            "Prediction error",
            Line(expr=of("prediction_error_ratio")),
            unit="percentunit",
            about="|predicted - measured| / measured of the last step.",
            width=4,
            steps=HIGH_IS_BAD,
        ),
        number(
            "Gap to bound",
            Line(expr=of("gap_ratio")),
            unit="none",
            about="Predicted step over what no plan can beat.",
            width=4,
            decimals=3,
        ),
        number(
            "Process groups",
            Line(expr=of("process_groups")),
            unit="short",
            about="Alive on a rank; bounded, however many sets of ranks plans ask for.",
            width=4,
            decimals=0,
        ),
    )


def _time() -> Section:
    return Section(
        title="Time",
        panels=(
            chart(
                "Planning beside training",
                Line(expr=of("plan_seconds"), legend="{{run}} plan"),
                Line(expr=of("prepare_seconds"), legend="{{run}} programs"),
                Line(expr=of("step_seconds"), legend="{{run}} step"),
                unit="s",
                about="Planners work ahead: programs may take as many steps as they are planned ahead.",
            ),
            chart(
                "Load of planners",
                Line(expr=of("planning_load_ratio"), legend="{{run}} load"),
                Line(expr=of("planners"), legend="{{run}} planners"),
                Line(expr=of("lookahead_steps"), legend="{{run}} steps ahead"),
                Line(expr=of("plan_queue_depth"), legend="{{run}} not planned yet"),
                unit="none",
                about="Load: time of programs over what planners have for them. Above 1 they cannot keep up.",
            ),
            chart(
                "Waiting for plans",
                Line(expr=of("plan_wait_seconds")),
                unit="s",
                about="Of each step. Zero while planners keep up.",
            ),
            chart(
                "Share of time spent waiting",
                Line(expr=WAIT_SHARE),
                unit="percentunit",
                about="Over five minutes. More planners or a smaller plan.search_moves bring it down.",
                steps=LATE,
            ),
        ),
    )


def _truth() -> Section:
    return Section(
        title="Truth",
        panels=(
            chart(
                "Predicted and measured step",
                Line(expr=of("predicted_seconds"), legend="{{run}} predicted"),
                Line(expr=of("step_seconds"), legend="{{run}} measured"),
                unit="s",
                about="They should rise and fall together: plans are chosen by the predicted one.",
                dashed=".*predicted",
            ),
            chart(
                "Prediction error",
                Line(expr=of("prediction_error_ratio")),
                Line(expr=recorded("run:rayfcp_prediction_error_ratio:avg5m"), legend="{{run}} mean of 5 minutes"),
                unit="percentunit",
                about="plan.refit follows measured steps and makes it fall; where it stays high, run rayfcp profile.",
                dashed=".*mean.*",
            ),
        ),
    )


def _choice() -> Section:
    chosen = "{{run}} {{strategy}}"
    return Section(
        title="Choice",
        panels=(
            bars(
                "Strategy of steps",
                Line(expr=grown("strategy_steps_total", by="run, strategy"), legend=chosen),
                about="Steps by the strategy that planned them. Other strategies stand in where one finds no plan.",
            ),
            shares(
                "Strategies in this time",
                Line(expr=grown("strategy_steps_total", by="strategy", window="$__range"), legend="{{strategy}}"),
                about="Their share of the steps on the time axis.",
            ),
            chart(
                "Making process groups",
                Line(expr=of("process_group_seconds")),
                unit="s",
                about="Time that the last generation of devices took to form its groups.",
                width=6,
            ),
        ),
    )
