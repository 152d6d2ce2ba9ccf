"""The checks of .ci/rules.py find violations; the command line loads nothing heavy; interfaces are typed."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from src.experiments.registry import TABLES
from tests.conftest import ROOT


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rules, english = load("rules"), load("english")

HEAVY = ("torch", "transformers", "accelerate", "numpy", "pandas", "matplotlib", "rich", "wandb", "datasets")
PROBE = """
import importlib, sys
for module in sys.argv[1].split(","):
    importlib.import_module(module)
    if loaded := [name for name in sys.argv[2].split(",") if name in sys.modules]:
        raise SystemExit(f"importing {module} loads {', '.join(loaded)}")
"""


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("src/models/x.py", "def f():\n    import src.training.loop", ":2: imports src.training.loop"),
        ("src/models/x.py", "from ..recipes import lm", ":1: imports src.recipes.lm"),
        ("src/recipes/x.py", "from src.recipes.lm import run", ":1: imports src.recipes.lm.run"),
        ("src/data/x.py", "from src.training import loss", ":1: imports src.training.loss"),
        ("src/tables/x.py", "import src.systems.t5.y", ":1: imports src.systems.t5.y"),
        ("src/systems/t5/x.py", "import src.systems.metadata", ":1: imports src.systems.metadata"),
        ("src/data/x.py", "import tests.conftest", ":1: imports tests.conftest"),
        ("src/novelty/x.py", "import os", ": is in no layer"),
        ("src/models/x.py", "def told(): ...", ":1: function told"),
        ("src/models/x.py", "rank = environ['RANK']", ":1: RANK"),
        ("src/models/x.py", "from src.models import hf as models", ":1: imports src.models.hf as models"),
        ("src/models/x.py", "from src.models import hf\nimport torch.nn as nn\n@property\ndef failed(): ...", None),
        ("src/recipes/x.py", "from src.training import loop", None),
        ("src/systems/t5/x.py", "from src.systems.t5 import y", None),
    ],
)
def test_a_violation_is_reported_with_its_line(path: str, code: str, expected: str | None):
    module = rules.Module(path, code)
    reported_lines = [
        *rules.layer_errors(module),
        *rules.naming_errors(module),
        *rules.alias_errors(module, {"src.models.hf"}),
    ]
    assert [message.startswith(f"{path}{expected}") for message in reported_lines] == ([True] if expected else [])


def test_a_cycle_through_an_import_in_a_function_is_reported():
    codes = {"a": "import b", "b": "def f():\n    from c import g", "c": "import a", "d": "import a"}
    modules = [rules.Module(f"{name}.py", code) for name, code in codes.items()]
    assert list(rules.cycle_errors(modules)) == ["import cycle: a, b, c"]


def test_an_import_of_types_is_no_cycle():
    codes = {"a": "import b", "b": "if TYPE_CHECKING:\n    from a import g"}
    assert not list(rules.cycle_errors([rules.Module(f"{name}.py", code) for name, code in codes.items()]))


def test_a_system_without_a_page_or_with_a_dead_path_is_reported(tmp_path: Path):
    (tmp_path / "t5").mkdir()
    assert len(list(rules.system_errors(tmp_path))) == 2
    (tmp_path / "t5" / "groups.py").touch()
    (tmp_path / "t5" / "README.md").write_text("| `groups.py`, `model/gone.py` | what |\n")
    assert [line.partition(": ")[2] for line in rules.system_errors(tmp_path)] == ["no file model/gone.py"]


def test_a_crowded_folder_is_reported():
    file_names = [f"tests/core/f{number}.py" for number in range(17)]
    assert any(line.startswith("tests/core: 17 entries") for line in rules.size_errors([], file_names))


def test_the_command_line_loads_nothing_heavy():
    """Also holds for every module that an experiment can name: they import torch when their methods are called."""
    rooms = ("experiments", "runs", "tables", "launch", "sweeps", "operations")
    light = {path for room in rooms for path in (ROOT / "src" / room).rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in light}
    names |= {module for table in TABLES for module in table.modules.values()}
    names |= {"trainval", "exp_configs", "job_configs"}
    command = [sys.executable, "-c", PROBE, ",".join(sorted(names)), ",".join(HEAVY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MISSPELT = """
from src.experiments.config import Places
from src.experiments.interfaces import DatasetConfig


def check(data: DatasetConfig, places: Places, tokenizer) -> None:
    data.chekc(places)
    data.build(places, tokenizer, "val", 0).smaple(0, 0)
"""


@pytest.mark.slow
def test_a_misspelt_method_is_a_type_error(tmp_path: Path):
    (tmp_path / "misspelt.py").write_text(MISSPELT)
    settings = {"include": [str(tmp_path)], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.findall(r'py:(\d+):\d+ - error: Cannot access attribute "(\w+)"', done.stdout) == [
        ("7", "chekc"),
        ("8", "smaple"),
    ], done.stdout


@pytest.mark.parametrize(
    ("name", "text", "hits"),
    [
        ("src/a.py", '"""Of a run: what is told is kept whole."""', {"code": 1, "docs": 0, "tests": 0, "names": 0}),
        (
            "src/a.py",
            '"""Save the complete run."""\nsaved, seed = 1, 2',
            dict.fromkeys(("code", "docs", "tests", "names"), 0),
        ),
        ("src/a.py", "def f(told):\n    self.kept = found = 1", {"code": 0, "docs": 0, "tests": 0, "names": 3}),
        ("tests/a.py", "def " + "test_it_goes_on(): ...", {"code": 0, "docs": 0, "tests": 1, "names": 0}),
        ("a.md", "It begins anew.\n\nIt restarts.", {"code": 0, "docs": 1, "tests": 0, "names": 0}),
    ],
)
def test_dialect_is_counted_by_kind(
    name: str, text: str, hits: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(english, "ROOT", tmp_path)
    messages, _ = english.check([name])
    assert {kind: len(each) for kind, each in messages.items()} == hits
