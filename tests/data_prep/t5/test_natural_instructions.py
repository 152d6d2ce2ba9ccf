"""Super-Natural-Instructions in the layout of its release: the text of a row, which instances are there, and what is
refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.t5 import natural_instructions
from src.errors import DataError
from src.evaluation.predictions import task_scores
from src.experiments.config import Places, load
from src.files import read_manifest
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


def change_task(release: Path, name: str, **columns: Any) -> None:
    (release / "tasks" / f"{name}.json").write_text(json.dumps({**TASK, **columns}))


def options(release: Path) -> natural_instructions.Options:
    return natural_instructions.Options(release)


@pytest.mark.parametrize(
    ("instance", "place"),
    [
        ({"input": "a", "output": "yes"}, "Instances[1]: field 'output': expected list, got 'yes'"),
        ({"input": "a", "output": ["\ud800"]}, "Instances[1]: field 'output'[0]: \\ud800"),
        ({"input": "a\ud800", "output": ["b"]}, "\\ud800"),
    ],
)
def test_a_malformed_instance_is_named(release: Path, instance: dict[str, Any], place: str):
    change_task(release, "task2_b", Instances=[TASK["Instances"][0], instance])
    with pytest.raises(DataError) as error:
        natural_instructions.prepare(release.parent / "data", options(release))
    assert str(error.value).startswith(str(release / "tasks" / "task2_b.json"))
    assert place in str(error.value)


def test_instances_without_an_answer_are_counted(release: Path):
    change_task(release, "task2_b", Instances=[*TASK["Instances"][:5], *[{"input": "a", "output": ["", " "]}] * 3])
    train = prepare(release)["train"]
    assert len(train) == 105
    counts = read_manifest(release.parent / "data" / "sni", DataError)["counts"]
    assert counts == {"train": 105, "train_without_answers": 3, "val": 100, "val_without_answers": 0}
    change_task(release, "task3_c", Instances=[{"input": "a", "output": []}])
    with pytest.raises(DataError, match=r"release: .*'val'"):
        natural_instructions.prepare(release.parent / "data", options(release))


@pytest.mark.parametrize(("content", "place"), [(b"task1_a", "task1_a"), (b"\xff", "byte 0")])
def test_a_list_of_another_form_is_refused(release: Path, content: bytes, place: str):
    """A task cannot be in both splits."""
    (release / "splits" / "default" / "test_tasks.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"splits/default.*{place}"):
        natural_instructions.prepare(release.parent / "data", options(release))
