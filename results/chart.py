"""The learning curves of the dashboard: a picture of each metric, with a line and its band for each configuration. The zoom is kept when
data change.

A line is found by the mouse within some pixels of it, wherever its points are; it lights up, and whoever watches is told its colour.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import panel as pn
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, CustomJS, DataRange1d, FactorRange, HoverTool
from bokeh.plotting import figure

from results import markup
from results.legend import NEUTRAL
from results.overview import Curves, Line

HEIGHT, LOWER = 350, 240
"""Pixels of one picture, and of each of several."""
_REACH = 14
"""Pixels across a line, or a point, in which the mouse finds it."""
_FEW_POINTS = 40
_DIMMED = 0.2
"""Opacity of the other lines where one is lit."""


class Plot:
    """`pane` displays the last argument of `show`, `legend` names its lines, and scrolls where they are many."""

    def __init__(self, on_hover: Callable[[str], None]) -> None:
        """on_hover: called with the colour of the line below the mouse, where it is another than before."""
        self.pane = pn.pane.Bokeh(sizing_mode="stretch_width", margin=0, css_classes=["plot"])
        self._on_hover = on_hover
        self._made_for: Any = None
        self._sources: list[ColumnDataSource] = []
        self._parts: list[tuple[str, Any, float]] = []
        """Colour, glyph and opacity of what dims where another line is lit."""

    def show(self, pictures: Mapping[str, Curves], x: str, logarithmic: bool) -> None:
        """Draw again if the lines are others; else only send the changed points. pictures: the curves of each metric."""
        lines = [line for curves in pictures.values() for line in curves.lines]
        factors = sorted({place for line in lines for place in line.x if isinstance(place, str)})
        drawn = [(metric, curves.scattered, [(line.label, line.colour) for line in curves.lines]) for metric, curves in pictures.items()]
        wanted = (x, logarithmic, factors, drawn)
        if wanted == self._made_for:
            for source, line in zip(self._sources, lines, strict=True):
                if (data := _data(line)) != source.data:
                    source.data = data
            return
        self._made_for, self._sources, self._parts = wanted, [], []
        hovered = ColumnDataSource({"colour": [""]})
        hovered.on_change("data", lambda _, __, data: self._on_hover(data["colour"][0]))
        figures = [self._draw(metric, curves, hovered, wanted[:3], len(pictures)) for metric, curves in pictures.items()]
        for other in figures[1:]:
            other.x_range = figures[0].x_range
        self.pane.object = column(*figures, sizing_mode="stretch_width")

    def light(self, colour: str | None) -> None:
        """Dim all lines but those of a colour; None: dim none."""
        for own, glyph, opacity in self._parts:
            wanted = opacity * (1 if colour in (None, own) else _DIMMED)
            for name in ("line_alpha", "fill_alpha"):
                if hasattr(glyph, name) and getattr(glyph, name) != wanted:
                    setattr(glyph, name, wanted)

    def _draw(self, metric: str, curves: Curves, hovered: Any, axes: tuple[str, bool, Sequence[str]], count: int) -> Any:
        x, logarithmic, factors = axes
        drawn = figure(
            height=HEIGHT if count == 1 else LOWER,
            sizing_mode="stretch_width",
            x_axis_label=x,
            y_axis_label=metric,
            y_axis_type="log" if logarithmic else "linear",
            x_range=FactorRange(factors=list(factors)) if factors else DataRange1d(),
            tools="pan,box_zoom,reset,save",
            toolbar_location="above",
            output_backend="canvas",
        )
        found: list[Any] = []
        for line in curves.lines:
            source = ColumnDataSource(_data(line))
            self._sources.append(source)
            points = curves.scattered or len(line.x) == 1
            if points or len(line.x) < _FEW_POINTS:
                size = 9 if curves.scattered else 4
                self._keep(line, drawn.scatter("x", "mean", source=source, color=line.colour, size=size))
            if not curves.scattered:
                self._keep(line, drawn.varea("x", "low", "high", source=source, fill_color=line.colour, fill_alpha=0.13), 0.13)
                self._keep(line, drawn.line("x", "mean", source=source, line_color=line.colour, line_width=2))
            halo = {"source": source, "name": line.colour}
            found.append(
                drawn.scatter("x", "mean", size=_REACH, alpha=0, hover_alpha=0.3, color=line.colour, **halo)
                if points
                else drawn.line("x", "mean", line_width=_REACH, line_alpha=0, hover_line_alpha=0.3, line_color=line.colour, **halo)
            )
        tell = CustomJS(args={"hovered": hovered}, code=_TELL)
        tooltips = [("", "@label"), (x, "@x"), (metric, "@mean{0.0000} (@low{0.0000} to @high{0.0000})")]
        drawn.add_tools(HoverTool(renderers=found, tooltips=tooltips, line_policy="nearest", callback=tell))
        _quiet(drawn)
        return drawn

    def _keep(self, line: Line, renderer: Any, opacity: float = 1.0) -> None:
        self._parts.append((line.colour, renderer.glyph, opacity))


_TELL = """
const found = cb_data.index.indices.length > 0 || cb_data.index.line_indices.length > 0
if (found && hovered.data.colour[0] !== cb_data.renderer.name) hovered.data = {colour: [cb_data.renderer.name]}
"""
"""Called for each line whenever the mouse moves. A line stays lit when the mouse leaves it: a row is often clicked next."""


def legend(pictures: Mapping[str, Curves]) -> str:
    """The names of all lines, each once."""
    named = {line.colour: line.label for curves in pictures.values() for line in curves.lines}
    return "".join(f'<div class="entry">{markup.dot(colour)}{markup.escape(label)}</div>' for colour, label in named.items())


def _data(line: Line) -> dict[str, Any]:
    return {"x": line.x, "mean": line.mean, "low": line.low, "high": line.high, "label": [line.label] * len(line.x)}


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
