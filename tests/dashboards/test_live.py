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
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(3 * PATIENCE_S)]

DEVICES = 3
RUN = "watched"
WAYS = re.compile(r"label_values\((\w+), (\w+)\)")
EXPRESSIONS = (*of_boards(), *of_rules())


AT_THE_END = [
    Expression(place="", text=text, instant=True)
    for text in (
        f"rayfcp_world_size == {DEVICES}",
        'rayfcp_recoveries_total{cause="died"} == 1',
        'rayfcp_resizes_total{direction="up"} >= 1',
        f"count(rayfcp_worker_step_seconds) == {DEVICES}",
    )
]
"""What came of the worker that was killed, and of the one that came."""


class PacedWorker(PickyWorker):
    """Takes its time for each step: what Prometheus sees of a run is what matters here, not how far it comes."""

    def step(self, *given: Any, **named: Any) -> Any:
        time.sleep(0.25)
        return super().step(*given, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A run, and the Prometheus that sees it from `start_s` to `end_s`, on the clock of the day."""

    prometheus: Prometheus
    start_s: float
    end_s: float

    def samples(self, expression: Expression) -> list[float]:
        """Numbers that Grafana would draw."""
        range_s = int(self.end_s - self.start_s)
        text = substituted(expression.text, runs=[RUN], scrape_s=SCRAPE_S, interval_s=SCRAPE_S, range_s=range_s)
        if expression.instant:
            found = self.prometheus.ask("query", query=text, time=self.end_s)
        else:
            over = {"start": self.start_s, "end": self.end_s, "step": SCRAPE_S}
            found = self.prometheus.ask("query_range", query=text, **over)
        series = [each.get("values") or [each["value"]] for each in found["result"]]
        return [float(value) for values in series for _, value in values if math.isfinite(float(value))]


class Course:
    """Closes the run to new workers and kills one, lets another come, and presses Ctrl-C in the end, each as soon as
    Prometheus has seen what came of the one before; at the end that is all that tests ask for, at one moment."""

    def __init__(self, config: Config, prometheus: Prometheus) -> None:
        self._prometheus, self._start_s = prometheus, time.time()
        self._stages = [
            (f"rayfcp_world_size == {DEVICES}", lambda: (close(config), kill(pids("PacedWorker")[0]))),
            (f"rayfcp_world_size == {DEVICES - 1}", lambda: reopen(config)),
        ]
        self._empty: list[Expression] = []
        self._asked_s = 0.0
        self.watched: Watched | None = None

    def log(self, text: str) -> None:
        """Nothing of it matters here."""

    def evaluating(self, done: int, total: int) -> None: ...

    def update(self, report: StepReport) -> None:
        if self.watched is not None or time.monotonic() < self._asked_s + SCRAPE_S:
            return
        now = Watched(prometheus=self._prometheus, start_s=self._start_s, end_s=time.time())
        if self._stages:
            seen, act = self._stages[0]
            if now.samples(Expression(place="", text=seen)):
                self._stages.pop(0)
                act()
        else:
            wanted = [*(each for each in EXPRESSIONS if not each.of_some), *AT_THE_END]
            self._empty = [each for each in self._empty if not now.samples(each)]
            if not self._empty:  # each has had data, now all of them at once
                self._empty = [each for each in wanted if not now.samples(each)]
            if not self._empty or now.end_s > self._start_s + PATIENCE_S:  # tests log what is missing
                self.watched = now
                raise KeyboardInterrupt
        self._asked_s = time.monotonic()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    texts = str(write_texts(folder))
    config = run_config(
        folder,
        name=RUN,
        data={"paths": [], "sources": {name: {"paths": texts} for name in ("one", "other")}},
        cluster={"num_workers": [1, DEVICES]},
        train={"steps": 100_000},
        checkpoint={"every_steps": 5},
        eval={"sets": {"val": {"paths": texts}}, "every_steps": 5, "batches": 1},
    )
    with Prometheus(folder / "prometheus", config=quick_config(folder)) as prometheus:
        course = Course(config, prometheus)
        with free_cpus_again():
            FlexTrainer(config, worker=PacedWorker).fit(watcher=course)
        assert course.watched is not None
        yield course.watched


@pytest.mark.parametrize("kind", [of_boards, of_rules], ids=["boards", "rules"])
def test_every_query_has_data(kind: Any, watched: Watched) -> None:
    """But for those of pictures and pairs: the model does not see, and the loss is cross entropy."""
    empty = [expression.place for expression in kind() if not watched.samples(expression)]
    assert empty == [expression.place for expression in kind() if expression.of_some]


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
    assert {DEVICES - 1, DEVICES} <= set(watched.samples(Expression(place="", text="rayfcp_world_size")))
    # At the end itself: the points of a range need not include the last scrape, with which the growth may have come.
    assert [each.text for each in AT_THE_END if not watched.samples(each)] == []
    ranks = watched.prometheus.ask("query", query="count by (rank) (rayfcp_worker_step_seconds)", time=watched.end_s)
    assert sorted(each["metric"]["rank"] for each in ranks["result"]) == ["0", "1", "2"]
