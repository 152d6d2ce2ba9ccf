"""Super-Natural-Instructions in the layout of its release: the text of a row, which instances are there, and what is
refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.t5 import natural_instructions
from src.evaluation.predictions import task_scores
from src.experiments.config import Places, load
from src.systems.t5.tasks import dataset
from tests.systems.metadata.data.test_examples import byte_tokenizer

TASK: dict[str, Any] = {
    "Definition": ["Say what colour the thing has"],
    "Positive Examples": [
        {"input": "The cat is red.", "output": "red", "explanation": "e"},
        {"input": "A blue dog", "output": "blue!", "explanation": "e"},
        {"input": "never", "output": "shown", "explanation": "e"},
    ],
    "Negative Examples": [],
    "Instances": [
        {"id": f"{i}", "input": f" The bird {i} is green ", "output": ["green", " It is green"]} for i in range(120)
    ],
}
EXPECTED = """Definition: Say what colour the thing has.

 Positive Example 1 -
Input: The cat is red.
 Output: red.

 Positive Example 2 -
Input: A blue dog.
 Output: blue!

Now complete the following example -
Input: The bird 0 is green.
Output:"""


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    (folder / "splits" / "default").mkdir(parents=True)
    (folder / "tasks").mkdir()
    for split, names in (("train", ["task1_a", "task2_b"]), ("test", ["task3_c"])):
        (folder / "splits" / "default" / f"{split}_tasks.txt").write_text("\n".join(names) + "\n")
        for name in names:
            (folder / "tasks" / f"{name}.json").write_text(json.dumps(TASK))
    return folder


def prepare(release: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    assert natural_instructions.main(["--data_path", str(release.parent / "data"), str(release), *options]) == 0
    folder = release.parent / "data" / "sni"
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "val")
    }


def test_model_inputs_and_scores(release: Path):
    prepare(release)
    config = load(dataset.Config, {"task": "sni", "corpus": "sni", "input_tokens": 999}, "data")
    data = config.build(Places(release.parent / "data", release.parent / "runs"), byte_tokenizer(), "val", 0)
    assert data.input(0) == EXPECTED
    assert data.target(0) in ("green", "It is green")
    assert task_scores(data.task, [data.prediction(0, "It is green")]) == {
        "rougeL": 1.0,
        "em": 1.0,
        "task_score": 100.0,
    }
    assert task_scores(data.task, [data.prediction(0, "greens")])["rougeL"] == 1.0, (
        "stems are compared, with the best reference"
    )
    assert task_scores(data.task, [data.prediction(0, "red")])["rougeL"] == 0.0


def test_instances(release: Path):
    instances = prepare(release)
    assert [len(instances[split]) for split in ("train", "val")] == [200, 100]
    assert all(int(row["text"].split("The bird ")[1].split()[0]) < 100 for row in instances["val"]), (
        "the benchmark is the first hundred"
    )
    assert {row["group"] for row in instances["train"]} == {"task1_a", "task2_b"}
    few = prepare(release, "--instances", "7", "--positive_examples", "0")
    assert [len(few[split]) for split in ("train", "val")] == [14, 7]
    assert "Positive" not in few["val"][0]["text"]
    short = prepare(release, "--input_characters", "200")
    assert short["val"][0]["text"].count("Positive Example") == 1, "the instance stays, examples go"


def test_missing_files(release: Path, capsys: pytest.CaptureFixture[str]):
    place = ["--data_path", str(release.parent / "data")]
    assert natural_instructions.main([*place, str(release / "nowhere")]) == 1
    assert "no list of tasks" in capsys.readouterr().err
    (release / "tasks" / "task2_b.json").write_text('{"Definition": "x"}')
    assert natural_instructions.main([*place, str(release)]) == 1
    assert (
        "task2_b.json: malformed task of Natural Instructions (KeyError: 'Positive Examples')"
        in capsys.readouterr().err
    )
    (release / "tasks" / "task2_b.json").write_text(
        json.dumps({**TASK, "Definition": [], "Instances": [{"input": 3, "output": ["x"]}]})
    )
    assert natural_instructions.main([*place, str(release)]) == 1
    assert "task2_b.json: malformed task of Natural Instructions (IndexError" in capsys.readouterr().err
    (release / "tasks" / "task2_b.json").write_text(json.dumps({**TASK, "Instances": [{"input": 3, "output": ["x"]}]}))
    assert natural_instructions.main([*place, str(release)]) == 1
    assert "task2_b.json: malformed task of Natural Instructions (AttributeError" in capsys.readouterr().err
    (release / "tasks" / "task2_b.json").unlink()
    assert natural_instructions.main([*place, str(release)]) == 1
    assert "task2_b.json: missing, although a split lists this task." in capsys.readouterr().err
    assert not (release.parent / "data" / "sni").exists()
