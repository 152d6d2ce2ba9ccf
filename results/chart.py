"""The learning curves of the dashboard: one line with its band for each configuration. The zoom is kept when data change."""

from collections.abc import Sequence
from typing import Any

import panel as pn
from bokeh.models import ColumnDataSource, HoverTool, Legend, LegendItem
from bokeh.plotting import figure

from results.legend import NEUTRAL, clip
from results.overview import LINES, Curves, Line

HEIGHT = 350
_LEGEND_CHARACTERS = 90
"""In a line of the legend."""
_LABEL_CHARACTERS = 44
_ONE_COLUMN = 6
"""Most lines whose labels stand below each other."""


class Plot:
    """`pane` displays the last argument of `show`."""

    def __init__(self) -> None:
        self.pane = pn.pane.Bokeh(sizing_mode="stretch_width", height=HEIGHT, margin=0)
        self._made_for: tuple[Any, ...] | None = None
        self._sources: list[ColumnDataSource] = []

    def show(self, curves: Curves, metric: str, x: str, logarithmic: bool) -> None:
        """Draw again if the lines are others; else only send the changed points."""
        lines = curves.lines
        factors = sorted({place for line in lines for place in line.x if isinstance(place, str)})
        wanted = (metric, x, logarithmic, curves.scattered, factors, *((line.label, line.colour) for line in lines))
        if wanted == self._made_for:
            for source, line in zip(self._sources, lines, strict=True):
                if (data := _data(line)) != source.data:
                    source.data = data
            return
        self._sources = [ColumnDataSource(_data(line)) for line in lines]
        self.pane.object = _draw(self._sources, [line.colour for line in lines], wanted[:5])
        self._made_for = wanted


def _data(line: Line) -> dict[str, Any]:
    return {"x": line.x, "mean": line.mean, "low": line.low, "high": line.high, "label": [line.label] * len(line.x)}


def _draw(sources: Sequence[ColumnDataSource], colours: Sequence[str], choices: tuple[Any, ...]) -> Any:
    metric, x, logarithmic, scattered, factors = choices
    drawn = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_axis_label=x,
        y_axis_label=metric,
        y_axis_type="log" if logarithmic else "linear",
        **({"x_range": factors} if factors else {}),
        tools="pan,box_zoom,reset,save",
        toolbar_location="above",
        output_backend="canvas",
    )
    labels = [clip(source.data["label"][0], _LABEL_CHARACTERS) for source in sources]
    items: list[LegendItem] = []
    marked: list[Any] = []
    for colour, source, label in zip(colours, sources, labels, strict=True):
        size = 9 if scattered else 4 if len(source.data["x"]) < 40 else 0
        parts: list[Any] = [drawn.scatter("x", "mean", source=source, color=colour, size=size)]
        marked.append(parts[0])
        if not scattered:
            parts.append(drawn.varea("x", "low", "high", source=source, fill_color=colour, fill_alpha=0.13))
            parts.append(drawn.line("x", "mean", source=source, line_color=colour, line_width=2))
        items.append(LegendItem(label=label, renderers=parts))
    drawn.add_tools(
        HoverTool(renderers=marked, tooltips=[("", "@label"), (x, "@x"), (metric, "@mean{0.0000} (@low{0.0000} to @high{0.0000})")])
    )
    if 0 < len(labels) <= LINES:
        longest = max(map(len, labels))
        drawn.add_layout(_legend(items, max(1, min(4, _LEGEND_CHARACTERS // (longest + 6))) if len(items) > _ONE_COLUMN else 1), "below")
    _quiet(drawn)
    return drawn


def _legend(items: list[LegendItem], columns: int) -> Legend:
    return Legend(
        items=items,
        location="left",
        ncols=columns,
        click_policy="hide",
        border_line_color=None,
        background_fill_color=None,
        label_text_color=NEUTRAL,
        label_text_font_size="11px",
        glyph_height=12,
        label_height=12,
        spacing=2,
        margin=2,
    )


def _quiet(drawn: Any) -> None:
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.outline_line_color = drawn.background_fill_color = drawn.border_fill_color = None  # light or dark, as the page is
    drawn.grid.grid_line_color = drawn.axis.axis_line_color = drawn.axis.major_tick_line_color = NEUTRAL
    drawn.grid.grid_line_alpha = 0.2
    drawn.axis.minor_tick_line_color = None
    drawn.axis.major_label_text_color = drawn.axis.axis_label_text_color = NEUTRAL
    drawn.axis.axis_label_text_font_style = "normal"
    drawn.axis.axis_label_text_font_size = "12px"
