"""The board Training: is the run learning, and how fast."""

from grafana_foundation_sdk.builders import dashboard

from dashboards.frame import Section, board
from dashboards.panels import GREEN, HIGH_IS_GOOD, RED, YELLOW, Line, Panel, bars, chart, number
from dashboards.queries import grown, of, per_second, recorded

STEP_S = recorded("run:rayfcp_step_seconds:avg5m")
STEPS_LEFT = f"max by (run) ({of('target_steps')} - {of('step')})"
LEFT_S = f"{STEPS_LEFT} * {STEP_S} / max by (run) ({of('goodput_ratio')})"


def training() -> dashboard.Dashboard:
    about = "Loss, throughput, time per step, model FLOPs utilisation and goodput of the chosen runs."
    return board("Training", about=about, sections=[_now(), _learning(), _speed(), _use()])


def _now() -> Section:
    return Section(title="Now", panels=(*_progress(), *_figures()))


def _progress() -> tuple[Panel, ...]:
    progress = f"{of('step')} / {of('target_steps')}"
    quiet = f"time() - {of('last_step_timestamp_seconds')}"
    quiet_steps = ((None, GREEN), (120, YELLOW), (600, RED))
    return (
        number("Done", Line(expr=progress), about="Steps done, of those that the run shall do.", unit="percentunit"),
        number(
            "Time left",
            Line(expr=LEFT_S),
            unit="s",
            about="Steps left, times the mean step of the last five minutes, over goodput.",
        ),
        number(
            "Since last step",
            Line(expr=quiet),
            unit="s",
            about="Grows while the run recovers, waits for devices, or hangs.",
            steps=quiet_steps,
            decimals=0,
        ),
    )


def _figures() -> tuple[Panel, ...]:
    return (
        number("Loss", Line(expr=of("loss")), unit="none", about="Nats per target, of the last step.", decimals=4),
        number("Tokens/s", Line(expr=per_second("tokens_total")), unit="short", about="Trained on; none are padding."),
        number(
            "MFU",
            Line(expr=of("mfu_ratio")),
            about="Model FLOPs of the last step, over its time and the peak of the devices in use.",
            unit="percentunit",
        ),
        number(
            "Goodput",
            Line(expr=of("goodput_ratio")),
            about="Time in steps that count, over time since the start; starting and recovering included.",
            steps=HIGH_IS_GOOD,
            unit="percentunit",
        ),
        number("Devices", Line(expr=of("world_size")), unit="short", about="In use.", decimals=0),
    )


def _learning() -> Section:
    return Section(
        title="Learning",
        panels=(
            chart(
                "Loss", Line(expr=of("loss")), unit="none", about="Nats per target, of each step's batch.", floor=None
            ),
            chart(
                "Gradient norm",
                Line(expr=of("grad_norm")),
                unit="none",
                about="Before clipping. Jumps that the loss follows ask for clipping or a lower learning rate.",
                width=6,
            ),
            chart("Learning rate", Line(expr=of("learning_rate")), unit="sci", about="Of the last step.", width=6),
            chart(
                "Evaluation loss",
                Line(expr=of("eval_loss"), legend="{{run}} {{set}}"),
                unit="none",
                about="Nats per target, of the last evaluated state on each set of eval.sets. Where it rises while the "
                "loss falls, the model overfits.",
                floor=None,
            ),
            chart(
                "Perplexity",
                Line(expr=of("eval_perplexity"), legend="{{run}} {{set}}"),
                unit="none",
                about="Of evaluation sets: e to the power of the loss.",
                width=6,
                floor=None,
            ),
            chart(
                "Evaluation time",
                Line(expr=of("eval_seconds")),
                unit="s",
                about="Of all sets together, between steps: no part of them, nor of goodput.",
                width=6,
            ),
            chart(
                "Rewards",
                Line(expr=of("reward"), legend="{{run}} {{answer}}"),
                unit="none",
                about="Means over the pairs of each step, in runs with loss.type dpo or reward. Where both fall, the "
                "model unlearns the chosen answers too, only more slowly.",
                floor=None,
            ),
            chart(
                "Reward accuracy",
                Line(expr=of("reward_accuracy_ratio")),
                Line(expr=of("eval_reward_accuracy_ratio"), legend="{{run}} {{set}}"),
                unit="percentunit",
                about="Share of pairs of which the chosen answer has the higher reward: of steps, and of evaluation "
                "sets.",
                width=6,
                ceiling=1,
            ),
            chart(
                "Evaluated reward margin",
                Line(expr=of("eval_reward_margin"), legend="{{run}} {{set}}"),
                unit="none",
                about="Mean reward of chosen answers beyond that of rejected ones, on evaluation sets.",
                width=6,
                floor=None,
            ),
            chart(
                "Loss by source",
                Line(expr=of("source_loss"), legend="{{run}} {{source}}"),
                unit="none",
                about="Nats per target, of the sources of a mixture (data.sources).",
                floor=None,
            ),
            bars(
                "Tokens by source",
                Line(expr=grown("source_tokens_total", by="run, source"), legend="{{run}} {{source}}"),
                about="Trained on, by sources of a mixture.",
                width=6,
            ),
            bars(
                "Sequences by source",
                Line(expr=grown("source_sequences_total", by="run, source"), legend="{{run}} {{source}}"),
                about="Trained on, by sources of a mixture.",
                width=6,
            ),
        ),
    )


def _speed() -> Section:
    return Section(
        title="Speed",
        panels=(
            chart("Tokens per second", Line(expr=per_second("tokens_total")), unit="short", about="Trained on."),
            chart(
                "Step time",
                Line(expr=of("step_seconds"), legend="{{run}} measured"),
                Line(expr=of("predicted_seconds"), legend="{{run}} predicted"),
                Line(expr=STEP_S, legend="{{run}} mean of 5 minutes"),
                unit="s",
                about="From dispatch to the last rank's report, and what the plan said it would be. Steps differ: "
                "batches hold sequences of different lengths.",
                dashed=".*(predicted|mean).*",
            ),
            chart("Sequences per second", Line(expr=per_second("sequences_total")), unit="short", about="Trained on."),
            chart(
                "Rows left out",
                Line(expr=of("sequences_skipped_total"), legend="{{run}} {{reason}}"),
                unit="short",
                about="Of the data, since the start, by reason.",
                width=6,
                stepped=True,
            ),
            bars(
                "Updates left out",
                Line(expr=grown("skipped_updates_total")),
                about="Steps without targets, or whose loss or gradients were not finite: nothing was learnt.",
                width=6,
            ),
        ),
    )


def _use() -> Section:
    return Section(
        title="Use of the devices",
        panels=(
            chart(
                "Model FLOPs utilisation",
                Line(expr=of("mfu_ratio"), legend="{{run}} MFU"),
                Line(expr=recorded("run:rayfcp_mfu_ratio:avg5m"), legend="{{run}} mean of 5 minutes"),
                Line(expr=recorded("run:rayfcp_mfu_ratio:median6h"), legend="{{run}} usual"),
                unit="percentunit",
                about="Attention counted by its mask. Below 80 % of the usual (the median of six hours) for ten "
                "minutes there is an alert.",
                dashed=".*(mean|usual).*",
            ),
            chart(
                "Attention's share of MFU",
                Line(expr=of("attention_mfu_ratio")),
                unit="percentunit",
                about="FLOPs of attention alone, over step time and peak; grows with the lengths of sequences.",
                width=6,
            ),
            chart(
                "Goodput",
                Line(expr=of("goodput_ratio")),
                unit="percentunit",
                about="Time in steps that count over time since the start.",
                width=6,
                ceiling=1,
            ),
        ),
    )
