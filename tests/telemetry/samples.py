"""Step reports and spans for the tests of telemetry."""

from hypothesis import strategies as st

from rayfcp.values import Imbalance, PairStats, SourceReport, Span, SpanKind, StepReport

RATIO = st.floats(0, 1)
SECONDS = st.floats(0, 1e4)
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)

SOURCES = st.builds(
    SourceReport,
    num_sequences=st.integers(0, 99),
    num_tokens=st.integers(0, 10**6),
    num_targets=st.integers(0, 10**6),
    loss=FINITE,
)


def report(step: int = 1, **changes: object) -> StepReport:
    """A plain report of `step`, with `changes` applied."""
    fields: dict[str, object] = {
        "step": step,
        "loss": 5.5,
        "grad_norm": 1.25,
        "learning_rate": 1e-3,
        "num_tokens": 1000,
        "num_sequences": 16,
        "step_s": 2.0,
        "predicted_s": 1.5,
        "plan_s": 0.01,
        "prepare_s": 0.04,
        "plan_wait_s": 0.001,
        "mfu": 0.3,
        "attention_mfu": 0.2,
        "imbalance": Imbalance(compute=0.1, attention=0.2, memory=0.3, communication=0.4),
        "bubble": 0.05,
        "gap": 1.02,
        "strategy": "flex-ring",
        "world_size": 4,
        "degrees": {1: 3, 4: 1},
        "num_microbatches": 2,
        "plan_hash": "0" * 16,
        "samples_hash": "f" * 16,
    }
    return StepReport(**(fields | changes))  # type: ignore[arg-type]


PAIRS = PairStats(num_pairs=4, chosen=0.5, rejected=-0.25, accuracy=0.75)


@st.composite
def reports(draw: st.DrawFn, *, max_size: int = 6) -> list[StepReport]:
    """Reports of ascending steps."""
    steps = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=max_size)))
    return [
        report(
            step,
            loss=draw(FINITE),
            step_s=draw(SECONDS),
            predicted_s=draw(SECONDS),
            plan_s=draw(SECONDS),
            prepare_s=draw(SECONDS),
            plan_wait_s=draw(SECONDS),
            num_tokens=draw(st.integers(0, 10**9)),
            mfu=draw(RATIO),
            sources=draw(st.dictionaries(st.sampled_from(["web", "code"]), SOURCES)),
            strategy=draw(st.sampled_from(["flex-ring", "flex-block", "ring"])),
            degrees=draw(st.dictionaries(st.integers(1, 64), st.integers(1, 9), max_size=4)),
            imbalance=Imbalance(
                compute=draw(RATIO),
                attention=draw(RATIO),
                memory=draw(RATIO),
                communication=draw(RATIO),
                encoder=draw(st.none() | RATIO),
            ),
        )
        for step in steps
    ]


spans = st.builds(
    Span,
    rank=st.integers(0, 5),
    stage=st.integers(0, 2),
    kind=st.sampled_from(SpanKind),
    label=st.text(max_size=6),
    start_s=st.floats(0, 100),
    stop_s=st.floats(100, 200),
    amount=st.floats(0, 1e15),
)
