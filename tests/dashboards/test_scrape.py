"""A real Prometheus finds the runs of a folder and reads them, with a token where they ask for one."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from rayfcp.telemetry.live import DeviceTimes, StepTimeline
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.values import EvalResult
from tests.dashboards.prometheus import SCRAPE_S, Prometheus, quick_config
from tests.dashboards.promql import of_boards, substituted
from tests.telemetry.samples import PAIRS, report
from tests.waiting import until

PICTURES = {"sees": (0.5, (0.0, 0.75)), "reads": (None, (0.0, 0.0))}
"""Imbalance of the encoder and its seconds by rank, in runs of these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scraped:
    """Runs by name, one of which asks for a token; the Prometheus that has it, and one that has not."""

    runs: dict[str, MetricsExporter]
    knowing: Prometheus
    other: Prometheus


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Both look at the same time: it takes a Prometheus seconds to look again for runs, whatever it is told."""
    folder = tmp_path_factory.mktemp("scraped")
    token = folder / "token"
    token.write_text("a-token-that-is-long-enough\n")
    with ExitStack() as ending:

        def begin(name: str, **options: str) -> MetricsExporter:
            run = MetricsExporter(name, run_dir=folder / name, **options)
            ending.callback(run.close)
            return run

        runs = {name: begin(name) for name in ("first", "second", "prefers", *PICTURES)}
        evaluated = {"val": EvalResult(loss=0.5, tokens=9, pairs=PAIRS)}
        runs["prefers"].observe_step(report(pairs=PAIRS, eval=evaluated), goodput=1.0)
        runs["guarded"] = begin("guarded", host="0.0.0.0", token_file=str(token))
        for name, (encoder, seconds) in PICTURES.items():
            workers = [
                DeviceTimes(rank=rank, step_s=2.0, busy_s=1.5, encode_s=each) for rank, each in enumerate(seconds)
            ]
            runs[name].observe_workers(workers, memory=[{}, {}], picture=StepTimeline(step=1))
            told = report(step_s=2.0, imbalance=replace(report().imbalance, encoder=encoder))
            runs[name].observe_step(told, goodput=1.0)
        knowing, other = (
            ending.enter_context(Prometheus(folder / name, config=quick_config(folder, token_file=given)))
            for name, given in (("knowing", token), ("other", None))
        )
        yield Scraped(runs=runs, knowing=knowing, other=other)


def up(prometheus: Prometheus) -> dict[str, float]:
    """Known runs, each with 1 if it could be read, else 0."""
    found = prometheus.ask("query", query="up")["result"]
    return {each["metric"]["run"]: float(each["value"][1]) for each in found}


def test_a_run_that_asks_for_a_token(scraped: Scraped) -> None:
    until(lambda: up(scraped.knowing) == dict.fromkeys(scraped.runs, 1.0), what=lambda: up(scraped.knowing))
    wanted = dict.fromkeys(scraped.runs, 1.0) | {"guarded": 0.0}
    until(lambda: up(scraped.other) == wanted, what=lambda: up(scraped.other))


def test_panels_of_some_runs_have_data_there_and_none_elsewhere(scraped: Scraped) -> None:
    def shown(run: str, word: str) -> dict[str, list[float]]:
        """Results by panel, of those with such series."""
        asked = {
            each.place: substituted(each.text, runs=[run], scrape_s=SCRAPE_S, interval_s=SCRAPE_S, range_s=60)
            for each in of_boards()
            if each.of_some and word in each.text
        }
        found = {place: scraped.knowing.ask("query", query=text)["result"] for place, text in asked.items()}
        return {place: sorted(float(each["value"][1]) for each in series) for place, series in found.items()}

    until(lambda: {"prefers", *PICTURES} <= {run for run, is_up in up(scraped.knowing).items() if is_up})
    assert shown("sees", "encode") == {
        "balance.json, Imbalance: encoder, A": [0.5],
        "balance.json, Slowest encoder, A": [0.75],
        "balance.json, Encoder's share of the step, A": [0.375],
        "balance.json, Encoder time by rank: $run, A": [0.0, 0.75],
    }
    assert shown("prefers", "reward") == {
        "training.json, Rewards, A": [-0.25, 0.5],
        "training.json, Reward accuracy, A": [0.75],
        "training.json, Reward accuracy, B": [0.75],
        "training.json, Evaluated reward margin, A": [0.75],
    }
    assert not any(shown("reads", "").values())


def test_runs_that_come_and_go(scraped: Scraped) -> None:
    until(lambda: {"first", "second"} <= up(scraped.knowing).keys())
    gone = scraped.runs.pop("second")
    gone.close()
    until(lambda: up(scraped.knowing).keys() == scraped.runs.keys(), what=lambda: up(scraped.knowing))
    tokens = scraped.knowing.ask("query", query='rayfcp_tokens_total{run="first"}')["result"]
    (labels,) = (each["metric"] for each in tokens)
    assert labels.pop("instance") == scraped.runs["first"].target
    assert labels == {"__name__": "rayfcp_tokens_total", "job": "rayfcp", "run": "first"}
