"""Labels and colours of configurations, consistent across tables, curves and pages, and independent of filters."""

import colorsys
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from src.files import encodable
from src.tables import results, statistics

COLOURS = (
    "#2563eb",
    "#e8590c",
    "#0f9d58",
    "#9333ea",
    "#d6336c",
    "#0891b2",
    "#a16207",
    "#65a30d",
    "#c026d3",
    "#b91c1c",
    "#0f766e",
    "#6d7a8c",
)
"""Readable on white and on black."""
NEUTRAL = "#7b8798"
"""Colour of text and axes without a background, readable on light and dark pages."""
LINES = 12
"""Default maximum number of lines in a picture."""
VALUE_CHARACTERS = 16
_GOLDEN_RATIO = 0.618034
_LIGHTNESS = (0.5, 0.36, 0.64)


class Configurations:
    """Configurations: groups of runs that differ only in their seed, with labels and colours.

    by: dotted config keys that define configurations; None: those that vary. among: the unfiltered rows, which
    determine the colours. unfinished: average over all runs, not only over finished ones.
    seed: the key to average over. most: maximum number of lines in a picture.
    """

    def __init__(
        self,
        rows: Sequence[results.Row],
        by: Sequence[str] | None = None,
        among: Sequence[results.Row] = (),
        unfinished: bool = False,
        seed: str = results.SEED,
        most: int = LINES,
    ) -> None:
        self.rows, self.unfinished, self.most = rows, unfinished, most
        self.keys = statistics.grouping_keys(rows, by, seed)
        self.groups = results.group_rows(rows, self.keys)
        self.colours = _colours(self.groups, self.keys) if not among or among == rows else colours(among, by, seed)

    def with_rows(self, rows: Sequence[results.Row]) -> "Configurations":
        """Copy with updated rows of the same runs."""
        if rows is self.rows:
            return self
        changed = copy.copy(self)
        current = {row["exp_id"]: row for row in rows}
        changed.rows = rows
        changed.groups = [[_member(current[row["exp_id"]], row) for row in group] for group in self.groups]
        return changed

    def label(self, group: Sequence[results.Row]) -> str:
        """Label of a configuration. Empty for a single configuration if all its runs are averaged."""
        over = len(statistics.averaged_rows(group, self.unfinished))
        if over == len(group):
            return label(group, self.keys)
        text = label(group[:1], self.keys)
        return f"{text} ({over} of {len(group)}{'' if over else ' done'})".strip()

    def sort_best_first(self, metric: str) -> list[list[results.Row]]:
        """Configurations by their mean of `metric`, best first. Those without a finished run are last."""

        def mean(group: Sequence[results.Row], unfinished: bool) -> tuple[bool, float]:
            value = statistics.mean(group, metric, unfinished)
            return value is None, (value or 0.0) * (1 if results.lower_is_better(metric) else -1)

        return sorted(self.groups, key=lambda group: (mean(group, self.unfinished), mean(group, True)))

    def curve_rows(self, group: Sequence[results.Row]) -> Sequence[results.Row]:
        """The runs to average for a curve: as in the table, or all if none is done."""
        return statistics.averaged_rows(group, self.unfinished) or group

    def colour(self, group: Sequence[results.Row]) -> str:
        """Colour of a configuration, as "#rrggbb"."""
        return self.colour_of(group[0]["exp_id"], group[0]["group"])

    def colour_of(self, exp_id: str, group: str | None = None) -> str:
        """Colour of a run's configuration, as a member of `group`."""
        return self.colours.get((exp_id, group)) or self.colours[exp_id, None]


def _member(row: results.Row, group: results.Row) -> results.Row:
    """`row` as a member of the group of row `group`."""
    return (
        row
        if row["group"] == group["group"]
        else next(each for each in row.in_groups() if each["group"] == group["group"])
    )


def colours(
    rows: Sequence[results.Row], by: Sequence[str] | None = None, seed: str = results.SEED
) -> dict[tuple[str, str | None], str]:
    """(experiment id, group) -> colour of its configuration.
    rows: all rows. by: keys that define configurations; None: those that vary.

    Colours depend on the sorted config values, not on scores, the order of runs, or filters.
    """
    keys = statistics.grouping_keys(rows, by, seed)
    return _colours(results.group_rows(rows, keys), keys)


def _colours(groups: Sequence[Sequence[results.Row]], keys: Sequence[str]) -> dict[tuple[str, str | None], str]:
    groups = sorted(groups, key=lambda group: [results.sort_key(group[0].get(key)) for key in keys])
    result: dict[tuple[str, str | None], str] = {}
    for place, group in enumerate(groups):
        colour = _colour(place)
        for row in group:
            result[row["exp_id"], row["group"]] = colour
            result.setdefault((row["exp_id"], None), colour)
    return result


def _colour(place: int) -> str:
    if place < len(COLOURS):
        return COLOURS[place]
    red, green, blue = colorsys.hls_to_rgb(place * _GOLDEN_RATIO % 1, _LIGHTNESS[place % len(_LIGHTNESS)], 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def label(group: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Distinguishing config values of a group, with the number of its runs."""
    names = results.short_names(keys)
    most = VALUE_CHARACTERS if len(keys) > 1 else 2 * VALUE_CHARACTERS
    text = ", ".join(f"{names[key]}={clip(group[0][key], most) or '–'}" for key in keys if key in group[0])
    return f"{text} ({len(group)})" if len(group) > 1 else text


def clip(value: Any, most: int = VALUE_CHARACTERS) -> str:
    """Truncate a text to `most` characters, ending with "…"."""
    text = encodable(str(value))
    return text if len(text) <= most else f"{text[: most - 1]}…"
