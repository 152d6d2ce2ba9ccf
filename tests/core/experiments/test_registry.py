"""Both ways: every line of the registry leads to a component of its interface, and every such component has its
line."""

import ast
import contextlib
import inspect
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from src.errors import DataError
from src.experiments import interfaces, registry
from src.experiments.config import Config, Places, Problems
from src.experiments.registry import TABLES, ComponentTable
from src.files import new_directory
from src.launch.job import LauncherConfig
from src.support.call_once import call_once, remember_calls
from src.systems.assistants.rewards.interface import RewardConfig

ROOT = Path(__file__).resolve().parents[3]
INTERFACES: dict[str, type[Config]] = {
    "recipe": interfaces.RecipeConfig,
    "model": interfaces.ModelConfig,
    "dataset": interfaces.DatasetConfig,
    "metric": interfaces.MetricConfig,
    "reward": RewardConfig,
    "launcher": LauncherConfig,
}
LINES = [(table, name) for table in TABLES for name in table.modules]


@cache
def trees() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module of src."""
    paths = [path for path in sorted((ROOT / "src").rglob("*.py")) if not path.name.startswith(".")]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
    }


@pytest.mark.parametrize(("table", "name"), LINES, ids=[f"{table.kind}-{name}" for table, name in LINES])
def test_every_line_leads_to_a_config_of_its_interface(table: ComponentTable, name: str):
    cls = import_module(table.modules[name]).Config
    assert issubclass(cls, INTERFACES[table.kind])
    assert not inspect.isabstract(cls), f"lacks {', '.join(cls.__abstractmethods__)}"
    assert cls.__module__ == table.modules[name]


@pytest.mark.parametrize("table", TABLES, ids=[table.kind for table in TABLES])
def test_every_config_of_an_interface_has_its_line(table: ComponentTable):
    folders = (
        ["src/launch"]
        if table.kind == "launcher"
        else ["src/recipes", "src/models", "src/data", "src/evaluation", "src/systems"]
    )
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    configs = [getattr(import_module(module), "Config", None) for module in modules if not module.endswith("__main__")]
    components = [
        cls for cls in configs if cls and issubclass(cls, INTERFACES[table.kind]) and not inspect.isabstract(cls)
    ]
    assert {cls.__module__ for cls in components} == set(table.modules.values())


def test_a_module_has_one_name():
    modules = [module for table in TABLES for module in table.modules.values()]
    assert len(modules) == len(set(modules))


def config_fields() -> Iterator[tuple[str, str, str]]:
    """(module, class, field) of every field of every Config class in src."""
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(parent).split(".")[-1].endswith("Config") for parent in node.bases
            ):
                for line in node.body:
                    if (
                        isinstance(line, ast.AnnAssign)
                        and isinstance(line.target, ast.Name)
                        and "ClassVar" not in ast.unparse(line.annotation)
                    ):
                        yield module, node.name, line.target.id


def reads(tree: ast.Module, excluded_name: str | None) -> set[str]:
    """Attribute names read in a module, but for the checks of the class called `excluded`."""
    names: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef) and node.name == excluded_name:
            waiting.extend(
                part
                for part in node.body
                if "validator" not in "".join(map(ast.unparse, getattr(part, "decorator_list", [])))
            )
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        waiting.extend(ast.iter_child_nodes(node))
    return names


def unread(fields: Iterator[tuple[str, str, str]]) -> list[str]:
    elsewhere = {module: reads(tree, None) for module, tree in trees().items()}
    for path in (ROOT / "data_prep").rglob("*.py"):  # reads fields of tasks
        elsewhere[str(path)] = reads(ast.parse(path.read_text(encoding="utf-8")), None)
    wrong = []
    for module, cls, field in fields:
        at_home = reads(trees()[module], cls)
        if not any(field in (at_home if name == module else names) for name, names in elsewhere.items()):
            wrong.append(f"{module}.{cls}.{field}")
    return wrong


@pytest.mark.slow
def test_every_config_field_is_read():
    assert list(config_fields())
    names_of_versions = ["src.recipes.training_recipe.TrainingRecipe.variant"]
    assert unread(config_fields()) == names_of_versions, "a setting that nothing reads would be ignored"


@pytest.mark.slow
def test_a_field_that_nothing_reads_is_found():
    assert unread(iter([("src.launch.local.launcher", "Config", "never_read_anywhere")])) == [
        "src.launch.local.launcher.Config.never_read_anywhere"
    ]


def test_fields_are_found():
    assert ("src.launch.local.launcher", "Config", "slots") in set(config_fields())


def test_equal_components_are_called_once_within_a_block(tmp_path: Path):
    with new_directory(tmp_path / "corpus") as folder:
        for split in ("train", "val"):
            (folder / f"{split}.jsonl").write_text('{"text": "a", "source": "b"}\n')
    places = Places(tmp_path, tmp_path)
    first, second = (
        registry.bind(registry.DATASETS, {"name": "text", "corpus": "corpus", "sequence_tokens": 2}) for _ in range(2)
    )
    with remember_calls():
        call_once(first.check, places)
        shutil.rmtree(tmp_path / "corpus")
        call_once(second.check, places)
    with pytest.raises(DataError, match="no such data set"):
        second.check(places)


def test_parts_that_mixtures_share_are_read_once_below_the_top_level(tmp_path: Path):
    """A dry run of three mixtures around one equal part opens each file of that part as often as a dry run of one."""
    with new_directory(tmp_path / "corpus") as folder:
        for split in ("train", "val"):
            (folder / f"{split}.jsonl").write_text('{"text": "a", "source": "b"}\n')
    places = Places(tmp_path, tmp_path)
    part = {"name": "text", "corpus": "corpus", "sequence_tokens": 2}
    bodies = [{"parts": {"shared": part}, "temperature": float(number)} for number in (1, 2, 3)]
    mixtures = [registry.bind(registry.DATASETS, {"name": "mixture", **body}) for body in bodies]
    opened_files: list[str] = []
    sys.addaudithook(
        lambda event, args: (
            opened_files.append(str(args[0])) if event == "open" and str(tmp_path) in str(args[0]) else None
        )
    )

    def count(components: list[interfaces.DatasetConfig], memory: contextlib.AbstractContextManager[None]) -> int:
        opened_files.clear()
        with memory:
            for component in components:
                call_once(component.check, places)
        return len(opened_files)

    once = count(mixtures[:1], remember_calls())
    assert once
    assert count(mixtures, remember_calls()) == once
    assert count(mixtures, contextlib.nullcontext()) == 3 * once


class Foreign(Config):
    """Of no table."""


def test_a_component_without_a_line_has_no_name():
    with pytest.raises(
        LookupError, match=r"^tests\.core\.experiments\.test_registry is in no table of src/experiments/registry\.py$"
    ):
        registry.name_of(Foreign())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_a_config_of_another_table_is_refused(table: ComponentTable):
    other = Foreign() if table is registry.LAUNCHERS else registry.bind(registry.LAUNCHERS, {"name": "local"})
    for foreign in (Foreign(), other):
        with pytest.raises(Problems) as error_info:
            registry.bind(table, foreign)
        ((path, message),) = error_info.value.problems
        assert path == ""
        assert message.startswith("expected a dict with 'name', got ")
