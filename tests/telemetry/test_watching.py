"""`rayfcp watch` on a real server of a run."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayfcp.cli import main
from rayfcp.config import ConfigError
from rayfcp.telemetry.metrics import MetricsExporter
from rayfcp.telemetry.serving import SD_FILE
from rayfcp.telemetry.watching import RunPage, describe_state, watch
from rayfcp.values import EvalResult
from tests.telemetry.samples import report


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[MetricsExporter]:
    made = MetricsExporter("demo", run_dir=tmp_path, target_steps=9, wanted=4)
    yield made
    made.close()


class Lines(io.StringIO):
    """Written lines, and actions carried out once a line with a given beginning is written."""

    def __init__(self, then: dict[str, Callable[[], object]]) -> None:
        super().__init__()
        self._then = then

    def write(self, text: str) -> int:
        for start in [each for each in self._then if text.startswith(each)]:
            self._then.pop(start)()
        return super().write(text)


def test_losses_of_evaluations_follow_the_loss(exporter: MetricsExporter) -> None:
    exporter.observe_step(report(7, eval={"val": EvalResult(loss=2.25, tokens=9)}), goodput=0.5)
    exporter.observe_step(report(8), goodput=0.5)
    parts = describe_state(RunPage(exporter._run_dir).ask())
    assert parts[:4] == ["training", "loss 5.5", "val loss 2.25", "500 tok/s"]


def test_a_run_is_followed_to_its_end(exporter: MetricsExporter, tmp_path: Path) -> None:
    exporter.keep_ranks(3)
    exporter.set_standing_by(1)
    exporter.log("training")
    exporter.observe_step(report(7), goodput=0.5)
    lines = Lines(
        {"step 7/9": lambda: exporter.observe_step(report(9, loss=4.25), goodput=0.5), "step 9/9": exporter.close}
    )
    watch(tmp_path, stream=lines, every_s=0.01)
    written = lines.getvalue().splitlines()
    assert written[:2] == [f"live page: http://127.0.0.1:{exporter.port}/", "training"]
    assert written[2].startswith("step 7/9  training  loss 5.5  500 tok/s") and " to go  3 of 4 devices" in written[2]
    assert written[3] == (
        "step 9/9  training  loss 4.25  500 tok/s  2 s  MFU 30 %  imbalance 10 %  3 of 4 devices  1 standing by"
    )
    assert written[4:] == ["the run has ended after step 9 of 9"]


@pytest.mark.parametrize("found", [None, "", "{}", '[{"targets": ["127.0.0.1:9"]}]'])
def test_no_run_is_alive_there(found: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if found is not None:
        (tmp_path / SD_FILE).write_text(found)
    assert main(["watch", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"rayfcp: error: run directory {str(tmp_path)!r}: no run is active there (")


def test_a_run_that_does_not_come_back_ends_the_watching(exporter: MetricsExporter, tmp_path: Path) -> None:
    """Killed processes leave the file that names the server."""
    text = (tmp_path / SD_FILE).read_text()

    def lose() -> None:
        exporter.close()
        (tmp_path / SD_FILE).write_text(text)

    lines = Lines({"step 0/9": lose})
    with pytest.raises(ConfigError, match=r"no run is active there \(no server answers at"):
        watch(tmp_path, stream=lines, every_s=0.01, patience_s=0.05)
    assert lines.getvalue().count("\n") == 2, "where the page is, and one step"


def test_a_run_that_comes_back_is_followed_on(exporter: MetricsExporter, tmp_path: Path) -> None:
    """After the loss of a controller the next one serves elsewhere."""
    text = (tmp_path / SD_FILE).read_text()
    again: list[MetricsExporter] = []

    def lose() -> None:
        exporter.close()
        (tmp_path / SD_FILE).write_text(text)
        again.append(MetricsExporter("demo", run_dir=tmp_path, target_steps=9, wanted=4))
        again[0].observe_step(report(9), goodput=0.5)

    def end() -> None:
        again[0].close()

    lines = Lines({"step 0/9": lose, "step 9/9": end})
    watch(tmp_path, stream=lines, every_s=0.01)
    assert lines.getvalue().endswith("the run has ended after step 9 of 9\n")


def test_the_runs_token_is_given_where_it_is_asked_for(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("a-token-of-the-user\n")
    (tmp_path / "config.yaml").write_text(f"metrics: {{token_file: {json.dumps(str(mine))}}}\n")
    exporter = MetricsExporter("demo", run_dir=tmp_path, host="0.0.0.0", token_file=str(mine))
    try:
        page = RunPage(tmp_path)
        assert page.ask()["run"] == "demo" and page.where.endswith(f"/?token=TOKEN, with the token in {mine}")
        mine.write_text("another-token-of-the-user\n")
        with pytest.raises(ConfigError, match=r"rejects the token in .*mine"):
            page.ask()
    finally:
        exporter.close()


def test_the_runs_own_token_is_found(tmp_path: Path) -> None:
    exporter = MetricsExporter("demo", run_dir=tmp_path, host="0.0.0.0")
    try:
        assert RunPage(tmp_path).ask()["run"] == "demo"
        assert (
            str(tmp_path / "token") in exporter.where and (tmp_path / "token").read_text().strip() not in exporter.where
        )
    finally:
        exporter.close()
