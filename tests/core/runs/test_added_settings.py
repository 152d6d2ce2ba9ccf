"""Runs that were made before a setting was added are opened after it."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import PlainSerializer

from src.errors import RunError
from src.experiments.config import Config, added_field
from src.files import read_json
from src.runs.run_dir import RunDir

EXP: dict[str, Any] = {"recipe": "toy", "seed": 0}
BEFORE: dict[str, Any] = {
    "recipe": "toy",
    "rate": 0.5,
    "parts": [{"name": "leaf", "width": 2}],
    "by_name": {"a": {"width": 1}},
    "stop": None,
}


class Leaf(Config):
    width: int = 2
    is_turned: bool = added_field(False)


class Stop(Config):
    after: int = 3


class Toy(Config):
    rate: float = 0.5
    parts: list[Annotated[Leaf, PlainSerializer(lambda leaf: {"name": "leaf", **leaf.model_dump()})]] = [Leaf()]
    by_name: dict[str, Leaf] = {"a": Leaf(width=1)}
    stop: Stop | None = None
    later: Stop = added_field(Stop())


def resolved(recipe: Config) -> dict[str, Any]:
    return {"recipe": "toy", **recipe.model_dump(mode="json")}


def reopen(runs: Path, recipe: Config) -> dict[str, Any]:
    """Open the run of EXP with `recipe`; returns its config.json."""
    with RunDir.open(runs, EXP, resolved(recipe), recipe=recipe) as run:
        return read_json(run.path / "config.json", RunError)


@pytest.mark.parametrize("state", ["stopped", "done"])
def test_a_run_resumes_without_settings_added_after_its_start(tmp_path: Path, state: Any):
    with RunDir.open(tmp_path, EXP, BEFORE) as run:
        run.set_status(state, step=3)
    assert reopen(tmp_path, Toy()) == BEFORE
    with RunDir.open(tmp_path, EXP, resolved(Toy()), recipe=Toy()) as run:
        assert run.status()["state"] == ("done" if state == "done" else "running")


def test_a_changed_default_is_refused_next_to_an_added_setting(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, BEFORE):
        pass

    class Changed(Toy):
        rate: float = 0.25

    with pytest.raises(RunError, match=r"started with different defaults: rate was 0\.5, is now 0\.25\. To resume it"):
        reopen(tmp_path, Changed())


def test_an_added_setting_that_says_something_else_is_refused(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, BEFORE):
        pass
    with pytest.raises(RunError, match=r"by_name\.a\.is_turned was absent, is now true"):
        reopen(tmp_path, Toy(by_name={"a": Leaf(width=1, is_turned=True)}))


def test_a_setting_that_is_not_declared_as_added_is_refused(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, BEFORE):
        pass

    class Careless(Toy):
        careless: bool = False

    with pytest.raises(RunError, match="careless was absent, is now false"):
        reopen(tmp_path, Careless())


def test_recorded_values_of_added_settings_are_compared(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, {**resolved(Toy()), "later": {"after": 4}}):
        pass
    with pytest.raises(RunError, match=r"later\.after was 4, is now 3"):
        reopen(tmp_path, Toy())
