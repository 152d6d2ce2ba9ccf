"""After the training: the questions of a split with the model's answers, whole or not at all, and their scores in the
last row."""

import copy
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from results import rescore
from src.evaluation.metrics import knowledge
from src.evaluation.metrics.answers import GAIN, WRONG, make_prediction
from src.experiments.identity import exp_id
from src.experiments.registry import METRICS, bind
from src.files import defect, new_directory
from src.tables import results
from tests import toy, warm

ROWS = 21
EXP: dict[str, Any] = copy.deepcopy(toy.CROSSATTN)
EXP["data"]["corpus"] = "asked_qa"
EXP["loop"] |= {"steps": 4, "sequences_per_step": 24, "micro_batch": 4, "eval_every": 2}
EXP["answers"] = {"questions": 3, "max_new_tokens": 4, "metrics": [{"name": "squad"}, {"name": "rouge"}]}
EXP["inference"] = {"max_new_tokens": 4, "metrics": [{"name": "squad"}, {"name": "knowledge"}], "split": "test"}
SOME = copy.deepcopy(EXP)
SOME["inference"] |= {"datasets": ["two"], "index_file": "hard.txt", "rows": 3}
CONTROL = copy.deepcopy(EXP)
CONTROL["inference"]["wrong_contexts"] = True


class World:
    """Data, a base whose random weights are so large that it answers differently to each question, and the runs that
    are made on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        toy.write_data(folder / "data")
        _write_base(folder / "base", folder / "data" / "toy_tokenizer")
        self.rows = [
            {
                "context": f"the {t} is {c} .",
                "question": f"what is {t} {c} ?",
                "answer": c,
                "dataset": ("one", "two")[i % 2],
                "title": f"Łódź {i}",
            }
            for i, t in enumerate(toy.THINGS * 4)
            for c in [toy.COLOURS[i % 8]]
        ]
        with new_directory(folder / "data" / "asked_qa") as new_world:
            for split, some in (("train", self.rows[ROWS:]), ("val", self.rows[:5]), ("test", self.rows[:ROWS])):
                (new_world / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
            (new_world / "hard.txt").write_text("7\n4\n\n5\n20\n1\n3\n")
        base = {"name": "hf", "path": str(folder / "base")}
        self.groups = {
            name: [{**exp, "model": {**exp["model"], "base": base}}]
            for name, exp in (("all", EXP), ("some", SOME), ("control", CONTROL))
        }
        self.project = toy.project(folder, f"EXP_GROUPS = {self.groups!r}\n")

    def main(self, group: str) -> int:
        """Train a group in this process."""
        return toy.main(["-e", group], self.groups, self.folder)

    def start(self, processes: int, more: list[str]) -> str:
        """Train "all" in several processes; what they print."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        process = warm.Process(
            toy.command(self.project, ["-e", "all", *more], self.folder, processes), toy.environment(), None, log
        )
        try:
            assert process.wait(timeout=600) == 0, log.read_text()
        finally:
            process.kill()
        return log.read_text()

    def run(self, group: str) -> Path:
        """Its save directory."""
        return self.folder / "runs" / exp_id(self.groups[group][0])


def _write_base(folder: Path, tokenizer: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(words), max_position_embeddings=64, initializer_range=0.5, **sizes)
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The run of "all" is kept aside as `undisturbed`."""
    new_world = World(tmp_path_factory.mktemp("inference"))
    assert new_world.main("all") == 0
    shutil.copytree(new_world.run("all"), new_world.folder / "undisturbed")
    return new_world


@pytest.fixture
def finished_run(world: World) -> Path:
    """The save directory of "all", finished, but for the last word of it: a start goes on from its last checkpoint."""
    shutil.rmtree(world.run("all"))
    shutil.copytree(world.folder / "undisturbed", world.run("all"))
    (world.run("all") / "status.json").unlink()
    return world.run("all")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "inference" / "test.jsonl").read_text().splitlines()]


def last_row(run: Path) -> dict[str, Any]:
    return json.loads((run / "scores.jsonl").read_text().splitlines()[-1])


def test_every_row_is_answered_and_scored(world: World):
    run = world.folder / "undisturbed"
    answers = lines(run)
    assert [{name: value for name, value in row.items() if name != "answer_pred"} for row in answers] == world.rows[
        :ROWS
    ]
    assert len({row["answer_pred"] for row in answers}) > 10, "else their order does not show"
    assert defect(run / "inference") is None
    assert not (run / "inference.part.jsonl").exists()

    before, last = (json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines())
    assert not [name for name in before if name.startswith(("inference", "cache"))]
    assert {"em", "rougeL", "val_loss", "em/one"} <= before.keys()
    for part, some in (("", answers), ("/one", answers[::2]), ("/two", answers[1::2])):
        for name, values in (
            knowledge.Config().score([make_prediction(row, row["answer_pred"]) for row in some]).items()
        ):
            assert last[f"inference/{name}{part}"] == pytest.approx(sum(values) / len(values))
    assert {"inference/em", "inference/f1/one"} <= last.keys()
    assert 0 < last["inference/k_precision/one"] != last["inference/k_precision/two"]
    # Base of 3 layers, 1 key/value head of width 16, hidden size 32; one block, with one key/value head of 16 too.
    assert last["cache_bytes_per_context_token"] == 4 * 32
    assert last["decoder_cache_bytes_per_context_token"] == 4 * 2 * 3 * 16
    assert last["projected_bytes_per_context_token"] == 4 * 2 * 16


def test_a_control_uses_the_contexts_of_other_questions(world: World):
    assert world.main("control") == 0
    run = world.run("control")
    right, wrong = (rescore.read(run / "inference" / f"test{end}.jsonl") for end in ("", WRONG))
    assert lines(run) == lines(world.folder / "undisturbed"), (
        "the questions themselves are answered as without a control"
    )
    assert [replace(answer, text="") for answer in wrong] == [replace(answer, text="") for answer in right]
    assert [answer.text for answer in wrong] != [answer.text for answer in right]

    metrics = [bind(METRICS, metric) for metric in EXP["inference"]["metrics"]]
    last, scores = last_row(run), rescore.score_answers(metrics, wrong, best_answer=False)["all"]
    for name, value in scores.items():
        if name != "rows":
            assert last[f"inference/{name}{WRONG}"] == value
            assert last[f"inference/{name}{GAIN}"] == last[f"inference/{name}"] - value


def test_its_speed_is_recorded(world: World):
    speed = json.loads((world.folder / "undisturbed" / "inference.speed.json").read_text())
    assert ROWS < speed["generated_tokens"] <= 4 * ROWS
    assert (speed["batch_size"], speed["processes"], speed["device"]) == (4, 1, "cpu")
    assert speed["seconds_to_first_token"] > 0
    assert speed["tokens_per_second"] > 0
    assert speed["flops_per_generated_token"] > 0


def test_scores_can_be_recomputed_from_the_file(world: World):
    run = world.folder / "undisturbed"
    metrics = [bind(METRICS, metric) for metric in EXP["inference"]["metrics"]]
    new_scores = rescore.score_answers(metrics, rescore.read(run / "inference" / "test.jsonl"), best_answer=False)
    again = {f"inference/{name}": value for name, value in new_scores["all"].items() if name != "rows"}
    again |= {
        f"inference/{name}/{s}": new_scores[s][name] for s in ("one", "two") for name in new_scores[s] if name != "rows"
    }
    assert again == {name: value for name, value in last_row(run).items() if name.startswith("inference/")}


def test_tables_show_the_scores_of_the_trained_model(world: World):
    rows, _ = results.load_rows(world.folder / "runs")
    score_names = results.headline_scores(results.score_names(rows))
    assert {"inference/em", "inference/f1", "cache_bytes_per_context_token"} <= set(score_names)
    assert not {"inference/em/one", "projected_bytes_per_context_token", "decoder_cache_bytes_per_context_token"} & set(
        score_names
    )


def test_a_finished_inference_is_not_made_again(world: World, finished_run: Path):
    new_world, row = (finished_run / "inference").stat().st_ino, last_row(finished_run)
    assert world.main("all") == 0
    assert (finished_run / "inference").stat().st_ino == new_world
    assert last_row(finished_run) == row


@pytest.mark.parametrize(
    "damage", ["of other weights", "of other inputs", "of another batch size", "torn", "a part of other weights"]
)
def test_outputs_with_another_key_are_recomputed(world: World, finished_run: Path, damage: str):
    expected, folder = lines(finished_run), finished_run / "inference"
    facts = {
        name: value for name, value in json.loads((folder / "manifest.json").read_text()).items() if name != "files"
    }
    changed = {
        "of other inputs": {"inputs": {**facts["inputs"], "data": "0" * 64}},
        "of another batch size": {"batch_size": 5},
    }
    others = facts | changed.get(damage, {"weights": "0" * 64})
    if damage == "torn":
        (folder / "test.jsonl").write_text("{")
    elif damage.startswith("of "):
        with new_directory(folder, others) as new_world:
            (new_world / "test.jsonl").write_text(
                "".join(json.dumps(row | {"answer_pred": "wrong"}) + "\n" for row in expected)
            )
    else:
        shutil.rmtree(folder)
        (finished_run / "inference.part.jsonl").write_text(json.dumps(others, sort_keys=True) + '\n"wrong"\n"wrong"\n')
    assert world.main("all") == 0
    assert lines(finished_run) == expected
    assert defect(folder) is None


def interrupt_inference(world: World, run: Path) -> int:
    """Send SIGTERM to this process, which trains, when some answers are noted; the exit code."""
    part, over = run / "inference.part.jsonl", threading.Event()

    def watch() -> None:
        until = time.monotonic() + 300
        while not over.is_set() and time.monotonic() < until:
            if part.exists() and part.read_bytes().count(b"\n") > 4:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return world.main("all")
    finally:
        over.set()
        thread.join()


def test_an_interrupted_inference_resumes(world: World, finished_run: Path, caplog: pytest.LogCaptureFixture):
    shutil.rmtree(finished_run / "inference")
    assert interrupt_inference(world, finished_run) == 75
    status = json.loads((finished_run / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 4)
    assert "SIGTERM: stopped at step 4" in status["reason"]
    assert not (finished_run / "inference").exists()
    done = (finished_run / "inference.part.jsonl").read_bytes().count(b"\n") - 1
    assert 4 <= done < ROWS
    with open(finished_run / "inference.part.jsonl", "ab") as file:
        file.write(b'\x00\x00\x00\n"a line that a kill has to')  # as a power cut leaves it

    caplog.clear()
    assert world.main("all") == 0
    assert f"resumes after {done} of {ROWS} inputs" in caplog.text
    for name in ("inference/test.jsonl", "inference/manifest.json", "scores.jsonl"):
        assert (finished_run / name).read_bytes() == (world.folder / "undisturbed" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "more"), [(3, []), (2, ["--fsdp"])], ids=["replicated", "fsdp"])
def test_several_processes_give_the_same_answers(world: World, finished_run: Path, processes: int, more: list[str]):
    """21 rows in batches of 4; the first is answered already, and a row of the second. Three do not share the five
    others evenly."""
    shutil.rmtree(finished_run / "inference")
    head = json.loads((world.folder / "undisturbed" / "inference" / "manifest.json").read_text())
    del head["files"]
    first = [json.dumps(row["answer_pred"]) for row in lines(world.folder / "undisturbed")][:4]
    (finished_run / "inference.part.jsonl").write_text(
        "\n".join([json.dumps(head, sort_keys=True), *first, '"wrong"', ""])
    )
    log = world.start(processes, more)
    assert "resumes after 4 of 21 inputs" in log
    assert lines(finished_run) == lines(world.folder / "undisturbed")
    assert last_row(finished_run) == last_row(world.folder / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_start_under_zero_that_has_only_the_inference_left(world: World, finished_run: Path, stage: int):
    """The base is frozen, so it is in no shard that DeepSpeed reads back."""
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    settings = world.folder / "zero.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage": stage}, "train_batch_size": "auto"}))
    shutil.rmtree(finished_run)
    world.start(2, ["--deepspeed", str(settings)])
    shutil.rmtree(finished_run / "inference")
    (finished_run / "status.json").unlink()
    assert "continues from step 4" in world.start(2, ["--deepspeed", str(settings)])
    assert lines(finished_run) == lines(world.folder / "undisturbed")


def test_some_rows(world: World):
    """Of the rows that the file lists (7 4 5 20 1 3) those of "two" are the odd ones."""
    assert world.main("some") == 0
    assert lines(world.run("some")) == [lines(world.folder / "undisturbed")[i] for i in (7, 5, 1)]
