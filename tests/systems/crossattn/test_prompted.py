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
PROMPTED: dict[str, Any] = {
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
SCORED: dict[str, Any] = {name: value for name, value in PROMPTED.items() if name != "loop"} | {
    "model": ref(PROMPTED),
    "evaluation": {"micro_batch": 16},
    "inference": {"max_new_tokens": 4, "metrics": METRICS},
}
CLOSED: dict[str, Any] = copy.deepcopy(SCORED)
CLOSED["data"] = {
    "name": "prompted_qa",
    "corpus": "toy_qa",
    "contexts": "none",
    "sequence_tokens": 16,
    "loss_on": "answer",
}
LORA: dict[str, Any] = copy.deepcopy(PROMPTED)
LORA["model"] = {
    "name": "lora",
    "rank": 4,
    "alpha": 8.0,
    "target_modules": ["c_attn", "c_fc", "c_proj"],
    "base": ref(toy.BASE),
}
LORA["loop"] |= {"steps": 6, "eval_every": 3, "sequences_per_step": 8, "micro_batch": 4}
GROUPS = {"base": [toy.BASE], "prompted": [PROMPTED], "scored": [SCORED], "closed": [CLOSED], "lora": [LORA]}
MEASURED = ("val_loss", "val_loss_shuffled_context", "em", "f1", "precision", "recall")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data, a base and a prompted model trained from it."""
    folder = tmp_path_factory.mktemp("prompted")
    toy.write_data(folder / "data")
    assert toy.main(["-e", "prompted", "--with-parents"], GROUPS, folder) == 0
    return folder


@pytest.fixture
def scored(folder: Path) -> Path:
    """The save directory of `scored`, new for every test."""
    shutil.rmtree(folder / "runs" / exp_id(SCORED), ignore_errors=True)
    return folder / "runs" / exp_id(SCORED)


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
        first, last = toy.evaluations(folder, exp_id(PROMPTED))
        assert last["val_loss"] < first["train_loss"]
        assert last["val_loss"] < last["val_loss_shuffled_context"] - 0.5
        # A colour is one of eight; with the end token known that is log(8) / 2 = 1.04 nats a token for who does not
        # read.
        assert last["val_loss"] < 0.8
        assert last["em"] > 0.25

    def test_adapters_alone_learn_and_a_run_that_was_cut_short_ends_with_the_same_bits(self, folder: Path):
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
    def test_a_trained_model_is_scored_as_at_its_last_step(self, folder: Path, scored: Path):
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        (row,) = toy.rows(folder, exp_id(SCORED))
        expected = toy.rows(folder, exp_id(PROMPTED))[-1]
        assert row["step"] == 0
        assert {name: row[name] for name in MEASURED} == {name: expected[name] for name in MEASURED}
        assert row["inference/em"] == row["em"], "the validation set has as many questions as are asked"
        # Keys and values of one head of width 16 in three layers, in float32.
        assert row["cache_bytes_per_context_token"] == 2 * 3 * 16 * 4
        assert not list((scored / "checkpoints").glob("*"))
        assert json.loads((scored / "status.json").read_text())["state"] == "done"
        assert [json.loads(line)["event"] for line in (scored / "ledger.jsonl").read_text().splitlines()] == [
            "start",
            "stop",
        ]
        answered = [json.loads(line) for line in (scored / "inference" / "val.jsonl").read_text().splitlines()]
        assert len(answered) == 16
        assert sum(line["answer_pred"] == line["answer"] for line in answered) / 16 == row["em"]

    def test_a_finished_one_is_left_and_an_interrupted_one_made_again(
        self, folder: Path, scored: Path, caplog: pytest.LogCaptureFixture
    ):
        caplog.set_level("INFO")
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        before = bits(scored, "scores.jsonl", "inference/val.jsonl")
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        assert "done already" in caplog.text
        status = json.loads((scored / "status.json").read_text())
        (scored / "status.json").write_text(json.dumps({**status, "state": "running"}))
        with (scored / "scores.jsonl").open("a") as file:
            file.write('{"step": 0, "val_lo')  # what a killed writer leaves
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        assert bits(scored, "scores.jsonl", "inference/val.jsonl") == before

    def test_a_stop_file_stops_it_until_it_is_removed(self, folder: Path, scored: Path):
        scored.mkdir()
        (scored / "stop").touch()
        assert toy.main(["-e", "scored"], GROUPS, folder) != 0
        assert json.loads((scored / "status.json").read_text())["state"] == "stopped"
        assert not (scored / "scores.jsonl").exists()
        (scored / "stop").unlink()
        assert toy.main(["-e", "scored"], GROUPS, folder) == 0
        assert len(toy.rows(folder, exp_id(SCORED))) == 1

    def test_prompts_of_several_lengths_are_answered_together_as_alone(self, folder: Path):
        """Padded on the left, they keep their positions, and nothing reads the padding."""
        lines = (folder / "data" / "toy_qa" / "val.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for i, row in enumerate(rows):
            row["context"] = " ".join([row["context"], *["the", "is", "it"][: i % 4]] * (1 + i % 2))
        with new_directory(folder / "data" / "uneven") as made:
            for split in ("train", "val"):
                (made / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = []
        for size in (1, 16):
            exp = set_path(
                set_path(SCORED, "data.corpus", "uneven", must_exist=True),
                "evaluation.micro_batch",
                size,
                must_exist=True,
            )
            assert toy.main(["-e", "g"], {**GROUPS, "g": [exp]}, folder) == 0
            answered = (folder / "runs" / exp_id(exp) / "inference" / "val.jsonl").read_text().splitlines()
            found.append(([json.loads(line)["answer_pred"] for line in answered], toy.rows(folder, exp_id(exp))[0]))
        (alone, one), (together, many) = found
        assert together == alone
        assert len(set(alone)) > 1, "not the same answer everywhere"
        for name in ("val_loss", "val_loss_shuffled_context"):
            assert many[name] == pytest.approx(one[name], rel=1e-5)

    def test_without_contexts_there_are_none_to_shuffle(self, folder: Path):
        assert toy.main(["-e", "closed"], GROUPS, folder) == 0
        (row,) = toy.rows(folder, exp_id(CLOSED))
        assert row["val_loss"] > toy.rows(folder, exp_id(PROMPTED))[-1]["val_loss"]
        assert "val_loss_shuffled_context" not in row
        assert "cache_bytes_per_context_token" not in row


class TestFilesFromElsewhere:
    """A model that no experiment trained: its files are all that says whose answers there are."""

    @pytest.fixture
    def elsewhere(self, folder: Path, tmp_path: Path) -> tuple[Callable[[int], list[str]], Path]:
        """(Seed -> writes the model, scores it and gives its answers, its save directory)."""
        exp = {
            **SCORED,
            "model": {"name": "hf", "path": str(tmp_path / "model")},
            "inference": {**SCORED["inference"], "rows": 8},
        }
        exp["evaluation"] = {"micro_batch": 4}
        run = folder / "runs" / exp_id(exp)

        def scored(seed: int) -> list[str]:
            write_model(tmp_path / "model", folder / "data" / "toy_tokenizer", seed)
            (run / "status.json").unlink(missing_ok=True)
            assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
            return [
                json.loads(line)["answer_pred"] for line in (run / "inference" / "val.jsonl").read_text().splitlines()
            ]

        return scored, run

    def test_answers_of_other_files_are_made_anew(self, elsewhere: tuple[Callable[[int], list[str]], Path]):
        scored, run = elsewhere
        first = scored(0)
        made = (run / "inference").stat().st_ino
        assert scored(0) == first
        assert (run / "inference").stat().st_ino == made, "the same files, so the same answers"
        assert scored(1) != first

    def test_an_answered_part_is_of_use_for_the_same_files_alone(
        self, elsewhere: tuple[Callable[[int], list[str]], Path]
    ):
        scored, run = elsewhere
        scored(0)
        facts = json.loads((run / "inference" / "manifest.json").read_text())
        assert facts.pop("files")
        for seed, kept in ((0, 4), (1, 0)):
            shutil.rmtree(run / "inference")
            (run / "inference.part.jsonl").write_text(
                "\n".join([json.dumps(facts, sort_keys=True), *['"noted"'] * 4, ""])
            )
            assert scored(seed).count("noted") == kept


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (
                "model",
                toy.CROSSATTN["model"],
                "model: expected a decoder, such as 'hf' or 'gpt_bigcode'; got 'cross_attention'",
            ),
            ("data", toy.CROSSATTN["data"], "data: the data of this recipe are 'prompted_qa', got 'qa'."),
            ("evaluation", {"micro_batch": 1}, "set exactly one of loop (train) and evaluation"),
            ("loop", None, "set exactly one of loop (train) and evaluation"),
            (
                "data.context_tokens",
                48,
                "data.sequence_tokens + data.context_tokens: 68 tokens are more than the 64 positions",
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
    def test_what_does_not_fit_is_told_before_anything_starts(
        self, folder: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any, message: str
    ):
        assert message in errors(set_path(PROMPTED, path, value, must_exist=False), folder, capsys)

    def test_a_parent_that_reads_contexts_beside_its_prompt(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        told = errors({**PROMPTED, "model": ref(toy.CROSSATTN)}, folder, capsys, toy.CROSSATTN)
        assert "model: expected a decoder" in told
        assert "got 'experiment', which is of the kind 'cross_attention'" in told

    def test_new_adapters_without_training(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        told = errors({**SCORED, "model": LORA["model"]}, folder, capsys)
        assert "model: untrained adapters change nothing. Use their base, or set loop to train them." in told

    def test_a_child_of_an_experiment_that_trains_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        told = errors({**PROMPTED, "model": ref(SCORED)}, folder, capsys, SCORED, PROMPTED)
        assert "the experiment trains nothing. Use the model that it evaluates." in told

    def test_another_precision_that_the_launcher_was_told(self):
        from src.errors import ConfigError
        from src.experiments.config import load
        from src.training.config import Evaluation

        config = load(Evaluation, {"micro_batch": 2, "precision": "bfloat16"}, "evaluation")
        config.check_accelerate({"precision": "bfloat16"})
        with pytest.raises(
            ConfigError, match=r"evaluation.precision: bfloat16, but accelerate launch has --mixed_precision float16"
        ):
            config.check_accelerate({"precision": "float16"})
