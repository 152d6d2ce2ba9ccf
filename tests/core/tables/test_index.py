"""The index changes no answer: not when it is missing, damaged, old, locked, forbidden or shared, and not while runs
change."""

import json
import logging
import os
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src.experiments.identity import exp_id
from src.runs import summary
from src.runs.run_dir import RunDir
from src.runs.scores import SCORE_LIST, SCORES, Scores, read_score_list
from src.runs.store import SavedRun
from src.runs.summary import SUMMARY, parse_summary, summarize
from src.tables import cache, curves, results, scan
from src.tables.cache import CACHE

ROOT = Path(__file__).resolve().parents[3]
Answer = tuple[list[tuple[dict[str, Any], tuple[str, ...], list[str]]], list[str]]


def experiment(number: int) -> dict[str, Any]:
    return {"recipe": "toy", "seed": number % 3, "model": {"name": "m", "stride": number // 3, "state": [number, None]}}


def make(runs: Path, number: int, rows: int = 3, state: str | None = "done", group: str = "g") -> Path:
    exp = experiment(number)
    shutil.rmtree(runs / exp_id(exp), ignore_errors=True)
    with RunDir.open(runs, exp, exp, facts={"groups": [group]}) as run:
        for step in range(1, rows + 1):
            run.scores.append({"step": step, "loss": number + 1 / step, "em": float("nan") if step > 1 else 0.5})
        if state:
            run.set_status(state)
        return run.path


def answer(runs: Path, group: str | None = None) -> Answer:
    rows, warnings = results.load_rows(runs, group)
    return [(dict(row), row.scores, list(row)) for row in rows], warnings


def full_scan(runs: Path, group: str | None = None) -> Answer:
    """What is answered of a copy in which nobody has noted anything: no index, and no summary in status.json."""
    copy = runs.with_name("copy")
    shutil.copytree(runs, copy, ignore=shutil.ignore_patterns(f"{CACHE}*"))
    for path in copy.glob("*/status.json"):
        try:
            status = json.loads(path.read_text())
            path.write_text(json.dumps({key: value for key, value in status.items() if key != SUMMARY}))
        except (ValueError, AttributeError):
            continue
    try:
        rows, warnings = answer(copy, group)
    finally:
        shutil.rmtree(copy)
    return rows, [warning.replace(str(copy), str(runs)) for warning in warnings]


def tick(folder: Path) -> None:
    """Wait until the clock of the file system has moved: what is changed from now on has another time."""
    probe = folder.with_name("probe")
    probe.write_text("")
    before, until = probe.stat().st_ctime_ns, time.monotonic() + 300
    while probe.stat().st_ctime_ns == before:
        assert time.monotonic() < until
        os.utime(probe)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled as soon as they are written; tests wait for the clock themselves."""
    monkeypatch.setattr(scan, "SETTLED_SECONDS", 0.0)


@pytest.fixture
def runs(tmp_path: Path, at_once: None) -> Path:
    folder = tmp_path / "runs"
    for number in range(6):
        make(folder, number)
    tick(folder)
    return folder


def cached(runs: Path) -> set[str]:
    """The ids of the runs whose records are cached."""
    return set(cache.read(runs, [path.name for path in runs.iterdir()], ["record"]))


def test_an_unchanged_run_is_read_once(runs: Path, monkeypatch: pytest.MonkeyPatch):
    first = answer(runs)
    assert len(cached(runs)) == 6
    monkeypatch.setattr(scan, "_read_record", None)  # calling it would fail
    monkeypatch.setattr(scan, "_groups", None)
    assert answer(runs) == first
    assert answer(runs, "g") == first


def test_recently_changed_runs_are_read_again(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan, "SETTLED_SECONDS", 60.0)
    answer(runs)
    assert cached(runs) == set()
    status = next(runs.glob("*/status.json"))
    saved = status.stat()
    status.write_text(status.read_text().replace('"done"', '"fail"'))  # as long as before
    os.utime(status, ns=(saved.st_atime_ns, saved.st_mtime_ns))
    assert "expected a dict with one of the states" in answer(runs)[1][0]


def test_a_run_that_died_is_lost_although_no_file_that_is_noted_changed(runs: Path):
    exp = experiment(7)
    with RunDir.open(runs, exp, exp):
        tick(runs)
        assert [row["state"] for row, _, _ in answer(runs)[0]].count("running") == 1
    assert [row["state"] for row, _, _ in answer(runs)[0]].count("lost") == 1


def changes(rng: random.Random, runs: Path) -> None:
    """One random change of the tree, by our own writers or by an accident."""
    paths = sorted(path for path in runs.iterdir() if len(path.name) == 32)
    path = rng.choice(paths)
    kind = rng.randrange(12)
    if kind == 0:
        make(
            runs, rng.randrange(30), rng.randrange(4), rng.choice(["done", "failed", "stopped", None]), rng.choice("gh")
        )
    elif kind == 1:
        shutil.rmtree(path)
    elif kind == 2:
        (path / rng.choice(["exp_dict.json", "env.json", "status.json", "groups.json", "scores.jsonl"])).unlink(
            missing_ok=True
        )
    elif kind == 3:
        (path / rng.choice(["exp_dict.json", "env.json", "status.json", "groups.json"])).write_text(
            rng.choice(["{", "[]", "{}", "\0"])
        )
    elif kind == 4:
        SavedRun(path).join_groups([rng.choice("ghi")])
    elif kind == 5:  # a row more, or the end of one
        with open(path / "scores.jsonl", "a") as file:
            file.write(
                rng.choice(['{"step": %d, "loss": 7.5, "f1": 1}\n', '{"step": %d', "oops %d\n"]) % rng.randrange(10, 99)
            )
    elif kind == 6 and (path / "scores.jsonl").exists():
        content = (path / "scores.jsonl").read_bytes()
        (path / "scores.jsonl").write_bytes(content[: rng.randrange(len(content) + 1)])
    elif kind == 7 and (path / "scores.jsonl").exists():  # as long as before
        (path / "scores.jsonl").write_text((path / "scores.jsonl").read_text().replace("0.5", "0.7"))
    elif kind == 8:
        (path / "score_list.pkl").write_bytes(
            pickle.dumps([{"loss": 0.25, "tags": {"a"}}, {"loss": rng.random(), 3: True}])
        )
        if rng.random() < 0.7:
            for name in ("status.json", "scores.jsonl"):
                (path / name).unlink(missing_ok=True)
    elif kind == 9:
        (runs / CACHE).unlink(missing_ok=True)
    elif kind == 10 and (runs / CACHE).exists():
        content = bytearray((runs / CACHE).read_bytes())
        for _ in range(rng.choice([1, 50])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (runs / CACHE).write_bytes(content[: rng.choice([len(content), len(content) // 2])])
    elif kind == 11:
        make(runs, 30)  # where nothing is left, so that there always is something


@pytest.mark.parametrize("seed", range(4))
def test_the_index_answers_as_a_full_scan_of_any_tree(runs: Path, seed: int):
    rng = random.Random(seed)
    make(runs, 31)
    for _ in range(20):
        changes(rng, runs)
        if not any(len(path.name) == 32 for path in runs.iterdir()):
            make(runs, 31)
        tick(runs)
        group = rng.choice([None, None, "g"])
        try:
            expected = full_scan(runs, group)
        except Exception as error:  # noqa: BLE001  whatever it says, the index must say, too
            with pytest.raises(type(error), match=r"unknown group|no runs"):
                answer(runs, group)
        else:
            assert answer(runs, group) == expected
            assert answer(runs, group) == expected


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + bytes(2000)])
def test_a_damaged_index_is_rebuilt(runs: Path, content: bytes):
    first = answer(runs)
    (runs / CACHE).write_bytes(content)
    assert answer(runs) == first
    assert answer(runs) == first
    assert len(cached(runs)) == 6


def test_an_index_of_another_version_is_rebuilt(runs: Path):
    first = answer(runs)
    with sqlite3.connect(runs / CACHE) as database:
        database.execute("PRAGMA user_version = 99")
        database.execute("DROP TABLE cached")
    database.close()
    assert answer(runs) == first
    assert len(cached(runs)) == 6


def test_a_record_that_was_altered_is_not_believed(runs: Path):
    first = answer(runs)
    with sqlite3.connect(runs / CACHE) as database:
        database.execute("UPDATE cached SET data = replace(data, '1.0', '8.0')")
    database.close()
    assert answer(runs) == first


def test_an_index_that_another_process_has_locked_is_done_without(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    first = answer(runs)
    monkeypatch.setattr(cache, "WAIT_SECONDS", 0.05)
    other = sqlite3.connect(runs / CACHE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with caplog.at_level(logging.WARNING):
            assert answer(runs) == first
    finally:
        other.close()
    assert "index.sqlite: not used: database is locked. Everything is read from the runs." in caplog.text
    assert len(cached(runs)) == 6, "it was not taken for damaged"


def test_a_folder_where_no_index_can_lie(runs: Path, caplog: pytest.LogCaptureFixture):
    first = answer(runs)
    (runs / CACHE).unlink()
    (runs / CACHE).mkdir()
    with caplog.at_level(logging.WARNING, logger="src"):
        assert answer(runs) == first
    assert caplog.text == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_a_read_only_folder(at_once: None):
    folder = Path(tempfile.mkdtemp())
    try:
        runs = folder / "runs"
        for number in range(3):
            make(runs, number)
        tick(runs)
        expected = answer(runs)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.seteuid(65534)
        try:
            assert answer(runs) == expected
            (changed,) = [row["exp_id"] for row, _, _ in expected[0] if row["model.stride"] == 0 and row["seed"] == 0]
            os.seteuid(0)
            with open(runs / changed / "scores.jsonl", "a") as file:
                file.write('{"step": 9, "loss": 0.125}\n')
            os.seteuid(65534)
            assert [row["loss"] for row, _, _ in answer(runs)[0] if row["exp_id"] == changed] == [0.125]
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(folder)


def test_many_processes_at_once(runs: Path):
    code = (
        "import sys; from pathlib import Path; from src.tables import results, scan; scan.SETTLED_SECONDS = 0.0\n"
        "for _ in range(20): print(len(results.load_rows(Path(sys.argv[1]))[0]))"
    )
    first = answer(runs)
    (runs / CACHE).unlink()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(runs)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert (out.split(), err) == (["6"] * 20, "")
    assert answer(runs) == first
    assert len(cached(runs)) == 6


def test_summaries_have_the_last_written_values(tmp_path: Path):
    path = make(tmp_path, 1)
    status = json.loads((path / "status.json").read_text())
    assert parse_summary(status[SUMMARY]) == summarize(path / "scores.jsonl")
    assert parse_summary(status[SUMMARY]).last == {"loss": 1 + 1 / 3, "em": None}  # type: ignore[union-attr]


def test_no_history_is_read_for_a_table_of_running_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    exp = experiment(1)
    with RunDir.open(tmp_path, exp, exp) as run:
        for step in range(1, 4):
            run.scores.append({"step": step, "loss": 1 / step})
            run.set_status("running", step=step)
        with monkeypatch.context() as patched:
            patched.setattr(summary, "parse_rows", None)  # calling it would fail
            (row,), warnings = results.load_rows(tmp_path)
        assert (row["state"], row["step"], row["loss"], warnings) == ("running", 3, 1 / 3, [])
        run.scores.append({"step": 4, "loss": 0.25})  # what a table sees between the two files of a row
        assert results.load_rows(tmp_path)[0][0]["loss"] == 0.25


def test_a_run_without_a_summary_in_its_status_is_read_from_its_scores(tmp_path: Path):
    path = make(tmp_path, 1)
    status = json.loads((path / "status.json").read_text())
    del status[SUMMARY]
    (path / "status.json").write_text(json.dumps(status))
    assert [row["em"] for row, _, _ in answer(tmp_path)[0]] == [None]


def test_runs_that_are_gone_are_forgotten(runs: Path):
    answer(runs)
    removed_id = exp_id(experiment(1))
    shutil.rmtree(runs / removed_id)
    make(runs, 7)
    tick(runs)
    answer(runs)
    assert cache.read(runs, [removed_id], ["record"]) == {}
    assert len(cached(runs)) == 6


@pytest.mark.parametrize("change", ["altered", "cut", "longer", "replaced"])
def test_a_summary_of_other_scores_is_not_believed(tmp_path: Path, change: str):
    path = make(tmp_path, 1) / "scores.jsonl"
    earlier = summarize(path)
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "altered": [*lines[:-1], lines[-1].replace("1.33", "1.44")],
        "cut": lines[:-1],
        "longer": [*lines, '{"step": 4, "loss": 9.0, "f1": 1}\n', '{"step": 5, "lo'],
        "replaced": ['{"step": 1, "other": 2.0}\n'] * 9,
    }
    path.write_text("".join(changed[change]))
    assert summarize(path, earlier.to_json()) == summarize(path)
    assert summarize(path) != earlier


@pytest.mark.parametrize(
    "value", [None, {}, {"bytes": "1"}, {"bytes": 1, "tail": "", "step": 1, "names": ["a"], "values": []}]
)
def test_malformed_summaries_are_ignored(value: Any):
    assert parse_summary(value) is None


def test_integers_are_those_that_were_written(tmp_path: Path):
    exp = experiment(1)
    with RunDir.open(tmp_path, exp, exp) as run:
        run.scores.append({"step": 1, "tokens": 2**70, "small": 1e-4 + 1 / 3e5})
        run.set_status("done")
    for _ in range(2):
        (row,), _ = results.load_rows(tmp_path)
        assert (row["tokens"], row["small"]) == (2**70, 1e-4 + 1 / 3e5)


def columns_of(runs: Path, name: str) -> dict[str, list[float | None]]:
    old = (runs / name / SCORE_LIST).exists() and not (runs / name / SCORES).exists()
    rows = read_score_list(runs / name / SCORE_LIST) if old else Scores(runs / name / SCORES).rows()
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}


def same(columns: dict[str, Any], expected: dict[str, list[float | None]]) -> None:
    assert list(columns) == [name for name in expected if name in columns]
    for name, values in columns.items():
        np.testing.assert_array_equal(values, np.array(expected[name], dtype=float))


@pytest.mark.parametrize("seed", range(3))
def test_histories_are_those_in_the_files_however_they_grow(runs: Path, seed: int):
    rng = random.Random(seed)
    names = sorted(path.name for path in runs.iterdir() if len(path.name) == 32)
    step = 10
    for _ in range(20):
        path = runs / rng.choice(names) / "scores.jsonl"
        kind = rng.randrange(5)
        if kind < 3:
            step += 1
            with open(path, "a") as file:
                file.write(
                    json.dumps({"step": step, "loss": rng.random()} | ({"late": step} if kind == 1 else {})) + "\n"
                )
        elif kind == 3:
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(lines[: rng.randrange(len(lines) + 1)]))
        else:
            (runs / CACHE).unlink(missing_ok=True)
        tick(runs)
        result, warnings = curves.histories(runs, names, rng.choice([["loss"], ["loss", "late"], ["em", "late"]]))
        assert warnings == []
        for name in names:
            if columns_of(runs, name):
                same(result[name], columns_of(runs, name))


def test_only_appended_rows_are_parsed(runs: Path, monkeypatch: pytest.MonkeyPatch):
    name = exp_id(experiment(1))
    curves.histories(runs, [name], ["loss"])
    with open(runs / name / "scores.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 0.125}\n')
    tick(runs)
    parsed_rows = []
    real = curves.parse_rows
    monkeypatch.setattr(curves, "parse_rows", lambda piece, path: parsed_rows.append(piece.lines) or real(piece, path))
    result, _ = curves.histories(runs, [name], ["loss"])
    assert result[name]["loss"].tolist() == [2.0, 1.5, 1 + 1 / 3, 0.125]
    assert parsed_rows == [b'{"step": 4, "loss": 0.125}\n']
    curves.histories(runs, [name], ["loss", "em"])
    assert len(parsed_rows) == 1, "nothing changed, so nothing was read"


def test_damaged_scores_are_named_and_the_remaining_runs_listed(runs: Path):
    names = [exp_id(experiment(number)) for number in (1, 2)]
    (runs / names[0] / "scores.jsonl").write_text('{"step": 1}\noops\n')
    result, warnings = curves.histories(runs, names, ["loss"])
    assert list(result) == [names[1]]
    assert "scores.jsonl:2: not a row of scores" in warnings[0]
