"""Learning curves of the dashboard: a picture per metric, with a line and a band per configuration.
New data do not reset the zoom.

The line closest to the mouse is highlighted, also between its points, and a callback gets its colour.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import panel as pn
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, CustomJS, DataRange1d, FactorRange, HoverTool
from bokeh.plotting import figure

from results.pages import markup
from results.pages.learning_curves import Curves, Line
from results.pages.legend import NEUTRAL

HEIGHT, LOWER = 350, 240
"""Height in pixels of a single picture, and of each of several pictures."""
_REACH = 14
"""Width in pixels of the area around a line or point that reacts to the mouse."""
_FEW_POINTS = 40
_BAND, _DIM_ALPHA = 0.13, 0.2
"""Opacity of bands, and factor on the opacity of lines while another line is highlighted."""


class Plot:
    """Pictures with the curves of several metrics, in `pane`."""

    def __init__(self, on_hover: Callable[[str], None]) -> None:
        """on_hover: called with the colour of the line below the mouse when it changes."""
        self.pane = pn.pane.Bokeh(sizing_mode="stretch_width", margin=0, css_classes=["plot"])
        self._on_hover = on_hover
        self._nearest = ColumnDataSource({"colour": [""]})
        """The highlighted colour, shared with the browser."""
        self._axes: Any = None
        self._kinds: list[list[tuple[bool, bool]]] = []
        """The kind of each line, by picture."""
        self._sources: list[ColumnDataSource] = []
        self._colours: list[str] = []
        self._visible: set[str] = set()
        self._renderers: list[list[Any]] = []
        """The renderers of each line; the last one reacts to the mouse."""
        self._opacities: list[tuple[int, Any, float]] = []
        """(line number, glyph, full opacity) of each glyph that is dimmed while another line is highlighted."""
        self.lit: str | None = None
        """Colour of the highlighted line."""

    def show(self, pictures: Mapping[str, Curves], x: str, logarithmic: bool) -> None:
        """Update the pictures. Draw new ones if the axes, the kinds of lines, or the number of lines changed.

        pictures: curves by metric.
        """
        lines = [line for curves in pictures.values() for line in curves.lines]
        factors = sorted({place for line in lines for place in line.x if isinstance(place, str)})
        axes = (x, logarithmic, factors, [(metric, curves.is_scatter) for metric, curves in pictures.items()])
        kinds = [[_kind(line, curves) for line in curves.lines] for curves in pictures.values()]
        if axes != self._axes or any(new != old[: len(new)] for new, old in zip(kinds, self._kinds, strict=True)):
            self._axes, self._kinds, self._sources, self._colours, self._renderers, self._opacities = (
                axes,
                kinds,
                [],
                [],
                [],
                [],
            )
            self._nearest = ColumnDataSource({"colour": [self.lit or ""]})
            self._nearest.on_change("data", lambda _, __, data: self._hover(data["colour"][0]))
            figures = [self._draw(metric, curves, axes[:3], len(pictures)) for metric, curves in pictures.items()]
            for other in figures[1:]:
                other.x_range = figures[0].x_range
            self.pane.object = column(*figures, sizing_mode="stretch_width")
        place = 0
        for curves, picture in zip(pictures.values(), self._kinds, strict=True):
            for line in [*curves.lines, *[None] * (len(picture) - len(curves.lines))]:
                self._update(place, line)
                place += 1
        self._visible = {line.colour for line in lines}
        self.light(self.lit)

    def light(self, colour: str | None) -> None:
        """Dim all lines except those of a colour. None, or a colour without a visible line, dims no line."""
        self.lit = colour = colour if colour in self._visible else None
        message: dict[str, Any] = {"colour": [colour or ""]}
        if (
            message != self._nearest.data
        ):  # before the repaint, after which the browser reports the line below the mouse
            self._nearest.data = message
        for place, glyph, opacity in self._opacities:
            target = opacity * (1 if colour in (None, self._colours[place]) else _DIM_ALPHA)
            for name in ("line_alpha", "fill_alpha"):
                if hasattr(glyph, name) and getattr(glyph, name) != target:
                    setattr(glyph, name, target)

    def _hover(self, colour: str) -> None:
        """Report a new colour from the browser. Ignores the colour set by `light`, which could undo a later choice."""
        if colour != (self.lit or ""):
            self._on_hover(colour)

    def _update(self, place: int, line: Line | None) -> None:
        """Draw a line with the renderers at `place`; None hides them."""
        for renderer in self._renderers[place]:
            if renderer.visible != (line is not None):
                renderer.visible = line is not None
        if line is None:
            return
        if (data := _data(line)) != self._sources[place].data:
            self._sources[place].data = data
        if self._colours[place] != line.colour:
            self._colours[place] = line.colour
            for renderer in self._renderers[place]:
                for glyph in filter(None, (renderer.glyph, renderer.hover_glyph)):
                    for name in {"line_color", "fill_color"} & glyph.properties():
                        setattr(glyph, name, line.colour)
            self._renderers[place][-1].name = line.colour

    def _draw(self, metric: str, curves: Curves, axes: tuple[str, bool, Sequence[str]], count: int) -> Any:
        x, logarithmic, factors = axes
        picture = figure(
            height=HEIGHT if count == 1 else LOWER,
            sizing_mode="stretch_width",
            x_axis_label=x,
            y_axis_label=metric,
            y_axis_type="log" if logarithmic else "linear",
            x_range=FactorRange(factors=list(factors)) if factors else DataRange1d(only_visible=True),
            y_range=DataRange1d(only_visible=True),
            tools="pan,box_zoom,reset,save",
            toolbar_location="above",
            output_backend="canvas",
        )
        first = len(self._renderers)
        for line in curves.lines:
            self._add(picture, line, curves)
        targets = [line_renderers[-1] for line_renderers in self._renderers[first:]]
        callback = CustomJS(
            args={"lit": self._nearest, "scale": "log" if logarithmic else "linear"}, code=_HOVER_SCRIPT
        )
        tooltips = [("", "@label"), (x, "@x"), (metric, "@mean{0.0000} (@low{0.0000} to @high{0.0000})")]
        picture.add_tools(HoverTool(renderers=targets, tooltips=tooltips, line_policy="nearest", callback=callback))
        _quiet(picture)
        return picture

    def _add(self, picture: Any, line: Line, curves: Curves) -> None:
        source = ColumnDataSource(_data(line))
        points, marks = _kind(line, curves)
        parts: list[Any] = []
        if marks:
            size = 9 if curves.is_scatter else 4
            parts.append(picture.scatter("x", "mean", source=source, color=line.colour, size=size))
        if not curves.is_scatter:
            parts.append(picture.line("x", "mean", source=source, line_color=line.colour, line_width=2))
            parts.append(picture.varea("x", "low", "high", source=source, fill_color=line.colour, fill_alpha=_BAND))
        self._opacities += [
            (len(self._renderers), part.glyph, _BAND if hasattr(part.glyph, "y2") else 1.0) for part in parts
        ]
        halo = {"source": source, "name": line.colour}
        parts.append(
            picture.scatter("x", "mean", size=_REACH, alpha=0, hover_alpha=0.3, color=line.colour, **halo)
            if points
            else picture.line(
                "x", "mean", line_width=_REACH, line_alpha=0, hover_line_alpha=0.3, line_color=line.colour, **halo
            )
        )
        self._sources.append(source)
        self._colours.append(line.colour)
        self._renderers.append(parts)


_HOVER_SCRIPT = """
if (cb_data.renderer !== cb_obj.renderers[0]) return
const height = scale === "log" ? Math.log : value => value
const {x, y} = cb_data.geometry
let name = lit.data.colour[0], least = Infinity
for (const line of cb_obj.renderers.filter(line => line.visible)) {
  const {inspected, data} = line.data_source
  const heights = inspected.indices.map(point => height(data.mean[point]))
  for (const point of inspected.line_indices) {
    const [left, right] = [data.x[point], data.x[point + 1]]
    const share = left < right ? Math.min(Math.max((x - left) / (right - left), 0), 1) : 0
    heights.push(height(data.mean[point]) * (1 - share) + height(data.mean[point + 1]) * share)
  }
  for (const away of heights.map(found => Math.abs(found - height(y)))) {
    if (away < least) [name, least] = [line.name, away]
  }
}
if (name !== lit.data.colour[0]) lit.data = {colour: [name]}
"""
"""Report the line closest to the mouse. Bokeh calls this for each line on every mouse move and every repaint.

A highlight causes a repaint. If lines overlap, reporting each of them would therefore loop forever; only the closest
one is reported. A line stays highlighted when the mouse leaves it, as users often click its row next.
"""


def legend(pictures: Mapping[str, Curves]) -> str:
    """HTML with the label of each line, once per colour."""
    labels = {line.colour: line.label for curves in pictures.values() for line in curves.lines}
    return "".join(
        f'<div class="entry">{markup.dot(colour)}{markup.escape(label)}</div>' for colour, label in labels.items()
    )


def _kind(line: Line, curves: Curves) -> tuple[bool, bool]:
    """(whether the line is only points, whether points have markers)."""
    points = curves.is_scatter or len(line.x) == 1
    return points, points or len(line.x) < _FEW_POINTS


def _data(line: Line) -> dict[str, Any]:
    return {"x": line.x, "mean": line.mean, "low": line.low, "high": line.high, "label": [line.label] * len(line.x)}


def _quiet(picture: Any) -> None:
    picture.toolbar.logo = None
    picture.toolbar.autohide = True
    picture.outline_line_color = picture.background_fill_color = picture.border_fill_color = (
        None  # transparent, for light and dark pages
    )
    picture.grid.grid_line_color = picture.axis.axis_line_color = picture.axis.major_tick_line_color = NEUTRAL
    picture.grid.grid_line_alpha = 0.2
    picture.axis.minor_tick_line_color = None
    picture.axis.major_label_text_color = picture.axis.axis_label_text_color = NEUTRAL
    picture.axis.axis_label_text_font_style = "normal"
    picture.axis.axis_label_text_font_size = "12px"
