"""Find the layout of a release by name or by its first record."""

from collections.abc import Iterator
from typing import Any, Protocol

from data_prep.crossattn.qa_releases import (
    ctxs,
    dpr,
    hotpotqa,
    msmarco,
    nq,
    nq_open,
    prepared,
    squad,
    topiocqa,
    triviaqa,
)
from data_prep.crossattn.qa_releases.question import Question, Record, Skipped
from src.errors import DataError
from src.experiments.config import unknown_text


class Layout(Protocol):
    """A module that reads one layout."""

    @property
    def DESCRIPTION(self) -> str: ...  # noqa: N802  a constant of the module

    def fits(self, record: dict[str, Any]) -> bool: ...
    def questions(self, record: Record) -> Iterator[Question | Skipped]: ...


LAYOUTS: dict[str, Layout] = {
    "prepared": prepared,  # first, because prepared rows also have the fields of other layouts
    "squad": squad,
    "hotpotqa": hotpotqa,
    "nq": nq,
    "ctxs": ctxs,
    "dpr": dpr,
    "msmarco": msmarco,
    "topiocqa": topiocqa,
    "triviaqa": triviaqa,
    "nq_open": nq_open,
}


def layout_of(record: dict[str, Any], where: str, name: str | None) -> str:
    """Name of the layout of a first record; `name` if it is given and the record fits it.

    Raises:
        DataError: `name` is unknown, the record fits another layout, or it fits no layout.
    """
    if name is not None and name not in LAYOUTS:
        raise DataError(f"--layout: {unknown_text('layout', name, LAYOUTS)}")
    if name is not None and LAYOUTS[name].fits(record):
        return name
    layout_name = next((name for name, layout in LAYOUTS.items() if layout.fits(record)), None)
    got = ", ".join(record) or "none"
    if name is not None:
        looks = f" It looks like {layout_name}." if layout_name else ""
        raise DataError(
            f"{where}: expected the layout {name} ({LAYOUTS[name].DESCRIPTION}), got the fields {got}.{looks} "
            "Correct or remove --layout."
        )
    if layout_name is None:
        known_layouts = "".join(f"\n  {name}: {layout.DESCRIPTION}" for name, layout in LAYOUTS.items())
        raise DataError(
            f"{where}: unknown layout with the fields {got}. Convert the file to a known layout:{known_layouts}"
        )
    return layout_name
