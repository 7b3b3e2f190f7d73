"""A real Prometheus watches a real run that loses a worker and gets it back: every query and every rule has data."""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rayfcp.cluster import FlexTrainer
from rayfcp.config import Config
from rayfcp.values import StepReport
from tests.cluster.light import free_cpus_again
from tests.cluster.recovering import PickyWorker, close, kill, pids, reopen
from tests.cluster.runs import run_config, write_texts
from tests.dashboards.prometheus import SCRAPE_S, Prometheus, quick_config
from tests.dashboards.promql import Expression, boards, of_boards, of_rules, rules, substituted

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

TRAIN_S = 60.0
DEVICES = 3
STEPS = 12
"""Of each stage of the run."""
RUN = "watched"
WAYS = re.compile(r"label_values\((\w+), (\w+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A run that is over, and the Prometheus that saw it. `end_s`: shortly before its end, on the clock of the day."""

    prometheus: Prometheus
    start_s: float
    end_s: float


class Course:
    """Closes the run to new workers and kills one; lets another come once there were steps without it; presses Ctrl-C
    once there were steps with it, and the run has trained for `TRAIN_S`."""

    def __init__(self, config: Config) -> None:
        self._config, self._first_s = config, 0.0
        self._stages = [
            (DEVICES, lambda: (close(config), kill(pids("PickyWorker")[0]))),
            (DEVICES - 1, lambda: reopen(config)),
            (DEVICES, self._press),
        ]
        self._num_steps = 0

    def say(self, text: str) -> None:
        """Nothing of it matters here."""

    def update(self, report: StepReport) -> None:
        self._first_s = self._first_s or time.monotonic()
        if not self._stages:
            return
        size, act = self._stages[0]
        self._num_steps += report.world_size == size
        is_last = len(self._stages) == 1
        if self._num_steps >= STEPS and not (is_last and time.monotonic() < self._first_s + TRAIN_S):
            self._num_steps = 0
            self._stages.pop(0)
            act()

    def _press(self) -> None:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    write_texts(folder)
    config = run_config(
        folder,
        name=RUN,
        cluster={"num_workers": [1, DEVICES]},
        train={"steps": 100_000},
        checkpoint={"every_steps": 20},
    )
    start_s = time.time()
    with Prometheus(folder / "prometheus", config=quick_config(folder)) as prometheus:
        with free_cpus_again():
            FlexTrainer(config, worker=PickyWorker).fit(watcher=Course(config))
        last = prometheus.ask("query", query="max(max_over_time(rayfcp_last_step_timestamp_seconds[10m]))")
        yield Watched(prometheus=prometheus, start_s=start_s, end_s=float(last["result"][0]["value"][1]))


def samples(watched: Watched, expression: Expression) -> list[float]:
    """Numbers that Grafana would draw."""
    range_s = int(watched.end_s - watched.start_s)
    text = substituted(expression.text, runs=[RUN], scrape_s=SCRAPE_S, interval_s=SCRAPE_S, range_s=range_s)
    if expression.instant:
        found = watched.prometheus.ask("query", query=text, time=watched.end_s)
    else:
        over = {"start": watched.start_s, "end": watched.end_s, "step": SCRAPE_S}
        found = watched.prometheus.ask("query_range", query=text, **over)
    series = [each.get("values") or [each["value"]] for each in found["result"]]
    return [float(value) for values in series for _, value in values if math.isfinite(float(value))]


@pytest.mark.parametrize("kind", [of_boards, of_rules], ids=["boards", "rules"])
def test_every_query_has_data(kind: Any, watched: Watched) -> None:
    """But for those of pictures: the model does not see."""
    empty = [expression.place for expression in kind() if not samples(watched, expression)]
    assert empty == [expression.place for expression in kind() if expression.of_pictures]


def test_rules_are_healthy_and_alerts_quiet(watched: Watched) -> None:
    groups = watched.prometheus.ask("rules")["groups"]
    loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(loaded) == {rule.get("record") or rule["alert"] for rule in rules()}
    assert {name: rule.get("lastError") for name, rule in loaded.items() if rule["health"] != "ok"} == {}
    firing = watched.prometheus.ask(
        "query_range", query='ALERTS{alertstate="firing"}', start=watched.start_s, end=watched.end_s, step=SCRAPE_S
    )
    assert firing["result"] == []


def test_readers_can_choose_the_run(watched: Watched) -> None:
    for board in boards().values():
        query = board["templating"]["list"][1]["query"]["query"]
        metric, label = WAYS.fullmatch(query).groups()  # type: ignore[union-attr]
        over = {"start": watched.start_s, "end": watched.end_s}
        assert watched.prometheus.ask(f"label/{label}/values", **{"match[]": metric}, **over) == [RUN]


def test_the_loss_and_the_growth_are_on_the_boards(watched: Watched) -> None:
    def values(text: str) -> set[float]:
        return set(samples(watched, Expression(place="", text=text)))

    assert {DEVICES - 1, DEVICES} <= values("rayfcp_world_size")
    assert max(values('rayfcp_recoveries_total{cause="died"}')) == 1
    assert max(values('rayfcp_resizes_total{direction="up"}')) >= 1
    ranks = watched.prometheus.ask("query", query="count by (rank) (rayfcp_worker_step_seconds)", time=watched.end_s)
    assert sorted(each["metric"]["rank"] for each in ranks["result"]) == ["0", "1", "2"]
