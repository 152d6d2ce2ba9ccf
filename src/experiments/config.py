"""Frozen, typed configs, made from experiment dicts. Errors name the dotted path of each mistake."""

import inspect
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from src.errors import ConfigError


def added_field(absence: Any, **constraints: Any) -> Any:
    """Declare a field that was added later: `absence` is its default, and the behavior of runs made without it.

    Runs without the field in config.json can then still be opened. `constraints`: see pydantic's Field.
    """
    return Field(default=absence, json_schema_extra={"absence": absence}, **constraints)


def operational_field(default: Any) -> Any:
    """A field that changes no number of a finished run, such as how many errors stop it.

    It is not part of the id or of exp_dict.json, and can change whenever a run resumes.
    """
    return Field(default=default, json_schema_extra={"operational": True})


def is_operational(config: Any, name: str) -> bool:
    """Whether a field of `config`, an object or a class, was declared with `operational_field`."""
    cls = config if isinstance(config, type) else type(config)
    info = cls.model_fields.get(name) if issubclass(cls, Config) else None
    return bool(info and isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("operational"))


def is_added(info: FieldInfo) -> bool:
    """Whether the field was declared with `added_field`."""
    return bool(_absence(info))


def _absence(info: FieldInfo) -> list[Any]:
    """[the value used for an absent field], or [] for a field that is not `added_field`."""
    extra = info.json_schema_extra
    return [extra["absence"]] if isinstance(extra, dict) and "absence" in extra else []


class Config(BaseModel):
    """Base class of configs: strict (`True` is not an int, `"1e-4"` is refused), frozen, no unknown keys.

    A float field accepts an int.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse an added field with a default that differs from its value for absence."""
        for name, info in cls.model_fields.items():
            default, absence = info.default, _absence(info)[0] if is_added(info) else info.default
            if (type(default), default) != (type(absence), absence):
                raise ConfigError(
                    f"{cls.__module__}.{cls.__name__}.{name}: the default {default!r} differs from the value for its "
                    f"absence, {absence!r}: runs made before the field was added would change. "
                    "Write the new value into the experiments instead."
                )


def fill_absences(saved: Any, config: Any) -> Any:
    """Fill the fields missing from `saved`, an older dict of `config`."""
    if isinstance(saved, dict) and isinstance(config, Config):
        filled_fields = {key: fill_absences(value, getattr(config, key, None)) for key, value in saved.items()}
        return filled_fields | config.model_dump(mode="json", include=_absent_fields(config) - saved.keys())
    if isinstance(saved, dict) and isinstance(config, dict):
        return {key: fill_absences(value, config.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(config, (list, tuple)) and len(saved) == len(config):
        return [fill_absences(value, item) for value, item in zip(saved, config, strict=True)]
    return saved


def drop_absences(config_json: Any, config: Any) -> Any:
    """Remove added fields at their value for absence from `dumped`, the JSON of `config`.
    A digest of it then stays the same."""
    if isinstance(config_json, dict) and isinstance(config, Config):
        absent = _absent_fields(config)
        return {
            key: drop_absences(value, getattr(config, key, None))
            for key, value in config_json.items()
            if key not in absent
        }
    if isinstance(config_json, dict) and isinstance(config, dict):
        return {key: drop_absences(value, config.get(key)) for key, value in config_json.items()}
    if isinstance(config_json, list) and isinstance(config, (list, tuple)):
        return [drop_absences(value, item) for value, item in zip(config_json, config, strict=True)]
    return config_json


def _absent_fields(config: Config) -> set[str]:
    """Names of the added fields at their value for absence."""
    return {
        name
        for name, info in type(config).model_fields.items()
        if is_added(info) and getattr(config, name) == info.default
    }


@dataclass(frozen=True)
class Places:
    """Folders on this machine. They must not change a result, so they are not part of an experiment."""

    data: Path
    """Prepared data sets, one folder each (`--data_path`)."""
    runs: Path
    """Save directories, one per experiment id (`--savedir_base`)."""
    experiments: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Every experiment of exp_configs.py by id. Parents that have not run yet are looked up here."""
    on_paper: bool = False
    """Whether models are built without weights, under torch.device("meta"). A pretrained model then needs only
    config.json, and a parent need not be trained."""


class Problems(ValueError):
    """Mistakes inside a component, as (path below the component, message)."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(f"{path}: {text}" for path, text in self.problems))


C = TypeVar("C", bound=Config)
GROUP_LIST = "`python trainval.py --list`"
"""The command that lists all groups."""
_MOST_LISTED = 40
"""Length of the longest list of choices that an error prints."""


def load(cls: type[C], raw: Any, where: str) -> C:
    """Check `raw` against `cls`.

    Raises:
        ConfigError: one line for each mistake, starting with `where` and the dotted path.
    """
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{join(where, path)}: {text}" for path, text in problems(cls, error))) from None


def problems(cls: type[Config], error: ValidationError) -> Iterator[tuple[str, str]]:
    """Turn pydantic's report into (dotted path, message) pairs, including those of nested components."""
    for item in error.errors(include_url=False):
        loc, context = item["loc"], item.get("ctx", {})
        path = dotted_path(loc)
        cause = context.get("error")
        if isinstance(cause, Problems):
            yield from ((join(path, below), text) for below, text in cause.problems)
        elif item["type"] == "extra_forbidden":
            yield dotted_path(loc[:-1]), unknown_text("key", str(loc[-1]), _config_at(cls, loc[:-1]).model_fields)
        elif item["type"] == "missing":
            yield path, "missing. It has no default, so write it."
        elif item["type"] == "literal_error" and isinstance(item["input"], str) and "'" in context["expected"]:
            yield path, unknown_text("value", item["input"], re.findall("'([^']*)'", context["expected"]))
        elif cause is not None:
            yield path, str(cause)
        else:
            yield (
                path,
                f"{_describe_expected(item['type'], item['msg'], context)}, got {describe_value(item['input'])}.",
            )


def unknown(kind: str, got: str, choices: Iterable[str], where: str, source: str = "") -> ConfigError:
    """An error that names the place, the unknown name, and the choices as in `unknown_text`."""
    return ConfigError(f"{where}: {unknown_text(kind, got, choices, source)}")


def unknown_text(kind: str, got: str, choices: Iterable[str], source: str = "") -> str:
    """The message of `unknown` without the place: the nearest choice, and all of them unless there are more than 40.

    source: where the user finds a longer list, such as a command. It is named if no choice is close to `got`.
    """
    choices = sorted(set(map(str, choices)))
    is_long = len(choices) > _MOST_LISTED
    hint = nearest_text([got], choices, 3 if is_long else 1)
    if not is_long:
        hint += f" Known: {', '.join(choices) or 'none'}."
    elif not hint:
        hint = f" Known: {len(choices)}, " + (f"see {source}." if source else f"such as {', '.join(choices[:3])}.")
    return f"unknown {kind} {shorten(got)}.{hint}"


def nearest_text(names: Iterable[str], choices: Iterable[str], most: int = 1) -> str:
    """ " Did you mean 'x'?", of at most `most` choices that are close to the first of `names` with such choices; "" if
    there are none."""
    choices = list(map(str, choices))
    close = next((each for name in names if (each := get_close_matches(name, choices, n=most))), [])
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def dotted_path(loc: Iterable[int | str]) -> str:
    """("loop", "betas", 0) -> "loop.betas[0]"."""
    path = ""
    for key in loc:
        path = f"{path}[{key}]" if isinstance(key, int) else join(path, key)
    return path


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """{"model": {"depth": 2}} -> {"model.depth": 2}. Lists and empty dicts are values."""
    if not isinstance(value, dict) or (not value and path):
        return {path: value}
    return {key: leaf for name, item in value.items() for key, leaf in flatten(item, join(path, name)).items()}


def join(head: str, tail: str) -> str:
    """Dotted path of `tail` below `head`; either can be empty."""
    return f"{head}{'' if tail.startswith('[') else '.'}{tail}" if head and tail else head or tail


def _config_at(cls: type[Config], loc: Iterable[int | str]) -> type[Config]:
    """The Config class that holds the field below `loc`."""
    for key in loc:
        if isinstance(key, str) and key in cls.model_fields:
            cls = next(_configs_in(cls.model_fields[key].annotation), cls)
    return cls


def _configs_in(annotation: Any) -> Iterator[type[Config]]:
    """The Config classes of an annotation such as `list[Loop] | None`."""
    if inspect.isclass(annotation) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from _configs_in(inner)


_TYPES = {
    "int_type": "int",
    "float_type": "float",
    "string_type": "str",
    "bool_type": "bool",
    "model_type": "a dict",
    "dict_type": "a dict",
    "list_type": "a list",
    "int_from_float": "int",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def _describe_expected(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind in _BOUNDS:
        sign, key = _BOUNDS[kind]
        return f"expected a number {sign} {context[key]}"
    if kind in _TYPES:
        return f"expected {_TYPES[kind]}"
    if kind == "string_too_short":
        least = context["min_length"]
        return "expected text that is not empty" if least == 1 else f"expected text of at least {least} characters"
    if kind == "too_short":
        least = context["min_length"]
        return "expected a list that is not empty" if least == 1 else f"expected a list of at least {least} values"
    if kind == "string_pattern_mismatch":
        return f"expected text of the form {context['pattern']}"
    return message.replace("Input should be", "expected", 1)


def describe_value(value: Any) -> str:
    """A value and its type, for a message."""
    return f"{shorten(value)} ({type(value).__name__})"


def shorten(value: Any) -> str:
    """`repr` of a value, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def top_level(module: str, name: str) -> dict[str, Any]:
    """The dict called `name` of a top-level file of the project, such as EXP_GROUPS of exp_configs.

    Raises:
        ConfigError: the file does not run (names the line), or has no such dict.
    """
    try:
        value = getattr(import_module(module), name, None)
    except ConfigError as error:
        at = [
            place
            for place in traceback.extract_tb(error.__traceback__)
            if Path(place.filename).parent.name != "experiments"
        ][-1]
        raise ConfigError(f"{at.filename}:{at.lineno}: {error}") from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from None
    except Exception as error:  # noqa: BLE001  the file is the user's: whatever it raises is reported with its line
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(f"{at.filename}:{at.lineno}: {type(error).__name__}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{module}.py: expected a dict called {name}, got {type(value).__name__}.")
    return value
