"""The examples of docs/dev/add_a_component.md run when they are put in place as written."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import toy

BLOCK = re.compile(r"```python\n# (\S.*?)\n(.*?)```", re.DOTALL)
METRIC = "src/evaluation/metrics/prefix_match.py"


def copy_project(folder: Path, exp_configs: str) -> Path:
    """As `toy.project`, with a copy of src that may be changed."""
    root = toy.project(folder, exp_configs)
    (root / "src").unlink()
    shutil.copytree(toy.ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_a_metric_and_an_experiment_as_shown(tmp_path: Path):
    blocks = dict(BLOCK.findall((toy.ROOT / "docs/dev/add_a_component.md").read_text()))
    metric, line, experiment, test = (
        blocks[name]
        for name in (
            METRIC,
            "src/experiments/registry.py",
            "exp_configs.py",
            "tests/core/evaluation/metrics/test_prefix_match.py",
        )
    )
    toy.write_data(tmp_path / "data")
    child = {**toy.CROSSATTN, "loop": {**toy.CROSSATTN["loop"], "steps": 2}}
    root = copy_project(
        tmp_path,
        "from src.experiments.grid import grid\n"
        f"BASE_TINY = {toy.BASE!r}\nCROSSATTN_TINY = {child!r}\nEXP_GROUPS = {{'base_tiny': "
        f"[BASE_TINY]}}\n{experiment}",
    )
    (root / "results").mkdir()
    for path in (toy.ROOT / "results").glob("*.py"):
        shutil.copy(path, root / "results")
    (root / METRIC).write_text(metric)
    registry = root / "src/experiments/registry.py"
    before = '        "squad": "src.evaluation.metrics.squad",\n'
    assert registry.read_text().count(before) == 1
    registry.write_text(registry.read_text().replace(before, before + line))

    (root / "test_prefix_match.py").write_text(test)
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_prefix_match.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    done = toy.run(root, ["-e", "crossattn_tiny_prefix", "--with-parents"], tmp_path)
    assert done.returncode == 0, done.stderr
    table = subprocess.run(
        [
            *(sys.executable, "-m", "results.table", str(tmp_path / "runs")),
            *("-e", "crossattn_tiny_prefix", "--json"),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert table.returncode == 0, table.stderr
    assert "prefix_match" in json.dumps(json.loads(table.stdout))


@pytest.mark.slow
def test_a_recipe_a_model_a_data_set_and_a_launcher_as_shown(tmp_path: Path):
    blocks = dict(BLOCK.findall((toy.ROOT / "docs/dev/add_a_component.md").read_text()))
    components = [
        name
        for name in blocks
        if name.startswith("src/") and name.endswith(".py") and name not in ("src/experiments/registry.py", METRIC)
    ]
    assert len(components) == 4
    toy.write_data(tmp_path / "data")
    experiment = blocks["exp_configs.py: bigrams"].replace("stdlib_tokenizer", "toy_tokenizer")
    root = copy_project(tmp_path, f"EXP_GROUPS = {{}}\n{experiment}")
    (root / "job_configs.py").write_text('JOB_CONFIGS = {"here": {"launcher": "foreground"}}\n')
    registry = (root / "src/experiments/registry.py").read_text()
    lines = blocks["src/experiments/registry.py: RECIPES, MODELS, DATASETS, LAUNCHERS"].splitlines(keepends=True)
    for table, name, line in zip(("recipe", "model", "dataset", "launcher"), components, lines, strict=True):
        module = name.removesuffix(".py").replace("/", ".")
        assert f'"{module}"' in line, "the line leads to the file"
        registry = registry.replace(f'    "{table}",\n    {{\n', f'    "{table}",\n    {{\n{line}')
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(blocks[name])
    (root / "src/experiments/registry.py").write_text(registry)

    done = toy.run(root, ["-e", "bigrams", "-j", "here"], tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (path.parent for path in (tmp_path / "runs").glob("*/scores.jsonl"))
    rows = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 4
    assert rows[-1]["val_loss"] > 0
    output = toy.run(root, ["-e", "bigrams", "-j", "here", "--job_option", "status"], tmp_path)
    assert output.returncode == 0, output.stderr
    assert "done" in output.stdout
    (code,) = (tmp_path / "runs").rglob("*.code")
    state = 'from src.launch.job import bind_launcher; print(bind_launcher({"launcher": "foreground"}).states(["%s"]))'
    process = subprocess.run(
        [sys.executable, "-c", state % code], cwd=root, capture_output=True, text=True, check=False
    )
    assert "completed" in process.stdout, process.stderr
