"""Losses of each recipe on the toy world, as they were when last looked at: a refactoring must not move them, nor a
restart a bit.

After a change that is meant to move them: `python -m tests.core.training.whole.test_golden`, look at the difference,
and say why in the commit.
"""

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from src.evaluation.metrics import squad, words
from src.experiments.identity import exp_id
from src.experiments.registry import RECIPES
from tests import toy
from tests.systems.assistants import train_assistants, train_policies
from tests.systems.crossattn.test_fid import FID
from tests.systems.crossattn.test_prompted import PROMPTED_TRAINING
from tests.systems.interleaved import train_pages
from tests.systems.metadata import test_metadata_lm
from tests.systems.t5 import test_seq2seq, test_t5_pretrain

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "losses.json"
NAMES = (
    "train_loss",
    "grad_norm",
    "val_loss",
    "val_loss_shuffled_context",
    "val_accuracy",
    "em",
    "accuracy",
    "reward",
    "entropy",
)


CHAIN = (
    *(train_assistants.SFT, train_assistants.REWARD, train_assistants.DPO, train_assistants.KTO),
    *(train_policies.GRPO, train_policies.PPO),
)
GROUPS: dict[str, list[dict[str, Any]]] = {"lm": [toy.BASE]} | {
    exp["recipe"]: [{**exp, "loop": {**exp["loop"], "steps": 8, "eval_every": 4}}]
    for exp in (
        toy.CROSSATTN,
        PROMPTED_TRAINING,
        FID,
        test_t5_pretrain.T5,
        test_seq2seq.EXP,
        test_metadata_lm.WITH_GAINS,
        train_pages.PAGES,
        *CHAIN,
    )
}


def train(folder: Path) -> None:
    """Each recipe on the toy world, which is there."""
    with train_policies.rewards_of_tests():
        assert toy.main(["-e", *GROUPS], GROUPS, folder) == 0


def measure(folder: Path) -> dict[str, list[dict[str, float]]]:
    """The score rows of each recipe on the toy world."""
    test_seq2seq.write_data(folder)
    test_t5_pretrain.write_tokenizer(folder / "data")
    test_metadata_lm.write_metadata(folder / "data")
    train_pages.write_data(folder / "data")
    train_assistants.write_data(folder / "data")
    train(folder)
    rows = {
        name: [row for row in toy.rows(folder, exp_id(group[0])) if row["step"] % 4 == 0]
        for name, group in GROUPS.items()
    }
    return {
        name: [{"step": row["step"], **{k: row[k] for k in NAMES if k in row}} for row in recipe_rows]
        for name, recipe_rows in rows.items()
    }


@pytest.fixture(scope="module")
def measured_losses(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, float]]]]:
    """(folder of the runs, what was measured)."""
    folder = tmp_path_factory.mktemp("golden")
    return folder, measure(folder)


def test_losses_are_where_they_were(measured_losses: tuple[Path, dict[str, list[dict[str, float]]]]):
    golden, losses = json.loads(GOLDEN.read_text()), measured_losses[1]
    assert losses.keys() == golden.keys()
    for name, rows in golden.items():
        assert [row.keys() for row in losses[name]] == [row.keys() for row in rows]
        for was, now in zip(rows, losses[name], strict=True):
            # The last digits depend on the processor and its libraries.
            assert now == pytest.approx(was, rel=1e-3, abs=1e-6), f"{name}, step {was['step']}"


def test_every_score_column_is_documented(measured_losses: tuple[Path, Any]):
    """docs/run_directory.md has a pattern for it, such as `val_loss/<part>`."""
    page = (toy.ROOT / "docs" / "run_directory.md").read_text().partition("## Score columns")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    names = {name for cell in cells for name in re.findall("`([^`]+)`", cell)}
    val_names = {f"val_{name}" for name in names if name.endswith("_logratio") or name in ("margin", "kl_estimate")}
    metrics = "|".join([*squad.Config().score_names(), *words.Config().score_names(), "accuracy", "macro_f1"])
    patterns = "|".join(re.sub(r"<\w+>", ".+", name.replace("<metric>", f"({metrics})")) for name in names | val_names)
    columns = {
        column for name, (exp,) in GROUPS.items() for row in toy.rows(measured_losses[0], exp_id(exp)) for column in row
    }
    assert len(columns) > 50
    assert not {column for column in columns if not re.fullmatch(patterns, column)}


def test_every_recipe_records_its_validation_data(measured_losses: tuple[Path, Any]):
    with_samples = set()
    for name, (exp,) in GROUPS.items():
        run = measured_losses[0] / "runs" / exp_id(exp)
        record = json.loads((run / "validation.json").read_text())
        assert record["step"] == toy.rows(measured_losses[0], run.name)[-1]["step"], name
        assert record["data"], name
        assert len(record["nats"]) == len(record["tokens"]) == record["samples"], name
        if record["samples"]:
            with_samples.add(name)
            loss = toy.rows(measured_losses[0], run.name)[-1]["val_loss"]
            assert loss == pytest.approx(sum(record["nats"]) / sum(record["tokens"]), rel=1e-4), name
    assert with_samples == GROUPS.keys() - {"reward", "dpo", "kto", "ppo", "grpo", "interleaved"}  # their losses differ


def test_every_recipe_resumes_bit_exactly_after_a_kill(measured_losses: tuple[Path, Any]):
    """Parents too: what stands on them goes on although they have been trained anew."""
    folder, before = measured_losses[0], {}
    assert GROUPS.keys() == set(RECIPES.modules), "a recipe that nobody looks at here"
    for name, (exp,) in GROUPS.items():
        run = folder / "runs" / exp_id(exp)
        *_, last = sorted((run / "checkpoints").glob("step-*"))
        files = [last / part for part in ("model.safetensors", "optimizer.safetensors", "state.json")] + [
            run / "scores.jsonl"
        ]
        before[name] = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        shutil.rmtree(last)
        (run / "status.json").unlink()
    train(folder)
    for name, (exp,) in GROUPS.items():
        assert "continues from step" in (folder / "runs" / exp_id(exp) / "logs" / "train.log").read_text(), name
        assert {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in before[name]} == before[name], name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        GOLDEN.write_text(json.dumps(measure(Path(temporary)), indent=1) + "\n")
