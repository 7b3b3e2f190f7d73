"""A real Prometheus finds the runs of a folder and reads them, with a token where they ask for one."""

from dataclasses import replace
from pathlib import Path

import pytest

from rayfcp.telemetry.live import Worker
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.picture import Picture
from tests.cluster.light import until
from tests.dashboards.prometheus import SCRAPE_S, Prometheus, quick_config
from tests.dashboards.promql import of_boards, substituted
from tests.telemetry.samples import report


def up(prometheus: Prometheus) -> dict[str, float]:
    """Of each run that it knows, whether it could be read."""
    found = prometheus.ask("query", query="up")["result"]
    return {each["metric"]["run"]: float(each["value"][1]) for each in found}


def test_runs_that_come_and_go(tmp_path: Path) -> None:
    with Prometheus(tmp_path / "prometheus", config=quick_config(tmp_path)) as prometheus:
        runs = [MetricsExporter(name, run_dir=tmp_path / name) for name in ("first", "second")]
        try:
            until(lambda: up(prometheus) == {"first": 1.0, "second": 1.0})
            runs.pop().close()
            until(lambda: up(prometheus) == {"first": 1.0})
            (labels,) = (each["metric"] for each in prometheus.ask("query", query="rayfcp_tokens_total")["result"])
            assert labels.pop("instance") == runs[0].target
            assert labels == {"__name__": "rayfcp_tokens_total", "job": "rayfcp", "run": "first"}
        finally:
            for run in runs:
                run.close()


def test_panels_of_pictures_have_data_where_a_model_sees_and_none_elsewhere(tmp_path: Path) -> None:
    runs = {name: MetricsExporter(name, run_dir=tmp_path / name) for name in ("sees", "reads")}

    def shown(prometheus: Prometheus, run: str) -> dict[str, list[float]]:
        """By panel."""
        asked = {
            each.place: substituted(each.text, runs=[run], scrape_s=SCRAPE_S, interval_s=SCRAPE_S, range_s=60)
            for each in of_boards()
            if each.of_pictures
        }
        found = {place: prometheus.ask("query", query=text)["result"] for place, text in asked.items()}
        return {place: sorted(float(each["value"][1]) for each in series) for place, series in found.items()}

    try:
        for name, (encoder, seconds) in {"sees": (0.5, (0.0, 0.75)), "reads": (None, (0.0, 0.0))}.items():
            workers = [Worker(rank=rank, step_s=2.0, busy_s=1.5, encode_s=each) for rank, each in enumerate(seconds)]
            runs[name].observe_workers(workers, memory=[{}, {}], picture=Picture(step=1))
            told = report(step_s=2.0, imbalance=replace(report().imbalance, encoder=encoder))
            runs[name].observe_step(told, goodput=1.0)
        with Prometheus(tmp_path / "prometheus", config=quick_config(tmp_path)) as prometheus:
            until(lambda: up(prometheus) == {"sees": 1.0, "reads": 1.0})
            assert shown(prometheus, "sees") == {
                "balance.json, Imbalance: encoder, A": [0.5],
                "balance.json, Slowest encoder, A": [0.75],
                "balance.json, Encoder's share of the step, A": [0.375],
                "balance.json, Encoder time by rank: $run, A": [0.0, 0.75],
            }
            assert not any(shown(prometheus, "reads").values())
    finally:
        for run in runs.values():
            run.close()


@pytest.mark.parametrize("knows", [True, False])
def test_a_run_that_asks_for_a_token(knows: bool, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-that-is-long-enough\n")
    run = MetricsExporter("guarded", run_dir=tmp_path / "guarded", host="0.0.0.0", token_file=str(token))
    try:
        config = quick_config(tmp_path, token_file=token if knows else None)
        with Prometheus(tmp_path / "prometheus", config=config) as prometheus:
            until(lambda: "guarded" in up(prometheus))
            assert up(prometheus) == {"guarded": float(knows)}
    finally:
        run.close()
