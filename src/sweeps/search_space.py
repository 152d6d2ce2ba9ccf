"""The parameters of a sweep file: the numbers that a sampler draws, and the resulting values of an experiment."""

import contextlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from src.errors import ConfigError, check_all
from src.experiments import config
from src.experiments.config import join
from src.experiments.grid import parse_assignment

MAX_COMBINATIONS = 100_000


def _check_number(value: Any) -> Any:
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise ValueError(f"expected a finite number, got {value!r}. YAML reads 1e-5 as text: write 1.0e-5.")
    return value


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

    def value(self, number: Any) -> Any:
        """The experiment's value for a drawn number."""
        return self.choices[number] if self.kind == "choice" else number


class Parameter(config.Config):
    """A parameter of a sweep file."""

    distribution: Literal["constant", "categorical", "int_uniform", "uniform", "log_uniform_values"] | None = None
    """If not given, two integer bounds mean int_uniform, as in wandb."""
    value: Any = None
    values: Annotated[list[Any], Field(min_length=1)] | None = None
    min: Annotated[Any, AfterValidator(_check_number)] = None
    max: Annotated[Any, AfterValidator(_check_number)] = None

    @property
    def kind(self) -> str:
        if self.distribution:
            return self.distribution
        if self.values is not None:
            return "categorical"
        if "value" in self.model_fields_set:
            return "constant"
        return "int_uniform" if type(self.min) is type(self.max) is int else "uniform"

    @model_validator(mode="after")
    def _check_together(self) -> "Parameter":
        keys = {"constant": {"value"}, "categorical": {"values"}}.get(self.kind, {"min", "max"})
        if self.model_fields_set - {"distribution"} != keys:
            got = ", ".join(sorted(self.model_fields_set - {"distribution"})) or "none"
            raise ValueError(f"expected {' and '.join(sorted(keys))} for {self.kind}, and nothing else; got {got}.")
        texts = [json.dumps(value, default=str, sort_keys=True) for value in self.values or ()]
        if len(set(texts)) < len(texts):
            duplicate = next(text for text in texts if texts.count(text) > 1)
            raise ValueError(f"values: duplicate value {duplicate}. Remove one.")
        if self.min is None or self.max is None:
            return self
        if self.min > self.max or (self.min == self.max and self.kind != "int_uniform"):
            raise ValueError(f"expected min below max, got {self.min} and {self.max}.")
        if self.kind == "int_uniform" and not type(self.min) is type(self.max) is int:
            raise ValueError(f"int_uniform needs integers, got {self.min} and {self.max}.")
        if self.kind == "log_uniform_values" and self.min <= 0:
            raise ValueError(f"expected min > 0 for {self.kind}, got {self.min}.")
        return self

    def dimension(self, path: str, grid: bool) -> SearchDimension:
        """The dimension for the sampler. grid: an integer range becomes a choice."""
        values, low, high = self.values or [self.value], self.min, self.max
        if self.kind == "int_uniform" and grid:
            values = range(low, high + 1)
        elif low is not None:
            kinds: dict[str, Any] = {"int_uniform": "int", "uniform": "float", "log_uniform_values": "log"}
            number = int if self.kind == "int_uniform" else float
            return SearchDimension(path, kinds[self.kind], number(low), number(high))
        return SearchDimension(path, "choice", 0, len(values) - 1, values)


def parse_dimensions(parameters: Mapping[str, Any], where: str, grid: bool = False) -> list[SearchDimension]:
    """The parameters of a sweep file, nested ones by dotted path. grid: each becomes a choice among all its values.

    Raises:
        ConfigError: one line for each mistake, with its path below `where`.
    """
    parsed: list[SearchDimension] = []

    def parse(path: str, spec: Any) -> None:
        place = join(where, path)
        dimension = config.load(Parameter, spec, place).dimension(path, grid)
        if grid and dimension.kind != "choice":
            raise ConfigError(f"{place}: method 'grid' needs values, a value, or int_uniform. Use 'random' or 'bayes'.")
        parsed.append(dimension)

    check_all(*(lambda path=path, spec=spec: parse(path, spec) for path, spec in _flatten(parameters, "", where)))
    for first, second in itertools.permutations((dimension.path for dimension in parsed), 2):
        if first == second or first.startswith(second + "."):
            raise ConfigError(f"{join(where, first)}: also set by {second}. Remove one of them.")
    if grid and (count := math.prod(len(dimension.choices) for dimension in parsed)) > MAX_COMBINATIONS:
        raise ConfigError(
            f"{where}: {count} combinations; the limit of a grid is {MAX_COMBINATIONS}. Use method 'random' or 'bayes'."
        )
    return parsed


def grid_draws(dimensions: Sequence[SearchDimension]) -> list[dict[str, int]]:
    """Every combination of a grid, the last parameter changing fastest: path -> index among the choices."""
    paths = [dimension.path for dimension in dimensions]
    draws = itertools.product(*(range(len(dimension.choices)) for dimension in dimensions))
    return [dict(zip(paths, draw, strict=True)) for draw in draws]


def values_of(dimensions: Sequence[SearchDimension], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> value, from the drawn numbers."""
    return {each.path: each.value(numbers[each.path]) for each in dimensions if each.path in numbers}


def agent_argument(path: str, value: Any, where: str) -> str:
    """The argument that `wandb agent` passes for a value: path=value, in Python's spelling.

    Raises:
        ConfigError: --set would parse it as a different value, such as True and None, which are not JSON.
    """
    text = f"{path}={value}"
    with contextlib.suppress(ConfigError):
        back = parse_assignment(text)[1]
        if isinstance(value, str) or (type(back) is type(value) and back == value):
            return text
    raise ConfigError(
        f"{join(where, path)}: wandb agent would pass {text!r}, which --set does not parse as {value!r}. "
        f"Write {json.dumps(json.dumps(value))}: --set parses it as JSON."
    )


def _flatten(parameters: Mapping[str, Any], above: str, where: str) -> Iterator[tuple[str, Any]]:
    for name, spec in parameters.items():
        path = f"{above}.{name}" if above else str(name)
        if not isinstance(name, str) or not all(name.split(".")):
            raise ConfigError(
                f"{join(where, path)}: expected a path into the experiment, such as loop.learning_rate, got {name!r}."
            )
        if isinstance(spec, dict) and set(spec) == {"parameters"} and isinstance(spec["parameters"], dict):
            yield from _flatten(spec["parameters"], path, where)
        else:
            yield path, spec


def random_values(dimensions: Sequence[SearchDimension], draws: random.Random) -> dict[str, Any]:
    """One random combination: dotted path -> value."""
    numbers = {
        each.path: draws.randint(int(each.low), int(each.high))
        if each.kind in ("choice", "int")
        else draws.uniform(each.low, each.high)
        for each in dimensions
    }
    return values_of(dimensions, numbers)
