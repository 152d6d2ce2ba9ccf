"""Recipe `seq2seq` through the command line: it learns tasks, resumes bit for bit, predicts, and refuses what does not
fit."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.t5 import prepare_task
from src.errors import RunError
from src.experiments.config import Places
from src.experiments.grid import ref, set_path
from src.experiments.identity import exp_id
from src.files import read_json
from src.models.load import load
from tests import toy

OWN_TASKS = f"""
paint:
  columns: [text]
  labels: [{", ".join(toy.COLOURS)}]
  metrics: [accuracy, macro_f1]
  optimise: macro_f1
  weight: 3
  submission: {{file: PAINT.tsv, label: number}}
said:
  kind: text
  columns: [text]
  metrics: [em]
  weight: 1
"""
T5: dict[str, Any] = {
    "name": "t5",
    "random": {
        "tokenizer": "toy_tokenizer",
        "hidden_size": 32,
        "feed_forward_size": 64,
        "num_layers": 1,
        "num_heads": 2,
    },
    "dropout_rate": 0.05,
}
PAINT = {"name": "task", "task": "paint", "corpus": "paint", "input_tokens": 12, "target_tokens": 4}
TEXT_TASK = {**PAINT, "task": "said", "corpus": "said"}
EXP: dict[str, Any] = {
    "recipe": "seq2seq",
    "seed": 0,
    "model": T5,
    "data": PAINT,
    "loop": {
        "steps": 80,
        "sequences_per_step": 16,
        "micro_batch": 8,
        "learning_rate": 1e-2,
        "eval_every": 40,
        "best_metric": "macro_f1",
        "best_mode": "max",
    },
    "predictions": {"splits": ["val", "test"]},
}
EVALUATION: dict[str, Any] = {name: value for name, value in EXP.items() if name != "loop"} | {
    "model": ref(EXP),
    "evaluation": {"micro_batch": 5},
}
FEW = {**EXP["loop"], "steps": 2, "eval_every": 1}
MIXTURE: dict[str, Any] = {
    **EXP,
    "data": {"name": "mixture", "parts": {"one": PAINT, "two": TEXT_TASK}, "rates": {"one": 3.0, "two": 1.0}},
    "loop": {**FEW, "best_metric": "macro_f1/paint"},
    "predictions": {},
}
GROUPS = {"paint": [EXP]}
TEST_ROWS = 18


def write_data(folder: Path) -> None:
    """The toy world below `folder`/data, and in it two tasks of one's own."""
    toy.write_data(folder / "data")
    (folder / "own.yaml").write_text(OWN_TASKS)
    facts = [(thing, toy.COLOURS[(i * 5 + j) % 8]) for i, thing in enumerate(toy.THINGS) for j in range(4)]
    rows = [
        {"text": f"the {thing} is {colour} .", "label": colour, "idx": 100 + i}
        for i, (thing, colour) in enumerate(facts)
    ]
    test_rows = [{"text": row["text"], "idx": row["idx"]} for row in rows[:TEST_ROWS]]
    for name, some in (
        ("train", [row for i, row in enumerate(rows) if i % 4]),
        ("val", rows[::4]),
        ("test", test_rows),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for task, splits in (("paint", ("train", "val", "test")), ("said", ("train", "val"))):
        words = [word for split in splits for word in (f"--{split}", str(folder / f"{split}.jsonl"))]
        prepare_task.main(
            ["--data_path", str(folder / "data"), "--task", task, "--task_file", str(folder / "own.yaml"), *words]
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data and a trained model."""
    folder = tmp_path_factory.mktemp("seq2seq")
    write_data(folder)
    assert toy.main(["-e", "paint"], GROUPS, folder) == 0
    return folder


def run_of(folder: Path, exp: dict[str, Any]) -> Path:
    return folder / "runs" / exp_id(exp)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_learns_the_task(folder: Path):
    first, last = toy.evaluations(folder, exp_id(EXP))
    assert last["accuracy"] > 0.9
    assert last["val_loss"] < 0.3
    assert last["task_score"] == 100 * last["macro_f1"]
    assert {"accuracy", "macro_f1", "task_score", "val_loss", "train_loss"} <= first.keys()
    assert last["predictions/val/accuracy"] == last["accuracy"]
    assert not [name for name in last if name.startswith("predictions/test")]  # nobody knows these labels


def test_predictions_are_rows_with_the_generated_text(folder: Path):
    predictions = run_of(folder, EXP) / "predictions"
    assert sorted(path.name for path in predictions.iterdir()) == [
        "PAINT.tsv",
        "manifest.json",
        "paint.test.jsonl",
        "paint.val.jsonl",
    ]
    val = lines(predictions / "paint.val.jsonl")
    assert [row["input"] for row in val] == [f"paint text: {row['text']}" for row in lines(folder / "val.jsonl")]
    assert [row["index"] for row in val] == list(range(100, 164, 4))
    right = [row["target"] == row["prediction"] for row in val]
    assert sum(right) / len(right) == toy.rows(folder, exp_id(EXP))[-1]["accuracy"]
    for row in val:
        assert row["class"] == (toy.COLOURS.index(row["prediction"]) if row["prediction"] in toy.COLOURS else None)
    test = lines(predictions / "paint.test.jsonl")
    assert {row["target"] for row in test} == {None}
    tsv_lines = (predictions / "PAINT.tsv").read_text().splitlines()
    assert tsv_lines[0] == "index\tprediction"
    assert tsv_lines[1:] == [f"{100 + i}\t{row['class'] or 0}" for i, row in enumerate(test)]
    assert len(test) == TEST_ROWS


def test_a_run_that_was_cut_short_ends_with_the_same_bits(folder: Path):
    run, last = run_of(folder, EXP), "checkpoints/step-00000080"
    files = [run / last / name for name in ("model.safetensors", "optimizer.safetensors", "state.json")]
    files += [run / "scores.jsonl", *sorted((run / "predictions").iterdir())]
    before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    shutil.rmtree(run / last)
    (run / "status.json").unlink()
    assert toy.main(["-e", "paint"], GROUPS, folder) == 0
    assert "continues from step 40" in (run / "logs" / "train.log").read_text()
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == before


@pytest.mark.parametrize(("num_recorded", "saved"), [(21, 16), (15, 8), (33, 32)])
def test_predictions_resume_from_the_last_complete_batch(folder: Path, num_recorded: int, saved: int):
    """16 rows of val and 18 of test, in batches of 8, which never hold rows of both."""
    run = run_of(folder, EXP)
    facts = {
        name: value
        for name, value in read_json(run / "predictions" / "manifest.json", RunError).items()
        if name != "files"
    }
    before = [lines(run / "predictions" / f"paint.{split}.jsonl") for split in ("val", "test")]
    shutil.rmtree(run / "predictions")
    noted_lines = [
        json.dumps(facts, sort_keys=True),
        *(json.dumps(text) for text in ["said before"] * num_recorded),
        '"cut sho',
    ]
    (run / "predictions.part.jsonl").write_text("\n".join(noted_lines))
    (run / "status.json").unlink()
    assert toy.main(["-e", "paint"], GROUPS, folder) == 0
    after = [lines(run / "predictions" / f"paint.{split}.jsonl") for split in ("val", "test")]
    predictions = [row["prediction"] for rows in after for row in rows]
    assert predictions == ["said before"] * saved + [row["prediction"] for rows in before for row in rows][saved:]
    assert not (run / "predictions.part.jsonl").exists()
    shutil.rmtree(run / "predictions")
    (run / "status.json").unlink()
    assert toy.main(["-e", "paint"], GROUPS, folder) == 0
    assert [lines(run / "predictions" / f"paint.{split}.jsonl") for split in ("val", "test")] == before


def test_complete_predictions_are_generated_once(folder: Path):
    run = run_of(folder, EXP)
    manifest_facts = (run / "predictions" / "manifest.json").stat()
    (run / "status.json").unlink()
    assert toy.main(["-e", "paint"], GROUPS, folder) == 0
    assert (run / "predictions" / "manifest.json").stat().st_ino == manifest_facts.st_ino


@pytest.mark.parametrize(
    "answers", [{"by": "generate"}, {"by": "rank"}, {"by": "rank", "length_normalised": True}, {"by": "teacher_forced"}]
)
def test_all_ways_of_answering_agree_on_words_of_one_token(folder: Path, answers: dict[str, Any]):
    exp = {**EVALUATION, "answers": answers, "predictions": {"splits": ["test"]}}
    assert toy.main(["-e", "g"], {"g": [exp], "paint": [EXP]}, folder) == 0
    (row,) = toy.rows(folder, exp_id(exp))
    expected = toy.rows(folder, exp_id(EXP))[-1]
    assert row["step"] == 0
    assert row["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert row["accuracy"] == expected["accuracy"]
    assert lines(run_of(folder, exp) / "predictions" / "paint.test.jsonl") == lines(
        run_of(folder, EXP) / "predictions" / "paint.test.jsonl"
    )


HIGH_RATE: dict[str, Any] = {**EXP, "model": ref(EXP), "loop": {**FEW, "learning_rate": 0.3, "warmup_rate": 0.99}}
"""The trained model: its first step is small, the second one ruins it."""
ENGINES: dict[str, list[str]] = {
    "copies": [],
    "fsdp": ["--fsdp"],
    "zero3": ["--deepspeed", str(toy.ROOT / "resources" / "ds_config_zero3.json")],
}


@pytest.mark.parametrize("checkpoint", ["best", "last"])
@pytest.mark.parametrize("engine", ["here", *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES)])
def test_predictions_use_the_selected_weights(folder: Path, tmp_path: Path, engine: str, checkpoint: str):
    exp = {**HIGH_RATE, "predictions": {"checkpoint": checkpoint}, "seed": ["here", *ENGINES].index(engine)}
    groups = {"g": [exp], "paint": [EXP]}
    if engine == "here":
        assert toy.main(["-e", "g"], groups, folder) == 0
    else:
        done = toy.run(
            toy.project(tmp_path, f"EXP_GROUPS = {groups!r}\n"), ["-e", "g", *ENGINES[engine]], folder, processes=2
        )
        assert done.returncode == 0, done.stderr
    rows = toy.evaluations(folder, exp_id(exp))
    best = max(rows, key=lambda row: row["macro_f1"])
    assert best["macro_f1"] > rows[-1]["macro_f1"], "the setting of the test"
    assert rows[-1]["predictions/val/macro_f1"] == (best if checkpoint == "best" else rows[-1])["macro_f1"]


def test_beams_are_those_of_transformers(folder: Path):
    exp = {
        **EXP,
        "data": {**TEXT_TASK, "target_tokens": 8},
        "loop": {**FEW, "best_metric": "em"},
        "answers": {"num_beams": 3, "length_penalty": 0.6},
    }
    exp["predictions"] = {}
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
    predictions = lines(run_of(folder, exp) / "predictions" / "said.val.jsonl")
    model, tokenizer = load(run_of(folder, exp), Places(folder / "data", folder / "runs"))
    inputs = tokenizer(
        [row["input"] + tokenizer.eos_token for row in predictions],
        return_tensors="pt",
        padding=True,
        padding_side="right",
    )
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }

    def answers(**beams: Any) -> list[str]:
        ids = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **options, **beams)
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    assert [row["prediction"] for row in predictions] == answers(num_beams=3, length_penalty=0.6)
    assert [row["prediction"] for row in predictions] != answers()


@pytest.mark.slow
def test_two_processes_answer_as_one(folder: Path, tmp_path: Path):
    """16 and 18 rows in batches of 5: the last round of each has a batch for one of them alone."""
    exp = {**EVALUATION, "answers": {"by": "rank"}, "seed": 1}
    groups = {"g": [exp], "paint": [EXP]}
    assert toy.main(["-e", "g"], groups, folder) == 0
    run = run_of(folder, exp)
    alone = {path.name: path.read_bytes() for path in (run / "predictions").iterdir()}, toy.rows(folder, exp_id(exp))
    shutil.rmtree(run)
    done = toy.run(toy.project(tmp_path, f"EXP_GROUPS = {groups!r}\n"), ["-e", "g"], folder, processes=2)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in (run / "predictions").iterdir()} == alone[0]
    (row,), (expected,) = toy.rows(folder, exp_id(exp)), alone[1]
    assert row == pytest.approx(expected)


@pytest.mark.slow
def test_processes_that_share_the_model_rank_together(folder: Path, tmp_path: Path):
    """The encoder alone would not be gathered."""
    exp = {**EXP, "loop": FEW, "answers": {"by": "rank"}}
    done = toy.run(
        toy.project(tmp_path, f"EXP_GROUPS = {{'g': [{exp!r}]}}\n"), ["-e", "g", "--fsdp"], folder, processes=2
    )
    assert done.returncode == 0, done.stderr
    assert "predictions/val/accuracy" in toy.rows(folder, exp_id(exp))[-1]


def test_phases_are_scored_on_the_tasks_of_the_last(folder: Path):
    data = {"name": "phases", "phases": [{"until": 0.5, "data": MIXTURE["data"]}, {"data": PAINT}]}
    exp = {**EXP, "data": data, "loop": FEW, "predictions": {}}
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
    first, last = toy.evaluations(folder, exp_id(exp))
    assert {name for name in first if name.startswith("loss/")} <= {"loss/one", "loss/two"}
    assert {name for name in last if name.startswith("loss/")} == {"loss/paint"}
    assert "macro_f1" in last


def test_several_tasks_at_once(folder: Path):
    assert toy.main(["-e", "g"], {"g": [MIXTURE]}, folder) == 0
    last = toy.rows(folder, exp_id(MIXTURE))[-1]
    names = {f"{name}/paint" for name in ("accuracy", "macro_f1")} | {"em/said"}
    assert (
        names | {f"{name}/{task}" for name in ("val_loss", "task_score") for task in ("paint", "said")} <= last.keys()
    )
    assert last["val_loss"] == pytest.approx((last["val_loss/paint"] + last["val_loss/said"]) / 2)
    assert last["val_perplexity/said"] == pytest.approx(math.exp(last["val_loss/said"]))
    assert "val_perplexity/paint" not in last, "labels are no text"
    assert last["task_score"] == pytest.approx((100 * last["macro_f1/paint"] + 100 * last["em/said"]) / 2)
    assert last["predictions/val/em/said"] == last["em/said"]
    run = run_of(folder, MIXTURE)
    assert sorted(path.name for path in (run / "predictions").glob("*.jsonl")) == ["paint.val.jsonl", "said.val.jsonl"]
    assert "class" not in lines(run / "predictions" / "said.val.jsonl")[0]


def test_a_task_without_training_is_evaluated(folder: Path):
    exp = {**EXP, "loop": FEW, "predictions": {"extra_tasks": [TEXT_TASK]}}
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
    last = toy.rows(folder, exp_id(exp))[-1]
    assert {"accuracy", "predictions/val/accuracy/paint", "predictions/val/em/said"} <= last.keys()
    assert "em/said" not in last


def test_it_stops_when_the_metric_of_the_task_no_longer_grows(folder: Path):
    loop = {**FEW, "steps": 8, "learning_rate": 1e-9, "best_metric": "task_score", "early_stopping": {"patience": 2}}
    exp = {**EXP, "loop": loop, "predictions": None}
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
    assert len(toy.rows(folder, exp_id(exp))) == 3


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model", toy.BASE["model"], "model: expected an encoder-decoder, such as 't5'; got 'gpt_bigcode'"),
        (
            "model",
            ref(toy.BASE),
            "model: expected an encoder-decoder, such as 't5'; got 'experiment', which is of the kind 'decoder'",
        ),
        ("model", {"name": "fusion_in_decoder", "base": T5}, "model: expected an encoder-decoder"),
        ("data", toy.BASE["data"], "data: expected 'task', or a 'mixture' of it, got 'text'."),
        ("data.task", "pain", "task: unknown task 'pain'. Did you mean 'paint'?"),
        ("data.task", "rte", "paint/train.jsonl:1: missing column 'sentence1' of task 'rte'"),
        ("data.corpus", "nowhere", "nowhere: no such data set"),
        ("data.input_token", 3, "g[0].data: unknown key 'input_token'. Did you mean 'input_tokens'?"),
        ("loop.best_metric", "matthews", "loop.best_metric: unknown score 'matthews'."),
        ("loop.best_metric", "accuracy/paint", "loop.best_metric: unknown score 'accuracy/paint'."),
        ("loop.compile", True, "loop.compile: needs batches of one length, and those of 'task' differ."),
        ("evaluation", {"micro_batch": 2}, "set exactly one of loop (train) and evaluation"),
        ("answers", {"by": "beam"}, "answers.by: unknown value 'beam'"),
        (
            "answers",
            {"by": "generate", "length_normalised": True},
            "length_normalised: ignored with by 'generate'.",
        ),
        (
            "answers",
            {"length_penalty": 0.6},
            "length_penalty: ignored without beam search. Set num_beams",
        ),
        ("answers", {"by": "rank", "num_beams": 2}, "num_beams: ignored with by 'rank'. Remove it"),
        (
            "loop.precision",
            "float16",
            "loop.precision: 'float16' needs a GPU. Use 'bfloat16' or 'float32'.",
        ),
        ("predictions.splits", [], "predictions.splits: expected a list that is not empty"),
        ("predictions.splits", ["tst"], "predictions.splits[0]: unknown value 'tst'"),
        ("predictions.extra_tasks", [PAINT], "data: duplicate task 'paint'"),
        ("loop.best_mode", "min", "loop.best_mode: expected 'max' for macro_f1"),
        ("predictions.extra_tasks", [{**TEXT_TASK, "task": "sad"}], "task: unknown task 'sad'. Did you mean 'said'?"),
        (
            "predictions.extra_tasks",
            [{**TEXT_TASK, "task": "rte"}],
            "said/val.jsonl:1: missing column 'sentence1' of task 'rte'",
        ),
        (
            "predictions.extra_tasks",
            [toy.BASE["data"]],
            "predictions.extra_tasks: expected data sets 'task', got 'text'.",
        ),
    ],
)
def test_an_invalid_experiment_is_refused_before_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any, message: str
):
    exp = set_path(EXP, path, value, must_exist=False)
    assert toy.main(["-e", "g", "--dry-run"], {"g": [exp], "base": [toy.BASE]}, folder) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": TEXT_TASK, "answers": {"by": "rank"}},
            "answers.by: 'rank' needs a list of answers, but task 'said' has free text.",
        ),
        (
            {"data": TEXT_TASK, "predictions": {"splits": ["test"]}},
            "predictions.splits: no 'test' split in 'said'.",
        ),
        (
            {"answers": {"by": "rank"}, "predictions": {"extra_tasks": [TEXT_TASK]}},
            "answers.by: 'rank' needs a list of answers, but task 'said' has free text",
        ),
        (
            {"predictions": {"splits": ["test"], "extra_tasks": [TEXT_TASK]}},
            "predictions: 'said' has no split test.",
        ),
        ({"data": {"name": "mixture", "parts": {"a": PAINT, "b": PAINT}}}, "data: duplicate task 'paint'"),
    ],
)
def test_contradicting_settings_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
):
    exp = {**EXP, "loop": {**EXP["loop"], "best_metric": "task_score"}, **changes}
    assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == 1
    assert message in capsys.readouterr().err
