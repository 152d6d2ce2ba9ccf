"""Hung, dead, finished, starting: told apart on real processes that hold a save directory, and each incident noted
once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.launch.status import format_table, table
from src.operations import watchdog
from src.runs import heartbeat, jsonl_records
from src.runs.history import events
from src.runs.store import STATUS, RunStore, SavedRun

EXP = {"recipe": "x", "seed": 0, "loop": {"steps": 100}}
ID = exp_id(EXP)
# Holds the save directory and does what it is told, one word a line.
HOLDER = f"""
import json, sys
from pathlib import Path
from src.runs.heartbeat import Heartbeat
from src.runs.run_dir import RunDir
with RunDir.open(Path(sys.argv[1]), {EXP!r}, {{}}) as run:
    beat = Heartbeat(run.path, run.attempt, every_seconds=0)
    print("open", flush=True)
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "beat":
            beat.on_step(int(number))
        elif word == "row":
            run.scores.append({{"step": int(number), "train_loss": 0.5}})
            run.set_status("running", step=int(number))
        elif word == "done":
            run.set_status("done", step=int(number))
        elif word == "fail":
            run.set_status("failed", reason="out of luck")
        print("did", flush=True)
"""


class World:
    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.run = self.runs / ID
        self.holder: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(self.runs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._expect("open")

    def _expect(self, word: str) -> None:
        assert self.holder is not None
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline().strip() == word

    def tell(self, *lines: str) -> None:
        assert self.holder is not None
        assert self.holder.stdin is not None
        for line in lines:
            self.holder.stdin.write(line + "\n")
            self.holder.stdin.flush()
            self._expect("did")

    def kill(self) -> None:
        if self.holder is not None:
            self.holder.kill()
            self.holder.communicate()
            self.holder = None

    def perf(self, *rows: tuple[int, float, float]) -> None:
        """(step, seconds since the row before, steps per second)"""
        keys = ("step", "seconds", "steps_per_second")
        (self.run / "perf.jsonl").write_text(
            "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)
        )

    def age(self, name: str, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(self.run / name, (then, then))

    def age_status(self) -> None:
        """Make the status look as if the last row was written after the start."""
        status = json.loads((self.run / STATUS).read_text())
        (self.run / STATUS).write_text(json.dumps({**status, "started": "2026-01-01T00:00:00+00:00"}))

    def look(self, *words: str) -> int:
        return watchdog.main([str(self.runs), "--once", *words])

    def verdict(self, **limits: float) -> watchdog.Verdict:
        (row,) = table(RunStore(self.runs), [ID])
        return watchdog.judge(self.run, row, watchdog.Limits(**limits))

    def event_rules(self) -> list[str]:
        return [event["rule"] for event in jsonl_records.rows(self.run / events.EVENTS)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    new_world = World(tmp_path)
    yield new_world
    with contextlib.suppress(ProcessLookupError):
        if new_world.holder is not None:
            new_world.holder.send_signal(signal.SIGCONT)
    new_world.kill()


def poll(condition: Callable[[], Any], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(0.05)


def test_a_run_that_makes_steps_is_running(world: World):
    world.start()
    world.tell("beat 1", "beat 2", "row 2")
    assert world.verdict().state == "running"
    assert world.look() == 0
    assert not (world.run / events.EVENTS).exists()


def test_a_step_older_than_its_median_allows_is_hung_once_and_recovers(world: World):
    world.start()
    world.tell("row 4", "beat 4", "beat 5")
    world.perf((2, 20.0, 0.1), (4, 26.0, 0.1))  # steps of 10 s; an evaluation of 6 s, of which 18 s are allowed
    (world.run / heartbeat.HEARTBEAT).write_text(json.dumps({"attempt": 1, "step": 5, "step_seconds": 10.0}))
    world.age(STATUS, 500)
    world.age(heartbeat.HEARTBEAT, 117)
    assert world.verdict(factor=10).state == "running"
    world.age(heartbeat.HEARTBEAT, 120)
    verdict = world.verdict(factor=10)
    assert (verdict.state, verdict.step) == ("hung", 5)
    assert "its last step, 5, was 120 s ago; a step takes 10 s, and 118 s are allowed" in verdict.reason
    assert world.verdict(factor=11).state == "running"
    assert [world.look(), world.look(), world.look("--factor", "11")] == [
        watchdog.NEW_INCIDENT_EXIT,
        watchdog.KNOWN_INCIDENT_EXIT,
        0,
    ]
    assert world.event_rules() == ["hung", "recovered"]
    assert table(RunStore(world.runs), [ID])[0].reason == ""
    assert world.look() == watchdog.KNOWN_INCIDENT_EXIT  # the same incident, which was told of
    world.tell("beat 6")
    world.age(heartbeat.HEARTBEAT, 120)
    (world.run / heartbeat.HEARTBEAT).write_text(json.dumps({"attempt": 1, "step": 6, "step_seconds": 10.0}))
    world.age(heartbeat.HEARTBEAT, 120)
    assert world.look() == watchdog.NEW_INCIDENT_EXIT
    assert world.event_rules() == ["hung", "recovered", "hung"]
    row = table(RunStore(world.runs), [ID])[0]
    assert row.state == "running"
    assert row.reason.startswith("hung: its last step, 6, was 120 s ago")


def test_without_heartbeats_the_way_to_the_next_row_is_allowed(world: World):
    world.start()
    world.tell("row 40")
    world.age_status()
    world.perf((20, 200.0, 0.1), (40, 260.0, 0.1))  # steps of 10 s, rows every 260 s at most, evaluations of 60 s
    world.age(STATUS, 100 + 180 + 260 - 3)
    assert world.verdict().state == "running"
    world.age(STATUS, 100 + 180 + 260 + 3)
    assert world.verdict().state == "hung"


def test_a_start_and_a_first_evaluation_take_their_time(world: World):
    world.start()
    world.age(STATUS, 1700)
    assert world.verdict().state == "running"
    world.age(STATUS, 1900)
    assert world.verdict().state == "hung"
    assert "no step since it was started" in world.verdict().reason
    world.tell("beat 1", "beat 2")  # no evaluation was seen yet
    world.age(heartbeat.HEARTBEAT, 1700)
    assert world.verdict().state == "running"
    world.age(heartbeat.HEARTBEAT, 1900)
    assert world.verdict().state == "hung"


def test_heartbeats_of_an_earlier_start_do_not_count(world: World):
    world.start()
    world.tell("beat 1", "beat 2")
    world.kill()
    world.start()
    world.perf((1, 1.0, 1.0), (2, 1.0, 1.0))
    for name in (STATUS, heartbeat.HEARTBEAT):
        world.age(name, 1000)
    assert world.verdict().state == "running"  # it has made no step yet


def test_a_killed_run_is_dead_once(world: World):
    world.start()
    world.tell("beat 1")
    world.kill()
    poll(lambda: world.verdict().state == "dead")
    assert [world.look(), world.look()] == [watchdog.NEW_INCIDENT_EXIT, watchdog.KNOWN_INCIDENT_EXIT]
    assert world.event_rules() == ["dead"]
    assert table(RunStore(world.runs), [ID])[0].state == "lost"
    world.start()
    assert world.look() == 0
    world.kill()
    assert world.look() == watchdog.NEW_INCIDENT_EXIT
    assert world.event_rules() == ["dead", "dead"]  # another start, another incident


def test_finished_and_failed_runs(world: World):
    world.start()
    world.tell("beat 1", "fail")
    world.kill()
    assert [world.look(), world.look()] == [watchdog.NEW_INCIDENT_EXIT, watchdog.KNOWN_INCIDENT_EXIT]
    assert [event["line"] for event in jsonl_records.rows(world.run / events.EVENTS)] == ["out of luck"]
    (world.run / events.EVENTS).unlink()
    command = [sys.executable, "-m", "src.operations.watchdog", str(world.runs), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith(f"{ID} error "), "out of luck" in done.stderr) == (
        watchdog.NEW_INCIDENT_EXIT,
        True,
        True,
    )
    world.start()
    world.tell("done 100")
    world.kill()
    for name in (STATUS, heartbeat.HEARTBEAT):
        world.age(name, 1e6)
    assert world.look() == 0
    assert table(RunStore(world.runs), [ID])[0].reason == ""


def test_a_stopped_process_is_hung_not_dead(world: World):
    world.start()
    world.tell("row 1", "beat 1", "beat 2")
    world.perf((1, 1.0, 1.0), (2, 1.0, 1.0))
    assert world.holder is not None
    world.holder.send_signal(signal.SIGSTOP)
    for name in (STATUS, heartbeat.HEARTBEAT, "lease"):
        world.age(name, 100)
    verdict = world.verdict()
    assert verdict.state == "hung"
    assert verdict.reason.endswith(
        "Its lease does not beat either: is the process stopped (SIGSTOP), or its disk full?"
    )


def test_a_silent_holder_on_another_machine_is_dead(world: World):
    world.start()
    world.kill()
    lease = json.loads((world.run / "lease").read_text())
    (world.run / "lease").write_text(json.dumps({**lease, "host": "far", "boot_id": "other"}))
    assert world.verdict().state == "running"
    world.age("lease", watchdog.SILENT_SECONDS + 5)
    assert world.verdict().state == "dead"
    assert "lost contact 5 min ago" in world.verdict().reason


def test_log_events_are_in_the_status_table_and_reported(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    world.start()
    log = world.runs / "logs" / f"{ID}.err.log"
    log.parent.mkdir()
    log.write_text("x\nsrun: error: Node failure on node-7\n")
    log_file = tmp_path / "told"
    command = f'cat >> {log_file}; echo "$WATCHDOG_RUN $WATCHDOG_RULE $WATCHDOG_SEVERITY" >> {log_file}; exit 3'
    assert world.look("--notify", command) == watchdog.NEW_INCIDENT_EXIT
    assert "--notify: the command ended with 3" in caplog.text
    assert world.look("--notify", command) == 0
    event, variables = log_file.read_text().splitlines()
    assert variables == f"{ID} node_failure error"
    assert json.loads(event)["exp_id"] == ID
    assert json.loads(event)["line"] == "srun: error: Node failure on node-7"
    (row,) = table(RunStore(world.runs), [ID])
    assert row.reason == "node_failure: srun: error: Node failure on node-7"
    assert format_table([row])[1].endswith(row.reason)
    world.kill()
    world.start()  # the next start has not seen it
    assert table(RunStore(world.runs), [ID])[0].reason == ""


def test_damaged_files_are_named_and_stop_nothing_else(world: World, caplog: pytest.LogCaptureFixture):
    world.start()
    (world.run / events.EVENTS).write_text("no json\n")
    (world.run / "perf.jsonl").write_text('{"step": 1\nnull\n[]\n{"step": 2, "seconds": "x", "steps_per_second": 0}\n')
    assert "expected a JSON object" in table(RunStore(world.runs), [ID])[0].reason
    assert world.verdict().state == "running"
    (world.run / STATUS).write_text("{")
    assert world.look() == watchdog.NEW_INCIDENT_EXIT
    assert "status.json:1: not valid JSON" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no such folder"),
        (["."], "contains no runs"),
        ([".", "--factor", "0"], "expected numbers above 0"),
    ],
)
def test_a_wrong_command_is_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    assert watchdog.main([*words, "--once"]) == 1
    assert message in capsys.readouterr().err


def test_a_misspelt_group_gets_a_suggestion(world: World, capsys: pytest.CaptureFixture[str]):
    world.start()
    SavedRun(world.run).join_groups(["base_tiny"])
    assert world.look("-e", "base_tiny") == 0
    assert world.look("-e", "base_tyni") == 1
    assert "unknown group 'base_tyni'. Did you mean 'base_tiny'?" in capsys.readouterr().err
