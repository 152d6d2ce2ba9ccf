"""The settings of every registered component: runs that exist must still open after a new one.

tests/golden/config_fields.json lists, by class, the fields that have been there since the class was made ("original"),
and those that were added later with what their absence meant ("added").
"""

import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from pydantic import Field

from src.errors import ConfigError
from src.experiments import registry
from src.experiments.config import Config, added_field, is_added, is_operational

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "config_fields.json"
Keys = dict[str, dict[str, Any]]


def nested(annotation: Any) -> Iterator[type[Config]]:
    """The classes of Config in an annotation such as `list[Loop] | None`."""
    if inspect.isclass(annotation) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from nested(inner)


def classes() -> set[type[Config]]:
    """Every Config that the registry names, and those of their fields."""
    configs: set[type[Config]] = set()
    waiting = [import_module(module).Config for table in registry.TABLES for module in table.modules.values()]
    while waiting:
        cls = waiting.pop()
        if cls not in configs:
            configs.add(cls)
            waiting += [below for field in cls.model_fields.values() for below in nested(field.annotation)]
    return {cls for cls in configs if cls.model_fields}


def keys_of(cls: type[Config]) -> dict[str, Any]:
    """Its entry in config_fields.json. Operational fields are not listed: they are no part of an experiment."""
    fields = {name: field for name, field in cls.model_fields.items() if not is_operational(cls, name)}
    absences = {name: field.json_schema_extra["absence"] for name, field in fields.items() if is_added(field)}  # type: ignore[index]
    entry: dict[str, Any] = {"original": sorted(fields.keys() - absences.keys())}
    return {**entry, "added": json.loads(json.dumps(absences, sort_keys=True))} if absences else entry


def mistakes(golden: Keys, now: Keys) -> list[str]:
    """What to do about each difference, one sentence each."""
    file, messages = "tests/golden/config_fields.json", []
    for name, entry in sorted(now.items()):
        if name not in golden:
            messages.append(f'{file}: add the new class: "{name}": {json.dumps(entry)}')
            continue
        before, before_added = set(golden[name]["original"]), golden[name].get("added", {})
        messages += [
            f"{name}.{key}: runs were made before this field, so write `{key}: ... = added_field(ABSENCE)` "
            f"(src/experiments/config.py), "
            f'where ABSENCE is what they did, and "added": {{"{key}": ABSENCE}} into {file}.'
            for key in sorted(set(entry["original"]) - before)
        ]
        for key, absence in sorted(entry.get("added", {}).items()):
            if key in before_added and before_added[key] == absence:
                continue
            if key in before_added:
                was = json.dumps(before_added[key])
                messages.append(
                    f"{name}.{key}: its absence meant {was} when it was added; "
                    f"{json.dumps(absence)} would change those runs."
                )
            elif key in before:
                messages.append(
                    f"{name}.{key}: was there from the start, so write its default as usual, not with `added_field`."
                )
            else:
                messages.append(f'{file}: write "{key}": {json.dumps(absence)} under "added" of "{name}".')
        messages += [
            (
                f"{name}.{key}: runs that have this field could no longer be opened. "
                "Keep it, or note the loss in CHANGELOG.md."
            )
            for key in sorted((before | before_added.keys()) - set(entry["original"]) - entry.get("added", {}).keys())
        ]
    return messages


def test_every_new_setting_says_what_its_absence_meant():
    now = {f"{cls.__module__}.{cls.__name__}": keys_of(cls) for cls in classes()}
    golden = json.loads(GOLDEN.read_text())
    assert mistakes(golden, now) == []
    removed_fields = golden.keys() - now.keys()
    assert not removed_fields, (
        f"tests/golden/config_fields.json: take out {sorted(removed_fields)}, which no registered Config uses."
    )


def test_each_difference_is_reported_with_its_remedy():
    golden = {"m.C": {"original": ["old"], "added": {"later": 1}}}
    assert mistakes(golden, golden) == []

    def only(original: list[str], later: dict[str, Any]) -> str:
        (text,) = mistakes(golden, {"m.C": {"original": original, "added": later}})
        return text

    assert "m.C.new: runs were made before this field, so write `new: ... = added_field(ABSENCE)`" in only(
        ["new", "old"], {"later": 1}
    )
    assert only(["old"], {"later": 2}) == "m.C.later: its absence meant 1 when it was added; 2 would change those runs."
    assert 'write "last": false under "added" of "m.C"' in only(["old"], {"last": False, "later": 1})
    assert "m.C.old: runs that have this field could no longer be opened" in only([], {"later": 1})
    assert mistakes({}, {"m.D": {"original": ["x"]}}) == [
        'tests/golden/config_fields.json: add the new class: "m.D": {"original": ["x"]}'
    ]


def test_a_default_that_is_not_the_absence_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"Wrong\.mode: the default True differs from the value for its absence, False: runs made before",
    ):

        class Wrong(Config):  # pyright: ignore[reportUnusedClass]
            mode: Annotated[bool, added_field(False)] = True

    class Right(Config):
        mode: bool = added_field(False)
        share: float = added_field(0.5, gt=0)

    assert Right() == Right(mode=False, share=0.5)
    with pytest.raises(ValueError, match="greater than 0"):
        Right(share=0.0)
    assert not is_added(Field(default=1))  # type: ignore[arg-type]


if __name__ == "__main__":
    entries = {f"{cls.__module__}.{cls.__name__}": keys_of(cls) for cls in classes()}
    GOLDEN.write_text(
        "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)) + "\n}\n"
    )
