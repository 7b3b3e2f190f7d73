"""Prometheus's configuration, rules and alerts, as promtool judges them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dashboards.places import RULE_TESTS, RULES, SCRAPE
from tests.dashboards.promql import RECORDED, boards, rules
from tests.dashboards.promql import panels as panels_of
from tests.waiting import PATIENCE_S

ALERTS = ("MfuDrop", "Imbalance", "Straggler", "PlannerLate", "NoProgress", "RunUnreachable", "RecoveryStorm")


def promtool(*arguments: str | Path) -> str:
    """What it says; it must be content."""
    program = shutil.which("promtool")
    assert program, "promtool is missing; run .ci/install-packages"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_is_valid() -> None:
    said = promtool("check", "config", SCRAPE)
    assert "2 rule files found" in said


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yml")), ids=lambda path: path.stem)
def test_rules_are_valid(path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", path)


@pytest.mark.parametrize("path", sorted(RULE_TESTS.glob("*.yml")), ids=lambda path: path.stem)
def test_rules_do_what_their_tests_say(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


def test_each_rule_has_a_test_and_each_alert_fires_in_one_and_not_in_another() -> None:
    tested = {
        case["expr"]: case["exp_samples"]
        for path in RULE_TESTS.glob("*.yml")
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test["promql_expr_test"]
        if case["exp_samples"]
    }
    for rule in rules():
        if "record" in rule:
            assert rule["record"] in tested
            continue
        asked = [expr for expr in tested if f'alertname="{rule["alert"]}"' in expr]
        assert asked and all('alertstate="firing"' in sample["labels"] for expr in asked for sample in tested[expr])
    for test in yaml.safe_load((RULE_TESTS / "alerts.yml").read_text())["tests"]:
        runs = {re.search(r'run="([^"]*)"', each["series"]) for each in test["input_series"]}
        fired = [sample for case in test["promql_expr_test"] for sample in case["exp_samples"]]
        assert len({each.group(1) for each in runs if each}) > len(fired), "a run that is well is beside it"


def test_alerts_say_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == [f"Rayfcp{name}" for name in ALERTS]
    titles = {panel["title"] for board in boards().values() for panel in panels_of(board)}
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook"} and "$labels.run" in notes["summary"]
        assert "$value" in notes["description"] or "$labels" in notes["description"]
    named = {"Slowest ranks", "Gap to bound", "Load of planners", "Devices", "Recoveries by cause"}
    assert named <= titles and all(any(name in rule["annotations"]["runbook"] for rule in alerts) for name in named)


def test_recorded_names_begin_with_the_labels_that_are_left() -> None:
    for rule in rules():
        if "record" in rule:
            assert RECORDED.fullmatch(rule["record"])
            labels = rule["record"].split(":")[0].split("_")
            assert f"by ({', '.join(labels)})" in rule["expr"]
