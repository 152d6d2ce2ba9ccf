"""Every results command takes runs, groups, expressions and -o the same way."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from results import answers, clean, diff, lineage, metadata, note, plot, progress, report, rollouts, share, table
from results.pages import run_page
from src.runs.run_dir import RunDir
from src.tables import run_arguments

COMMANDS: dict[str, Callable] = {
    module.__name__.rpartition(".")[2]: module.main
    for module in (
        answers,
        clean,
        diff,
        lineage,
        metadata,
        note,
        plot,
        progress,
        report,
        rollouts,
        run_page,
        share,
        table,
    )
}
NUMBER = {"diff": 2, "metadata": 1, "rollouts": 1, "run_page": 1}
"""Runs that a command needs, if not any number."""
FORMS = [
    "folder and group",
    "group and folder",
    "expression",
    "save directories",
    "ids",
    "ids after their folder",
    "ids and folder",
]
SUFFIX = {"plot": ".svg", "metadata": ".svg", "progress": ".svg"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with everything that the commands read; two are in group "two", one in group "one"."""
    folder = tmp_path_factory.mktemp("many") / "runs"
    gains = {f"{kind}{end}/html": 0.1 for kind in ("val_gain", "val_gain_control") for end in ("", "_low", "_high")}
    gains |= {f"val_text_perplexity_{kind}/html": 2.0 for kind in ("without", "with")}
    for seed in range(3):
        exp = {"recipe": "toy", "seed": seed}
        with RunDir.open(folder, exp, exp, facts={"groups": ["one" if seed == 2 else "two"]}) as run:
            run.scores.append({"step": 1, "val_loss": 1.0 + seed, "reward": 1.0, "inference/em": 1.0, **gains})
            (run.path / "inference").mkdir()
            row = {"question": "q", "context": "c", "answer": "a", "dataset": "d", "answer_pred": "a"}
            (run.path / "inference" / "val.jsonl").write_text(json.dumps(row) + "\n")
            rollout = {"step": 1, "iteration": 0, "prompt": "p", "answer": "a", "reward": 1.0}
            (run.path / "rollouts.jsonl").write_text(json.dumps(rollout) + "\n")
            run.set_status("done", step=1)
    return folder


def ids(runs: Path, group: str) -> list[str]:
    groups = {
        path.name: json.loads((path / "groups.json").read_text()) for path in runs.iterdir() if len(path.name) == 32
    }
    return sorted(name for name, of_run in groups.items() if group in of_run)


def selections(runs: Path, count: int) -> dict[str, list[str]]:
    """Words that choose one or two runs, in each form."""
    group = {1: "one", 2: "two"}[count]
    names = ids(runs, group)
    expression = f"seed {'== 2' if count == 1 else '< 2'}"
    return {
        "folder and group": [str(runs), "-e", group],
        "group and folder": ["-r", str(runs), "-e", group],
        "expression": [str(runs), "--where", expression],
        "save directories": [str(runs / name) for name in names],
        "ids": ["--runs", str(runs), *(name[:10] for name in names)],
        "ids after their folder": [f"{runs}/{name[:10]}" for name in names],
        "ids and folder": [*names, "-r", str(runs)],
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_chooses_the_same_runs(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, form: str
):
    count = NUMBER.get(command, 2)
    outputs = []
    for words in (selections(runs, count)[form], selections(runs, count)["save directories"]):
        output = tmp_path / f"{len(outputs)}{SUFFIX.get(command, '.txt')}"
        assert COMMANDS[command]([*words, "-o", str(output)]) == 0, capsys.readouterr().err
        assert str(output) in capsys.readouterr().out
        outputs.append(output.read_bytes())
    if command not in (
        "report",
        "run_page",
        "share",
        "plot",
        "metadata",
        "progress",
    ):  # these hold a time, a title or a random id
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["FOLDER", "FOLDER/.."], "FOLDER/.."),
        (["nowhere/at-all"], "nowhere/at-all"),
        (["-r", "nowhere", "abc"], "nowhere"),
        (["-r", "FOLDER", "fffffffff"], "fffffffff"),
        (["FOLDER", "-e", "tow"], "tow"),
    ],
)
def test_mistakes_are_one_line_that_names_the_value(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, words: list[str], value: str
):
    words = [word.replace("FOLDER", str(runs)) for word in words]
    assert COMMANDS[command]([*words, "-o", str(tmp_path / "x.svg")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert value.replace("FOLDER", str(runs)) in error
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize("command", ["diff", "rollouts", "run_page"])
def test_a_wrong_number_of_runs_is_one_line(runs: Path, capsys: pytest.CaptureFixture[str], command: str):
    assert COMMANDS[command]([str(runs)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "got 3" in error


def test_a_note_of_all_runs_needs_a_choice(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert note.main([str(runs), "--tag", "x"]) == 1
    assert "--tag" in capsys.readouterr().err


def test_the_folder_of_named_runs_is_theirs(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(runs.parent)
    (name,) = ids(runs, "one")
    assert run_arguments.find_run(f"runs/{name[:6]}", Path("elsewhere")) == Path("runs") / name
    assert run_arguments.find_run(name[:6], Path("runs")) == Path("runs") / name
    assert run_arguments.find_run(f"runs/{name}", Path("elsewhere")) == Path("runs") / name
