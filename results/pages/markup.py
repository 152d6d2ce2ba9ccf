"""HTML elements for the dashboard and the report. Arguments are plain text and are escaped."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from src.files import ROOT, encodable


def style(name: str) -> str:
    """Read a style sheet of resources/."""
    return (ROOT / "resources" / f"{name}.css").read_text(encoding="utf-8")


CSS = style("markup")
"""Style sheet of these elements."""


def chips(counts: Mapping[str, int]) -> str:
    """A coloured label for each state."""
    return f'<div class="chips">{"".join(chip(state, f"{number} {state}") for state, number in counts.items())}</div>'


def chip(state: str, text: str) -> str:
    """A label in the colour of `state`."""
    return f'<span class="chip {escape(state)}">{escape(text)}</span>'


def warnings(texts: Sequence[str]) -> str:
    """A foldable box of warnings; empty without warnings."""
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    count = "1 warning" if len(texts) == 1 else f"{len(texts)} warnings"
    return (
        f'<details class="warnings"{" open" if len(texts) <= 3 else ""}><summary>{count}</summary>'
        f"<ul>{items}</ul></details>"
    )


def error(text: str) -> str:
    """An error message; empty without text."""
    return f'<div class="error">{escape(text)}</div>' if text else ""


def note(text: str) -> str:
    """A remark in small print; empty without text."""
    return f'<div class="note">{escape(text)}</div>' if text else ""


def text_block(text: str) -> str:
    """Preformatted text that is scrolled to its end."""
    return f'<div class="tail"><pre>{escape(text)}</pre></div>'


def dot(colour: str) -> str:
    """A coloured dot that marks a configuration."""
    return f'<span class="dot" style="background:{escape(colour)}"></span>'


def link(address: str, text: str) -> str:
    """A link that opens in a new tab."""
    return f'<a href="{escape(address)}" target="_blank" rel="noopener">{escape(text)}</a>'


def plain_table(
    headings: Sequence[str],
    lines: Iterable[Sequence[Any]],
    chips: int | None = None,
    colours: Sequence[str] | None = None,
) -> str:
    """A small table with row headings. chips: index of the column of states, if any.
    colours: colour of the configuration in each line."""
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    top = f"<thead><tr>{cells}</tr></thead>" if cells else ""
    rows = []
    for number, line in enumerate(lines):
        cells = [chip(cell, cell) if place == chips else escape(cell) for place, cell in enumerate(line)]
        kind, mark = ("key", "") if colours is None else ("marked", dot(colours[number]))
        rows.append(
            f'<tr><td class="{kind}">{mark}{cells[0]}</td>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>'
        )
    return f'<div class="scroll"><table class="plain">{top}<tbody>{"".join(rows)}</tbody></table></div>'


def escape(value: Any) -> str:
    """Escape for text and quoted attributes."""
    return html.escape(encodable(str(value)), quote=True)
