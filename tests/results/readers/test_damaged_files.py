"""Every file of a run, truncated, empty, binary, of a wrong type or nested too deeply: results commands print lines,
never a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from results import answers, clean, diff, lineage, metadata, note, plot, report, rescore, rollouts, share, table
from results.dashboard import ALL, Dashboard
from results.pages import run_page
from src.files import new_directory, write_json
from src.launch import submissions
from src.runs.checkpoints import checkpoints, pins
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from src.tables.cache import CACHE

# panel 1.9.4 calls pandas in a way that pandas 3.1 announces the end of
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:pandas.errors.Pandas4Warning")

DEEP = b"[" * 100_000
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "binary": lambda _: bytes(range(256)) * 4,
    "number": lambda _: b"3\n",
    "list": lambda _: b"[1]\n",
    "text": lambda _: b'"text"\n',
    "dict": lambda _: (
        b'{"state": [1], "step": "x", "event": 1, "groups": {"a": 1}, "inputs": 3, "tags": 1, "holder": 1}\n'
    ),
    "deep": lambda _: DEEP + b"\n",
    "deep in a key": lambda _: b'{"step": ' + DEEP + b"]" * 100_000 + b"}\n",
}


def exchange(content: bytes, value: object, only: str = "") -> bytes:
    """The lines of JSON with `value` in place of each value, or of that of the key `only`."""
    lines = []
    for line in content.splitlines() or [b"{}"]:
        try:
            value_of_line = json.loads(content if content.startswith(b"{\n") else line)
        except ValueError:
            return json.dumps({"a": value}).encode()
        if isinstance(value_of_line, dict):
            value_of_line = {key: value if only in ("", key) else old for key, old in value_of_line.items()}
        lines.append(json.dumps(value_of_line))
        if content.startswith(b"{\n"):
            break
    return "".join(f"{line}\n" for line in lines).encode()


DAMAGES |= {
    f"values {value!r:.9}": lambda content, value=value: exchange(content, value)
    for value in (None, "x", "\ud800", [1], {"a": 1}, 10**30, -1.5, True)
}


def jsonl(path: Path, *rows: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(runs: Path, seed: int) -> Path:
    """A run with every file that a reader opens."""
    exp = {"recipe": "toy", "seed": seed, "model": {"name": "m"}, "inference": {"metrics": [{"name": "squad"}]}}
    facts = {
        "groups": ["g"],
        "commit": "a" * 40,
        "time": "2026-01-01T00:00:00+00:00",
        "packages": {"torch": "2"},
        "diff": "+line\n",
    }
    with RunDir.open(runs, exp, exp, facts=facts) as run:
        gains = {f"val_gain{end}/html": 0.1 for end in ("", "_low", "_high")}
        gains |= {f"val_gain_control{end}/html": 0.0 for end in ("", "_low", "_high")}
        gains |= {f"val_text_perplexity_{kind}/html": 2.0 for kind in ("without", "with")}
        for step in (1, 2):
            run.scores.append(
                {"step": step, "train_loss": 2.0, "val_loss": 1.0 / step, "reward": 0.5, "inference/em": 0.5, **gains}
            )
        run.scores.export_haven()
        jsonl(run.path / "perf.jsonl", {"step": 1, "seconds": 1.0, "tokens_per_second": 5.0})
        jsonl(run.path / "statistics.jsonl", {"step": 1, "name": "layer", "context": "hp", "abs_var_mean": 1.0})
        jsonl(run.path / "rollouts.jsonl", {"step": 1, "iteration": 0, "prompt": "p", "answer": "a", "reward": 1.0})
        jsonl(run.path / "ledger.jsonl", {"event": "start", "when": "2026-01-01T00:00:00+00:00", "who": "x", "id": "1"})
        answer = {"question": "q", "context": "c", "answer": "a", "dataset": "d", "answer_pred": "a"}
        for name in ("val", "val_wrong_context"):
            jsonl(run.path / "inference" / f"{name}.jsonl", answer)
        with new_directory(checkpoints.folder(run.path, 2)) as folder:
            write_json(folder / "state.json", {"inputs": {"data": "d"}})
        checkpoints.mark_best(run.path, 2)
        run.set_status("failed", step=2, reason="x")
    SavedRun(run.path).write_remarks(["good"], note="n")
    pins.place(run.path, "evaluation", pins.Pin(holder="evaluation", every=1))
    SavedRun(run.path).write_job("1", "c", "s1")
    folder = runs / submissions.FOLDER / "s1"
    folder.mkdir(parents=True, exist_ok=True)
    intent = {
        "launcher": {"launcher": "local"},
        "job_config": "local",
        "snapshot": "x",
        "experiments": [],
        "commands": {},
    }
    write_json(folder / submissions.INTENT, intent)
    return run.path


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    for seed in range(2):
        make(folder, seed)
    return folder


FILES = [
    *(
        "exp_dict.json",
        "config.json",
        "env.json",
        "status.json",
        "groups.json",
        "remarks.json",
        "job_dict.json",
        "lease",
        "heartbeat.json",
    ),
    *(
        "scores.jsonl",
        "score_list.pkl",
        "perf.jsonl",
        "statistics.jsonl",
        "rollouts.jsonl",
        "ledger.jsonl",
        "branch.json",
    ),
    *(
        "inference/val.jsonl",
        "inference/val_wrong_context.jsonl",
        "pins/evaluation.json",
        "attempts/001/env.json",
        "attempts/001/diff.patch",
    ),
    *("checkpoints/best.json", "checkpoints/step-00000002/manifest.json", "checkpoints/step-00000002/state.json"),
    *(f"../{submissions.FOLDER}/s1/{name}" for name in (submissions.INTENT, submissions.JOBS)),
    f"../{CACHE}",
]


def commands(runs: Path, run: Path, other: Path, output: Path) -> dict[str, Callable[[], int]]:
    """Each command on the damaged run, or on the folder with it."""
    words, out = [str(runs)], ["-o", str(output / "file")]
    return {
        "table": lambda: table.main([*words, "--unfinished", "--gpu-hours"]),
        "table at a step": lambda: table.main([*words, "--at-step", "1"]),
        "plot": lambda: plot.main([*words, "-o", str(output / "a.svg")]),
        "report": lambda: report.main([*words, *out]),
        "share": lambda: share.main([*words, *out]),
        "clean": lambda: clean.main([*words, "--keep-last", "0"]),
        "clean --delete": lambda: clean.main(
            [*words, "-e", "g", "--delete", "-o", str(output / "list"), "--older-than", "0.1"]
        ),
        "diff": lambda: diff.main([str(run), str(other)]),
        "note": lambda: note.main([str(run)]),
        "note --tag": lambda: note.main([str(run), "--tag", "x"]),
        "run_page": lambda: run_page.main([str(run), *out]),
        "answers": lambda: answers.main([*words, "--exp_id", run.name]),
        "rescore": lambda: rescore.main([str(run)]),
        "lineage": lambda: lineage.main(words),
        "rollouts": lambda: rollouts.main([str(run)]),
        "metadata": lambda: metadata.main([str(run), "-o", str(output / "b.svg")]),
        "dashboard": lambda: 0 if Dashboard(runs, ALL).view() else 1,
    }


KINDS = ("empty", "truncated", "binary", "dict", "deep")
CASES = [
    (name, damage)
    for number, name in enumerate(FILES)
    for place, damage in enumerate(DAMAGES)
    if damage in KINDS or (number + place) % 6 == 0
]
"""Each file with each of `KINDS`, and with some of the other damages: all of them take a quarter of an hour."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("lease", "deep"),
        ("remarks.json", "values '\\ud800'"),
        ("scores.jsonl", "deep"),
        ("status.json", "truncated"),
        ("exp_dict.json", "binary"),
    ],
)
def test_a_damaged_small_file_is_a_line_of_every_command(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[str, str]
):
    check(pristine, tmp_path, capsys, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_damaged_file_is_a_line_of_every_command(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[str, str]
):
    check(pristine, tmp_path, capsys, *case)


def check(pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str) -> None:
    runs = Path(shutil.copytree(pristine, tmp_path / "runs"))
    run, other = sorted(path for path in runs.iterdir() if len(path.name) == 32)
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(DAMAGES[damage](path.read_bytes() if path.exists() else b'{"step": 1, "beat": 2}\n'))
    failures = {}
    for command, act in commands(runs, run, other, tmp_path).items():
        try:
            code = act()
        except Exception as error:  # noqa: BLE001  what a user would see as a traceback
            failures[command] = f"{type(error).__name__}: {error!s:.100}"
            continue
        error = capsys.readouterr().err
        if code not in (0, 1) or (
            code == 1 and not (error and all(line.startswith("error: ") for line in error.splitlines()[-1:]))
        ):
            failures[command] = f"exit code {code}: {error[-300:]}"
        if any(len(line) > 1000 for line in error.splitlines()) or "Traceback" in error:
            failures[command] = error[-300:]
    assert not failures
