"""Which questions an experiment asks, and what is refused of it before anything is loaded, or before the training."""

import copy
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, DataError
from src.evaluation.config import Answers, Inference, score_names
from src.experiments import config
from tests import toy

INFERENCE: dict[str, Any] = {"max_new_tokens": 4, "metrics": [{"name": "squad"}]}
ROUGE = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


class Rows:
    """Ten questions of two sources."""

    num_questions = 10
    reads_contexts = False

    def source(self, index: int) -> str:
        return "odd" if index % 2 else "even"


def inference(**settings: Any) -> Inference:
    return config.load(Inference, {**INFERENCE, **settings}, "inference")


@pytest.mark.parametrize(
    ("settings", "row_indices", "expected"),
    [
        ({}, None, list(range(10))),
        ({"rows": 3}, None, [0, 1, 2]),
        ({"datasets": ["odd"]}, None, [1, 3, 5, 7, 9]),
        ({"datasets": ["odd"], "rows": 2}, None, [1, 3]),
        ({"datasets": ["odd", "even"]}, None, list(range(10))),
        ({"index_file": "x.txt"}, [9, 0, 4], [9, 0, 4]),
        ({"index_file": "x.txt", "datasets": ["even"], "rows": 1}, [9, 4, 0], [4]),
    ],
)
def test_chosen_questions(settings: dict[str, Any], row_indices: list[int] | None, expected: list[int]):
    assert inference(**settings).select(Rows(), row_indices) == expected


@pytest.mark.parametrize(
    ("settings", "row_indices", "error", "message"),
    [
        ({"rows": 11}, None, DataError, r"^inference\.rows: 11 requested, only 10 available\."),
        (
            {"datasets": ["ood"]},
            None,
            ConfigError,
            r"^inference\.datasets: unknown source 'ood'\. Did you mean 'odd'\? Known: even, odd\.$",
        ),
        (
            {"index_file": "x.txt"},
            [3, 10],
            DataError,
            r"^inference\.index_file: x\.txt: row 10 is out of range, expected 0 to 9\.$",
        ),
        (
            {"index_file": "x.txt"},
            [3, 5, 3],
            DataError,
            r"^inference\.index_file: x\.txt: row 3 is listed 2 times, expected once\.$",
        ),
        ({"index_file": "x.txt"}, [], DataError, r"^inference: no row of the split is in both inference\.index_file"),
        (
            {"index_file": "x.txt", "datasets": ["odd"]},
            [2, 4],
            DataError,
            r"^inference: no row of the split is in both inference\.index_file",
        ),
    ],
)
def test_questions_that_do_not_exist(
    settings: dict[str, Any], row_indices: list[int] | None, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        inference(**settings).select(Rows(), row_indices)


def test_names_of_scores_and_number_of_questions():
    answers = config.load(
        Answers, {"questions": 10, "max_new_tokens": 7, "metrics": [{"name": "squad"}, {"name": "rouge"}]}, "answers"
    )
    assert set(score_names(answers.metrics)) == {"em", "f1", "precision", "recall", *ROUGE}
    answers.require(Rows())
    control = answers.model_copy(update={"shuffled_context": True})
    assert set(control.score_names()) == {
        end for name in score_names(answers.metrics) for end in (name, f"{name}_shuffled_context")
    }
    assert answers.score_names() == score_names(answers.metrics)
    with pytest.raises(ConfigError, match=r"^answers\.shuffled_context: these data have no contexts\. Remove it\.$"):
        control.require(Rows())
    with pytest.raises(DataError, match=r"^answers\.questions: 11 requested, only 10 available\."):
        answers.model_copy(update={"questions": 11}).require(Rows())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("asked")
    toy.write_data(root / "data")
    return root


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"inference": {**INFERENCE, "metrics": [{"name": "rogue"}]}},
            "c[0].inference.metrics[0].name: unknown metric 'rogue'. Did you mean",
        ),
        ({"inference": {**INFERENCE, "metrics": []}}, "c[0].inference.metrics: expected a list that is not empty"),
        (
            {"inference": {**INFERENCE, "metrics": [{"name": "rouge"}, {"name": "rouge", "stemmer": True}]}},
            "rouge1, rouge2, rougeL, rougeLsum",
        ),
        ({"inference": {**INFERENCE, "rows": 0}}, "c[0].inference.rows: expected a number > 0"),
        ({"inference": {**INFERENCE, "split": "../val"}}, "c[0].inference.split: expected text of the form"),
        ({"inference": {**INFERENCE, "split": "tst"}}, "toy_qa: has no tst.jsonl. Files: train.jsonl, val.jsonl."),
        ({"inference": {**INFERENCE, "index_file": "hard.txt"}}, "toy_qa: has no hard.txt."),
        ({"inference": {**INFERENCE, "max_new_tokens": 60}}, "data.sequence_tokens"),
        (
            {"loop": {**toy.CROSSATTN["loop"], "best_metric": "rougeL", "best_mode": "max"}},
            "loop.best_metric: unknown score 'rougeL'.",
        ),
        (
            {"loop": {**toy.CROSSATTN["loop"], "best_metric": "inference/em", "best_mode": "max"}},
            "loop.best_metric: unknown score",
        ),
    ],
)
def test_a_dry_run_reports_mistakes(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
):
    exp = copy.deepcopy(toy.CROSSATTN) | changes
    assert toy.main(["-e", "c", "--dry-run"], {"base": [toy.BASE], "c": [exp]}, folder) == 1
    assert message in capsys.readouterr().err


def test_a_dry_run_of_valid_experiments(folder: Path):
    loop = {**toy.CROSSATTN["loop"], "best_metric": "rougeL", "best_mode": "max"}
    answers = {**toy.CROSSATTN["answers"], "metrics": [{"name": "rouge"}]}
    exp = {**toy.CROSSATTN, "loop": loop, "answers": answers, "inference": INFERENCE}
    assert toy.main(["-e", "c", "--dry-run", "--with-parents"], {"base": [toy.BASE], "c": [exp]}, folder) == 0


def test_too_many_rows_show_before_the_training(folder: Path, capsys: pytest.CaptureFixture[str]):
    exp = {**toy.CROSSATTN, "inference": {**INFERENCE, "rows": 17}}
    base = copy.deepcopy(toy.BASE)
    base["loop"] |= {"steps": 1, "eval_every": 1}
    exp["model"] = {**exp["model"], "base": toy.ref(base)}
    assert toy.main(["-e", "base", "c"], {"base": [base], "c": [exp]}, folder) == 1
    assert "inference.rows: 17 requested, only 16 available." in capsys.readouterr().err
