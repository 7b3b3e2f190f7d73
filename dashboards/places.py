"""Paths of this folder's files."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
BOARDS = HERE / "grafana"
KUBERNETES = HERE / "kubernetes"
SCRAPE = HERE / "prometheus" / "prometheus.yml"
RULES = HERE / "prometheus" / "rules"
RULE_TESTS = HERE / "prometheus" / "tests"
