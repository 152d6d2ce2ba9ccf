"""A group on a real Slurm whose controller is stopped: what has ended stays known, what is open says why it is not,
retry repairs it."""

import copy
import csv
import io
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from results import report, table
from results.pages import overview
from src.experiments.grid import ref
from src.experiments.identity import exp_id
from src.launch import status, tracking
from src.runs.store import RunStore, SavedRun
from tests import toy
from tests.slurm.real import Cluster, command

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
WELL: dict[str, Any] = copy.deepcopy(toy.BASE)
WELL["loop"] |= {"steps": 4, "eval_every": 2}
FRAGILE: dict[str, Any] = {**WELL, "data": {**WELL["data"], "corpus": "fragile"}}
OPEN: dict[str, Any] = {**WELL, "seed": 7}
CROSSATTN: dict[str, Any] = {key: value for key, value in copy.deepcopy(toy.CROSSATTN).items() if key != "answers"}
CROSSATTN["loop"] |= {"steps": 4, "sequences_per_step": 8, "micro_batch": 8, "eval_every": 2}
CHILD = {**CROSSATTN, "model": {**CROSSATTN["model"], "base": ref(FRAGILE)}}
GROUP = [FRAGILE, WELL, OPEN, CHILD]
FRAGILE_ID, WELL_ID, OPEN_ID, CHILD_ID = IDS = [exp_id(exp) for exp in GROUP]
NO_ANSWER = re.compile("the scheduler did not answer|does not answer|no answer from Slurm")
PATIENCE_SECONDS = 120
"""How long the jobs' own config would ask."""
ENTRY = {
    "launcher": "slurm",
    "cpus_per_task": 2,
    "environment": {"OMP_NUM_THREADS": "1"},
    "patience_seconds": PATIENCE_SECONDS,
}
JOB_CONFIGS = {"one": ENTRY, "held": {**ENTRY, "options": {"hold": True}}}


def trainval(folder: Path, *arguments: str) -> str:
    """What trainval.py says; it must succeed."""
    done = toy.run_cold(folder / "project", ["-e", "lineage", *arguments], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def job_id(folder: Path, identity: str) -> str:
    job = SavedRun(folder / "runs" / identity).job
    assert job is not None
    return job["job_id"]


def test_a_lineage_is_read_without_the_controller_and_repaired_with_it(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking, "_memory", tracking._Memory())
    runs, data = tmp_path / "runs", toy.write_data(tmp_path / "data")
    subprocess.run(["cp", "-r", str(data / "toy_text"), str(data / "fragile")], check=True)
    (toy.project(tmp_path, f"EXP_GROUPS = {{'lineage': {GROUP!r}}}\n") / "job_configs.py").write_text(
        f"JOB_CONFIGS = {JOB_CONFIGS!r}\n"
    )
    trainval(tmp_path, "-j", "held")
    rows = data / "fragile" / "train.jsonl"
    sound = rows.read_bytes()
    # Of the length that is checked before the run begins; checks read only the first rows.
    rows.write_bytes(sound[:-20] + b"?" * 20)
    command("scontrol", "release", *(job_id(tmp_path, identity) for identity in IDS if identity != OPEN_ID))
    open_job_id = job_id(tmp_path, OPEN_ID)
    cluster.wait_for_all(300, but=open_job_id)

    known_states = {FRAGILE_ID: "failed", WELL_ID: "done"}
    with cluster.without_controller():
        began = time.monotonic()
        output = trainval(tmp_path, "--job_option", "status")
        content = overview.load(runs)
        assert report.main([str(runs), "-o", str(tmp_path / "report.html")]) == 0
        assert time.monotonic() - began < PATIENCE_SECONDS / 2, "who only looks is less patient than who acts"
        capsys.readouterr()
        assert table.main([str(runs), "--format", "csv", "--by", "exp_id"]) == 0
    expected_states = known_states | {OPEN_ID: "unknown", CHILD_ID: "unknown"}
    assert dict(re.findall(r"^([0-9a-f]{32}) +\S+ +(\w+)", output, re.MULTILINE)) == expected_states
    assert len(NO_ANSWER.findall(output)) == 3
    seen = {job.exp_id: job for job in content.jobs}
    assert {identity: job.state for identity, job in seen.items()} == expected_states
    assert {row["exp_id"]: row["state"] for row in content.rows} == expected_states
    for identity in (OPEN_ID, CHILD_ID, FRAGILE_ID):
        assert NO_ANSWER.search(seen[identity].reason), seen[identity]
    assert re.search(r"fragile/train\.jsonl:\d+: not valid JSON", seen[FRAGILE_ID].reason)
    assert seen[WELL_ID].reason == ""
    page = (tmp_path / "report.html").read_text()
    assert len(NO_ANSWER.findall(page)) >= 3
    assert all(text in page for text in ("1 done", "2 unknown", "1 failed", "not valid JSON"))
    listed_states = {line["exp_id"]: line["state"] for line in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert listed_states == known_states | {OPEN_ID: "new", CHILD_ID: "new"}, (
        "what the save directories say, whom nobody need ask"
    )
    assert cluster.alive() == [open_job_id], "whoever looks submits nothing"

    rows.write_bytes(sound)
    trainval(tmp_path, "-j", "one", "--job_option", "retry")
    command("scontrol", "release", open_job_id)
    cluster.wait_for_all(300)
    assert [row.state for row in status.table(RunStore(runs), IDS)] == ["done"] * 4
    assert [SavedRun(runs / identity).attempts for identity in IDS] == [2, 1, 1, 1]
