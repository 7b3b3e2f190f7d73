"""Where the files of this folder lie."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
BOARDS = HERE / "grafana"
KUBERNETES = HERE / "kubernetes"
SCRAPE = HERE / "prometheus" / "prometheus.yml"
RULES = HERE / "prometheus" / "rules"
RULE_TESTS = HERE / "prometheus" / "tests"
