"""The data set and the recipe of docs/extending.md, put in place as they are written there, train."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from src.experiments.registry import DATASETS, RECIPES
from tests import toy

BLOCKS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", (toy.ROOT / "docs" / "extending.md").read_text(), re.DOTALL))


@pytest.fixture
def weighted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The experiment, with its components registered, and its file of texts: the second half has the weight 0."""
    lines = dict(re.findall(r'"(\w+)": "(\S+)",', BLOCKS["src/experiments/registry.py"]))
    for table, (name, module) in zip((DATASETS, RECIPES), lines.items(), strict=True):
        path = f"{module.replace('.', '/')}.py"
        file = tmp_path / path.replace("/", "_")
        file.write_text(BLOCKS[path])
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        new_module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module, new_module)
        spec.loader.exec_module(new_module)
        monkeypatch.setitem(table.modules, name, module)
    toy.write_data(tmp_path / "data")
    rows = [
        {
            "text": f"the thing{i % 16} is {'red . ' * (1 + i % 5)}" if i < 40 else "what is it ?",
            "weight": float(i < 40),
        }
        for i in range(80)
    ]
    (tmp_path / "data" / "weighted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    namespace = {"EXP_GROUPS": {}}
    exec(BLOCKS["exp_configs.py"].replace("stdlib_tokenizer", "toy_tokenizer"), namespace)
    experiment = namespace["EXP_GROUPS"]["weighted"][0]
    return {**experiment, "loop": {**experiment["loop"], "steps": 4, "eval_every": 2, "learning_rate": 1e-2}}


def losses(folder: Path) -> dict[int, list[tuple[float, float]]]:
    """(train_loss, val_loss) of each row, by the micro-batch of the run."""
    result = {}
    for path in (folder / "runs").glob("*/scores.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        loop = json.loads((path.parent / "config.json").read_text())["loop"]
        result[loop["micro_batch"]] = [(row["train_loss"], row["val_loss"]) for row in rows]
    return result


def test_the_example_trains_and_does_not_depend_on_micro_batches(weighted: dict[str, object], tmp_path: Path):
    groups = {"weighted": [weighted, {**weighted, "loop": {**weighted["loop"], "micro_batch": 4}}]}  # type: ignore[dict-item]
    assert toy.main(["-e", "weighted", "--dry-run"], groups, tmp_path) == 0
    assert toy.main(["-e", "weighted"], groups, tmp_path) == 0
    result = losses(tmp_path)
    assert result.keys() == {16, 4}
    for one, other in zip(result[16], result[4], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_missing_file_is_named_before_the_start(
    weighted: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "data" / "weighted.jsonl").unlink()
    assert toy.main(["-e", "weighted", "--dry-run"], {"weighted": [weighted]}, tmp_path) == 1
    assert "data.file: there is no file" in capsys.readouterr().err
