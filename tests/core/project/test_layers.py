"""Arrows point down: which module may import which, what may be imported at all, and where."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from src.experiments.registry import RECIPES, TABLES
from tests.conftest import ROOT

# Each layer may import itself and those of the levels above it in this list, never a neighbour of its own level.
# A module belongs to the longest of these names that it starts with.
LEVELS: list[set[str]] = [
    {"src.support.missing_package"},
    {"src.errors", "src.experiments.batches", "src.support.read_cache", "src.__init__"},
    {"src.support.parsing", "src.support.renaming"},
    {"src.files", "src.support.command_line", "src.support.served_page", "src.support.torch_settings"},
    {
        "src.experiments.config",
        "src.support.distributed",
        "src.support.flops",
        "src.experiments.kinds",
        "src.support.patterns",
        "src.support.weights",
    },
    {"src.support.call_once", "src.runs.history.log_rules", "src.experiments.registry"},
    {"src.experiments.interfaces"},
    {"src.experiments", "src.evaluation.metrics"},
    {"src.runs"},
    {"src.data.orders"},
    {"src.tables", "src.training", "src.models", "src.launch"},
    {"src.evaluation", "src.data", "src.sweeps", "src.operations"},
    {"src.recipes", "src.serving"},
    {"src.systems"},
    {"data_prep", "results"},
    {"trainval", "exp_configs", "job_configs"},
]
# What a level allows and a layer must do without: data knows neither models nor loops, an experiment names models and
# metrics.
NOT = {
    "src.evaluation.metrics": {"src.support.distributed", "src.support.weights"},
    "src.experiments.interfaces": {"src.support.distributed", "src.support.weights", "src.files"},
    "src.data": {"src.tables", "src.training", "src.models", "src.launch"},
    "src.operations": {"src.training", "src.models"},
    "src.sweeps": {"src.training", "src.models"},
    "src.recipes": {"src.models", "src.launch", "src.tables", "src.sweeps", "src.operations"},
    "src.systems": {"src.launch", "src.tables", "src.sweeps", "src.operations"},
    "data_prep": {"src.training", "src.evaluation", "src.launch", "src.runs", "src.recipes", "src.serving"},
    "results": {"src.training", "src.models", "src.data", "src.recipes", "src.serving"},
    "trainval": {
        f"src.{name}" for name in ["training", "models", "data", "evaluation", "recipes", "serving", "systems"]
    },
    "exp_configs": {layer for level in LEVELS for layer in level if layer not in ("src.experiments", "src.systems")},
    "job_configs": {layer for level in LEVELS for layer in level},
}
NEIGHBOURS = {"trainval": {"exp_configs", "job_configs"}}
OUTSIDE = {"tests", "benchmarks"}  # these may import anything
SHORT = {
    "src.systems.crossattn.demo": "found by its name",
    "src.__init__": "the first import of every command",
    "src.support.missing_package": "the hook of that import",
    "src.support.patterns": "one idea, which expressions and rewards share",
    "src.experiments.kinds": "kinds and sizes, which interfaces and models both need",
    "src.training.seeds": "found by its name",
    "src.systems.crossattn.model.kv_cache": "found by its name",
    "src.systems.crossattn.data.row_index": "one format of file",
}
"""Modules under 40 lines that are no entry of the registry, and why each is a file."""
MOST_LINES, MOST_ENTRIES, LEAST_LINES = 470, 16, 40
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "custom", "v2"}
NO_FUNCTION_NAMES = re.compile(
    "about|alike|alone|apart|at|begun|by|chosen|cut|do|done|drawn|found|given|gone|held|in|kept|known|laid|left|made|most|must|of|on|put"
    "|rest|said|same|seen|sent|set|shown|spoken|taken|told|what|where|which|who|whose|written|(?!seed|feed|embed)[a-z]+ed"
)
"""What is no name of a function by itself, as it does not say what the function does or returns."""
HEAVY = {"torch", "transformers", "accelerate", "numpy", "pandas", "matplotlib", "rich", "wandb", "datasets"}


def allowed_by_level() -> dict[str, set[str]]:
    """layer -> the layers that it may import besides itself."""
    allowed, above = {}, set[str]()
    for level in LEVELS:
        allowed |= {layer: (above - NOT.get(layer, set())) | NEIGHBOURS.get(layer, set()) for layer in level}
        above |= level
    return allowed


ALLOWED = allowed_by_level()
LAYERS = sorted(ALLOWED, key=len, reverse=True)
RECIPE_MODULES = tuple(RECIPES.modules.values())
"""What several recipes share lies beside them, in files that are no recipe."""


@cache
def sources() -> dict[str, Path]:
    """Dotted module name -> path of each Python file that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = [Path(name) for name in listing.split("\0") if name and (ROOT / name).exists()]
    return {".".join(path.with_suffix("").parts): ROOT / path for path in paths if path.parts[0] != ".ci"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def ours(module: str) -> bool:
    return module.partition(".")[0] not in OUTSIDE


def imports(module: str, parsed: ast.Module) -> Iterator[tuple[str, int]]:
    """Every dotted name imported anywhere in a file, inside functions too, with its line."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def layer_of(name: str) -> str | None:
    """The layer that a dotted name belongs to, or None for what is not ours."""
    known = next((layer for layer in LAYERS if f"{name}.".startswith(f"{layer}.")), None)
    parts = name.split(".")
    return known or (".".join(parts[:2]) if parts[0] == "src" else parts[0] if parts[0] in OUTSIDE else None)


def system_of(name: str) -> str | None:
    """The training system that a dotted name belongs to, None for the core."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["src", "systems"] and len(parts) > 2 else None


def upward(module: str, parsed: ast.Module) -> list[str]:
    """The imports of a file that its layer may not make, as messages."""
    layer = layer_of(module)
    if layer not in ALLOWED:
        return [f"{module}: is in no layer. Put it in one, or add the layer to LEVELS and design it."]
    allowed = ALLOWED[layer] | {layer}
    wrong = []
    for name, line in imports(module, parsed):
        within = layer_of(name) in allowed
        other_recipe = any(f"{name}.".startswith(f"{recipe}.") for recipe in RECIPE_MODULES if recipe != module)
        other_system = system_of(module) and system_of(name) not in (None, system_of(module))
        if layer_of(name) is not None and (not within or other_recipe or other_system):
            wrong.append(f"{module}:{line}: may not import {name}")
    return wrong


def test_arrows_point_down():
    wrong = [message for module, path in sources().items() if ours(module) for message in upward(module, tree(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("src.models.x", "from src.training import loop", "src.models.x:1: may not import src.training.loop"),
        ("src.models.x", "def f():\n    import src.training.loop", "src.models.x:2: may not import src.training.loop"),
        ("src.models.x", "from src import data", "src.models.x:1: may not import src.data"),
        ("src.models.x", "from ..recipes import lm", "src.models.x:1: may not import src.recipes.lm"),
        ("src.recipes.x", "from src.recipes.lm import run", "src.recipes.x:1: may not import src.recipes.lm.run"),
        ("src.errors", "import src.files", "src.errors:1: may not import src.files"),
        (
            "src.experiments.config",
            "from src.support.distributed import rank",
            "src.experiments.config:1: may not import src.support.distributed.rank",
        ),
        ("exp_configs", "from src.runs import scores", "exp_configs:1: may not import src.runs.scores"),
        ("src.data.x", "from src.training import loss", "src.data.x:1: may not import src.training.loss"),
        ("src.launch.x", "from src.models import hf", "src.launch.x:1: may not import src.models.hf"),
        ("job_configs", "import src.launch.local.launcher", "job_configs:1: may not import src.launch.local.launcher"),
        ("src.tables.x", "import src.systems.t5.y", "src.tables.x:1: may not import src.systems.t5.y"),
        ("src.systems.t5.x", "import src.systems.metadata", "src.systems.t5.x:1: may not import src.systems.metadata"),
        ("src.data.x", "import tests.conftest", "src.data.x:1: may not import tests.conftest"),
        ("src.novelty.x", "import os", "src.novelty.x: is in no layer"),
    ],
)
def test_an_import_from_a_higher_layer_is_reported(module: str, code: str, expected: str):
    assert [message for message in upward(module, ast.parse(code)) if message.startswith(expected)]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("src.models.x", "from src.errors import ConfigError\nfrom src.models import y\nimport torch"),
        ("exp_configs", "from src.experiments.grid import grid, ref"),
        ("src.recipes.x", "from src.training import loop"),
        ("src.systems.t5.x", "from src.systems.t5 import y"),
        ("trainval", "from src.support import distributed"),
    ],
)
def test_an_arrow_that_points_down_is_not(module: str, code: str):
    assert upward(module, ast.parse(code)) == []


LIGHT_PROBE = """
import importlib, sys
modules = sys.argv[1].split(",")
heavy = sys.argv[2].split(",")
for module in modules:
    importlib.import_module(module)
    loaded = [name for name in heavy if name in sys.modules]
    if loaded:
        raise SystemExit(f"importing {module} loads {', '.join(loaded)}")
"""


LIGHT = tuple(f"src.{room}." for room in ("experiments", "runs", "tables", "launch", "sweeps", "operations"))


def light_modules() -> list[str]:
    listed = {module for table in TABLES for module in table.modules.values()}
    named = {m for m in sources() if m.startswith(LIGHT) or m in {"trainval", "exp_configs", "job_configs"}}
    return sorted(listed | named | {"src.experiments.registry"})


def test_the_command_line_loads_nothing_heavy():
    """Also holds for every module that an experiment can name: they import torch when their verb is called."""
    command = [sys.executable, "-c", LIGHT_PROBE, ",".join(light_modules()), ",".join(sorted(HEAVY))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def only_in(pattern: set[str], allowed: set[str]) -> list[str]:
    """Places outside the `allowed` modules that import one of the packages in `pattern`."""
    return [
        f"{module}:{line}: imports {name}"
        for module, path in sources().items()
        if ours(module) and module not in allowed
        for name, line in imports(module, tree(path))
        if name.split(".")[0] in pattern
    ]


def test_wandb_is_spoken_to_in_one_file():
    assert not only_in({"wandb"}, {"src.training.monitoring.wandb"})


def test_pickles_are_written_and_read_in_one_file():
    """Elsewhere only the error that torch.load may raise is named."""
    found = only_in({"dill", "cloudpickle", "joblib"}, set())
    for module, path in sources().items():
        used = {name for name, _ in imports(module, tree(path)) if name.startswith("pickle.")}
        used |= {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        if ours(module) and module != "src.runs.scores":
            found += [f"{module}: {name}" for name in used if re.fullmatch(r"pickle\.(?!UnpicklingError)\w+", name)]
    assert not found


def test_src_prints_nothing():
    calls = [
        f"{module}:{node.lineno}"
        for module, path in sources().items()
        if module.startswith("src.")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not calls, "use logging"


def test_one_file_reads_the_ranks():
    """environment.py only writes them down for the record."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    readers = [
        f"{module}:{node.lineno}: {node.value}"
        for module, path in sources().items()
        if ours(module) and module not in {"src.support.distributed", "src.runs.environment"}
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not readers, "ask src/support/distributed.py"


def test_no_broad_except_without_a_reason():
    reason = re.compile(r"# noqa: BLE001\s{2,}\S")
    broad = []
    for module, path in sources().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        handlers = [
            node
            for node in ast.walk(tree(path))
            if isinstance(node, ast.ExceptHandler) and ours(module) and is_broad(node)
        ]
        broad += [
            f"{module}:{h.lineno}: {lines[h.lineno - 1].strip()}"
            for h in handlers
            if not reason.search(lines[h.lineno - 1])
        ]
    assert not broad, "\n".join(broad)


def is_broad(handler: ast.ExceptHandler) -> bool:
    """True for a handler that takes every error and does not end by raising it again, or another from it."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    every = any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}) for kind in caught
    )
    last = handler.body[-1]
    again = isinstance(last, ast.Raise) and (
        last.exc is None or (isinstance(last.cause, ast.Name) and last.cause.id == handler.name)
    )
    return every and not again


def test_file_names_are_specific():
    vague = [
        str(path.relative_to(ROOT))
        for path in sources().values()
        if FORBIDDEN_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not vague


def vague_functions(module: str, parsed: ast.Module) -> list[str]:
    """The functions whose whole name is a participle, a preposition or a pronoun. A property may be one:
    `writer.failed`."""
    functions = [node for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef)]
    functions = [
        f for f in functions if not any(ast.unparse(decorator).endswith("property") for decorator in f.decorator_list)
    ]
    return [
        f"{module}:{f.lineno}: {f.name}"
        for f in functions
        if NO_FUNCTION_NAMES.fullmatch(f.name.strip("_")) and not f.name.startswith("__")
    ]


def test_functions_are_verbs_or_nouns():
    wrong = [line for module, path in sources().items() if ours(module) for line in vague_functions(module, tree(path))]
    assert not wrong, "name these by a verb, or by a noun of what they return:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def told(): ...", ["m:1: told"]),
        ("class A:\n    def _joined(self): ...", ["m:2: _joined"]),
        ("def seed(): ...\ndef feed(): ...\ndef joined_rows(): ...", []),
        ("class A:\n    @property\n    def failed(self): ...", []),
    ],
)
def test_vague_names_are_found(code: str, found: list[str]):
    assert vague_functions("m", ast.parse(code)) == found


def test_every_module_opens_with_one_line():
    without = [module for module, path in sources().items() if not (ast.get_docstring(tree(path)) or "").strip()]
    assert not without


def test_folders_stay_small():
    entries: dict[Path, set[str]] = {}
    for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        parts = Path(path).parts
        for depth in range(1, len(parts)):
            entries.setdefault(Path(*parts[:depth]), set()).add(parts[depth])
    crowded = {
        str(folder): len(names)
        for folder, names in entries.items()
        if folder.parts[0] in {"src", "data_prep", "results", "tests", "benchmarks"}
        and len(names - {"__init__.py"}) > MOST_ENTRIES
    }
    assert not crowded, "put what belongs together into a folder"


def test_a_file_is_an_idea_neither_a_crumb_nor_a_heap():
    lines = {
        module: path.read_text(encoding="utf-8").count("\n")
        for module, path in sources().items()
        if module.startswith("src.")
    }
    entries = {module for table in TABLES for module in table.modules.values()}
    short = {module for module, count in lines.items() if count < LEAST_LINES} - entries
    assert short == SHORT.keys(), "fold it into the file that uses it, or give the reason in SHORT"
    assert not {module: count for module, count in lines.items() if count > MOST_LINES}


def test_no_module_imports_itself_in_a_circle():
    """At import; a function may import what imports its module."""
    modules = {module for module in sources() if ours(module)}
    needs = {
        module: {name for name in imported_at_import(sources()[module]) if name in modules and name != module}
        for module in modules
    }
    while free := {module for module, others in needs.items() if not others}:
        needs = {module: others - free for module, others in needs.items() if module not in free}
    assert not needs


def imported_at_import(path: Path) -> Iterator[str]:
    """Every dotted name that a module may import when it is imported itself."""
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MISSPELT = """
from src.experiments.config import Places
from src.experiments.interfaces import DatasetConfig


def check(data: DatasetConfig, places: Places, tokenizer) -> None:
    data.chekc(places)
    data.build(places, tokenizer, "val", 0).smaple(0, 0)
"""


def test_a_misspelt_verb_is_a_type_error(tmp_path: Path):
    (tmp_path / "misspelt.py").write_text(MISSPELT)
    settings = {
        "include": [str(tmp_path)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.search(
        r'misspelt\.py:7:\d+ - error: Cannot access attribute "chekc" for class "DatasetConfig"', done.stdout
    ), done.stdout
    assert re.search(
        r'misspelt\.py:8:\d+ - error: Cannot access attribute "smaple" for class "Dataset"', done.stdout
    ), done.stdout
    assert "2 errors" in done.stdout
