"""The search space of a sweep. Distribution names and their meaning are those of Weights & Biases."""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from src.errors import ConfigError, check_all
from src.experiments.config import join, unknown_text
from src.experiments.grid import parse_assignment

MAX_COMBINATIONS = 100_000
_BOUNDS = ("min", "max")
_KEYS = {
    "constant": ("value",),
    "categorical": ("values",),
    "int_uniform": _BOUNDS,
    "uniform": _BOUNDS,
    "log_uniform_values": _BOUNDS,
}
_UNSUPPORTED = re.compile(r"(q_)?((inv_)?log_)?(uniform|normal|beta)(_values)?|categorical_w_probabilities")
"""The other distributions of Weights & Biases."""


@dataclass(frozen=True)
class SearchDimension:
    """One parameter. The sampler draws a number between `low` and `high`, both included."""

    path: str
    """Dotted path in the experiment."""
    kind: Literal["choice", "int", "float", "log"]
    low: float
    high: float
    choices: Sequence[Any] = ()
    """For kind choice: the drawn number is an index into these."""

    def value(self, drawn: Any) -> Any:
        """The experiment's value for a drawn number."""
        return self.choices[drawn] if self.kind == "choice" else drawn


def parse_dimensions(parameters: Mapping[str, Any], where: str) -> list[SearchDimension]:
    """The parameters of a sweep file; nested ones by their dotted path.

    Raises:
        ConfigError: one line for each mistake, with its path below `where`.
    """
    flat = list(_flatten(parameters, "", where))
    parsed: list[SearchDimension] = []
    check_all(
        *(
            lambda path=path, spec=spec: parsed.append(_parse_dimension(path, spec, join(where, path)))
            for path, spec in flat
        )
    )
    for first, second in itertools.permutations((dimension.path for dimension in parsed), 2):
        if first == second or first.startswith(second + "."):
            raise ConfigError(f"{join(where, first)}: set twice, here and by {second}.")
    return parsed


def grid_dimensions(dimensions: Sequence[SearchDimension], where: str) -> list[SearchDimension]:
    """The same parameters for a grid, each a choice among all its values.

    Raises:
        ConfigError: a continuous parameter, or too many combinations.
    """
    for dimension in dimensions:
        if dimension.kind in ("float", "log"):
            raise ConfigError(
                f"{join(where, dimension.path)}: method 'grid' needs values, a value, or int_uniform. "
                "Use 'random' or 'bayes'."
            )
    listed = [
        _choice(dimension.path, dimension.choices or range(int(dimension.low), int(dimension.high) + 1))
        for dimension in dimensions
    ]
    if (count := math.prod(len(dimension.choices) for dimension in listed)) > MAX_COMBINATIONS:
        raise ConfigError(
            f"{where}: {count} combinations; the limit of a grid is {MAX_COMBINATIONS}. Use method 'random' or 'bayes'."
        )
    return listed


def grid_indices(dimensions: Sequence[SearchDimension]) -> list[dict[str, int]]:
    """Every combination of a grid, the last parameter changing fastest: path -> index among the choices."""
    indices = itertools.product(*(range(len(dimension.choices)) for dimension in dimensions))
    return [
        dict(zip((dimension.path for dimension in dimensions), combination, strict=True)) for combination in indices
    ]


def agent_argument(path: str, value: Any, where: str) -> str:
    """The argument that `wandb agent` passes for a value: path=value, as Python spells it.

    Raises:
        ConfigError: --set would read another value in it, as in True and None, which JSON does not have.
    """
    text = f"{path}={value}"
    with contextlib.suppress(ConfigError):
        back = parse_assignment(text)[1]
        if isinstance(value, str) or (type(back) is type(value) and back == value):
            return text
    raise ConfigError(
        f"{join(where, path)}: wandb agent would pass {text!r}, in which --set does not find {value!r} again. "
        f"Write the text {json.dumps(json.dumps(value))}: --set reads it as JSON."
    )


def _flatten(parameters: Any, above: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, spec in parameters.items():
        path = f"{above}.{name}" if above else str(name)
        if not isinstance(name, str) or not all(name.split(".")):
            raise ConfigError(
                f"{join(where, path)}: expected a path into the experiment, such as loop.learning_rate, got {name!r}."
            )
        if not isinstance(spec, dict):
            raise ConfigError(
                f"{join(where, path)}: "
                f"expected a dict with value, values, or min and max, got {spec!r} ({_type(spec)})."
            )
        if set(spec) == {"parameters"} and isinstance(spec["parameters"], dict):
            yield from _flatten(spec["parameters"], path, where)
        else:
            yield path, spec


def _parse_dimension(path: str, spec: Mapping[str, Any], where: str) -> SearchDimension:
    name = spec.get("distribution") or _implied_distribution(spec, where)
    if isinstance(name, str) and name not in _KEYS and _UNSUPPORTED.fullmatch(name):
        raise ConfigError(
            f"{where}: the distribution {name} is not supported. Use one of {', '.join(_KEYS)}, or list its values."
        )
    if not isinstance(name, str) or name not in _KEYS:
        raise ConfigError(f"{where}.distribution: {unknown_text('distribution', str(name), _KEYS)}")
    for key in spec:
        if key not in ("distribution", *_KEYS[name]):
            raise ConfigError(f"{where}: {unknown_text(f'key of {name}', str(key), ('distribution', *_KEYS[name]))}")
    for key in _KEYS[name]:
        if key not in spec:
            raise ConfigError(f"{where}.{key}: missing. {name} needs it.")
    if name in ("constant", "categorical"):
        values = [spec["value"]] if name == "constant" else spec["values"]
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.values: expected a list that is not empty, got {values!r} ({_type(values)}).")
        if len({json.dumps(value, default=str, sort_keys=True) for value in values}) < len(values):
            raise ConfigError(f"{where}.values: duplicate value.")
        return _choice(path, values)
    low, high = (_number(spec[key], f"{where}.{key}") for key in _BOUNDS)
    if low > high or (low == high and name != "int_uniform"):
        raise ConfigError(f"{where}: expected min below max, got {low} and {high}.")
    if name == "int_uniform":
        if not (type(low) is type(high) is int):
            raise ConfigError(f"{where}: int_uniform needs integers, got {low} and {high}.")
        return SearchDimension(path, "int", low, high)
    if name == "log_uniform_values" and low <= 0:
        raise ConfigError(f"{where}.min: expected a number > 0 for {name}, got {low}.")
    return SearchDimension(path, "float" if name == "uniform" else "log", float(low), float(high))


def _choice(path: str, values: Sequence[Any]) -> SearchDimension:
    return SearchDimension(path, "choice", 0, len(values) - 1, values)


def _implied_distribution(spec: Mapping[str, Any], where: str) -> str:
    """As in wandb, two integer bounds mean int_uniform."""
    if "value" in spec:
        return "constant"
    if "values" in spec:
        return "categorical_w_probabilities" if "probabilities" in spec else "categorical"
    if "min" in spec and "max" in spec:
        return "int_uniform" if type(spec["min"]) is type(spec["max"]) is int else "uniform"
    raise ConfigError(f"{where}: expected value, values, or min and max, got {', '.join(map(str, spec)) or 'nothing'}.")


def _number(value: Any, where: str) -> Any:
    if type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300:
        return value
    hint = ""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            hint = f" YAML takes a number for text where it has an exponent but no dot: write {float(value):.1e}."
    raise ConfigError(f"{where}: expected a finite number, got {value!r} ({_type(value)}).{hint}")


def _type(value: Any) -> str:
    return type(value).__name__
