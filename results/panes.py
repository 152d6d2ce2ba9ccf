"""The parts that the dashboard is put together from: boxes, panes of HTML, and tables that can be sorted."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import panel as pn

from results import markup, overview

CSS = markup.CSS + markup.style("dashboard")


def box(*children: Any, kind: str = "card", row: bool = False) -> pn.layout.ListPanel:
    """Children below or beside each other, in the look that `kind` has in dashboard.css."""
    layout = pn.Row if row else pn.Column
    return layout(*children, css_classes=kind.split(), stylesheets=[CSS], sizing_mode="stretch_width", margin=0)


def page(text: str = "", **sizes: Any) -> pn.pane.HTML:
    """A pane of HTML."""
    return pn.pane.HTML(text, stylesheets=[CSS], visible=bool(text), **({"margin": (0, 5), "sizing_mode": "stretch_width"} | sizes))


def put(pane: pn.pane.HTML, text: str) -> None:
    """Show `text`; nothing is sent where it stands there already."""
    if pane.object != text:
        pane.param.update(object=text, visible=bool(text))


def table(name: str, page_size: int, **settings: Any) -> pn.widgets.Tabulator:
    """An empty table that only shows; `name` is its CSS class."""
    return pn.widgets.Tabulator(
        pd.DataFrame(),
        css_classes=[name],
        show_index=False,
        disabled=True,
        theme="simple",
        layout="fit_data_stretch",
        pagination="local",
        page_size=page_size,
        stylesheets=[CSS],
        sizing_mode="stretch_width",
        margin=(0, 0, 0, 5),
        **settings,
    )


def fill(widget: pn.widgets.Tabulator, headings: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """Show these cells; nothing is sent where they stand there already."""
    frame = pd.DataFrame(list(map(list, lines)), columns=pd.Index(unique(headings)), dtype=object)
    if list(widget.value.columns) != list(frame.columns) or not widget.value.equals(frame):
        titles = {name: markup.escaped(name) for name in frame.columns}  # titles are taken for HTML, cells are not
        widget.param.update(value=frame, titles=titles)


def unique(names: Sequence[str]) -> list[str]:
    """`names`, of which a later equal one gets a number: the columns of a table need names of their own."""
    return [f"{name} ({names[:index].count(name) + 1})" if name in names[:index] else name for index, name in enumerate(names)]


def head(found: overview.Overview, shown: overview.Overview) -> str:
    """Title, folder, and how many experiments are in which state."""
    told = f"{len(shown.jobs)} experiments" if len(shown.jobs) == len(found.jobs) else f"{len(shown.jobs)} of {len(found.jobs)} experiments"
    return f'<h1>Experiments</h1><span class="where">{markup.escaped(found.runs)} · {told}</span>{markup.chips(shown.counts())}'
