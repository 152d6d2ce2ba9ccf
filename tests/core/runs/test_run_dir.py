"""Save directories: what is written, what is refused, and what happens on disks that refuse."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from src.errors import ConfigError, RunError
from src.experiments.identity import exp_id
from src.runs.lease import GUARD, this_process
from src.runs.run_dir import RunDir, start_over
from src.runs.store import SavedRun

ROOT = Path(__file__).resolve().parents[3]
EXP = {"recipe": "toy", "seed": 0, "model": {"depth": 2}}
RESOLVED = {**EXP, "model": {"depth": 2, "rate": 0.5}}
ID = exp_id(EXP)


def loaded(path: Path) -> dict:
    return json.loads(path.read_text())


def test_a_new_directory_holds_everything(tmp_path: Path):
    with RunDir.open(
        tmp_path / "deep" / "runs", EXP, RESOLVED, reset=0, facts={"groups": ["g"], "commit": "c", "diff": "+x\n"}
    ) as run:
        assert run.path == tmp_path / "deep" / "runs" / ID
        assert (run.exp_id, run.exp, run.attempt) == (ID, EXP, 1)
        assert loaded(run.path / "exp_dict.json") == EXP
        assert loaded(run.path / "config.json") == RESOLVED
        assert loaded(run.path / "env.json") == {"attempt": 1, "groups": ["g"], "commit": "c"}
        assert (run.path / "attempts" / "001" / "diff.patch").read_text() == "+x\n"
        assert run.status()["state"] == "running"
        assert run.logs == run.path / "logs"
        run.scores.append({"step": 1, "loss": 1.0})
        assert run.scores is run.scores
    assert not (run.path / "lease").exists()


def test_opening_again_resumes_with_the_history(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, RESOLVED, facts={"groups": ["g"], "commit": "first"}) as run:
        run.set_status("failed", step=7, reason="boom")
        assert run.status()["reason"] == "boom"
        start_time = run.status()["started"]
        run.set_status("stopped")
        assert "reason" not in run.status()
        assert run.status()["started"] == start_time
    with RunDir.open(tmp_path, EXP, RESOLVED, facts={"groups": ["h"], "commit": "second"}) as run:
        status = run.status()
        assert (run.attempt, status["attempt"], status["state"], status["step"]) == (2, 2, "running", 7)
        assert loaded(run.path / "attempts" / "001" / "env.json")["commit"] == "first"
        assert loaded(run.path / "env.json")["commit"] == "second"
        assert SavedRun(run.path).groups == ["g", "h"]


def test_a_finished_run_is_left_as_it_is_but_for_its_groups(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, RESOLVED, facts={"groups": ["g"]}) as run:
        run.set_status("done", step=7)
    contents = {p: p.read_bytes() for p in run.path.rglob("*.json") if p.name != "groups.json"}
    with RunDir.open(tmp_path, EXP, RESOLVED, facts={"groups": ["h"]}) as run:
        assert (run.status()["state"], run.attempt) == ("done", 1)
        assert SavedRun(run.path).groups == ["g", "h"]
    assert {p: p.read_bytes() for p in run.path.rglob("*.json") if p.name != "groups.json"} == contents


def test_the_holder_is_named(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, RESOLVED):
        for reset in (0, 1):
            with pytest.raises(RunError, match=f"{ID}: held by process {os.getpid()} on host"):
                RunDir.open(tmp_path, EXP, RESOLVED, reset=reset)
        assert not (tmp_path / "deleted").exists()


def test_a_failed_open_lets_go(tmp_path: Path):
    RunDir.open(tmp_path, EXP, RESOLVED).close()
    with pytest.raises(RunError, match="different defaults"):
        RunDir.open(tmp_path, EXP, EXP)
    RunDir.open(tmp_path, EXP, RESOLVED).close()


def test_another_dict_with_the_same_id_is_refused(tmp_path: Path):
    RunDir.open(tmp_path, {"a": 1, "b": {"c": True}}, {}).close()
    pattern = (
        r'exp_dict\.json: another experiment has the id \w{32}: a was 1, is now "1"; b\.c was true, is now "True"\.'
    )
    with pytest.raises(RunError, match=pattern):
        RunDir.open(tmp_path, {"a": "1", "b": {"c": "True"}}, {})


def test_a_message_names_some_of_many_changed_defaults(tmp_path: Path):
    RunDir.open(tmp_path, EXP, {}).close()
    with pytest.raises(RunError) as error:
        RunDir.open(tmp_path, EXP, {f"setting{n}": "v" * 1000 for n in range(500)})
    assert "setting0" in str(error.value)
    assert "490 more" in str(error.value)
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    ("resolved", "pattern"),
    [
        (
            {**EXP, "model": {"depth": 2, "rate": 0.1}},
            r"model\.rate was 0\.5, is now 0\.1\. To resume it, restore the old defaults",
        ),
        ({**EXP, "model": {"depth": 2, "rate": 0.5, "bias": True}}, r"model\.bias was absent, is now true"),
        (EXP, r"model\.rate was 0\.5, is now absent"),
        ({**RESOLVED, "extra": []}, r"extra was absent, is now \[\]"),
        ({**RESOLVED, "seed": 0.0}, r"seed was 0, is now 0\.0"),
    ],
)
def test_changed_defaults_are_named(tmp_path: Path, resolved: dict, pattern: str):
    RunDir.open(tmp_path, EXP, RESOLVED).close()
    with pytest.raises(RunError, match=rf"config\.json: this run was started with different defaults: {pattern}"):
        RunDir.open(tmp_path, EXP, resolved)
    with RunDir.open(tmp_path, EXP, resolved, reset=1) as run:
        assert loaded(run.path / "config.json") == resolved


def test_reset_deletes_no_older_directory(tmp_path: Path):
    for number in range(4):
        with RunDir.open(tmp_path, EXP, RESOLVED, reset=1) as run:
            assert run.attempt == 1
            assert run.scores.rows() == []
            run.scores.append({"step": number})
    names = [ID, f"{ID}.1", f"{ID}.2"]
    assert sorted(p.name for p in (tmp_path / "deleted").iterdir()) == names
    assert [(tmp_path / "deleted" / name / "scores.jsonl").read_text() for name in names] == [
        f'{{"step": {n}}}\n' for n in range(3)
    ]
    assert not (tmp_path / "deleted" / ID / "lease").exists()


def test_reset_forgets_neither_the_groups_nor_the_submitted_job(tmp_path: Path):
    RunDir.open(tmp_path, EXP, RESOLVED, facts={"groups": ["g", "h"]}).close()
    SavedRun(tmp_path / ID).write_job("7", "python trainval.py --exp_id x")
    with RunDir.open(tmp_path, EXP, RESOLVED, reset=1, facts={"groups": ["i"]}) as run:
        assert run.attempt == 1
        assert SavedRun(run.path).groups == ["g", "h", "i"]
        assert loaded(run.path / "job_dict.json") == {
            "job_id": "7",
            "command": "python trainval.py --exp_id x",
            "submission": "",
        }


def test_only_leftovers_of_killed_writers_are_removed(tmp_path: Path):
    RunDir.open(tmp_path, EXP, RESOLVED).close()
    temporary_names = [
        ".status.json.0a1b2c3d",
        ".lease.00000000",
        ".exp_dict.json.ffffffff",
        "checkpoints/.best.json.12345678",
    ]
    temporary_names += ["attempts/001/.env.json.12345678"]
    contents = [".notes", ".status.json.0a1b2c3", "status.json.0a1b2c3d", "logs/.train.log.12345678"]
    for name in [*temporary_names, *contents]:
        (tmp_path / ID / name).parent.mkdir(exist_ok=True)
        (tmp_path / ID / name).write_text("{")
    (tmp_path / ID / ".folder.12345678").mkdir()
    RunDir.open(tmp_path, EXP, RESOLVED).close()
    assert [name for name in temporary_names if (tmp_path / ID / name).exists()] == []
    assert [name for name in contents if not (tmp_path / ID / name).exists()] == []
    assert (tmp_path / ID / ".folder.12345678").is_dir()


def test_notes_without_the_lease_wait_for_the_sweep(tmp_path: Path):
    """Many launchers note groups while the experiment is opened again and again: none is lost, none is disturbed."""
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(SavedRun(tmp_path / ID).join_groups, [f"g{number}"]) for number in range(40)]
        for _ in range(10):
            RunDir.open(tmp_path, EXP, RESOLVED).close()
    for future in futures:
        future.result()
    assert sorted(SavedRun(tmp_path / ID).groups) == sorted(f"g{number}" for number in range(40))


def test_many_processes_prepare_a_complete_directory(tmp_path: Path):
    """Each is whole from its first moment, loses no group, and costs no more than its two files."""
    SavedRun(tmp_path / "runs" / ID).write_exp(EXP, ["g"])
    assert sorted(entry.name for entry in (tmp_path / "runs" / ID).iterdir()) == ["exp_dict.json", "groups.json"]
    for turn in range(10):
        run = tmp_path / str(turn) / ID
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(SavedRun(run).write_exp, EXP, [f"g{number}"]) for number in range(8)]:
                done.result()
        assert SavedRun(run).exp == EXP
        assert sorted(SavedRun(run).groups) == [f"g{number}" for number in range(8)]
        assert [entry.name for entry in run.parent.iterdir()] == [ID]


def test_a_directory_that_holds_something_is_prepared_too(tmp_path: Path):
    (tmp_path / ID / "logs").mkdir(parents=True)
    SavedRun(tmp_path / ID).write_exp(EXP, ["g"])
    SavedRun(tmp_path / ID).write_exp(EXP, ["h"])
    assert (SavedRun(tmp_path / ID).exp, SavedRun(tmp_path / ID).groups) == (EXP, ["g", "h"])
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write"):
        SavedRun(tmp_path / "file" / ID).write_exp(EXP, ["g"])


def test_a_job_is_noted_though_its_directory_was_removed(tmp_path: Path):
    SavedRun(tmp_path / "runs" / ID).write_job("7", "x")
    job = SavedRun(tmp_path / "runs" / ID).job
    assert job is not None
    assert job["job_id"] == "7"


def test_reset_of_nothing_makes_no_backup(tmp_path: Path):
    (tmp_path / ID).mkdir()
    (tmp_path / ID / "exp_dict.json").write_text(json.dumps(EXP))  # as a launcher leaves it for its job
    RunDir.open(tmp_path, EXP, RESOLVED, reset=1).close()
    assert not (tmp_path / "deleted").exists()
    with pytest.raises(ConfigError, match=r"^-r: expected 0 \(continue\) or 1 \(start over\), got 2"):
        RunDir.open(tmp_path, EXP, RESOLVED, reset=2)


def test_values_that_cannot_be_hashed_are_refused_before_anything_is_made(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^experiment\.x: expected a JSON value"):
        RunDir.open(tmp_path, {"x": (1,)}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "config.json",
            b"{",
            r"config\.json:1: not valid JSON: .* Delete it if no default has changed .*, or start over with -r 1",
        ),
        (
            "status.json",
            b"",
            r"status\.json:1: not valid JSON: .* Delete it: the run then resumes from its newest checkpoint",
        ),
        ("status.json", b"\xff", r"status\.json: not UTF-8 text"),
        (
            "status.json",
            b'{"state": "flying"}',
            r"status\.json: expected a dict with one of the states running, done, failed, stopped",
        ),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path, file: str, content: bytes, message: str):
    RunDir.open(tmp_path, EXP, RESOLVED).close()
    (tmp_path / ID / file).write_bytes(content)
    with pytest.raises(RunError, match=message):
        RunDir.open(tmp_path, EXP, RESOLVED)
    (tmp_path / ID / file).unlink()
    RunDir.open(tmp_path, EXP, RESOLVED).close()


def test_a_damaged_exp_dict_is_healed_as_the_id_vouches_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    RunDir.open(tmp_path, EXP, RESOLVED).close()
    (tmp_path / ID / "exp_dict.json").write_text('{"recipe": "to')
    with RunDir.open(tmp_path, EXP, RESOLVED) as run:
        assert loaded(run.path / "exp_dict.json") == EXP
    assert "exp_dict.json:1: not valid JSON" in caplog.text


def test_attached_processes_read_and_cannot_write(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, RESOLVED) as owner:
        owner.scores.append({"step": 1, "loss": 0.5})
        other = RunDir.attach(owner.path)
        assert (other.exp_id, other.exp, other.attempt) == (ID, EXP, 1)
        assert other.scores.rows() == [{"step": 1, "loss": 0.5}]
        assert other.status()["state"] == "running"
        for write in (
            lambda: other.set_status("done"),
            other.confirm,
            lambda: other.scores.append({"step": 2}),
            other.scores.export_haven,
        ):
            with pytest.raises(RunError, match="opened for reading only; the process that holds the lease writes"):
                write()
        other.close()
        owner.confirm()


def test_attach_refuses_a_folder_without_a_run(tmp_path: Path):
    with pytest.raises(RunError, match=r"exp_dict\.json: no such file"):
        RunDir.attach(tmp_path / ID)
    RunDir.open(tmp_path, EXP, RESOLVED).close()
    shutil.copytree(tmp_path / ID, tmp_path / "copy")
    with pytest.raises(RunError, match=rf"exp_dict\.json: its id is {ID}, not the name of its directory"):
        RunDir.attach(tmp_path / "copy")
    for content, message in (("[]", "expected a dict, got list"), ('{"a.b": 1}', "must not be empty or contain a dot")):
        (tmp_path / ID / "exp_dict.json").write_text(content)
        with pytest.raises(RunError, match=message):
            _ = SavedRun(tmp_path / ID).exp


def test_a_process_that_lost_the_directory_writes_nothing_more(tmp_path: Path):
    run = RunDir.open(tmp_path, EXP, RESOLVED)
    (run.path / "lease").write_text(json.dumps({**this_process(), "boot_id": "other", "token": "t", "beat": 0}))
    before = (run.path / "status.json").read_bytes()
    for write in (run.confirm, lambda: run.set_status("done")):
        with pytest.raises(RunError, match="no longer holds the lease"):
            write()
    assert (run.path / "status.json").read_bytes() == before
    run.close()
    assert (run.path / "lease").exists()


def test_states_of_a_directory(tmp_path: Path):
    assert SavedRun(tmp_path / ID).state == "new"
    with RunDir.open(tmp_path, EXP, RESOLVED) as run:
        assert SavedRun(run.path).state == "running"
        run.set_status("done", step=3)
        assert SavedRun(run.path).state == "done"
        run.set_status("running")
    assert SavedRun(run.path).state == "lost"


def test_groups_are_noted_once(tmp_path: Path):
    for groups in (["a"], ["b", "a", "b"], []):
        SavedRun(tmp_path).join_groups(groups)
    assert SavedRun(tmp_path).groups == ["a", "b"]
    (tmp_path / "groups.json").write_text("{")
    assert SavedRun(tmp_path).groups == []


OPENER = """
import sys, time
from pathlib import Path
from src.runs.run_dir import RunDir
while True:
    reset, facts = int(sys.argv[2]), {"groups": ["g"]}
    with RunDir.open(Path(sys.argv[1]), {"a": 1}, {"a": 1, "b": 2}, reset=reset, facts=facts) as run:
        print("open", flush=True)
        run.set_status("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("reset", ["0", "1"])
def test_a_kill_at_any_moment_leaves_a_directory_that_opens(tmp_path: Path, reset: str):
    for number in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", OPENER, str(tmp_path), reset], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(1 + 3 * number):
            assert process.stdout.readline() == "open\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with RunDir.open(tmp_path, {"a": 1}, {"a": 1, "b": 2}, facts={"groups": ["g"]}) as run:
            assert loaded(run.path / "exp_dict.json") == {"a": 1}


ENTRANT = """
import os, random, sys, time
from pathlib import Path
from src.errors import RunError
from src.runs.run_dir import RunDir
rng, entered = random.Random(int(sys.argv[2])), 0
while entered < 6:
    try:
        run = RunDir.open(Path(sys.argv[1]), {"a": 1}, {"a": 1}, reset=rng.randrange(2))
    except RunError as error:
        assert "held by process" in str(error), error
        time.sleep(rng.random() * 0.01)
        continue
    os.close(os.open(run.path / "inside", os.O_CREAT | os.O_EXCL))
    run.set_status("running")
    (run.path / "inside").unlink()
    run.close()
    entered += 1
"""


def test_one_at_a_time_even_when_some_start_over(tmp_path: Path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENTRANT, str(tmp_path), str(seed)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for seed in range(5)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take every byte that is left."""
    with open(disk / "filler", "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return disk / "filler"


def append_for_ever(run: RunDir) -> None:
    for step in itertools.count(2):
        run.scores.append({"step": step, "loss": 1.0})


def test_a_full_disk_loses_nothing_and_says_so(small_disk: Path):
    with RunDir.open(small_disk, EXP, RESOLVED) as run:
        run.scores.append({"step": 1, "loss": 1.0})
        run.scores.export_haven()
        filler = fill(small_disk)
        before = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
        with pytest.raises(RunError, match=r"status\.json: cannot write: No space left on device"):
            run.set_status("done")
        with pytest.raises(RunError, match=r"score_list\.pkl: cannot write: No space left"):
            run.scores.export_haven()
        # The last page of the file has room for some rows; the one that no longer fits must leave no part of itself.
        with pytest.raises(RunError, match=r"scores\.jsonl: cannot write: No space left"):
            append_for_ever(run)
        step = run.scores.rows()[-1]["step"]
        assert [row["step"] for row in run.scores.rows()] == list(range(1, step + 1))
        assert run.scores.path.read_bytes().endswith(b"\n")
        assert {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file() and p.name != "scores.jsonl"} == {
            name: content for name, content in before.items() if name != "scores.jsonl"
        }
        filler.unlink()
        run.scores.append({"step": step + 1, "loss": 0.5})
        run.set_status("done")


def test_opening_on_a_full_disk_is_one_line(small_disk: Path):
    fill(small_disk)
    with pytest.raises(RunError, match=rf"{ID}.*: cannot write: No space left on device") as error_info:
        RunDir.open(small_disk / "runs", EXP, RESOLVED)
    assert "\n" not in str(error_info.value)
    (small_disk / "filler").unlink()
    RunDir.open(small_disk / "runs", EXP, RESOLVED).close()


def test_a_read_only_disk_refuses_in_one_line(small_disk: Path):
    run = RunDir.open(small_disk, EXP, RESOLVED)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        other = {**EXP, "seed": 1}
        for write in (
            lambda: run.set_status("done"),
            lambda: run.scores.append({"step": 1}),
            lambda: RunDir.open(small_disk, other, other),
            lambda: RunDir.open(small_disk / "new" / "runs", EXP, RESOLVED),
        ):
            with pytest.raises(RunError, match="cannot write: Read-only file system") as error_info:
                write()
            assert "\n" not in str(error_info.value)
        run.close()
        assert RunDir.attach(run.path).exp == EXP
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path: Path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="cannot write: Not a directory"):
        RunDir.open(tmp_path / "runs", EXP, RESOLVED)
    (tmp_path / ID).write_text("")
    with pytest.raises(RunError, match=f"{ID}: a file where the save directory should be"):
        RunDir.open(tmp_path, EXP, RESOLVED)


def test_a_closed_directory_holds_no_lock(tmp_path: Path):
    run = RunDir.open(tmp_path, EXP, RESOLVED)
    run.close()
    run.close()
    assert (run.path / GUARD).exists()
    with pytest.raises(RunError, match="the lease was released"):
        run.set_status("done")


def test_starting_over_forgets_the_job_and_not_the_groups(tmp_path: Path):
    with RunDir.open(tmp_path, EXP, RESOLVED, facts={"groups": ["g"]}) as run:
        with pytest.raises(RunError, match="held by process"):
            start_over(run.path)
        run.scores.append({"step": 1})
    SavedRun(tmp_path / ID).write_job("7", "x")
    start_over(tmp_path / ID)
    assert SavedRun(tmp_path / ID).groups == ["g"]
    assert SavedRun(tmp_path / ID).job is None
    assert SavedRun(tmp_path / ID).state == "new"
    assert (tmp_path / "deleted" / ID / "scores.jsonl").exists()
    SavedRun(tmp_path / ID).write_job("8", "x", "s")
    assert SavedRun(tmp_path / ID).job == {"job_id": "8", "command": "x", "submission": "s"}
    (tmp_path / ID / "job_dict.json").write_text('{"job_id": 8}')
    with pytest.raises(RunError, match=r"job_dict\.json: expected a dict"):
        _ = SavedRun(tmp_path / ID).job
