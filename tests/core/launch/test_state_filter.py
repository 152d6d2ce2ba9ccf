"""--job_option status --state: the experiments in these states, or one line if there are none."""

import json
from pathlib import Path

import pytest

import trainval
from src.experiments.config import Places
from src.launch import arguments
from src.runs import plan
from src.runs.run_dir import RunDir
from src.support import documents
from tests import toy

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("states", [["failed"], ["lost", "running"]])
def test_no_match_is_one_line_with_the_states_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], states: list[str]
):
    items = plan.load_groups({"g": [toy.BASE, {**toy.BASE, "seed": 1}]}, ["g"], [])
    with RunDir.open(tmp_path, items[0].exp, {}) as run:
        run.set_status("done")

    def look(*words: str) -> list[str]:
        with documents.scope():
            args = arguments.parse(["-e", "g", "--job_option", "status", *words], "", ROOT)
            assert trainval.look(args, items, Places(tmp_path, tmp_path, {})) == 0
        return capsys.readouterr().out.splitlines()

    (line,) = look("--state", *states)
    assert all(text in line for text in (*states, "2 experiments", "1 done", "1 never"))
    assert json.loads("\n".join(look("--state", *states, "--json")))["experiments"] == []
    assert items[0].exp_id in look("--state", *states, "done")[1]
