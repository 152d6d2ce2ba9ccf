"""The learning curves of the dashboard: one line with its band for each configuration. The zoom is kept when data change."""

from collections.abc import Sequence
from typing import Any

import panel as pn
from bokeh.models import ColumnDataSource, HoverTool, Legend, LegendItem
from bokeh.plotting import figure

from results.overview import Line

COLOURS = (
    "#2563eb",
    "#e8590c",
    "#0f9d58",
    "#9333ea",
    "#d6336c",
    "#0891b2",
    "#a16207",
    "#4b5563",
    "#65a30d",
    "#c026d3",
    "#b91c1c",
    "#0f766e",
)
HEIGHT = 350
_LEGEND_CHARACTERS = 90


class Plot:
    """`pane` displays the last argument of `show`."""

    def __init__(self) -> None:
        self.pane = pn.pane.Bokeh(sizing_mode="stretch_width", height=HEIGHT, margin=0)
        self._made_for: tuple[Any, ...] | None = None
        self._sources: list[ColumnDataSource] = []

    def show(self, lines: Sequence[Line], metric: str, x: str, logarithmic: bool) -> None:
        """Draw again if the lines are others; else only send the changed points."""
        wanted = (metric, x, logarithmic, *(line.label for line in lines))
        if wanted == self._made_for:
            for source, line in zip(self._sources, lines, strict=True):
                if (data := _data(line)) != source.data:
                    source.data = data
            return
        self._sources = [ColumnDataSource(_data(line)) for line in lines]
        self.pane.object = _draw(self._sources, metric, x, logarithmic)
        self._made_for = wanted


def _data(line: Line) -> dict[str, Any]:
    return {"x": line.x, "mean": line.mean, "low": line.low, "high": line.high, "label": [line.label] * len(line.x)}


def _draw(sources: Sequence[ColumnDataSource], metric: str, x: str, logarithmic: bool) -> Any:
    drawn = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_axis_label=x,
        y_axis_label=metric,
        y_axis_type="log" if logarithmic else "linear",
        tools="pan,box_zoom,reset,save",
        toolbar_location="above",
        output_backend="canvas",
    )
    items: list[LegendItem] = []
    marked: list[Any] = []
    for index, source in enumerate(sources):
        colour = COLOURS[index % len(COLOURS)]
        band: Any = drawn.varea("x", "low", "high", source=source, fill_color=colour, fill_alpha=0.13)
        line: Any = drawn.line("x", "mean", source=source, line_color=colour, line_width=2)
        points: Any = drawn.scatter("x", "mean", source=source, color=colour, size=4 if len(source.data["x"]) < 40 else 0)
        marked.append(points)
        items.append(LegendItem(label=str(source.data["label"][0]), renderers=[band, line, points]))
    drawn.add_tools(
        HoverTool(renderers=marked, tooltips=[("", "@label"), (x, "@x"), (metric, "@mean{0.0000} (@low{0.0000} to @high{0.0000})")])
    )
    longest = max((len(source.data["label"][0]) for source in sources), default=0)
    if longest:
        drawn.add_layout(_legend(items, max(1, min(4, _LEGEND_CHARACTERS // (longest + 6)))), "below")
    _quiet(drawn)
    return drawn


def _legend(items: list[LegendItem], columns: int) -> Legend:
    return Legend(
        items=items,
        location="left",
        ncols=columns,
        click_policy="hide",
        border_line_color=None,
        label_text_font_size="11px",
        glyph_height=12,
        label_height=12,
        spacing=2,
        margin=2,
    )


def _quiet(drawn: Any) -> None:
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.outline_line_color = None
    drawn.grid.grid_line_color = "#eceef1"
    drawn.axis.axis_line_color = "#c4c9d2"
    drawn.axis.major_tick_line_color = "#c4c9d2"
    drawn.axis.minor_tick_line_color = None
    drawn.axis.major_label_text_color = drawn.axis.axis_label_text_color = "#667085"
    drawn.axis.axis_label_text_font_style = "normal"
    drawn.axis.axis_label_text_font_size = "12px"
