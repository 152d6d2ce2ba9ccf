"""Sampling reports, and how well a reward model agrees with ranked replies."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.serving import chat
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.serving import reward_evaluation, sampling_report
from tests import toy
from tests.systems.assistants.train_assistants import REWARD, SFT, write_data

WAYS = """
default:
  generate_args: {max_new_tokens: 6, do_sample: true, temperature: 3.0, top_k: 5}
  pre_text: "Say: "
  system_profile: terse
configurations:
  - {name: greedy, generate_args: {do_sample: false}}
  - {name: wild, generate_args: {top_k: 0}, pre_text: "", system_profile: ""}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that was fine-tuned a little, a reward model, prompts and configurations."""
    folder = tmp_path_factory.mktemp("sampling")
    write_data(folder / "data")
    assert toy.main(["-e", "sft", "reward"], {"sft": [SFT], "reward": [REWARD]}, folder) == 0
    rows: list[Any] = [
        "1?",
        {"prompt": "2?"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "3?"}]},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ways.yaml").write_text(WAYS)
    return folder


def run_of(folder: Path, exp: dict[str, Any]) -> str:
    return str(folder / "runs" / exp_id(exp))


def places(folder: Path) -> list[str]:
    return ["--data_path", str(folder / "data"), "-sb", str(folder / "runs"), "--device", "cpu"]


def report(folder: Path, *words: str, exp: dict[str, Any] = SFT, prompts: str = "prompts.jsonl") -> Any:
    """The report, or None if there is none."""
    file = folder / "report.json"
    file.unlink(missing_ok=True)
    parts = ["--prompts", str(folder / prompts), "--report", str(file), "--config", str(folder / "ways.yaml"), *words]
    code = sampling_report.main([run_of(folder, exp), *parts, *places(folder)])
    assert (code == 0) == file.exists()
    return json.loads(file.read_text()) if code == 0 else None


def outputs(summary: Any) -> dict[tuple[str, str], list[str]]:
    return {
        (entry["prompt"], result["sampling_config"]): result["outputs"]
        for entry in summary["prompts"]
        for result in entry["results"]
    }


def test_a_report_has_the_layout_that_tools_read(folder: Path):
    summary = report(folder, "--num_samples", "3")
    assert summary.keys() == {"model_name", "date", "args", "prompts"}
    assert summary["args"]["num_samples"] == 3
    assert [entry["prompt"] for entry in summary["prompts"]] == ["1?", "2?", "3?"]
    assert summary["prompts"][0]["results"][0].keys() == {"sampling_config", "sampling_params", "outputs"}
    assert {name: len(texts) for (_, name), texts in outputs(summary).items()} == {"greedy": 1, "wild": 3}


def test_values_that_are_false_override_the_default(folder: Path):
    greedy, wild = sampling_report.read_samplings(folder / "ways.yaml", None)
    assert greedy.generate_args == {"max_new_tokens": 6, "do_sample": False}
    assert wild.generate_args == {"max_new_tokens": 6, "do_sample": True, "temperature": 3.0, "top_k": 0}
    assert greedy.messages("1?") == [Message("system", "terse"), Message("user", "Say: 1?")]
    assert wild.messages("1?") == [Message("user", "1?")]


def test_samples_depend_only_on_seed_configuration_and_prompt(folder: Path):
    first, alone, other = (outputs(report(folder, *words)) for words in ((), ("--only", "wild"), ("--seed", "1")))
    assert alone == {key: texts for key, texts in first.items() if key[1] == "wild"}
    assert {key: texts == first[key] for key, texts in other.items()} == {key: key[1] == "greedy" for key in first}
    assert len({text for texts in first.values() for text in texts}) > 3


def test_the_shipped_configurations_are_understood_by_transformers(folder: Path):
    samplings = sampling_report.read_samplings(sampling_report.ROOT / "resources" / "sampling.yaml", None)
    short = [way.model_copy(update={"generate_args": {**way.generate_args, "max_new_tokens": 2}}) for way in samplings]
    talk, _ = sampling_report.load_writer(Path(run_of(folder, SFT)), Places(folder / "data", folder / "runs"))
    ((entry),) = sampling_report.sample(talk, short, ["1?"], 2, 0)  # type: ignore[arg-type]
    assert {result["sampling_config"]: len(result["outputs"]) for result in entry["results"]} == {
        way.name: 2 if way.generate_args["do_sample"] else 1 for way in samplings
    }


def test_an_evaluation_has_the_scores_of_the_training(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "scores.json"
    assert reward_evaluation.main([run_of(folder, REWARD), "replies", "--report", str(file), *places(folder)]) == 0
    summary, last = json.loads(file.read_text()), toy.evaluations(folder, exp_id(REWARD))[-1]
    assert (summary["dataset"], summary["split"], summary["conversations"]) == ("replies", "val", 6)
    words = [run_of(folder, REWARD), "replies", "--report", str(file), "--micro_batch", "1", *places(folder)]
    assert reward_evaluation.main(words) == 0
    assert json.loads(file.read_text()) == pytest.approx(summary, abs=1e-6), "the batch changes no score"
    for name, column in (
        ("accuracy", "accuracy"),
        ("kendalltau", "kendall"),
        ("spearmanr", "spearman"),
        ("loss", "loss"),
    ):
        assert summary[name] == pytest.approx(last["val_loss" if column == "loss" else f"val_{column}"], abs=1e-6)
    assert "kendalltau" in capsys.readouterr().out
    assert (
        reward_evaluation.main(
            [run_of(folder, REWARD), str(folder / "data" / "replies"), "--split", "train", *places(folder)]
        )
        == 0
    )
    assert "conversations  24" in capsys.readouterr().out


COLD = "configurations: [{name: a, generate_args: {max_new_tokens: 1, do_sample: true, temperature: -1.0}}]"
IGNORED = "configurations: [{name: a, generate_args: {max_new_tokens: 1, top_p: 0.5}}]"
MISTAKES = [
    ("report", {"--config": IGNORED}, "configurations[0]: top_p: would be ignored without do_sample."),
    ("report", {"--only": "gredy"}, "--only: unknown configuration 'gredy'. Did you mean 'greedy'?"),
    ("report", {"--num_samples": "0"}, "--num_samples: expected at least 1, got 0."),
    ("report", {"--prompts": "none"}, "none: no such file."),
    (
        "report",
        {"--prompts": '{"text": "x"}'},
        'expected a text, or an object with "prompt" or "messages"; got {"text": "x"}',
    ),
    ("report", {"--prompts": '"x'}, ":1: not valid JSON"),
    (
        "report",
        {"--prompts": json.dumps("x" * 99)},
        "prompt 1, configuration 'greedy': 114 tokens and --max_new_tokens 6 exceed",
    ),
    (
        "report",
        {"--config": "configurations: [{name: a, generate_args: {tempratur: 1}}]"},
        "Did you mean 'temperature'?",
    ),
    ("report", {"--config": "configurations: [{name: a}]"}, "max_new_tokens: expected an int above 0, got None."),
    (
        "report",
        {"--config": "default: {generate_args: {max_new_tokens: 1}}\nconfigurations: [{name: a}, {name: a}]"},
        "duplicate name 'a'",
    ),
    (
        "report",
        {"--config": "samplings: []"},
        "expected default, an object, and configurations, a list of objects; got the keys samplings.",
    ),
    ("report", {"--config": COLD}, "`temperature`"),
    ("report", {"RUN": "reward"}, "a reward model "),
    ("evaluate", {"--micro_batch": "0"}, "--micro_batch: expected at least 1, got 0."),
    ("evaluate", {"FOLDER": "numbers"}, "numbers: no conversation has replies of different ranks."),
    ("evaluate", {"FOLDER": "repliez"}, "no such data set"),
    ("evaluate", {"RUN": "sft"}, "expected a run of recipe 'reward'"),
]


@pytest.mark.parametrize(("command", "parts", "message"), MISTAKES)
def test_mistakes_are_reported_and_nothing_is_written(
    command: str, parts: dict[str, str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def file(name: str, default: str) -> str:
        content = parts.get(name, default)
        (tmp_path / name).write_text(content)
        return str(tmp_path / name) if content != "none" else "none"

    run = run_of(folder, {"sft": SFT, "reward": REWARD}[parts.get("RUN", "sft" if command == "report" else "reward")])
    options = [
        word
        for name, value in parts.items()
        if name in ("--only", "--num_samples", "--micro_batch")
        for word in (name, value)
    ]
    words = {
        "report": [
            run,
            "--prompts",
            file("--prompts", '"1?"'),
            "--config",
            file("--config", WAYS),
            "--report",
            str(tmp_path / "out"),
        ],
        "evaluate": [run, parts.get("FOLDER", "replies"), "--report", str(tmp_path / "out")],
    }[command]
    main = {"report": sampling_report, "evaluate": reward_evaluation}[command].main
    assert main([*words, *options, *places(folder)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_broken_text_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Half of a surrogate pair in an argument or a prompt; messages that are no list."""
    prompts = {
        '{"messages": 5}': 'prompts.jsonl:1: expected a text, or an object with "prompt"',
        '"\\ud800"': "half of a surrogate pair",
    }
    for line, message in prompts.items():
        (folder / "bad").mkdir(exist_ok=True)
        (folder / "bad" / "prompts.jsonl").write_text(line + "\n")
        assert report(folder, prompts="bad/prompts.jsonl") is None
        assert message in capsys.readouterr().err
    assert chat.main([run_of(folder, SFT), "\udc80", *places(folder)]) == 1
    assert "the message: \\udc80 at character 0 is half of a surrogate pair" in capsys.readouterr().err


def test_a_line_that_cannot_be_answered_does_not_end_a_conversation(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("2?\n" + "x" * 90 + "\n\ud800\n!reset\n2?\n"))
    assert chat.main([run_of(folder, SFT), "--temperature", "0", "--max_new_tokens", "4", *places(folder)]) == 0
    captured = capsys.readouterr()
    assert "error: the conversation: " in captured.err
    assert "half of a surrogate pair" in captured.err
    first, last, *_ = captured.out.splitlines()
    assert first == last
