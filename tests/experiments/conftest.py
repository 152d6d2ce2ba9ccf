"""A recipe of two fields, for tests that need a registered one and nothing that it does."""

from pathlib import Path

import pytest

from src.registry import RECIPES

TOY = """
import src.config


class Config(src.config.Config):
    seed: int
    rate: float = 0.5


def run(config, run):
    return config.rate * config.seed
"""


@pytest.fixture
def toy_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the recipe "toy"."""
    (tmp_path / "toy_recipe_for_tests.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(RECIPES.modules, "toy", "toy_recipe_for_tests")  # type: ignore[arg-type]
