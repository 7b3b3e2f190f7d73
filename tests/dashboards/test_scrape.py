"""A real Prometheus finds the runs of a folder and reads them, with a token where they ask for one."""

from pathlib import Path

import pytest

from rayfcp.telemetry.metrics import MetricsExporter
from tests.cluster.light import until
from tests.dashboards.prometheus import Prometheus, quick_config


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
