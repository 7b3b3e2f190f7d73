"""The expressions of boards and rules: where they are, what Grafana makes of them, what they name."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml

from dashboards.places import BOARDS, RULES

COMPARISONS = re.compile(r"==|!=|<=|>=|<|>|\b(?:and|or|unless)\b")
MODIFIERS = re.compile(r"^\s*(?:bool\b|(?:on|ignoring|group_left|group_right)\s*\([^)]*\)|\s)+")
SERIES = re.compile(r"\brayfcp_[a-z0-9_]+")
RECORDED = re.compile(r"\b[a-z_]+:[a-z0-9_:]+")
STRINGS = re.compile(r'"[^"]*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """`place`: for people. `instant`: asked for one moment, not over time."""

    place: str
    text: str
    instant: bool = False

    @property
    def of_some(self) -> bool:
        """True if only models with a vision encoder, or losses of pairs, have such series."""
        return "encode" in self.text or "reward" in self.text


def boards() -> dict[str, dict[str, Any]]:
    """The committed boards by their files' names."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(BOARDS.rglob("*.json"))}


def panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Without the headings of rows, with what folded rows hold."""
    for panel in board["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else [panel]


def rules() -> list[dict[str, Any]]:
    """Recording rules and alerts."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def of_boards() -> list[Expression]:
    """Queries of panels and of the marks on time axes, with Grafana's variables in them."""
    found = []
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                place = f"{name}, {panel['title']}, {target['refId']}"
                found.append(Expression(place=place, text=target["expr"], instant=target["instant"]))
        for mark in board["annotations"]["list"]:
            found.append(Expression(place=f"{name}, mark {mark['name']}", text=mark["expr"]))
    return found


def of_rules() -> list[Expression]:
    """Expressions that rules record, and each side of the comparisons of alerts, which hold for nothing in a healthy
    run."""
    found = []
    for rule in rules():
        if "record" in rule:
            found.append(Expression(place=rule["record"], text=rule["expr"]))
        else:
            sides = operands(rule["expr"])
            found += [Expression(place=f"{rule['alert']}, {index}", text=side) for index, side in enumerate(sides)]
    return found


def operands(text: str) -> list[str]:
    """What a comparison compares and what `and`, `or` and `unless` join, at the outermost level.

    >>> operands('a{x="<"} - (b > 1) > on (run) group_left () 2 * c and on (run) d < e')
    ['a{x="<"} - (b > 1)', '2 * c', 'd', 'e']
    """
    flat, depth = [], 0
    for character in STRINGS.sub(lambda string: "_" * len(string.group()), text):
        depth -= character in ")}]"
        flat.append(character if depth == 0 else "_")
        depth += character in "({["
    ends = [(0, 0), *(match.span() for match in COMPARISONS.finditer("".join(flat))), (len(text), len(text))]
    sides = [text[start:end] for (_, start), (end, _) in pairwise(ends)]
    return [MODIFIERS.sub("", side).strip() for side in sides]


def substituted(text: str, *, runs: list[str], scrape_s: int, interval_s: int, range_s: int) -> str:
    """Query as Grafana sends it to Prometheus: chosen runs as alternatives, windows from the interval and time
    shown."""
    values = {
        "$run": "|".join(runs) if len(runs) == 1 else f"({'|'.join(runs)})",
        "$__rate_interval": f"{max(interval_s + scrape_s, 4 * scrape_s)}s",
        "$__interval": f"{interval_s}s",
        "$__range": f"{range_s}s",
    }
    for name in sorted(values, key=len, reverse=True):
        text = text.replace(name, values[name])
    return text


def names(text: str) -> tuple[set[str], set[str]]:
    """The metrics and the recorded series that it names."""
    bare = STRINGS.sub("", text)
    recorded = set(RECORDED.findall(bare))
    return set(SERIES.findall(RECORDED.sub("", bare))), recorded
