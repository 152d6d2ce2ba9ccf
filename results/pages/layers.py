"""Heat maps of a run's statistics by layer and step, from its statistics.jsonl."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.files import reading
from src.runs.jsonl_records import parse_object

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "statistics.jsonl"
MAX_COLUMNS = 400
"""Maximum number of steps in a picture; above it, every n-th step is drawn."""
_LABELS = 64
"""Maximum number of labelled rows."""
_CHARACTERS = 48
"""Maximum length of a label; of longer names the end is shown."""
_NONFINITE = "#b42318"
_ZERO = "#e3e6ea"


@dataclass
class Layers:
    """One number per layer and step; None if it is not finite."""

    title: str
    values: dict[str, dict[int, float | None]] = field(default_factory=dict)
    """Layer, in model order -> step -> number."""

    def add(self, name: str, step: int, value: float | None) -> None:
        """Add a number; replaces an earlier one for the same step."""
        self.values.setdefault(name, {})[step] = value

    def steps(self) -> list[int]:
        """All steps; above MAX_COLUMNS every n-th, including the last."""
        steps = sorted({step for layer_values in self.values.values() for step in layer_values})
        every = math.ceil(len(steps) / MAX_COLUMNS)
        return steps[::-every][::-1] if every > 1 else steps


def read(run: Path) -> tuple[list[Layers], list[str]]:
    """Read the layer statistics in save directory `run`; also returns warnings about malformed lines.

    Raises:
        RunError: the file cannot be read.
    """
    kinds = {title: Layers(title) for title, _, _ in _KINDS}
    wrong = 0
    try:
        with reading(run / FILE), open(run / FILE, "rb") as file:
            for line in file:
                record = _record(line)
                if record is None:
                    wrong += line.endswith(b"\n")  # a last line without a line end is still being written
                    continue
                for title, fits, number in _KINDS:
                    if fits(record):
                        kinds[title].add(record["name"] or "model", record["step"], record.get(number))
    except FileNotFoundError:
        pass
    warnings = [f"{run / FILE}: {wrong} of its lines are no records of statistics and are left out."] if wrong else []
    return [layers for layers in kinds.values() if layers.values], warnings


def _record(line: bytes) -> dict[str, Any] | None:
    record = parse_object(line)
    if record is None or type(record.get("step")) is not int or not isinstance(record.get("name"), str):
        return None
    numbers = (record.get(name) for name in ("abs_var_mean", "update_rate"))
    return record if all(number is None or isinstance(number, int | float) for number in numbers) else None


def _context_filter(context: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda record: record.get("context") == context and "type" not in record


_KINDS = (
    ("Gradients: mean |g|", _context_filter("hp_grad"), "abs_var_mean"),
    ("Weights: mean |w|", _context_filter("hp"), "abs_var_mean"),
    ("Update ratio: |update| / |w|", _context_filter("effective_update"), "update_rate"),
    ("Adam: mean of exp_avg_sq", _context_filter("exp_avg_sq"), "abs_var_mean"),
    (
        "Activations: mean |output|",
        lambda record: "type" in record and record.get("context") in ("output", "output[0]"),
        "abs_var_mean",
    ),
)


def draw(layers: Layers) -> "Figure":
    """Draw a heat map with a row per layer and a column per step. Zero is grey; values that are not finite are red."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    steps, names = layers.steps(), list(layers.values)
    table = np.array(
        [[layer_values.get(step, 0.0) for step in steps] for layer_values in layers.values.values()], dtype=float
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(np.abs(table))
    usual = logs[np.isfinite(logs)]
    low, high = (float(usual.min()), float(usual.max())) if usual.size else (0.0, 0.0)
    logs[np.isneginf(logs)] = low - 1  # imshow treats infinity as a missing number
    figure = Figure(figsize=(10, min(9.0, 1.4 + 0.12 * len(names))), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps["viridis"].with_extremes(bad=_NONFINITE, under=_ZERO)
    image = axes.imshow(
        logs, aspect="auto", interpolation="nearest", cmap=colours, vmin=low, vmax=max(high, low + 1e-6)
    )
    every = math.ceil(len(names) / _LABELS)
    labels = [name if len(name) <= _CHARACTERS else f"…{name[1 - _CHARACTERS :]}" for name in names[::every]]
    axes.set_yticks(range(0, len(names), every), labels, fontsize=5)
    places = sorted({round(place) for place in np.linspace(0, len(steps) - 1, min(8, len(steps)))})
    axes.set_xticks(places, [str(steps[place]) for place in places], fontsize=7)
    axes.set_xlabel("step", fontsize=8)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.set_label("power of ten", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    return figure


def notable(kinds: Iterable[Layers], most: int = 3) -> list[tuple[str, str, str]]:
    """(title, layer, number at the last step) of the layers with the largest numbers; not finite ones first."""
    rows = []
    for layers in kinds:
        last = layers.steps()[-1]
        last_values = [
            (name, layer_values[last]) for name, layer_values in layers.values.items() if last in layer_values
        ]
        last_values.sort(key=lambda entry: math.inf if entry[1] is None else entry[1], reverse=True)
        title = f"{layers.title}, step {last}"
        rows += [(title, name, "not finite" if value is None else f"{value:.3g}") for name, value in last_values[:most]]
    return rows
