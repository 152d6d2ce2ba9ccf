"""Dicts become typed configs, and every mistake is named by its path."""

import sys
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PlainSerializer, PlainValidator, ValidationError, model_validator

from src.errors import ConfigError
from src.experiments import config, registry
from src.experiments.config import Config, dotted_path, join, load, unknown
from src.experiments.interfaces import Component, load_experiment
from src.experiments.registry import ComponentTable, bind, canonical_dict, resolved_dict


class Loop(Config):
    steps: int = Field(gt=0)
    rate: float = Field(default=0.1, ge=0, le=1)
    betas: list[float] = [0.9, 0.95]
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warm: bool = False

    @model_validator(mode="after")
    def _check(self) -> "Loop":
        if len(self.betas) != 2:
            raise ValueError(f"betas: expected 2 numbers, got {len(self.betas)}.")
        return self


class Outer(Config):
    loop: Loop
    loops: list[Loop] = []
    maybe: Loop | None = None
    label: str = Field(default="x", min_length=1)
    names: dict[str, float] = {}
    several: list[Loop] | None = None
    modes: list[Literal["fast", "slow"]] = []
    level: Literal[1, 2] | None = None


def mistake(raw: Any) -> str:
    with pytest.raises(ConfigError) as error_info:
        load(Outer, raw, "copy_lr[2]")
    return str(error_info.value)


def test_defaults_are_written_out():
    assert load(Outer, {"loop": {"steps": 3}}, "here").model_dump() == {
        "loop": {"steps": 3, "rate": 0.1, "betas": [0.9, 0.95], "schedule": "cosine", "warm": False},
        "loops": [],
        "maybe": None,
        "label": "x",
        "names": {},
        "several": None,
        "modes": [],
        "level": None,
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "copy_lr[2].loop: missing. It has no default, so write it."),
        ({"loop": {}}, "copy_lr[2].loop.steps: missing. It has no default, so write it."),
        ({"loop": {"steps": "20_000"}}, "copy_lr[2].loop.steps: expected int, got '20_000' (str)."),
        ({"loop": {"steps": 1.0}}, "copy_lr[2].loop.steps: expected int, got 1.0 (float)."),
        ({"loop": {"steps": True}}, "copy_lr[2].loop.steps: expected int, got True (bool)."),
        ({"loop": {"steps": None}}, "copy_lr[2].loop.steps: expected int, got None (NoneType)."),
        ({"loop": {"steps": 1, "rate": "1e-4"}}, "copy_lr[2].loop.rate: expected float, got '1e-4' (str)."),
        ({"loop": {"steps": 1, "rate": True}}, "copy_lr[2].loop.rate: expected float, got True (bool)."),
        (
            {"loop": {"steps": 1, "rate": float("nan")}},
            "copy_lr[2].loop.rate: expected a finite number, got nan (float).",
        ),
        (
            {"loop": {"steps": 1, "rate": float("inf")}},
            "copy_lr[2].loop.rate: expected a finite number, got inf (float).",
        ),
        ({"loop": {"steps": 0}}, "copy_lr[2].loop.steps: expected a number > 0, got 0 (int)."),
        ({"loop": {"steps": 1, "rate": 1.5}}, "copy_lr[2].loop.rate: expected a number <= 1.0, got 1.5 (float)."),
        ({"loop": {"steps": 1, "rate": -1}}, "copy_lr[2].loop.rate: expected a number >= 0.0, got -1 (int)."),
        ({"loop": {"steps": 1, "warm": 1}}, "copy_lr[2].loop.warm: expected bool, got 1 (int)."),
        ({"loop": {"steps": 1, "betas": [0.9, "x"]}}, "copy_lr[2].loop.betas[1]: expected float, got 'x' (str)."),
        ({"loop": {"steps": 1, "betas": [0.9]}}, "copy_lr[2].loop: betas: expected 2 numbers, got 1."),
        (
            {"loop": {"steps": 1, "betas": (0.9, 0.95)}},
            "copy_lr[2].loop.betas: expected a list, got (0.9, 0.95) (tuple).",
        ),
        ({"loop": 3}, "copy_lr[2].loop: expected a dict, got 3 (int)."),
        ({"loop": {"steps": 1}, "label": 1}, "copy_lr[2].label: expected str, got 1 (int)."),
        ({"loop": {"steps": 1}, "names": {"a": "b"}}, "copy_lr[2].names.a: expected float, got 'b' (str)."),
        ({"loop": {"steps": 1}, "label": ""}, "copy_lr[2].label: expected text that is not empty, got '' (str)."),
        (
            {"loop": {"steps": 1}, "modes": ["fast", "slwo"]},
            "copy_lr[2].modes[1]: unknown value 'slwo'. Did you mean 'slow'? Known: fast, slow.",
        ),
        ({"loop": {"steps": 1}, "modes": [3]}, "copy_lr[2].modes[0]: expected 'fast' or 'slow', got 3 (int)."),
        ({"loop": {"steps": 1}, "level": 3}, "copy_lr[2].level: expected 1 or 2, got 3 (int)."),
        ({"loop": {"steps": 1}, "level": "1"}, "copy_lr[2].level: expected 1 or 2, got '1' (str)."),
        (
            {"loop": {"steps": 1}, "several": [{"stps": 1, "steps": 1}]},
            "copy_lr[2].several[0]: unknown key 'stps'. Did you mean 'steps'?",
        ),
        ({"loop": {"steps": 1}, "names": 1}, "copy_lr[2].names: expected a dict, got 1 (int)."),
        (7, "copy_lr[2]: expected a dict, got 7 (int)."),
        (
            {"loop": {"stepz": 1, "steps": 1}},
            "copy_lr[2].loop: unknown key 'stepz'. Did you mean 'steps'? Known: betas, rate, schedule, steps, warm.",
        ),
        (
            {"loop": {"steps": 1}, "zzz": 1},
            "copy_lr[2]: unknown key 'zzz'. Known: label, level, loop, loops, maybe, modes, names, several.",
        ),
        (
            {"loop": {"steps": 1, "schedule": "cosin"}},
            "copy_lr[2].loop.schedule: unknown value 'cosin'. Did you mean 'cosine'? Known: constant, cosine, linear.",
        ),
        (
            {"loop": {"steps": 1}, "loops": [{"steps": 1}, {"steps": 1, "rat": 0.5}]},
            "copy_lr[2].loops[1]: unknown key 'rat'. Did you mean 'rate'? Known: betas, rate, schedule, steps, warm.",
        ),
        (
            {"loop": {"steps": 1}, "maybe": {"steps": -1}},
            "copy_lr[2].maybe.steps: expected a number > 0, got -1 (int).",
        ),
        (
            {"loop": {"steps": 1}, "maybe": {"steps": 1, "wrm": 1}},
            "copy_lr[2].maybe: unknown key 'wrm'. Did you mean 'warm'?",
        ),
    ],
)
def test_a_mistake_is_named_by_its_path(raw: Any, message: str):
    assert mistake(raw).startswith(message)
    assert "\n" not in mistake(raw)


class Short(Config):
    name: str = Field(default="abc", min_length=3)
    several: list[int] = Field(default=[1], min_length=1)
    pairs: list[int] = Field(default=[1, 2], min_length=2)
    code: str = Field(default="ab", pattern="^[a-f]+$")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"name": "ab"}, "s.name: expected text of at least 3 characters, got 'ab' (str)."),
        ({"several": []}, "s.several: expected a list that is not empty, got [] (list)."),
        ({"pairs": [1]}, "s.pairs: expected a list of at least 2 values, got [1] (list)."),
        ({"code": "xyz"}, "s.code: expected text of the form ^[a-f]+$, got 'xyz' (str)."),
    ],
)
def test_errors_describe_lengths_and_patterns(raw: Any, message: str):
    with pytest.raises(ConfigError) as error_info:
        load(Short, raw, "s")
    assert str(error_info.value) == message


def test_unknown_sorts_names_of_several_types():
    assert str(unknown("group", "b", [2, "a"], "-e")) == ("-e: unknown group 'b'. Known: 2, a.")  # type: ignore[list-item]


def test_all_mistakes_are_reported_at_once():
    assert mistake({"loop": {"steps": "x", "rat": 1}, "label": 2}).splitlines() == [
        "copy_lr[2].loop.steps: expected int, got 'x' (str).",
        "copy_lr[2].loop: unknown key 'rat'. Did you mean 'rate'? Known: betas, rate, schedule, steps, warm.",
        "copy_lr[2].label: expected str, got 2 (int).",
    ]


def test_a_long_value_is_cut():
    text = mistake({"loop": {"steps": "x" * 500}})
    assert len(text) < 120
    assert "xxx... (str)" in text


def test_an_int_is_taken_for_a_float_and_nothing_else_is_changed():
    loop = load(Loop, {"steps": 1, "rate": 1}, "here")
    assert type(loop.rate) is float
    assert type(loop.steps) is int


def test_configs_are_frozen():
    loop = load(Loop, {"steps": 1}, "here")
    with pytest.raises(ValidationError, match="frozen"):
        loop.steps = 2


def test_unknown_names_the_nearest_and_all():
    assert str(unknown("group", "crosattn", ["crossattn", "lm"], "-e")) == (
        "-e: unknown group 'crosattn'. Did you mean 'crossattn'? Known: crossattn, lm."
    )
    assert str(unknown("group", "x", [], "-e")) == "-e: unknown group 'x'. Known: none."


def test_a_long_list_is_not_printed():
    names = [f"group_{n:03}" for n in range(170)]
    close = str(unknown("group", "crossatn", [*names, "crossattn"], "-e", "`list`"))
    assert close == "-e: unknown group 'crossatn'. Did you mean 'crossattn'?"
    several = str(unknown("group", "group_1", names, "-e", "`list`"))
    assert sum(name in several for name in names) == 3
    assert str(unknown("group", "zzz", names, "-e", "`list`")) == "-e: unknown group 'zzz'. Known: 170, see `list`."
    assert sum(name in str(unknown("group", "zzz", names, "-e")) for name in names) == 3
    at_most = str(unknown("group", "zzz", names[:40], "-e", "`list`"))
    assert all(name in at_most for name in names[:40])


@pytest.mark.parametrize(
    ("loc", "path"),
    [
        ((), ""),
        (("a",), "a"),
        (("a", "b"), "a.b"),
        (("a", 0, "b"), "a[0].b"),
        ((0, 1), "[0][1]"),
        (("a", 0, 1), "a[0][1]"),
    ],
)
def test_dotted(loc: tuple[int | str, ...], path: str):
    assert dotted_path(loc) == path


@pytest.mark.parametrize(
    ("head", "tail", "path"),
    [("a", "b", "a.b"), ("a", "", "a"), ("", "b", "b"), ("a", "[0].b", "a[0].b"), ("", "", "")],
)
def test_join(head: str, tail: str, path: str):
    assert join(head, tail) == path


# Parts: a table of their own, whose modules are made in the test


class Leaf(Component):
    width: float = Field(default=1.0, gt=0)
    note: str | None = None


@pytest.fixture
def things(monkeypatch: pytest.MonkeyPatch) -> ComponentTable:
    """Two entries: a leaf, and a wrapper whose `base` is again one of the two."""
    table = ComponentTable("thing", {"leaf": "made_leaf", "wrap": "made_wrap"})

    Thing = Annotated[
        Component, PlainValidator(partial(bind, table)), PlainSerializer(resolved_dict)
    ]  # as src/experiments/interfaces.py does it

    class Wrap(Component):
        base: Thing
        parts: list[Thing] = []
        rank: int = Field(default=8, gt=0)

    for name, cls in (("made_leaf", Leaf), ("made_wrap", Wrap)):
        module = ModuleType(name)
        vars(module)["Config"] = cls
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(cls, "__module__", name)
    monkeypatch.setattr(registry, "TABLES", (*registry.TABLES, table))
    return table


def problems(table: ComponentTable, raw: Any) -> list[tuple[str, str]]:
    with pytest.raises(config.Problems) as error_info:
        bind(table, raw)
    return error_info.value.problems


def test_a_component_is_its_config_and_knows_its_name(things: ComponentTable):
    part = bind(things, {"name": "wrap", "base": {"name": "leaf", "width": 2}, "rank": 4})
    assert (part.name, part.base.name, part.base.width) == ("wrap", "leaf", 2.0)


def test_a_component_can_be_passed_as_an_object(things: ComponentTable):
    part = bind(things, {"name": "leaf"})
    assert bind(things, part) is part


@pytest.mark.parametrize(
    ("raw", "expected_problems"),
    [
        ({}, [("name", "missing. Known: leaf, wrap.")]),
        ("leaf", [("", "expected a dict with 'name', got 'leaf' (str).")]),
        (None, [("", "expected a dict with 'name', got None (NoneType).")]),
        ({"name": "leav"}, [("name", "unknown thing 'leav'. Did you mean 'leaf'? Known: leaf, wrap.")]),
        ({"name": 3}, [("name", "expected str, got 3 (int).")]),
        ({"name": ["leaf"]}, [("name", "expected str, got ['leaf'] (list).")]),
        ({"name": "wrap"}, [("base", "missing. It has no default, so write it.")]),
        (
            {"name": "wrap", "base": {"name": "leaf", "width": 0}},
            [("base.width", "expected a number > 0.0, got 0 (int).")],
        ),
        (
            {"name": "wrap", "base": {"name": "leef"}},
            [("base.name", "unknown thing 'leef'. Did you mean 'leaf'? Known: leaf, wrap.")],
        ),
        (
            {"name": "wrap", "base": {"name": "wrap", "base": {"name": "leaf", "widht": 1}}},
            [("base.base", "unknown key 'widht'. Did you mean 'width'? Known: note, width.")],
        ),
        (
            {"name": "wrap", "base": {"name": "leaf"}, "parts": [{"name": "leaf"}, {"name": "leaf", "note": 1}]},
            [("parts[1].note", "expected str, got 1 (int).")],
        ),
        (
            {"name": "wrap", "rank": "x", "base": {"name": "leaf", "width": 0, "note": 2}},
            [
                ("base.width", "expected a number > 0.0, got 0 (int)."),
                ("base.note", "expected str, got 2 (int)."),
                ("rank", "expected int, got 'x' (str)."),
            ],
        ),
    ],
)
def test_mistakes_in_components_have_full_paths(
    things: ComponentTable, raw: Any, expected_problems: list[tuple[str, str]]
):
    assert problems(things, raw) == expected_problems


def test_resolved_writes_every_default(things: ComponentTable):
    raw = {"name": "wrap", "base": {"name": "leaf", "width": 2}}
    full = {"name": "wrap", "base": {"name": "leaf", "width": 2.0, "note": None}, "parts": [], "rank": 8}
    assert resolved_dict(bind(things, raw)) == full
    assert resolved_dict(bind(things, full)) == full


def test_canonical_spells_ints_as_floats_where_the_config_says_float(things: ComponentTable):
    raw = {
        "name": "wrap",
        "base": {"name": "leaf", "width": 2},
        "parts": [{"name": "leaf"}, {"name": "leaf", "width": 3}],
        "rank": 4,
    }
    canonical = canonical_dict(raw, bind(things, raw))
    assert canonical == raw
    assert repr(canonical) == repr(raw).replace("'width': 2", "'width': 2.0").replace("'width': 3", "'width': 3.0")
    assert canonical_dict(canonical, bind(things, canonical)) == canonical


def test_canonical_reaches_lists_dicts_and_options():
    raw = {
        "loop": {"steps": 1, "betas": [0, 1]},
        "maybe": {"steps": 2, "rate": 1},
        "names": {"a": 1},
        "loops": [{"steps": 1, "rate": 0}],
    }
    assert repr(canonical_dict(raw, load(Outer, raw, "here"))) == repr(
        {
            "loop": {"steps": 1, "betas": [0.0, 1.0]},
            "maybe": {"steps": 2, "rate": 1.0},
            "names": {"a": 1.0},
            "loops": [{"steps": 1, "rate": 0.0}],
        }
    )


def test_an_experiment_is_named_in_its_mistakes():
    with pytest.raises(
        ConfigError, match=r"^nq\[1\].recipe: unknown recipe 'crosattn'. Did you mean 'crossattn'\? Known: .*crossattn"
    ):
        load_experiment({"recipe": "crosattn"}, "nq[1]")
    with pytest.raises(ConfigError, match=r"^nq\[1\].recipe: missing. Known: "):
        load_experiment({}, "nq[1]")
    with pytest.raises(ConfigError, match=r"^nq\[1\]: expected a dict with 'recipe', got 3 \(int\)."):
        load_experiment(3, "nq[1]")  # pyright: ignore[reportArgumentType]
