"""The parameters of a sweep: what each of its distributions draws. Names and meaning are those of Weights & Biases."""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from src.config import join, unknown_text
from src.errors import ConfigError, check_all
from src.experiments.grid import parse_assignment

MOST = 100_000
"""Combinations of a grid."""
_NEEDS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "categorical": ("values",),
    "categorical_w_probabilities": ("values", "probabilities"),
    "int_uniform": ("min", "max"),
    "uniform": ("min", "max"),
    "q_uniform": ("min", "max"),
    "log_uniform": ("min", "max"),
    "log_uniform_values": ("min", "max"),
    "inv_log_uniform": ("min", "max"),
    "inv_log_uniform_values": ("min", "max"),
    "q_log_uniform": ("min", "max"),
    "q_log_uniform_values": ("min", "max"),
    "normal": (),
    "q_normal": (),
    "log_normal": (),
    "q_log_normal": (),
}


@dataclass(frozen=True)
class Axis:
    """One parameter. The sampler draws a number, or a choice, and `value` makes a value of the experiment of it."""

    path: str
    """Dotted path in the experiment."""
    kind: Literal["choice", "int", "float", "log"]
    low: float
    high: float
    """Bounds of the number drawn, both within; for a choice 0 and the number of choices - 1."""
    value: Callable[[Any], Any]
    listed: Sequence[Any] | None
    """What a grid goes through, in order; None: too many."""


def axes(parameters: Mapping[str, Any], where: str) -> list[Axis]:
    """The parameters of a sweep file; nested ones by their dotted path.

    Raises:
        ConfigError: one line for each mistake, with its path below `where`.
    """
    found = list(_flat(parameters, "", where))
    made: list[Axis] = []
    check_all(*(lambda path=path, spec=spec: made.append(_axis(path, spec, join(where, path))) for path, spec in found))
    for first, second in itertools.permutations((axis.path for axis in made), 2):
        if first == second or first.startswith(second + "."):
            raise ConfigError(f"{join(where, first)}: set twice, here and by {second}.")
    return made


def listed(axes: Sequence[Axis], where: str) -> list[Axis]:
    """The same parameters for a grid, each a choice among all that it can be.

    Raises:
        ConfigError: an axis that cannot be listed, or too many combinations.
    """
    for axis in axes:
        if axis.listed is None:
            raise ConfigError(f"{join(where, axis.path)}: method 'grid' needs values, a value, or int_uniform. Use 'random' or 'bayes'.")
    if (count := math.prod(len(axis.listed or ()) for axis in axes)) > MOST:
        raise ConfigError(f"{where}: {count} combinations; a grid may have {MOST}. Use method 'random' or 'bayes'.")
    return [_choice(axis.path, list(axis.listed or ())) for axis in axes]


def combinations(axes: Sequence[Axis]) -> list[dict[str, int]]:
    """Every combination of the choices of `axes`, the last changing fastest: path -> place among the choices."""
    places = [range(int(axis.high) + 1) for axis in axes]
    return [dict(zip((axis.path for axis in axes), chosen, strict=True)) for chosen in itertools.product(*places)]


def word(path: str, value: Any, where: str) -> str:
    """The word that `wandb agent` passes for a value: path=value, as Python spells it.

    Raises:
        ConfigError: --set would read another value in it, as in True and None, which JSON does not have.
    """
    text = f"{path}={value}"
    back = parse_assignment(text)[1]
    if isinstance(value, str) or (type(back) is type(value) and back == value):
        return text
    raise ConfigError(
        f"{join(where, path)}: wandb agent would pass {text!r}, in which --set does not find {value!r} again. "
        f"Write the text {json.dumps(json.dumps(value))}: --set reads it as JSON."
    )


def _flat(parameters: Any, above: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, spec in parameters.items():
        path = f"{above}.{name}" if above else str(name)
        if not isinstance(name, str) or not all(name.split(".")):
            raise ConfigError(f"{join(where, path)}: expected a path into the experiment, such as loop.learning_rate, got {name!r}.")
        if not isinstance(spec, dict):
            raise ConfigError(f"{join(where, path)}: expected a dict with value, values, or min and max, got {spec!r} ({_type(spec)}).")
        if set(spec) == {"parameters"} and isinstance(spec["parameters"], dict):
            yield from _flat(spec["parameters"], path, where)
        else:
            yield path, spec


def _axis(path: str, spec: Mapping[str, Any], where: str) -> Axis:
    name = spec.get("distribution") or _implied(spec, where)
    if not isinstance(name, str) or name not in _NEEDS:
        raise ConfigError(f"{where}.distribution: {unknown_text('distribution', str(name), _NEEDS)}")
    needs = _NEEDS[name]
    may = {"distribution", *needs, *(("q",) if name.startswith("q_") else ()), *(("mu", "sigma") if name.endswith("normal") else ())}
    for key in spec:
        if key not in may:
            raise ConfigError(f"{where}: {unknown_text(f'key of {name}', str(key), may)}")
    for key in needs:
        if key not in spec:
            raise ConfigError(f"{where}.{key}: missing. {name} needs it.")
    if name in ("constant", "categorical", "categorical_w_probabilities"):
        return _listed(path, name, spec, where)
    axis = _spread(path, name, spec, where) if name.endswith("normal") else _between(path, name, spec, where)
    return _quantized(axis, spec, where) if name.startswith("q_") else axis


def _implied(spec: Mapping[str, Any], where: str) -> str:
    """As wandb: bounds that are both whole mean int_uniform."""
    if "value" in spec:
        return "constant"
    if "values" in spec:
        return "categorical_w_probabilities" if "probabilities" in spec else "categorical"
    if "min" in spec and "max" in spec:
        return "int_uniform" if type(spec["min"]) is type(spec["max"]) is int else "uniform"
    raise ConfigError(f"{where}: expected value, values, or min and max, got {', '.join(map(str, spec)) or 'nothing'}.")


def _listed(path: str, name: str, spec: Mapping[str, Any], where: str) -> Axis:
    values = [spec["value"]] if name == "constant" else spec["values"]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}.values: expected a list that is not empty, got {values!r} ({_type(values)}).")
    if len({json.dumps(value, default=str, sort_keys=True) for value in values}) < len(values):
        raise ConfigError(f"{where}.values: a value stands twice.")
    if name != "categorical_w_probabilities":
        return _choice(path, values)
    shares = spec["probabilities"]
    if not isinstance(shares, list) or len(shares) != len(values):
        raise ConfigError(f"{where}.probabilities: expected a list of {len(values)} numbers, one for each value, got {shares!r}.")
    shares = [_number(share, f"{where}.probabilities[{i}]") for i, share in enumerate(shares)]
    if min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ConfigError(f"{where}.probabilities: expected numbers of at least 0 that sum to 1, got {shares}.")
    upto = list(itertools.accumulate(shares))
    last = max(i for i, share in enumerate(shares) if share)

    def chosen(drawn: float) -> Any:
        return values[next((i for i, bound in enumerate(upto) if drawn < bound), last)]

    return Axis(path, "float", 0.0, 1.0, chosen, [value for value, share in zip(values, shares, strict=True) if share])


def _choice(path: str, values: Sequence[Any]) -> Axis:
    return Axis(path, "choice", 0, len(values) - 1, lambda drawn: values[drawn], values)


def _between(path: str, name: str, spec: Mapping[str, Any], where: str) -> Axis:
    low, high = (_number(spec[key], f"{where}.{key}") for key in ("min", "max"))
    if low > high or (low == high and name != "int_uniform"):
        raise ConfigError(f"{where}: expected min below max, got {spec['min']} and {spec['max']}.")
    if name == "int_uniform":
        if not (type(low) is type(high) is int):
            raise ConfigError(f"{where}: int_uniform needs whole numbers, got {low} and {high}.")
        return Axis(path, "int", low, high, int, range(low, high + 1) if high - low < MOST else None)
    if name.endswith("_values"):
        if low <= 0:
            raise ConfigError(f"{where}.min: expected a number > 0 for {name}, got {low}.")
        return Axis(path, "log", low, high, float, None)
    if "log_uniform" in name:  # bounds are natural logarithms, of 1/value for the inverse
        sign = -1 if name.startswith("inv_") else 1
        _finite_power(low, high, where)
        return Axis(path, "float", low, high, lambda drawn: math.exp(sign * drawn), None)
    return Axis(path, "float", low, high, float, None)


def _spread(path: str, name: str, spec: Mapping[str, Any], where: str) -> Axis:
    """Normal: the sampler draws the share of the distribution that lies below the value."""
    mu, sigma = (_number(spec.get(key, default), f"{where}.{key}") for key, default in (("mu", 0.0), ("sigma", 1.0)))
    if sigma <= 0:
        raise ConfigError(f"{where}.sigma: expected a number > 0, got {sigma}.")
    normal = NormalDist(mu, sigma)
    if "log_normal" not in name:
        return Axis(path, "float", 1e-9, 1 - 1e-9, normal.inv_cdf, None)
    _finite_power(mu - 6 * sigma, mu + 6 * sigma, where)
    return Axis(path, "float", 1e-9, 1 - 1e-9, lambda drawn: math.exp(normal.inv_cdf(drawn)), None)


def _quantized(axis: Axis, spec: Mapping[str, Any], where: str) -> Axis:
    """Multiples of q. They are ints where q is one."""
    q = _number(spec.get("q", 1), f"{where}.q")
    if q <= 0:
        raise ConfigError(f"{where}.q: expected a number > 0, got {q}.")

    def rounded(drawn: float) -> float:
        times = round(axis.value(drawn) / q)
        return times * q if isinstance(q, int) else float(f"{times * q:.12g}")  # 3 * 0.1 is 0.3

    if axis.kind == "float" and spec["distribution"] == "q_uniform" and (axis.high - axis.low) / q < MOST:
        steps = range(round(axis.low / q), round(axis.high / q) + 1)
        listed = [step * q if isinstance(q, int) else float(f"{step * q:.12g}") for step in steps]
    else:
        listed = None
    return Axis(axis.path, axis.kind, axis.low, axis.high, rounded, listed)


def _number(value: Any, where: str) -> Any:
    if type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e300:
        return value
    hint = ""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            hint = f" YAML takes a number for text where it has an exponent but no dot: write {float(value):.1e}."
    raise ConfigError(f"{where}: expected a finite number, got {value!r} ({_type(value)}).{hint}")


def _finite_power(low: float, high: float, where: str) -> None:
    if max(abs(low), abs(high)) > 690:
        raise ConfigError(
            f"{where}: the values would be e to the power of {low:g} to {high:g}. The bounds are natural logarithms here; "
            "log_uniform_values takes the values themselves."
        )


def _type(value: Any) -> str:
    return type(value).__name__
