"""Writes what is made from code: boards as JSON, and boards and rules for Kubernetes.

python -m dashboards.generate
"""

from collections.abc import Mapping
from pathlib import Path

from dashboards import boards
from dashboards.cluster_objects import config_maps, rule_object
from dashboards.places import BOARDS, KUBERNETES, RULES


def generated() -> Mapping[Path, str]:
    """Text of each file that is made from code."""
    texts = boards.texts()
    rules = {path.name: path.read_text(encoding="utf-8") for path in sorted(RULES.glob("*.yml"))}
    return {
        **{BOARDS / name: text for name, text in texts.items()},
        KUBERNETES / "boards.yaml": config_maps(texts),
        KUBERNETES / "rules.yaml": rule_object(rules),
    }


def main() -> None:
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
