"""Learning curves of the dashboard and the report, without markup."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from results.pages import legend
from results.pages.overview import Overview, format_value
from src.errors import UserError
from src.runs.summary import is_finite
from src.tables import results, statistics
from src.tables.curves import Band
from src.tables.curves import bands as bands_of_runs


@dataclass(frozen=True)
class Line:
    """Learning curve of a configuration: the mean over seeds and its band at each x, sorted by x."""

    label: str
    colour: str
    x: list[Any]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Curves:
    """Lines of one picture, best first, and remarks. is_scatter: each point is a run; points are not connected."""

    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_scatter: bool = False


@dataclass(frozen=True)
class Look:
    """Display options of curves.
    x: "step", "seconds" of training, a score such as "tokens", or a config key, which draws a point per run."""

    x: str = "step"
    spread: str = "std"
    smoothing: float = 0.0
    """Weight for `curves.Band.smooth`."""
    by: Sequence[str] = ()
    """Config keys that define configurations; empty: all that vary, except the seed."""


def build(content: Overview, metric: str, look: Look = Look()) -> Curves:
    """Learning curves of the best configurations, or the last values of all runs over a config key."""
    if metric not in results.score_names(content.rows):
        return Curves()
    configs = content.configurations(look.by)
    if any(look.x in results.config_keys(row) for row in content.rows):
        return Curves(
            [_points(configs, group, look.x, metric) for group in _having(configs.groups, metric)], is_scatter=True
        )
    best = _having(configs.sort_best_first(metric), metric)
    best_groups = best[: configs.most]
    try:
        (bands,), notes = bands_of_runs(
            content.runs, [configs.curve_rows(group) for group in best_groups], [metric], look.x
        )
    except UserError as error:
        return Curves(notes=[str(error)])
    left_out = (
        [f"The best {len(best_groups)} of {len(best)} configurations; filter to see more."]
        if len(best) > len(best_groups)
        else []
    )
    lines = [
        _line(band.smooth(look.smoothing), configs.label(group) or "all", configs.colour(group), look.spread)
        for band, group in zip(bands, best_groups, strict=True)
        if len(band.x)
    ]
    return Curves(lines, [*left_out, *notes, *statistics.nan_remarks(content.rows, [metric], content.unfinished)])


def _having(groups: Iterable[list[results.Row]], metric: str) -> list[list[results.Row]]:
    return [group for group in groups if any(metric in row for row in group)]


def _points(configs: legend.Configurations, group: Sequence[results.Row], x: str, metric: str) -> Line:
    """The last values of a configuration's finished runs over a config key; non-numeric keys become texts."""
    numbers = all(is_finite(row.get(x, 0)) for row in configs.rows)
    over = statistics.averaged_rows(group, configs.unfinished)
    points = [
        (row[x] if numbers else format_value(row[x]), row[metric])
        for row in over
        if x in row and row.get(metric) is not None
    ]
    values = [value for _, value in points]
    return Line(
        configs.label(group) or "all", configs.colour(group), [place for place, _ in points], values, values, values
    )


def _line(band: Band, label: str, colour: str, spread: str) -> Line:
    points = sorted(
        zip(band.x.tolist(), band.mean.tolist(), band.half_width(spread).tolist(), strict=True),
        key=lambda point: point[0],
    )
    halves = [0.0 if math.isnan(half) else half for _, _, half in points]  # a single run has no deviation
    means = [mean for _, mean, _ in points]
    low, high = ([mean + sign * half for mean, half in zip(means, halves, strict=True)] for sign in (-1, 1))
    return Line(label, colour, [at for at, _, _ in points], means, low, high)
