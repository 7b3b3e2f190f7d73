"""The kinds of panels that boards are made of, in one style."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import common, dashboard, heatmap, piechart, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import piechart as piechart_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

WIDE = 12
"""Columns of a panel that takes half of the screen."""

DATA = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"

Steps = Sequence[tuple[float | None, str]]
"""Thresholds and their colours; the first value is None."""

HIGH_IS_BAD: Steps = ((None, GREEN), (0.1, YELLOW), (0.25, RED))
"""Thresholds of a share of time that is lost."""

HIGH_IS_GOOD: Steps = ((None, RED), (0.7, YELLOW), (0.9, GREEN))
"""Thresholds of a share of time that is used."""

ANY_IS_BAD: Steps = ((None, GREEN), (1, ORANGE))
"""Thresholds of counts that are zero in a quiet run."""


Panel = stat.Panel | timeseries.Panel | heatmap.Panel | piechart.Panel
AnyPanel = TypeVar("AnyPanel", stat.Panel, timeseries.Panel, heatmap.Panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One query of a panel. `legend`: how its series are named."""

    expr: str
    legend: str = "{{run}}"


def number(
    title: str,
    line: Line,
    *,
    unit: str,
    about: str,
    width: int = 3,
    steps: Steps = ((None, BLUE),),
    decimals: int = 1,
    empty: str = "-",
) -> Panel:
    """The value now, large, with its course behind it. `empty`: what stands there without one."""
    panel = stat.Panel().title(title).description(about).datasource(DATA).span(width).height(4)
    panel = panel.unit(unit).decimals(decimals).thresholds(_thresholds(steps)).no_value(empty)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.graph_mode(common_models.BigValueGraphMode.AREA).color_mode(common_models.BigValueColorMode.VALUE)
    return _with_lines(panel, [line])


def chart(
    title: str,
    *lines: Line,
    unit: str,
    about: str,
    width: int = 12,
    steps: Steps = (),
    floor: float | None = 0,
    ceiling: float | None = None,
    dashed: str = "",
    stepped: bool = False,
) -> Panel:
    """Values over time. `steps` are drawn as lines across; series whose name matches `dashed` are drawn dashed;
    `stepped`: values that jump."""
    panel = timeseries.Panel().title(title).description(about).datasource(DATA).span(width).height(8)
    panel = panel.unit(unit).line_width(2).fill_opacity(8).show_points(common_models.VisibilityMode.NEVER)
    panel = panel.legend(_legend(width)).tooltip(_tooltip()).span_nulls(False)
    interpolation = common_models.LineInterpolation
    panel = panel.line_interpolation(interpolation.STEP_AFTER if stepped else interpolation.LINEAR)
    if floor is not None:
        panel = panel.min(floor)
    if ceiling is not None:
        panel = panel.max(ceiling)
    if steps:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(_thresholds(steps)).thresholds_style(style)
    if dashed:
        panel = panel.override_by_regexp(
            dashed, [models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 8]})]
        )
    return _with_lines(panel, lines)


def bars(title: str, *lines: Line, about: str, unit: str = "short", width: int = 12) -> Panel:
    """Events in each interval, on top of each other."""
    panel = timeseries.Panel().title(title).description(about).datasource(DATA).span(width).height(8).unit(unit)
    panel = panel.draw_style(common_models.GraphDrawStyle.BARS).fill_opacity(80).line_width(0).min(0)
    panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return _with_lines(panel.legend(_legend(width, "sum")).tooltip(_tooltip()), lines)


def rows(title: str, line: Line, *, unit: str, about: str, axis: str, empty: str = "") -> Panel:
    """A heat map with a row for each series, once for each chosen run. `empty`: what stands there without one."""
    panel = _heat(title, about=about, unit=unit, width=24, height=9, axis=axis)
    if empty:
        panel = panel.no_value(empty)
    return _with_lines(panel.repeat("run").repeat_direction("h").max_per_row(2), [line])


def histogram(title: str, line: Line, *, about: str, axis: str, width: int = 12) -> Panel:
    """A heat map of a Prometheus histogram: a row for each bucket."""
    panel = _heat(title, about=about, unit="short", width=width, height=8, axis=axis)
    return panel.with_target(_query(line, ref="A").format(prometheus_models.PromQueryFormat.HEATMAP))


def shares(title: str, line: Line, *, about: str, width: int = 6) -> Panel:
    """A ring of what makes up the whole."""
    panel = piechart.Panel().title(title).description(about).datasource(DATA).span(width).height(8).unit("short")
    panel = panel.pie_type(piechart_models.PieChartType.DONUT).decimals(0)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).tooltip(_tooltip())
    legend = piechart.PieChartLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    legend = legend.display_mode(common_models.LegendDisplayMode.LIST)
    panel = panel.legend(legend.values([piechart_models.PieChartLegendValues.PERCENT]))
    panel = panel.hide_from(_nowhere())
    return panel.with_target(_query(line, ref="A").instant())


def _heat(title: str, *, about: str, unit: str, width: int, height: int, axis: str) -> heatmap.Panel:
    panel = (
        heatmap.Panel()
        .title(title)
        .description(about)
        .datasource(DATA)
        .span(width)
        .height(height)
        .unit(unit)
        .hide_from(_nowhere())
    )
    colours = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Turbo").steps(64)
    y_axis = heatmap.YAxisConfig().axis_label(axis).axis_placement(common_models.AxisPlacement.LEFT).unit("short")
    panel = panel.calculate(False).color(colours).y_axis(y_axis.decimals(0)).cell_gap(1)
    return panel.cell_values(heatmap.CellValues().unit(unit)).show_color_scale(True).show_legend()


def _with_lines(panel: AnyPanel, lines: Sequence[Line]) -> AnyPanel:
    for place, line in enumerate(lines):
        panel = panel.with_target(_query(line, ref=chr(ord("A") + place)))
    return panel


def _query(line: Line, *, ref: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(DATA).expr(line.expr).legend_format(line.legend).ref_id(ref).range()


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    found = [models.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def _nowhere() -> common.HideSeriesConfig:
    """Series are hidden from nothing; the schema wants it said."""
    return common.HideSeriesConfig().legend(False).tooltip(False).viz(False)


def _legend(width: int, *calcs: str) -> common.VizLegendOptions:
    """A table with figures where there is room for it."""
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    if width < WIDE:
        return legend.display_mode(common_models.LegendDisplayMode.LIST)
    return legend.display_mode(common_models.LegendDisplayMode.TABLE).calcs(
        list(calcs or ("lastNotNull", "mean", "max"))
    )


def _tooltip() -> common.VizTooltipOptions:
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    return tooltip.sort(common_models.SortOrder.DESCENDING)
