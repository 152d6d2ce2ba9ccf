"""Dashboard components: boxes, HTML panes, sortable tables, and details of an experiment."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import panel as pn

from results.lineage import tree
from results.pages import markup, overview
from src.errors import UserError
from src.tables import lineage, results

CSS = markup.CSS + markup.style("dashboard")
COLOUR = "colour"
"""Column of coloured dots, which has no title."""
MAX_PIXELS = 360
"""Maximum width of a column. Longer texts wrap in `wrapped` columns, and are clipped in all other columns."""
_NUMBER = re.compile(
    r"[-+]?[\d.]+(e[-+]?\d+)?( ± [\d.]+)?( \(\d+ of \d+\))?( / \d+)?$|\d+ of \d+ (done|at step "
    r"\d+)$|NaN$|\d+-\d+$|[\d.]+ (d|h|min|s)\b"
)
"""Right-aligned cells: numbers, means, "40 / 200", "2 h 5 min"."""
MAX_PATCHES = 500
"""Maximum number of cell changes to send individually; above it, the complete table is sent."""
BUILDING_SECONDS = 1.5
"""Time for a browser to build a table; must be less than the refresh interval."""


def box(*children: Any, kind: str = "card", row: bool = False) -> pn.layout.ListPanel:
    """Arrange children in a column or a row, with the class `kind` of dashboard.css."""
    layout = pn.Row if row else pn.Column
    return layout(*children, css_classes=kind.split(), stylesheets=[CSS], sizing_mode="stretch_width", margin=0)


def page(text: str = "", **sizes: Any) -> pn.pane.HTML:
    """An HTML pane."""
    return pn.pane.HTML(
        text, stylesheets=[CSS], visible=bool(text), **({"margin": (0, 5), "sizing_mode": "stretch_width"} | sizes)
    )


def show_html(pane: pn.pane.HTML, text: str) -> None:
    """Show `text`; does nothing if it is unchanged."""
    if pane.object != text:
        pane.param.update(object=text, visible=bool(text))


class Table:
    """A read-only table, in `pane`.

    If columns disappear, they are hidden, as a filter often removes a column and adds it again. New columns need a new
    widget: while the browser builds a table, Tabulator throws if columns change and drops new data.
    """

    def __init__(
        self,
        name: str,
        page_size: int,
        on_selection: Callable[[list[int]], None],
        html: Sequence[str] = (),
        wrapped: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """name: CSS class. on_selection: called with the numbers of the selected lines. html: columns with HTML cells.
        wrapped: columns with wrapped texts.
        """
        formatters = {column: {"type": "html"} for column in html} | {
            column: {"type": "textarea"} for column in wrapped
        }
        self._settings = {
            "css_classes": [name],
            "page_size": page_size,
            "selectable": 1,
            "formatters": formatters,
            **settings,
        }
        self._on_selection = on_selection
        self.pane = pn.Column(sizing_mode="stretch_width", margin=(0, 0, 0, 5))
        self._numbers: set[str] = set()
        self._cells: Sequence[Sequence[Any]] = ()
        self._bold: set[str] = set()
        """Columns rendered as HTML, because they had a bold cell."""
        self._make(pd.DataFrame(), [])

    @property
    def value(self) -> pd.DataFrame:
        """The displayed cells."""
        return self.widget.value.drop(columns=self.widget.hidden_columns)

    def fill(
        self, headings: Sequence[str], lines: Sequence[Sequence[Any]], bold: Sequence[Collection[int]] = ()
    ) -> None:
        """Show these cells; sends only the changes.
        bold: numbers of the lines with a bold cell, per column; all cells of such a column are texts."""
        columns = unique(headings)
        bold_columns = {name for name, bold_lines in zip(columns, bold, strict=False) if bold_lines}
        previous = list(self.widget.value.columns)
        hidden = [name for name in previous if name not in columns]
        fits = (
            bool(columns) and [name for name in previous if name in columns] == columns and bold_columns <= self._bold
        )
        if not fits:
            hidden = hidden if len(hidden) < len(columns) else []
            previous = _join(columns, hidden, previous)
            self._bold = bold_columns | self._bold & set(previous)
        html = [name in self._bold for name in columns]
        cells = (
            [
                [
                    _mark(cell, number, bold[place] if bold else ()) if html[place] else cell
                    for place, cell in enumerate(line)
                ]
                for number, line in enumerate(lines)
            ]
            if any(html)
            else list(lines)
        )
        changes = self._changes(columns, cells) if fits and hidden == self.widget.hidden_columns else None
        self._cells = cells
        if changes is not None and sum(map(len, changes.values())) <= (MAX_PATCHES if self._is_built() else 0):
            if changes:
                self.widget.patch(changes, as_index=False)
            return
        frame = pd.DataFrame(cells, columns=pd.Index(columns), dtype=object).reindex(columns=previous, fill_value="")
        if fits and self._has_pages(frame) == self._has_pages(self.value) and self._is_built():
            self.widget.param.update(value=frame, hidden_columns=hidden)
        else:
            self._make(frame, hidden)

    def _changes(self, columns: list[str], cells: Sequence[Sequence[Any]]) -> dict[str, list[tuple[int, Any]]] | None:
        """Column -> (line, cell) of each changed cell; None if the number of lines changed."""
        if len(cells) != len(self._cells):
            return None
        changes: dict[str, list[tuple[int, Any]]] = {}
        for number, (line, before) in enumerate(zip(cells, self._cells, strict=True)):
            if line is not before and line != before:
                for name, cell, old in zip(columns, line, before, strict=True):
                    if cell != old:
                        changes.setdefault(name, []).append((number, cell))
        return changes

    def _is_built(self) -> bool:
        return time.monotonic() - self._creation_time > BUILDING_SECONDS

    def _has_pages(self, frame: pd.DataFrame) -> bool:
        return len(frame) > self._settings["page_size"]

    def select(self, line: int | None) -> None:
        """Select a line as if it was clicked; None: no line."""
        selection = [] if line is None else [line]
        if self.widget.selection != selection:
            if line is not None and self.widget.pagination:
                self.widget.page = line // self._settings["page_size"] + 1
            self.widget.selection = selection

    def _make(self, frame: pd.DataFrame, hidden: list[str]) -> None:
        settings = self._settings
        self._numbers = {
            name for name in frame.columns if (name in self._numbers if name in hidden else _are_numbers(frame[name]))
        }
        numbers = dict.fromkeys(self._numbers, "right")
        formatters = settings["formatters"] | {name: {"type": "html"} for name in self._bold}
        self.widget = pn.widgets.Tabulator(
            frame,
            titles={
                name: "" if name == COLOUR else markup.escape(name) for name in frame.columns
            },  # titles are rendered as HTML, unlike cells
            hidden_columns=hidden,
            show_index=False,
            disabled=True,
            theme="simple",
            layout="fit_data_stretch",
            configuration={"columnDefaults": {"maxWidth": MAX_PIXELS}},
            pagination="local" if self._has_pages(frame) else None,
            stylesheets=[CSS],
            sizing_mode="stretch_width",
            margin=0,
            text_align=numbers,
            header_align=numbers,
            **settings | {"formatters": formatters},
        )
        self.widget.param.watch(lambda event: self._on_selection(event.new), "selection")
        self.pane.objects = [self.widget]
        self._creation_time = time.monotonic()


def _join(columns: list[str], hidden: list[str], previous: list[str]) -> list[str]:
    """Insert hidden columns into `columns`, each after its nearest predecessor in `previous`."""
    names = list(columns)
    for name in hidden:
        before = [names.index(other) for other in previous[: previous.index(name)] if other in names]
        names.insert(before[-1] + 1 if before else 0, name)
    return names


def _mark(cell: Any, line: int, bold: Collection[int]) -> str:
    """A cell as HTML, in bold if its line is in `bold`."""
    return f"<b>{markup.escape(cell)}</b>" if line in bold else markup.escape(cell)


def _are_numbers(cells: Iterable[Any]) -> bool:
    """Whether a column has only numbers, possibly with deviations, and blanks."""
    texts = [re.sub("<.*?>", "", str(cell)) for cell in cells if cell not in ("", "-", "–")]
    return bool(texts) and all(_NUMBER.match(text) for text in texts)


def unique(names: Sequence[str]) -> list[str]:
    """Append numbers to repeated names, as the columns of a table need distinct names."""
    return [
        f"{name} ({names[:index].count(name) + 1})" if name in names[:index] else name
        for index, name in enumerate(names)
    ]


def head(title: str, loaded: overview.Overview, selection: overview.Overview) -> str:
    """HTML with the title, the folder, and the number of experiments by state."""
    count, total = len(selection.jobs), len(loaded.jobs)
    text = f"{total} experiments" if count == total else f"{count} of {total} experiments"
    return (
        f'<h1>{markup.escape(title)}</h1><span class="where">{markup.escape(loaded.runs)} · '
        f"{text}</span>{markup.chips(selection.counts())}"
    )


def offer(widget: Any, options: list[str] | dict[str, str]) -> None:
    """Set the options of a widget; its value is preserved if it is still an option."""
    several = isinstance(widget, pn.widgets.MultiChoice)
    if several:
        options = {markup.escape(value): value for value in options}  # this widget renders its labels as HTML
    if widget.options == options:
        return
    values = list(options.values()) if isinstance(options, dict) else options
    current = widget.value
    if several:
        widget.param.update(options=options, value=[value for value in current if value in values])
    else:
        widget.param.update(options=options, value=current if current in values else next(iter(values), None))


def config(content: overview.Overview, name: str) -> str:
    """Config of an experiment, and code and machine of its last start."""
    row = content.row(name)
    if row is None:
        return markup.note("It has no experiment dict yet, or one that cannot be read.")
    values = [(key, overview.format_value(row[key])) for key in results.config_keys(row)]
    start = overview.environment(content.runs, name).items()
    return markup.plain_table(("config", "value"), values) + markup.plain_table(("last start", ""), start)


def differences(runs: Path, other: str | None, name: str) -> str:
    """Differences of experiment `name` from `other`."""
    if not other or other == name:
        return markup.note("Choose another experiment to compare with.")
    changes, warnings = overview.differences(runs, name, other)
    lines = (
        markup.plain_table(("", name[:8], other[:8]), changes)
        if changes
        else markup.note("They differ in nothing that was noted.")
    )
    return lines + markup.warnings(warnings)


def ancestry(runs: Path, name: str) -> str:
    """Experiments that an experiment started from, and those that started from it."""
    try:
        family = lineage.build(runs).family([name])
    except UserError as error:
        return markup.error(str(error))
    return markup.text_block(tree(family)) + markup.warnings(family.problems)
