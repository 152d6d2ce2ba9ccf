"""Files for the server of SuperGLUE, from the rows of its own release."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.t5 import prepare_task
from src.evaluation.predictions import TaskSplit, submission
from src.experiments.config import Places, load
from src.systems.t5.tasks import dataset
from tests.systems.metadata.data.test_examples import byte_tokenizer

MULTIRC = {
    "idx": 9,
    "passage": {
        "text": "A.",
        "questions": [
            {"question": "q", "answers": [{"text": "a", "idx": 0}, {"text": "b", "idx": 1}], "idx": 4},
            {"question": "r", "answers": [{"text": "c", "idx": 0}], "idx": 5},
        ],
    },
}
RECORD = {
    "idx": 7,
    "passage": {"text": "Ann met Bo.", "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 9}]},
    "qas": [{"query": "@placeholder left", "idx": 70}, {"query": "@placeholder stayed", "idx": 71}],
}
WSC = {
    "text": "Ann saw her .",
    "target": {"span1_text": "Ann", "span1_index": 0, "span2_text": "her", "span2_index": 2},
    "idx": 3,
}


@pytest.mark.parametrize(
    ("task", "row", "answers", "expected"),
    [
        ("boolq", {"question": "q", "passage": "p", "idx": 5}, ["True"], [{"idx": 5, "label": "true"}]),
        ("boolq", {"question": "q", "passage": "p", "idx": 5}, ["nonsense"], [{"idx": 5, "label": "false"}]),
        ("cb", {"premise": "p", "hypothesis": "h", "idx": 0}, ["neutral"], [{"idx": 0, "label": "neutral"}]),
        (
            "copa",
            {"premise": "p", "choice1": "a", "choice2": "b", "question": "cause", "idx": 1},
            ["choice2"],
            [{"idx": 1, "label": 1}],
        ),
        ("wic", {"sentence1": "a", "sentence2": "b", "word": "w", "idx": 2}, ["False"], [{"idx": 2, "label": "false"}]),
        ("wsc", WSC, ["True"], [{"idx": 3, "label": "True"}]),
        (
            "superglue_rte",
            {"premise": "p", "hypothesis": "h", "idx": 8},
            ["entailment"],
            [{"idx": 8, "label": "entailment"}],
        ),
        (
            "axb",
            {"sentence1": "p", "sentence2": "h", "idx": 8},
            ["not_entailment"],
            [{"idx": 8, "label": "not_entailment"}],
        ),
        ("axg", {"premise": "p", "hypothesis": "h", "idx": 8}, ["entailment"], [{"idx": 8, "label": "entailment"}]),
        ("record", RECORD, ["Ann", "Bo"], [{"idx": 70, "label": "Ann"}, {"idx": 71, "label": "Bo"}]),
        (
            "multirc",
            MULTIRC,
            ["True", "False", "True"],
            [
                {
                    "idx": 9,
                    "passage": {
                        "questions": [
                            {"idx": 4, "answers": [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]},
                            {"idx": 5, "answers": [{"idx": 0, "label": 1}]},
                        ]
                    },
                }
            ],
        ),
    ],
)
def test_lines_are_those_of_the_server(
    tmp_path: Path, task: str, row: dict[str, Any], answers: list[str], expected: list[Any]
):
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    assert (
        prepare_task.main(
            ["--data_path", str(tmp_path / "data"), "--task", task, "--test", str(tmp_path / "test.jsonl")]
        )
        == 0
    )
    config = load(dataset.Config, {"task": task, "corpus": task, "input_tokens": 200, "target_tokens": 20}, "data")
    data = config.build(Places(tmp_path / "data", tmp_path / "runs"), byte_tokenizer(), "test", 0)
    assert [json.loads(line) for line in submission(TaskSplit(data, "test"), answers).splitlines()] == expected
