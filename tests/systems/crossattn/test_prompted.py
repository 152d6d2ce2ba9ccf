"""A prompted decoder through the command line: it learns to read its prompt, and one that is not trained is scored as
it stands."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.experiments.grid import ref, set_path
from src.experiments.identity import exp_id
from src.files import new_directory
from tests import toy

METRICS = [{"name": "squad"}]
PROMPTED_TRAINING: dict[str, Any] = {
    "recipe": "prompted",
    "seed": 0,
    "model": ref(toy.BASE),
    "data": {
        "name": "prompted_qa",
        "corpus": "toy_qa",
        "contexts": "all",
        "context_tokens": 16,
        "sequence_tokens": 16,
        "loss_on": "answer",
    },
    "loop": {"steps": 160, "sequences_per_step": 16, "micro_batch": 16, "learning_rate": 5e-3, "eval_every": 80},
    "answers": {"questions": 16, "max_new_tokens": 4, "metrics": METRICS},
}
EVALUATION: dict[str, Any] = {name: value for name, value in PROMPTED_TRAINING.items() if name != "loop"} | {
    "model": ref(PROMPTED_TRAINING),
    "evaluation": {"micro_batch": 16},
    "inference": {"max_new_tokens": 4, "metrics": METRICS},
}
CLOSED_BOOK: dict[str, Any] = copy.deepcopy(EVALUATION)
CLOSED_BOOK["data"] = {
    "name": "prompted_qa",
    "corpus": "toy_qa",
    "contexts": "none",
    "sequence_tokens": 16,
    "loss_on": "answer",
}
LORA: dict[str, Any] = copy.deepcopy(PROMPTED_TRAINING)
LORA["model"] = {
    "name": "lora",
    "rank": 4,
    "alpha": 8.0,
    "target_modules": ["c_attn", "c_fc", "c_proj"],
    "base": ref(toy.BASE),
}
LORA["loop"] |= {"steps": 6, "eval_every": 3, "sequences_per_step": 8, "micro_batch": 4}
GROUPS = {
    "base": [toy.BASE],
    "prompted": [PROMPTED_TRAINING],
    "scored": [EVALUATION],
    "closed": [CLOSED_BOOK],
    "lora": [LORA],
}
SCORE_NAMES = ("val_loss", "val_loss_shuffled_context", "em", "f1", "precision", "recall")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data, a base and a prompted model trained from it."""
    folder = tmp_path_factory.mktemp("prompted")
    toy.write_data(folder / "data")
    assert toy.main(["-e", "prompted", "--with-parents"], GROUPS, folder) == 0
    return folder


@pytest.fixture
def evaluated_run(folder: Path) -> Path:
    """The save directory of `scored`, new for every test."""
    shutil.rmtree(folder / "runs" / exp_id(EVALUATION), ignore_errors=True)
    return folder / "runs" / exp_id(EVALUATION)


def bits(run: Path, *names: str) -> dict[str, str]:
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names}


def errors(exp: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], *others: dict[str, Any]) -> str:
    """What --dry-run says against `exp`."""
    assert (
        toy.main(
            ["-e", "g", "--dry-run", "--with-parents"], {"g": [exp], "others": list(others), "base": [toy.BASE]}, folder
        )
        == 1
    )
    return capsys.readouterr().err


def write_model(folder: Path, tokenizer: Path, seed: int) -> None:
    """A decoder with weights so large that it answers differently to each question."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(words), max_position_embeddings=64, initializer_range=0.5, **sizes)
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)


class TestTraining:
    def test_it_learns_to_read_its_prompt(self, folder: Path):
        first, last = toy.evaluations(folder, exp_id(PROMPTED_TRAINING))
        assert last["val_loss"] < first["train_loss"]
        assert last["val_loss"] < last["val_loss_shuffled_context"] - 0.5
        # A colour is one of eight; with the end token known that is log(8) / 2 = 1.04 nats a token for who does not
        # read.
        assert last["val_loss"] < 0.8
        assert last["em"] > 0.25

    def test_only_adapters_learn_and_resume_is_bit_exact(self, folder: Path):
        run, last = folder / "runs" / exp_id(LORA), "checkpoints/step-00000006"
        assert toy.main(["-e", "lora"], GROUPS, folder) == 0
        files = (f"{last}/model.safetensors", f"{last}/optimizer.safetensors", f"{last}/state.json", "scores.jsonl")
        before = bits(run, *files)
        shutil.rmtree(run / last)
        (run / "status.json").unlink()
        assert toy.main(["-e", "lora"], GROUPS, folder) == 0
        assert "continues from step 3" in (run / "logs" / "train.log").read_text()
        assert bits(run, *files) == before
        rows = toy.rows(folder, exp_id(LORA))
        assert rows[-1]["val_loss"] < rows[0]["val_loss"]
        model = json.loads((run / last / "model.json").read_text())
        assert model["name"] == "lora"


class TestScoring:
    def test_a_trained_model_is_scored_as_at_its_last_step(self, folder: Path, evaluated_run: Path):
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        (row,) = toy.rows(folder, exp_id(EVALUATION))
        expected = toy.rows(folder, exp_id(PROMPTED_TRAINING))[-1]
        assert row["step"] == 0
        assert {name: row[name] for name in SCORE_NAMES} == {name: expected[name] for name in SCORE_NAMES}
        assert row["inference/em"] == row["em"], "the validation set has as many questions as are asked"
        # Keys and values of one head of width 16 in three layers, in float32.
        assert row["cache_bytes_per_context_token"] == 2 * 3 * 16 * 4
        assert not list((evaluated_run / "checkpoints").glob("*"))
        assert json.loads((evaluated_run / "status.json").read_text())["state"] == "done"
        assert [json.loads(line)["event"] for line in (evaluated_run / "ledger.jsonl").read_text().splitlines()] == [
            "start",
            "stop",
        ]
        answers = [json.loads(line) for line in (evaluated_run / "inference" / "val.jsonl").read_text().splitlines()]
        assert len(answers) == 16
        assert sum(line["answer_pred"] == line["answer"] for line in answers) / 16 == row["em"]

    def test_a_finished_one_is_left_and_an_interrupted_one_made_again(
        self, folder: Path, evaluated_run: Path, caplog: pytest.LogCaptureFixture
    ):
        caplog.set_level("INFO")
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        before = bits(evaluated_run, "scores.jsonl", "inference/val.jsonl")
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        assert "already done" in caplog.text
        status = json.loads((evaluated_run / "status.json").read_text())
        (evaluated_run / "status.json").write_text(json.dumps({**status, "state": "running"}))
        with (evaluated_run / "scores.jsonl").open("a") as file:
            file.write('{"step": 0, "val_lo')  # what a killed writer leaves
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        assert bits(evaluated_run, "scores.jsonl", "inference/val.jsonl") == before

    def test_a_stop_file_stops_it_until_it_is_removed(self, folder: Path, evaluated_run: Path):
        evaluated_run.mkdir()
        (evaluated_run / "stop").touch()
        assert toy.main(["-e", "scored"], GROUPS, folder) != 0
        assert json.loads((evaluated_run / "status.json").read_text())["state"] == "stopped"
        assert not (evaluated_run / "scores.jsonl").exists()
        (evaluated_run / "stop").unlink()
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        assert len(toy.rows(folder, exp_id(EVALUATION))) == 1

    def test_batched_prompts_of_different_lengths_have_the_same_answers(self, folder: Path):
        """Padded on the left, they keep their positions, and nothing reads the padding."""
        lines = (folder / "data" / "toy_qa" / "val.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for i, row in enumerate(rows):
            row["context"] = " ".join([row["context"], *["the", "is", "it"][: i % 4]] * (1 + i % 2))
        with new_directory(folder / "data" / "uneven") as data_folder:
            for split in ("train", "val"):
                (data_folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        all_answers = []
        for size in (1, 16):
            exp = set_path(
                set_path(EVALUATION, "data.corpus", "uneven", must_exist=True),
                "evaluation.micro_batch",
                size,
                must_exist=True,
            )
            assert toy.main(["-e", "g"], {**GROUPS, "g": [exp]}, folder) == 0
            answers = (folder / "runs" / exp_id(exp) / "inference" / "val.jsonl").read_text().splitlines()
            all_answers.append(
                ([json.loads(line)["answer_pred"] for line in answers], toy.rows(folder, exp_id(exp))[0])
            )
        (alone, one), (together, many) = all_answers
        assert together == alone
        assert len(set(alone)) > 1, "not the same answer everywhere"
        for name in ("val_loss", "val_loss_shuffled_context"):
            assert many[name] == pytest.approx(one[name], rel=1e-5)

    def test_without_contexts_nothing_is_shuffled(self, folder: Path):
        assert toy.main(["-e", "closed"], GROUPS, folder) == 0
        (row,) = toy.rows(folder, exp_id(CLOSED_BOOK))
        assert row["val_loss"] > toy.rows(folder, exp_id(PROMPTED_TRAINING))[-1]["val_loss"]
        assert "val_loss_shuffled_context" not in row
        assert "cache_bytes_per_context_token" not in row


class TestFilesFromElsewhere:
    """A model that no experiment trained: its files are all that says whose answers there are."""

    @pytest.fixture
    def elsewhere(self, folder: Path, tmp_path: Path) -> tuple[Callable[[int], list[str]], Path]:
        """(Seed -> writes the model, scores it and gives its answers, its save directory)."""
        exp = {
            **EVALUATION,
            "model": {"name": "hf", "path": str(tmp_path / "model")},
            "inference": {**EVALUATION["inference"], "rows": 8},
        }
        exp["evaluation"] = {"micro_batch": 4}
        run = folder / "runs" / exp_id(exp)

        def score(seed: int) -> list[str]:
            write_model(tmp_path / "model", folder / "data" / "toy_tokenizer", seed)
            (run / "status.json").unlink(missing_ok=True)
            assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
            return [
                json.loads(line)["answer_pred"] for line in (run / "inference" / "val.jsonl").read_text().splitlines()
            ]

        return score, run

    def test_answers_of_other_files_are_recomputed(self, elsewhere: tuple[Callable[[int], list[str]], Path]):
        score, run = elsewhere
        first = score(0)
        inode = (run / "inference").stat().st_ino
        assert score(0) == first
        assert (run / "inference").stat().st_ino == inode, "the same files, so the same answers"
        assert score(1) != first

    def test_partial_answers_are_only_reused_for_the_same_files(
        self, elsewhere: tuple[Callable[[int], list[str]], Path]
    ):
        score, run = elsewhere
        score(0)
        facts = json.loads((run / "inference" / "manifest.json").read_text())
        assert facts.pop("files")
        for seed, num_reused in ((0, 4), (1, 0)):
            shutil.rmtree(run / "inference")
            (run / "inference.part.jsonl").write_text(
                "\n".join([json.dumps(facts, sort_keys=True), *['"noted"'] * 4, ""])
            )
            assert score(seed).count("noted") == num_reused


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (
                "model",
                toy.CROSSATTN["model"],
                "model: expected a decoder, such as 'hf' or 'gpt_bigcode'; got 'cross_attention'",
            ),
            ("data", toy.CROSSATTN["data"], "data: expected 'prompted_qa', got 'qa'."),
            ("evaluation", {"micro_batch": 1}, "set exactly one of loop (train) and evaluation"),
            ("loop", None, "set exactly one of loop (train) and evaluation"),
            (
                "data.context_tokens",
                48,
                "data.sequence_tokens + data.context_tokens: 68 tokens (64 + answers.max_new_tokens 4) are more than",
            ),
            (
                "loop.compile",
                True,
                "loop.compile: needs batches of one length, and those of 'prompted_qa' differ.",
            ),
            ("loop.best_metric", "bleu", "loop.best_metric: unknown score 'bleu'."),
            ("data.corpus", "toy_q", "no such data set"),
        ],
    )
    def test_invalid_settings_are_reported_before_the_start(
        self, folder: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any, message: str
    ):
        assert message in errors(set_path(PROMPTED_TRAINING, path, value, must_exist=False), folder, capsys)

    def test_parent_with_cross_attention_is_refused(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        stderr = errors({**PROMPTED_TRAINING, "model": ref(toy.CROSSATTN)}, folder, capsys, toy.CROSSATTN)
        assert "model: expected a decoder" in stderr
        assert "got 'experiment', which is of the kind 'cross_attention'" in stderr

    def test_new_adapters_without_training(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        stderr = errors({**EVALUATION, "model": LORA["model"]}, folder, capsys)
        assert "model: untrained adapters change nothing. Use their base, or set loop to train them." in stderr

    def test_a_child_of_an_experiment_that_trains_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        stderr = errors({**PROMPTED_TRAINING, "model": ref(EVALUATION)}, folder, capsys, EVALUATION, PROMPTED_TRAINING)
        assert "the experiment trains nothing. Use the model that it evaluates." in stderr

    def test_other_precision_of_the_launcher_is_refused(self):
        from src.errors import ConfigError
        from src.experiments.config import load
        from src.training.config import Evaluation

        config = load(Evaluation, {"micro_batch": 2, "precision": "bfloat16"}, "evaluation")
        config.check_accelerate({"precision": "bfloat16"})
        with pytest.raises(
            ConfigError, match=r"evaluation.precision: bfloat16, but accelerate launch has --mixed_precision float16"
        ):
            config.check_accelerate({"precision": "float16"})
