"""A user's actions on the live page: pointing at charts and bars, and watching the run end and resume."""

from pathlib import Path

from rayfcp.telemetry.metrics import MetricsExporter
from tests.browser.conftest import Opener
from tests.browser.test_other_pages import exporter  # noqa: F401 - a fixture
from tests.telemetry.samples import report


def test_pointing_tells_values(exporter: MetricsExporter, watched: Opener) -> None:  # noqa: F811
    page = watched("live-pointed", allowed=(exporter.target,)).open(f"http://{exporter.target}/")
    page.wait_for_selector('#step:text-is("30 of 40")')
    assert page.locator("#tip").is_hidden()
    page.locator("#loss-chart svg.chart").hover()
    assert page.inner_text("#tip").splitlines()[0].startswith("step 1"), "the middle of 30 steps"
    page.locator("#plan-chart canvas").hover(position={"x": 300, "y": 40})
    assert page.inner_text("#tip").splitlines()[:2] == ["planned, rank 0", "microbatch 0, degree 1, 500 tokens"]
    page.locator("#rank-chart svg rect.own.on").nth(2).hover()
    assert page.inner_text("#tip").split("\n") == ["device 2", "step", "2 s", "own work", "1.7 s"]
    page.locator("h1").hover()
    assert page.locator("#tip").is_hidden()


def test_a_run_that_goes_is_missed_in_one_line_and_found_again(watched: Opener, tmp_path: Path) -> None:
    first = MetricsExporter("gone", run_dir=tmp_path, target_steps=4, wanted=1)
    first.observe_step(report(1), goodput=1.0)
    tab = watched("live-gone", allowed=(first.target,))
    page = tab.open(f"http://{first.target}/")
    page.wait_for_selector('#step:text-is("1 of 4")')
    assert page.locator("#error").is_hidden()
    first.close()
    page.wait_for_selector("#error:not([hidden])")
    assert page.inner_text("#error").startswith("No answer from the run since ")
    assert page.inner_text("#state") == "no answer" and page.inner_text("#step") == "1 of 4"
    again = MetricsExporter("gone", run_dir=tmp_path, port=first.port, target_steps=4, wanted=1)
    try:
        again.observe_step(report(2), goodput=1.0)
        page.wait_for_selector('#step:text-is("2 of 4")')
        page.wait_for_selector("#error", state="hidden")
        assert page.inner_text("#state") == "training"
    finally:
        tab.leave()
        again.close()
    assert tab.problems and all("ERR_CONNECTION_REFUSED" in each for each in tab.problems)
    tab.problems.clear()
