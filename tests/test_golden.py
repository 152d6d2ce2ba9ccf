"""Losses of each recipe on the toy world, as they were when last looked at: a refactoring must not move them.

After a change that is meant to move them: `python -m tests.test_golden`, look at the difference, and say why in the commit.
"""

import json
import tempfile
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from tests import toy
from tests.recipes import test_seq2seq, test_t5_pretrain
from tests.recipes.test_fid import FID
from tests.recipes.test_prompted import PROMPTED

GOLDEN = Path(__file__).parent / "golden" / "losses.json"
NAMES = ("train_loss", "grad_norm", "val_loss", "val_loss_shuffled_context", "val_accuracy", "em", "accuracy")


def measure(folder: Path) -> dict[str, list[dict[str, float]]]:
    """The score rows of each recipe on the toy world."""
    test_seq2seq.write_data(folder)
    test_t5_pretrain.write_tokenizer(folder / "data")
    groups = {"lm": [toy.BASE]}
    for exp in (toy.CROSSATTN, PROMPTED, FID, test_t5_pretrain.T5, test_seq2seq.EXP):
        groups[exp["recipe"]] = [{**exp, "loop": {**exp["loop"], "steps": 8, "eval_every": 4}}]
    assert toy.main(["-e", *groups], groups, folder) == 0
    rows = {name: toy.rows(folder, exp_id(group[0])) for name, group in groups.items()}
    return {name: [{"step": row["step"], **{k: row[k] for k in NAMES if k in row}} for row in found] for name, found in rows.items()}


def test_losses_are_where_they_were(tmp_path: Path):
    golden, found = json.loads(GOLDEN.read_text()), measure(tmp_path)
    assert found.keys() == golden.keys()
    for name, rows in golden.items():
        assert [row.keys() for row in found[name]] == [row.keys() for row in rows]
        for was, now in zip(rows, found[name], strict=True):
            # The last digits depend on the processor and its libraries.
            assert now == pytest.approx(was, rel=1e-3, abs=1e-6), f"{name}, step {was['step']}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        GOLDEN.write_text(json.dumps(measure(Path(temporary)), indent=1) + "\n")
