"""Elements of all boards: variables, links to each other, marks of recoveries, and the places of panels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import DATA, Panel
from dashboards.queries import grown

TAG = "rayfcp"
COLUMNS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Panels under one heading, from left to right; their widths fill rows of 24 columns."""

    title: str
    panels: tuple[Panel, ...]


def board(name: str, *, about: str, sections: Sequence[Section]) -> dashboard.Dashboard:
    """A whole board. Panels are numbered in their order, so that links to them last.

    Raises:
        ValueError: the panels of a section leave a row of the grid unfilled.
    """
    made = dashboard.Dashboard(f"rayfcp: {name}").uid(f"{TAG}-{name.lower()}").description(about).tags([TAG])
    made = made.time("now-1h", "now").refresh("10s").tooltip(models.DashboardCursorSync.CROSSHAIR).editable()
    made = made.variables([_datasource(), _runs()]).link(_to_other_boards())
    for mark in _marks():
        made = made.annotation(mark)
    number = 0
    for section in sections:
        _check_widths(section)
        number += 1
        made = made.with_row(dashboard.Row(section.title).id(number))
        for panel in section.panels:
            number += 1
            made = made.with_panel(panel.id(number))
    return made


def as_json(made: dashboard.Dashboard) -> str:
    """Text that is committed: the same for the same board."""
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _check_widths(section: Section) -> None:
    filled = 0
    for panel in section.panels:
        place = panel.build().grid_pos
        filled += place.w if place else COLUMNS
        if filled > COLUMNS:
            raise ValueError(f"panels of '{section.title}' pass {COLUMNS} columns; change their widths")
        filled %= COLUMNS
    if filled:
        raise ValueError(f"panels of '{section.title}' leave {COLUMNS - filled} of {COLUMNS} columns empty; widen one")


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _runs() -> dashboard.QueryVariable:
    names = dashboard.QueryVariable("run").label("Run").datasource(DATA).multi(True).include_all(True)
    names = names.query({"query": "label_values(rayfcp_world_size, run)", "refId": "runs"})
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return (
        names.current(everything)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _to_other_boards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Boards").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True).as_dropdown(False).icon("external link")


def _marks() -> list[dashboard.AnnotationQuery]:
    """Vertical lines where a run recovered, and where it changed its size."""
    marks = (
        ("Recoveries", "red", f"{grown('recoveries_total', by='run, cause')} > 0"),
        ("Resizes", "blue", f"{grown('resizes_total', by='run, direction')} > 0"),
    )
    return [
        dashboard.AnnotationQuery().name(name).datasource(DATA).enable(True).icon_color(colour).expr(expr)
        for name, colour, expr in marks
    ]
