"""Grids: which experiments come out, in which order, sharing nothing."""

import re
import shlex

import pytest

from src.errors import ConfigError
from src.experiments.grid import (
    BrokenGroup,
    deferred_errors,
    grid,
    parse_assignment,
    parse_assignments,
    ref,
    seeds,
    set_path,
    zip_axes,
)
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import canonical_dict
from tests import toy

BASE = {"recipe": "r", "seed": 0, "model": {"stride": 1, "sizes": [1, 2]}}


def test_grid_is_the_product_with_the_last_axis_fastest():
    experiments = grid(BASE, {"model.stride": [1, 2], "seed": [0, 1, 2]})
    assert [(e["model"]["stride"], e["seed"]) for e in experiments] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert all(e["recipe"] == "r" and e["model"]["sizes"] == [1, 2] for e in experiments)


def test_grid_selects_experiments_by_where():
    assert [e["seed"] for e in grid(BASE, {"seed": [0, 1, 2, 3]}, where=lambda e: e["seed"] % 2 == 1)] == [1, 3]
    assert grid(BASE, {}) == [BASE]


def test_a_list_stays_a_list_and_nothing_is_shared():
    value = [3, 4]
    first, second = grid(BASE, {"model.sizes": [value], "seed": [0, 1]})
    first["model"]["sizes"].append(5)
    assert second["model"]["sizes"] == [3, 4] == value
    assert BASE["model"]["sizes"] == [1, 2]


def test_a_dict_value_can_be_refined_by_a_later_axis():
    experiments = grid(BASE, {"model": [{"stride": 0, "depth": 9}], "model.stride": [5, 6]})
    assert [e["model"] for e in experiments] == [{"stride": 5, "depth": 9}, {"stride": 6, "depth": 9}]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"model.strid": [1]}, r"^model: unknown key 'strid'\. Did you mean 'stride'\? Known: sizes, stride\.$"),
        ({"sed": [1]}, r"unknown key 'sed'\. Did you mean 'seed'\?"),
        ({"seed.x": [1]}, r"^seed\.x: seed is 0, not a dict"),
        ({"model..stride": [1]}, r"'model\.\.stride': expected keys joined by single dots"),
        ({"seed": []}, r"^grid: seed: an axis without values"),
        ({"recipe": "lm"}, r"^grid: recipe: expected a list of values, got 'lm' \(str\)"),
        ({"model.stride": [1], "model": [{}]}, r"^grid: model: it would overwrite model\.stride"),
    ],
)
def test_grid_refuses(axes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        grid(BASE, axes)


def test_zip_axes_goes_position_by_position():
    experiments = zip_axes(BASE, {"model.stride": [1, 2], "seed": [7, 8]})
    assert [(e["model"]["stride"], e["seed"]) for e in experiments] == [(1, 7), (2, 8)]
    with pytest.raises(
        ConfigError, match=r"^zip_axes: expected axes of equal length, got model\.stride: 1, seed: 2\.$"
    ):
        zip_axes(BASE, {"model.stride": [1], "seed": [7, 8]})


def test_seeds_by_number_or_by_list():
    assert [e["seed"] for e in seeds([BASE, BASE], 2)] == [0, 1, 0, 1]
    assert [e["seed"] for e in seeds([BASE], [5, 3])] == [5, 3]
    for none in (0, []):
        with pytest.raises(ConfigError, match="expected a number of seeds above 0"):
            seeds([BASE], none)


def test_set_path_adds_a_last_key_only_if_allowed():
    assert set_path(BASE, "model.depth", 3, must_exist=False)["model"] == {"stride": 1, "sizes": [1, 2], "depth": 3}
    assert "depth" not in BASE["model"]
    with pytest.raises(ConfigError, match="unknown key 'depth'"):
        set_path(BASE, "model.depth", 3, must_exist=True)
    with pytest.raises(ConfigError, match=r"unknown key 'lop'\. Did you mean 'loop'"):
        set_path(toy.BASE, "lop.steps", 3, must_exist=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20", 20),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ('"20"', "20"),
        ("[1, 2]", [1, 2]),
        ("cosine", "cosine"),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_assignments_are_json_where_they_can_be(text: str, value: object):
    assert parse_assignment(f"loop.x={text}") == ("loop.x", value)


@pytest.mark.parametrize("text", ["loop.steps", "=3", ""])
def test_an_assignment_without_path_or_value_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"^--set: expected path=value"):
        parse_assignment(text)


@pytest.mark.parametrize("value", ["[" * 100_000, "1" * 5_000])
def test_an_assignment_that_python_cannot_hold_is_refused(value: str):
    with pytest.raises(ConfigError, match=r"^--set: loop\.x: .{30}\.\.\. \(.* is nested too deeply"):
        parse_assignment(f"loop.x={value}")


@pytest.mark.parametrize("base", [None, "x", [BASE]])
def test_a_base_that_is_no_dict_is_refused(base: object):
    for make in (
        lambda b: grid(b, {"seed": [1]}),
        lambda b: grid(b, {}),
        lambda b: zip_axes(b, {"seed": [1]}),
        lambda b: seeds([b], 1),
    ):
        with pytest.raises(ConfigError, match=r"^expected a dict of an experiment, got "):
            make(base)


def test_ref_is_the_id_of_the_canonical_parent(toy_recipe: None):
    whole, decimal = ({"recipe": "toy", "seed": 0, "rate": rate} for rate in (1, 1.0))
    assert ref(whole) == ref(decimal) == {"name": "experiment", "exp_id": exp_id(decimal), "checkpoint": "last"}
    assert exp_id(canonical_dict(whole, load_experiment(whole, "x"))) == exp_id(decimal) != exp_id(whole)
    assert ref(whole, checkpoint="best")["checkpoint"] == "best"
    assert ref({**whole, "seed": 1})["exp_id"] != ref(whole)["exp_id"]


def test_ref_of_an_invalid_parent_names_the_mistake(toy_recipe: None):
    with pytest.raises(ConfigError, match=r"^ref\.rte: |^ref: unknown key 'rte'\. Did you mean 'rate'"):
        ref({"recipe": "toy", "seed": 0, "rte": 1})
    with pytest.raises(ConfigError, match=r"^ref\.rate: expected a JSON value"):
        ref({"recipe": "toy", "seed": 0, "rate": (1,)})


def test_an_axis_can_be_a_field_that_the_base_leaves_at_its_default():
    experiments = grid(toy.BASE, {"loop.weight_decay": [0.0, 0.5], "loop.early_stopping.patience": [3]})
    assert [exp["loop"]["weight_decay"] for exp in experiments] == [0.0, 0.5]
    assert [exp["loop"]["early_stopping"] for exp in experiments] == [{"patience": 3}] * 2
    assert "weight_decay" not in toy.BASE["loop"]
    assert zip_axes(toy.BASE, {"loop.weight_decay": [0.5]}) == [
        experiments[1] | {"loop": {**toy.BASE["loop"], "weight_decay": 0.5}}
    ]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"loop.weight_decai": [0.5]}, r"^loop: unknown key 'weight_decai'"),
        ({"lop.weight_decay": [0.5]}, r"^lop\.weight_decay: unknown key 'lop'\. Did you mean 'loop'\?"),
        ({"loop.weight_decay": [-1.0]}, r"^grid\.loop\.weight_decay: expected a number >= 0\.0, got -1\.0"),
    ],
)
def test_such_an_axis_is_checked_by_the_config(axes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        grid(toy.BASE, axes)


def test_a_refused_grid_breaks_only_its_own_group():
    with deferred_errors():
        group = grid(BASE, {"sed": [1]})
        whole = grid(BASE, {"seed": [1, 2]})
        around = [seeds(group, 2), whole + group, group + whole]
    assert len(whole) == 2
    assert isinstance(group, BrokenGroup)
    line = re.match(
        rf"^{re.escape(__file__)}:(\d+): unknown key 'sed'|^{re.escape(__file__)}:(\d+): sed: unknown key 'sed'",
        group.error,
    )
    assert line, group.error
    assert [each.error for each in around if isinstance(each, BrokenGroup)] == [group.error] * 3, (
        "the place where it began"
    )
    with pytest.raises(ConfigError, match="unknown key 'sed'"):
        list(group)
    with pytest.raises(ConfigError, match=r"^sed: unknown key 'sed'"):
        grid(BASE, {"sed": [1]})


@pytest.mark.parametrize(
    ("texts", "combinations"),
    [
        ([], [[]]),
        (["a=1"], [[("a", 1)]]),
        (["a=0,1,2"], [[("a", 0)], [("a", 1)], [("a", 2)]]),
        (["a=1e-3,true", "b=x"], [[("a", 0.001), ("b", "x")], [("a", True), ("b", "x")]]),
        (['a="x","y"'], [[("a", "x")], [("a", "y")]]),
        (["a=[1,2]"], [[("a", [1, 2])]]),
        (['a="x,y"'], [[("a", "x,y")]]),
        (['a="1,2"'], [[("a", "1,2")]]),
        (["a=007x"], [[("a", "007x")]]),
    ],
)
def test_numbers_between_commas_make_a_grid(texts: list[str], combinations: list):
    assert parse_assignments(texts) == combinations


@pytest.mark.parametrize(
    ("text", "several", "one", "values"),
    [
        ("tag=a,b", 'tag="a","b"', 'tag="a,b"', ["a", "b"]),
        ("x=1,.5, +2", "x=1,0.5,2", 'x="1,.5, +2"', [1, 0.5, 2]),
        ("x=True,1e-3", "x=true,1e-3", 'x="True,1e-3"', [True, 1e-3]),
        ('x="a",b', 'x="a","b"', 'x="\\"a\\",b"', ["a", "b"]),
        ("x='a','b'", 'x="a","b"', "x=\"'a','b'\"", ["a", "b"]),
        ("x=0,1,", "x=0,1", 'x="0,1,"', [0, 1]),
        ("x=[a,.5]", 'x=["a",0.5]', 'x="[a,.5]"', [["a", 0.5]]),
    ],
)
def test_commas_between_values_that_are_not_json_are_refused_with_both_spellings(
    text: str, several: str, one: str, values: list
):
    with pytest.raises(ConfigError) as error_info:
        parse_assignments([text])
    assert text.partition("=")[0] in str(error_info.value)
    assert shlex.quote(several) in str(error_info.value)
    assert shlex.quote(one) in str(error_info.value)
    assert [value for ((_, value),) in parse_assignments([several])] == values
    assert parse_assignments([one]) == [[text.partition("=")[::2]]]


@pytest.mark.parametrize(
    ("value", "spelling"),
    [
        (".5", "0.5"),
        ("+1", "1"),
        ("5.", "5.0"),
        ("-.25", "-0.25"),
        ("+1e3", "1000.0"),
        ("1_000", "1000"),
        ("01", "1"),
        ("True", "true"),
        ("None", "null"),
    ],
)
def test_a_number_that_json_spells_differently_is_refused_with_that_spelling(value: str, spelling: str):
    with pytest.raises(ConfigError) as error_info:
        parse_assignment(f"loop.x={value}")
    assert f"loop.x: {value} " in str(error_info.value)
    assert f"loop.x={spelling}" in str(error_info.value)
