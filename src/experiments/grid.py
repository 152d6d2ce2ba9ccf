"""Make many experiments from one dict. Experiment files import only this module and each other."""

import contextlib
import functools
import itertools
import json
import re
import reprlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from src.errors import ConfigError
from src.experiments.config import Config, describe_value, shorten, unknown
from src.experiments.identity import check_values, exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import canonical_dict, sparse_dict

Experiment = dict[str, Any]
Axes = Mapping[str, list[Any]]
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_INTEGER = re.compile(r"[+-]?[0-9_]+")
_NUMBER = re.compile(r"[+-]?([0-9_]+\.?[0-9_]*|\.[0-9_]+)([eE][+-]?[0-9]+)?")
P = ParamSpec("P")
T = TypeVar("T")
_deferring = False


class BrokenGroup(list[Experiment]):
    """The result of a failed call inside `deferred_errors`. Reading it raises the error."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error

    def __iter__(self) -> Iterator[Experiment]:
        raise ConfigError(self.error)

    def __add__(self, other: Any) -> "BrokenGroup":  # type: ignore[override]
        return self

    __radd__ = __add__


@contextlib.contextmanager
def deferred_errors() -> Iterator[None]:
    """Within the block, an error of `grid`, `zip_axes` or `seeds` breaks only its own group."""
    global _deferring  # noqa: PLW0603
    before, _deferring = _deferring, True
    try:
        yield
    finally:
        _deferring = before


def _deferrable(make: Callable[P, list[T]]) -> Callable[P, list[T]]:
    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> list[T]:
        try:
            return make(*args, **kwargs)
        except ConfigError as error:
            if not _deferring:
                raise
            place = sys._getframe(1)
            at = f"{place.f_code.co_filename}:{place.f_lineno}: "
            return BrokenGroup(str(error) if ".py:" in str(error) else f"{at}{error}")  # type: ignore[return-value]

    return call


@_deferrable
def grid(base: Experiment, axes: Axes, where: Callable[[Experiment], bool] | None = None) -> list[Experiment]:
    """Every combination of the values of `axes` (dotted path -> values), the last axis changing fastest.

    `where` filters the experiments. A value that is a list stays a list. The dicts share no objects.

    Raises:
        ConfigError: `base` is not a dict, a path is neither in it nor a field of its config, or an axis has no values.
    """
    _check_axes(axes, "grid")
    experiments = _fill(base, axes, itertools.product(*axes.values()))
    return [exp for exp in experiments if where is None or where(exp)]


@_deferrable
def zip_axes(base: Experiment, axes: Axes) -> list[Experiment]:
    """One experiment for each position in the axes: the first values together, the second values together, and so on.

    Raises:
        ConfigError: the axes differ in length, a path is neither in `base` nor a field of its config, or an axis has
            no values.
    """
    _check_axes(axes, "zip_axes")
    lengths = {path: len(values) for path, values in axes.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"zip_axes: expected axes of equal length, got {', '.join(f'{p}: {n}' for p, n in lengths.items())}."
        )
    return _fill(base, axes, zip(*axes.values(), strict=True))


@_deferrable
def seeds(experiments: Iterable[Experiment], seeds: int | Sequence[int]) -> list[Experiment]:
    """Each experiment once for each seed: 0 … `seeds` - 1, or the seeds listed.

    Raises:
        ConfigError: there are no seeds.
    """
    values = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not values:
        raise ConfigError(f"seeds: expected a number of seeds above 0, or a list of them, got {seeds!r}.")
    return [set_path(exp, "seed", seed, must_exist=False) for exp in experiments for seed in values]


def ref(parent: Experiment, checkpoint: str = "last", step: int | None = None) -> dict[str, Any]:
    """Model dict that starts from the model trained by `parent`.
    It contains the parent's id, so changing the parent changes the child's id.

    step: continue the training of `parent` after this step, with its optimizer state and data position, instead of
    starting a new training from its weights. See src/training/checkpointing/continuation.py.

    Raises:
        ConfigError: `parent` is not a valid experiment.
    """
    check_values(parent, "ref")
    return {
        "name": "experiment",
        "exp_id": exp_id(canonical_dict(parent, load_experiment(parent, "ref"))),
        "checkpoint": checkpoint,
        **({} if step is None else {"step": step}),
    }


def set_path(exp: Experiment, path: str, value: Any, must_exist: bool) -> Experiment:
    """A deep copy of `exp` with `value` at the dotted `path`.

    must_exist: also refuse a last key that is not in `exp`; the keys before it must always exist.

    Raises:
        ConfigError: a key is missing, or is not a dict.
    """
    return _combine(exp, [(path, value)], must_exist)


def override(exp: Experiment, values: Mapping[str, Any]) -> Experiment:
    """A copy of `exp` with new values by dotted path. The last key of a path can be new; it is checked later.

    Raises:
        ConfigError: a key is missing, or is not a dict.
    """
    return _combine(exp, values.items(), must_exist=False)


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split "loop.steps=20" into ("loop.steps", 20). A value that is not JSON is a string.

    Raises:
        ConfigError: no "=" or nothing before it; a number, true, false or null in another spelling than JSON's; a value
            that is nested too deeply or a number of thousands of digits.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set: expected path=value, such as loop.steps=20, got {shorten(text)}.")
    try:
        return path.strip(), json.loads(value)
    except json.JSONDecodeError:
        if (spelling := _json_spelling(value.strip())) is not None:
            raise ConfigError(
                f"--set: {path.strip()}: {value} is not JSON. For the value write {path.strip()}={spelling}, "
                f"for the text {_quote(path.strip(), json.dumps(value))}."
            ) from None
        return path.strip(), value
    except (RecursionError, ValueError):
        excerpt = f"{value[:30]}... ({len(value)} characters)"
        raise ConfigError(
            f"--set: {path.strip()}: {excerpt} is nested too deeply, or has a number of too many digits. "
            "Write a shorter value."
        ) from None


def _json_spelling(text: str) -> str | None:
    """How JSON spells a value of Python or a number such as .5 and +1; None for other texts."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return json.dumps(int(text) if _INTEGER.fullmatch(text) else float(text), allow_nan=False)
    except ValueError:
        return None


def _quote(path: str, values: str) -> str:
    """The assignment in quotes for a shell."""
    return shlex.quote(f"{path}={values}")


def parse_assignments(texts: Iterable[str]) -> list[list[tuple[str, Any]]]:
    """Every combination of the assignments of --set: `seed=0,1,2` and `tag="a","b"` are sweeps over values in JSON.

    Raises:
        ConfigError: a value with commas that is not JSON; and as `parse_assignment`.
    """
    axes = [
        (path, _values(path, text.partition("=")[2], value))
        for text in texts
        for path, value in [parse_assignment(text)]
    ]
    return [
        list(zip((path for path, _ in axes), values, strict=True))
        for values in itertools.product(*(each for _, each in axes))
    ]


def _values(path: str, text: str, value: Any) -> list[Any]:
    """The values of a sweep, or a single value as a list.
    text: the argument after "=", equal to `value` if it is not JSON."""
    if value != text or "," not in text:
        return [value]
    try:
        return json.loads(f"[{text}]")
    except (ValueError, RecursionError):
        bare = text.strip()
        is_list = bare.startswith("[") and bare.endswith("]")
        parts = ",".join(
            _spell_in_json(part.strip()) for part in bare[is_list : len(bare) - is_list].split(",") if part.strip()
        )
        several, one = f"[{parts}]" if is_list else parts, json.dumps(text)
        raise ConfigError(
            f"--set: {path}: {shorten(text)} is not JSON. For a {'list' if is_list else 'sweep'} write "
            f"{_quote(path, several)}, "
            f"for one text {_quote(path, one)}."
        ) from None


def _spell_in_json(text: str) -> str:
    try:
        json.loads(text)
        return text
    except (ValueError, RecursionError):
        return _json_spelling(text) or json.dumps(text.strip("'\""))


def _fill(base: Any, axes: Axes, combinations: Iterable[Sequence[Any]]) -> list[Experiment]:
    """One experiment per combination of values. A path that is not in `base` must be a field of its config."""
    assignments = [list(zip(axes, values, strict=True)) for values in combinations]
    try:
        return [_combine(base, values) for values in assignments]
    except ConfigError as error:
        if not assignments:
            raise
        experiments = [_combine(base, values, must_exist=False) for values in assignments]
        try:
            load_experiment(experiments[0], "grid")
        except ConfigError as other:
            raise error if "unknown" in str(other) else other from None
        return experiments


def _combine(base: Any, values: Iterable[tuple[str, Any]], must_exist: bool = True) -> Experiment:
    """A deep copy of `base` with `values` at their dotted paths; see `_assign`."""
    if not isinstance(base, dict):
        raise ConfigError(f"expected a dict of an experiment, got {reprlib.repr(base)} ({type(base).__name__}).")
    try:
        exp = _copy(base)
    except RecursionError:
        raise ConfigError("an experiment contains itself, or is nested too deeply. Copy the inner dict.") from None
    for path, value in values:
        _assign(exp, path, value, must_exist)
    return exp


def _copy(value: Any) -> Any:
    """A copy of JSON values, five times as fast as copy.deepcopy.
    Values of other types are refused later, by their path."""
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if type(value) is list else value


def _assign(exp: Experiment, path: str, value: Any, must_exist: bool) -> None:
    """`set_path` in place. `value` is copied, so that experiments share no dict."""
    place, keys = exp, path.split(".")
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if not key:
            raise ConfigError(f"{path!r}: expected keys joined by single dots, such as 'loop.steps'.")
        if key not in place and must_exist:
            raise unknown("key", key, map(str, place), ".".join(keys[:depth]) or path)
        if last:
            place[key] = _copy(value)
            return
        if key not in place:
            place[key] = _default_of(exp, keys[: depth + 1], path)
        if not isinstance(place[key], dict):
            raise ConfigError(
                f"{path}: {'.'.join(keys[: depth + 1])} is {place[key]!r}, not a dict, so nothing can be set below it. "
                "Set a dict there first."
            )
        place = place[key]


def _default_of(exp: Experiment, keys: Sequence[str], path: str) -> Any:
    """The default, as JSON, of a field that `exp` leaves out; {} for None. Only a valid `exp` has defaults.

    Raises:
        ConfigError: there is no such field; names the key and the fields.
    """
    try:
        value: Any = load_experiment(exp, "")
    except ConfigError:
        value = exp
    for depth, key in enumerate(keys):
        fields = dict(value) if isinstance(value, Config) else value
        if not isinstance(fields, dict) or key not in fields:
            names = map(str, fields) if isinstance(fields, dict) else ()
            raise unknown("key", key, names, ".".join(keys[:depth]) or path)
        value = fields[key]
    return sparse_dict(value)


def _check_axes(axes: Axes, where: str) -> None:
    for path, values in axes.items():
        if not isinstance(values, list):
            raise ConfigError(f"{where}: {path}: expected a list of values, got {describe_value(values)}.")
        if not values:
            raise ConfigError(
                f"{where}: {path}: an axis without values makes no experiment. Add values, or remove the axis."
            )
    for first, second in itertools.combinations(axes, 2):
        if first.startswith(second + "."):
            raise ConfigError(f"{where}: {second}: it would overwrite {first}. Put the axis {second} first.")
