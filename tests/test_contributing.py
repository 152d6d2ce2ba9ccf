"""What CONTRIBUTING.md shows is all it takes: one metric as a file and a line, one experiment, and the table has its score."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import toy

BLOCK = re.compile(r"```python\n# (\S+)\n(.*?)```", re.DOTALL)


def test_a_metric_and_an_experiment_as_shown(tmp_path: Path):
    blocks = dict(BLOCK.findall((toy.ROOT / "CONTRIBUTING.md").read_text()))
    metric, line, experiment, test = (
        blocks[name] for name in ("src/metrics/prefix_match.py", "src/registry.py", "exp_configs.py", "tests/metrics/test_prefix_match.py")
    )
    toy.write_data(tmp_path / "data")
    child = {**toy.CROSSATTN, "loop": {**toy.CROSSATTN["loop"], "steps": 2}}
    root = toy.project(
        tmp_path,
        "from src.experiments.grid import grid\n"
        f"BASE_TINY = {toy.BASE!r}\nCROSSATTN_TINY = {child!r}\nEXP_GROUPS = {{'base_tiny': [BASE_TINY]}}\n{experiment}",
    )
    (root / "src").unlink()
    shutil.copytree(toy.ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "results").mkdir()
    for name in ("table.py", "run_arguments.py"):
        shutil.copy(toy.ROOT / "results" / name, root / "results")
    (root / "src/metrics/prefix_match.py").write_text(metric)
    registry = root / "src/registry.py"
    before = '        "squad": "src.metrics.squad",\n'
    assert registry.read_text().count(before) == 1
    registry.write_text(registry.read_text().replace(before, before + line))

    (root / "test_prefix_match.py").write_text(test)
    own = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_prefix_match.py"], cwd=root, capture_output=True, text=True, check=False
    )
    assert own.returncode == 0, own.stdout
    done = toy.run(root, ["-e", "crossattn_tiny_prefix", "--with-parents"], tmp_path)
    assert done.returncode == 0, done.stderr
    table = subprocess.run(
        [sys.executable, "-m", "results.table", str(tmp_path / "runs"), "-e", "crossattn_tiny_prefix", "--format", "json"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert table.returncode == 0, table.stderr
    assert "prefix_match" in json.dumps(json.loads(table.stdout))
