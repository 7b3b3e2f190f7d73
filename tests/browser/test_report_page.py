"""The report in a real browser: whole, quiet, drawn, and it can be pointed at and zoomed."""

from pathlib import Path

import pytest
from playwright.sync_api import Page

from rayfcp.telemetry.summary import number, percent, seconds, summarize
from tests.browser.conftest import Opener
from tests.browser.samples import Sample
from tests.telemetry.samples import report

SAMPLE = Sample()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    SAMPLE.write(path)
    return path


def tile(page: Page, key: str) -> str:
    return page.inner_text(f'[data-tile="{key}"] dd b')


def drawn_pixels(page: Page) -> int:
    """Number of colours in the time x rank view, thinned, that are neither a lane's nor the background's."""
    return page.evaluate(
        """() => {
          const canvas = document.querySelector(".zoom canvas");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          let count = 0;
          for (let at = 0; at < data.length; at += 40) {
            const [red, green, blue, alpha] = data.slice(at, at + 4);
            if (alpha > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) count += 1;
          }
          return count;
        }"""
    )


def view_of(page: Page) -> tuple[float, float]:
    start, stop = page.get_attribute(".zoom canvas", "data-view").split(",")
    return float(start), float(stop)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_the_page_is_whole_in_every_light_and_size(watched: Opener, folder: Path, dark: bool, size: str) -> None:
    tab = watched(f"report-{size}", dark=dark, size=size)
    page = tab.open(folder / "report.html")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the right"
    assert page.locator("figure").count() == 21
    for figure in page.locator("svg.chart").all():
        box = figure.bounding_box()
        assert box is not None and box["width"] > 250 and box["height"] > 60
    cut = page.evaluate(
        """() => [...document.querySelectorAll("svg.chart text")].filter((text) => {
          const own = text.getBoundingClientRect(), all = text.closest("figure").getBoundingClientRect();
          return own.left < all.left || own.right > all.right || own.bottom > all.bottom;
        }).map((text) => text.textContent)"""
    )
    assert cut == [], "labels that are cut off"
    assert drawn_pixels(page) > 500
    tab.picture("dark" if dark else "light")


def test_tiles_say_what_the_steps_say(watched: Opener, folder: Path) -> None:
    page = watched("report-tiles").open(folder / "report.html")
    summary = summarize(Sample().write(folder))
    expected = {
        "steps": "240",
        "loss": number(summary.last_loss),
        "speed": number(summary.tokens_per_s),
        "mfu": percent(summary.mfu),
        "step": seconds(summary.step_s),
        "imbalance": percent(summary.compute_imbalance),
        "planning": seconds(summary.plan_s),
        "devices": "8 → 7 → 8",
        "recoveries": "1",
    }
    assert {key: tile(page, key) for key in expected} == expected
    assert 80 < float(tile(page, "goodput").removesuffix(" %")) < 85, "steps take 1 / 1.2 of the wall time"


def test_charts_have_a_line_for_each_series_and_tell_a_step(watched: Opener, folder: Path) -> None:
    page = watched("report-charts").open(folder / "report.html")
    lines = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("figure")].filter((each) => each.querySelector("h3"))
          .map((each) => [each.querySelector("h3").textContent, each.querySelectorAll("path.line").length]))"""
    )
    assert lines["Loss"] == 1 and lines["Imbalance"] == 4 and lines["Step time"] == 2 and lines["MFU"] == 2
    assert lines["Rewards"] == 2 and lines["Accuracy"] == 1
    assert lines["Evaluation loss: val"] == lines["Evaluation accuracy: val"] == 1
    assert lines["Compute imbalance and the static baseline"] == 2
    path = page.get_attribute('figure:has(h3:text-is("Loss")) path.line', "d")
    assert path is not None and path.count("L") == SAMPLE.num_steps - 1
    degrees = page.locator('figure:has(h3:text-is("Context-parallel degrees")) svg.chart > rect')
    assert degrees.count() > 100
    for kind in ("recovery", "resize"):
        assert page.locator(f"line.mark-{kind}").count() >= 10, "losses and resizes are on the charts"
    chart = page.locator('figure:has(h3:text-is("Loss")) svg.chart')
    chart.hover()
    told = page.inner_text(".tip")
    assert 100 <= int(told.split()[1]) <= 130 and "loss" in told
    page.mouse.move(2, 2)
    assert page.locator(".tip").is_hidden()


def test_time_by_rank_can_be_zoomed_moved_and_reset(watched: Opener, folder: Path) -> None:
    tab = watched("report-zoom")
    page = tab.open(folder / "report.html")
    canvas = page.locator(".zoom canvas")
    canvas.scroll_into_view_if_needed()
    assert page.locator('.zoom button[aria-pressed="true"]').inner_text() == "step 240"
    whole, pixels = view_of(page), drawn_pixels(page)
    box = canvas.bounding_box()
    assert box is not None and pixels > 500
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 50)
    page.mouse.wheel(0, 10)
    assert view_of(page) == whole, "until it is clicked, the wheel scrolls the page"
    page.mouse.wheel(0, -10)
    page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + 50)
    page.mouse.wheel(0, -600)
    near = view_of(page)
    assert near[1] - near[0] < 0.5 * (whole[1] - whole[0]) and whole[0] < near[0] < near[1] < whole[1]
    tab.picture("near", whole=False)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50, steps=4)
    page.mouse.up()
    moved = view_of(page)
    assert moved[0] > near[0] and moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 50)
    assert view_of(page) == pytest.approx(whole)
    canvas.press("+")
    assert view_of(page)[1] - view_of(page)[0] < whole[1] - whole[0]
    page.click('.zoom button:text-is("all")')
    assert view_of(page)[1] - view_of(page)[0] > 2.5 * (whole[1] - whole[0])
    page.click('.zoom button:text-is("step 239")')
    page.mouse.move(box["x"] + 100, box["y"] + 35)
    told = page.inner_text(".tip")
    assert "predicted, rank 0" in told and "forward microbatch 0" in told


@pytest.mark.parametrize("sample", [Sample(num_steps=1, num_devices=1), Sample(num_steps=5000, num_devices=40)])
def test_very_short_and_very_long_runs(watched: Opener, tmp_path: Path, sample: Sample) -> None:
    sample.write(tmp_path)
    tab = watched(f"report-of-{sample.num_steps}")
    page = tab.open(tmp_path / "report.html")
    assert tile(page, "steps") == f"{sample.num_steps:,}"
    most = page.evaluate(
        """() => Math.max(...[...document.querySelectorAll("path.line")]
          .map((line) => line.getAttribute("d").split(" ").length))"""
    )
    assert most <= 2 * 2000 and (tmp_path / "report.html").stat().st_size < 3_000_000
    assert drawn_pixels(page) > 100
    tab.picture("light")


def test_a_run_without_trace_events_and_times(watched: Opener, tmp_path: Path) -> None:
    from rayfcp.telemetry.report import write_report
    from rayfcp.telemetry.steps import StepLog

    with StepLog(tmp_path / "steps.jsonl") as log:
        log.append(report(1, strategy="<script>document.title = 'run by whom?'</script>"))
    page = watched("report-bare").open(write_report(tmp_path))
    assert page.locator(".zoom").count() == 0 and tile(page, "wall") == "–"
    assert page.locator('figure[data-steps="devices"]').is_hidden(), "their number never changed"
    assert page.locator('figure[data-steps="loss"]').is_visible()
    assert page.title() == f"{tmp_path.name} · rayfcp"
