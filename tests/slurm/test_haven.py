"""haven's own job manager, on a real Slurm: it submits an experiment of ours, sees it end, and our table shows it
done."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.launch import status
from src.runs.store import RunStore, SavedRun
from src.tables import results
from tests import toy
from tests.slurm.real import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
EXPERIMENTS: list[dict[str, Any]] = [toy.BASE]
HAVEN = """
import json, sys
from haven import haven_jobs
from haven.haven_jobs import slurm_manager

# As shipped it runs sbatch without a script, which waits for one forever, or fails.
slurm_manager.sanity_check = lambda: None
experiments, runs, root, command, option = json.loads(sys.argv[1])
resources = {"account_id": "lab", "time": 5, "cpus-per-task": 2}
manager = haven_jobs.JobManager(
    exp_list=experiments, savedir_base=runs, workdir=root, job_config=resources, job_scheduler="slurm"
)
manager.launch_menu(command=command, job_option=option)
print(json.dumps([row["job_state"] for row in manager.get_summary_list()]))
"""


def haven(root: Path, folder: Path, option: str) -> list[str]:
    """Choose `option` in the menu of haven's job manager; returns the states that it then sees."""
    words = toy.command(root, ["--exp_id", "EXP_ID"], folder)
    command = " ".join(words).replace("EXP_ID", "<exp_id>")
    arguments = json.dumps([EXPERIMENTS, str(folder / "runs"), str(root), command, option])
    python = [sys.executable, "-W", "ignore", "-c", HAVEN, arguments]
    done = subprocess.run(python, capture_output=True, text=True, env=toy.environment(), cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_havens_job_manager_runs_our_experiments(cluster: Cluster, tmp_path: Path):
    toy.write_data(tmp_path / "data")
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'toy': {EXPERIMENTS!r}}}\n")
    assert len(haven(root, tmp_path, "run")) == 1
    assert len(cluster.alive()) == 1
    cluster.wait_for_all(120)
    assert haven(root, tmp_path, "run") == ["COMPLETED"]
    assert not cluster.alive(), "haven left alone what it saw completed"
    runs = tmp_path / "runs"
    ids = [exp_id(exp) for exp in EXPERIMENTS]
    rows = status.table(RunStore(runs), ids)
    assert [row.state for row in rows] == ["done"]
    assert all(row.job_id and row.job_id.isdigit() for row in rows)
    assert [SavedRun(runs / identity).attempts for identity in ids] == [1]
    table_rows, complaints = results.load_rows(runs)
    assert {row["exp_id"] for row in table_rows} == set(ids)
    assert not complaints
