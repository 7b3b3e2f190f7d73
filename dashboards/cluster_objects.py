"""The boards and rules as Kubernetes objects: what Grafana's sidecar and the Prometheus operator watch for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

NAMES = {"app.kubernetes.io/name": "rayfcp"}
BOARD_LABEL = {"grafana_dashboard": "1"}
"""Label that the sidecar of Grafana's Helm charts selects by default."""

RULE_LABEL = {"release": "prometheus"}
"""Label that the operator of the chart kube-prometheus-stack selects, in a release that is called prometheus."""


def config_maps(boards: Mapping[str, str]) -> str:
    """A ConfigMap for each board, its JSON unchanged. One each, since `kubectl apply` keeps what it applied in an
    annotation, of 256 KiB at most."""
    return _documents(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"rayfcp-board-{Path(name).stem}",
                "labels": NAMES | BOARD_LABEL,
                "annotations": {"grafana_folder": "rayfcp"},
            },
            "data": {f"rayfcp-{name}": _Block(text)},
        }
        for name, text in boards.items()
    )


def rule_object(rule_files: Mapping[str, str]) -> str:
    """All groups of the rule files in one PrometheusRule."""
    groups = [group for text in rule_files.values() for group in yaml.safe_load(text)["groups"]]
    metadata = {"name": "rayfcp", "labels": NAMES | RULE_LABEL}
    made = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata}
    return _documents([made | {"spec": {"groups": groups}}])


class _Block(str):
    """A text that stays as it is, line by line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def _documents(objects: Any) -> str:
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True, allow_unicode=True)
    return "# Made by python -m dashboards.generate; kubectl apply -f dashboards/kubernetes\n" + text
