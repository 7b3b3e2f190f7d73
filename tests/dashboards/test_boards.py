"""The committed boards: made by the code, valid by Grafana's schema, readable, and of metrics that exist."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dashboards.generate import generated
from dashboards.places import BOARDS, HERE, KUBERNETES, RULES
from rayfcp.telemetry.names import METRICS, PREFIX, MetricKind
from tests.dashboards.promql import boards, names, of_boards, of_rules, panels, rules
from tests.dashboards.schema import problems
from tests.waiting import PATIENCE_S

COLUMNS = 24
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
BOARD_NAMES = ("balance.json", "elasticity.json", "planning.json", "training.json")


def test_what_is_committed_is_what_the_code_makes() -> None:
    made = generated()
    assert {path: path.read_text(encoding="utf-8") for path in made} == dict(made), "run python -m dashboards.generate"
    assert set(made) == {*BOARDS.rglob("*"), *KUBERNETES.rglob("*")}


def test_json_files_are_boards() -> None:
    files = sorted(HERE.rglob("*.json"))
    assert tuple(path.name for path in files) == BOARD_NAMES
    assert all(isinstance(json.loads(path.read_text())["panels"], list) for path in files)


@pytest.mark.parametrize("name", BOARD_NAMES)
def test_boards_are_valid(name: str) -> None:
    assert problems(boards()[name]) == []


def _broken() -> Iterator[tuple[str, dict[str, Any]]]:
    """A board with one fault, and what is said of it."""
    faults: list[tuple[str, tuple[str | int, ...], Any]] = [
        ("is not known", ("panels", 1, "fieldConfig", "defaults", "units"), "s"),
        ("is not known", ("panels", 1, "targets", 0, "expression"), "up"),
        ("is not known", ("panels", 1, "options", "reduce"), {}),
        ("must be", ("panels", 1, "options", "colorMode"), "rainbow"),
        ("must be", ("panels", 1, "gridPos", "w"), "3"),
        ("must be", ("panels", 1, "title"), 3),
        ("must be", ("panels", 1, "targets", 0, "instant"), "yes"),
        ("unknown kind 'graph3d'", ("panels", 1, "type"), "graph3d"),
        ("must be one of", ("templating", "list", 0, "type"), "guess"),
    ]
    for said, (*way, last), value in faults:
        board = boards()["training.json"]
        place: Any = board
        for step in way:
            place = place[step]
        place[last] = value
        yield said, board


@pytest.mark.parametrize(("said", "board"), [*_broken()])
def test_the_schema_finds_faults(said: str, board: dict[str, Any]) -> None:
    assert any(said in problem for problem in problems(board)), problems(board)


def test_a_board_without_what_the_schema_demands_is_refused() -> None:
    board = boards()["training.json"]
    del board["schemaVersion"]
    assert problems(board)


@pytest.mark.parametrize("name", BOARD_NAMES)
def test_panels_fill_rows_and_overlap_nowhere(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in boards()[name]["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    assert {x for x, _ in taken} == set(range(COLUMNS))
    assert len(taken) == COLUMNS * (1 + max(y for _, y in taken)), "there are holes"


@pytest.mark.parametrize("name", BOARD_NAMES)
def test_panels_say_what_they_show(name: str) -> None:
    board = boards()[name]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels(board):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}" and target["legendFormat"], panel["title"]
            assert 'run=~"$run"' in target["expr"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_boards_share_variables_and_lead_to_each_other() -> None:
    for board in boards().values():
        variables = {each["name"]: each for each in board["templating"]["list"]}
        assert list(variables) == ["datasource", "run"] and variables["run"]["multi"]
        (link,) = board["links"]
        assert link["type"] == "dashboards" and set(link["tags"]) <= set(board["tags"]) and link["includeVars"]
    assert len({board["uid"] for board in boards().values()}) == len(BOARD_NAMES)


def _exported() -> set[str]:
    """Names of series that a run serves."""
    found = set()
    for metric in METRICS:
        ends = OF_HISTOGRAMS if metric.kind is MetricKind.HISTOGRAM else ("",)
        found |= {f"{PREFIX}{metric.name}{end}" for end in ends}
    return found


def test_queries_name_what_exists() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used: set[str] = set()
    for expression in (*of_boards(), *of_rules()):
        metrics, series = names(expression.text)
        assert metrics <= _exported() and series <= recorded, expression
        assert metrics or series or expression.text.replace(".", "").isdigit() or "up{" in expression.text, expression
        used |= series
    assert used == recorded, "rules record what nobody asks for"


def test_every_metric_is_shown_or_watched() -> None:
    shown = set().union(*(names(expression.text)[0] for expression in (*of_boards(), *of_rules())))
    for metric in METRICS:
        ends = OF_HISTOGRAMS if metric.kind is MetricKind.HISTOGRAM else ("",)
        assert {f"{PREFIX}{metric.name}{end}" for end in ends} & shown, metric.name


def test_kubernetes_holds_the_same_boards_and_rules() -> None:
    maps = list(yaml.safe_load_all((KUBERNETES / "boards.yaml").read_text()))
    texts = {name: text for each in maps for name, text in each["data"].items()}
    assert texts == {f"rayfcp-{path.name}": path.read_text() for path in BOARDS.glob("*.json")}
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
    limit = 256 * 1024
    assert all(len(json.dumps(each)) < limit for each in maps), "kubectl apply refuses larger ones"
    (rule,) = yaml.safe_load_all((KUBERNETES / "rules.yaml").read_text())
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    assert rule["kind"] == "PrometheusRule" and rule["spec"]["groups"] == [g for file in files for g in file["groups"]]


def test_boards_know_nothing_of_the_package() -> None:
    check = (
        "import sys, dashboards.generate, dashboards.install; "
        "sys.exit(any(name.split('.')[0] == 'rayfcp' for name in sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", check], cwd=HERE.parent, check=False, timeout=PATIENCE_S).returncode == 0
    )
