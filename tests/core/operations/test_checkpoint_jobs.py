"""Convert, evaluate, upload, clean up: each stage once, whoever is killed when; nothing deleted that was not read
back."""

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from src.errors import ConfigError, RunError
from src.experiments.identity import exp_id
from src.files import defect, new_directory, write_json
from src.operations.checkpoint_jobs import __main__ as checkpoint_jobs
from src.operations.checkpoint_jobs import plan as checkpoint_plan
from src.operations.checkpoint_jobs import uploads
from src.operations.checkpoint_jobs.stages import EVALUATIONS, JOBS
from src.runs import jsonl_records, metadata
from src.runs.checkpoints import folder as checkpoints

ROOT = Path(checkpoint_jobs.__file__).resolve().parents[4]
EXP = {"recipe": "x", "seed": 0}
ID = exp_id(EXP)
Raw = dict[str, Any]


class World:
    """A run with checkpoints at steps 10, 20, …, that is done; a place to upload to; a plan."""

    def __init__(self, folder: Path, steps: Sequence[int] = (10, 20, 30, 40)) -> None:
        self.folder, self.runs, self.there = folder, folder / "my runs", folder / "there"
        self.run, self.effects, self.file = self.runs / ID, folder / "effects", folder / "plan.yaml"
        self.there.mkdir()
        metadata.prepare(self.run, EXP, ["toys"])
        for step in steps:
            self.checkpoint(step)
        write_json(self.run / metadata.STATUS, {"state": "done", "step": steps[-1], "attempt": 1})
        self.raw: Raw = {
            "checkpoints": {"every": 10},
            "convert": {
                "command": self.says("convert", "cp {checkpoint}/model.safetensors {output}/weights"),
                "retry_seconds": 0,
            },
            "evaluate": {
                "tasks": {
                    "size": {
                        "command": self.says("evaluate", 'echo "{{\\"bytes\\": {step}}}" > {scores}'),
                        "retry_seconds": 0,
                    }
                }
            },
            "upload": {"folders": ["checkpoint", "converted"], "to": f"file://{self.there}", "retry_seconds": 0},
            "clean_up": {"delete": ["checkpoint", "converted"], "keep_last": 1, "retry_seconds": 0},
        }

    def says(self, name: str, command: str) -> str:
        return f"{command} && echo {name} {{step}} >> {self.effects}"

    def checkpoint(self, step: int, text: str = "") -> Path:
        with new_directory(checkpoints.folder(self.run, step)) as folder:
            (folder / "model.safetensors").write_bytes(f"weights of {step} {text}".encode() * 1000)
            (folder / "tokenizer").mkdir()
            (folder / "tokenizer" / "tokenizer.json").write_text("{}")
        return checkpoints.folder(self.run, step)

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.raw))

    def once(self, *words: str) -> int:
        self.write()
        return checkpoint_jobs.main([str(self.runs), "--plan", str(self.file), "--once", *words])

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        self.write()
        command = [
            sys.executable,
            "-m",
            "src.operations.checkpoint_jobs",
            str(self.runs),
            "--plan",
            str(self.file),
            *words,
        ]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def done(self) -> Counter[str]:
        return Counter(self.effects.read_text().splitlines()) if self.effects.exists() else Counter()

    def lines(self, stage: str = "", result: str = "") -> list[dict[str, Any]]:
        rows = jsonl_records.rows(self.run / JOBS)
        return [row for row in rows if stage in ("", row["stage"]) and result in ("", row["result"])]

    def steps(self) -> list[int]:
        return [checkpoints.step_of(path) for path in checkpoints.list_all(self.run)]

    def uploaded(self, step: int, which: str, name: str) -> Path:
        return self.there / ID / f"branch-0-step-{step:08d}" / which / name


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def poll(happened: Callable[[], Any], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(0.02)


def test_every_stage_of_every_checkpoint_once(world: World):
    assert [world.once(), world.once()] == [0, 0]
    assert world.done() == Counter(
        [f"{stage} {step}" for stage in ("convert", "evaluate") for step in (10, 20, 30, 40)]
    )
    assert world.steps() == [40]
    assert sorted(path.name for path in (world.run / "converted").iterdir()) == ["branch-0-step-00000040"]
    for step in (10, 20, 30, 40):
        weights = f"weights of {step} ".encode() * 1000
        assert world.uploaded(step, "checkpoint", "model.safetensors").read_bytes() == weights
        assert world.uploaded(step, "converted", "weights").read_bytes() == weights
        assert world.uploaded(step, "checkpoint", "tokenizer/tokenizer.json").exists()
    assert (
        defect(world.there / ID / "branch-0-step-00000010" / "checkpoint") is None
    )  # a whole checkpoint, to be copied back
    rows = jsonl_records.rows(world.run / EVALUATIONS)
    assert [(row["run"], row["branch"], row["step"], row["task"], row["scores"]) for row in rows] == [
        (ID, 0, step, "size", {"bytes": step}) for step in (10, 20, 30, 40)
    ]
    first = world.lines()[0]
    assert (first["stage"], first["step"], first["branch"], first["attempt"], first["exit_code"], first["result"]) == (
        "convert",
        10,
        0,
        1,
        0,
        "ok",
    )
    assert (world.run / first["log"]).exists()


def test_command_prints_its_actions(world: World):
    world.raw["evaluate"]["tasks"]["size"]["command"] = "false {scores}"
    world.write()
    command = [
        sys.executable,
        "-m",
        "src.operations.checkpoint_jobs",
        str(world.runs),
        "--plan",
        str(world.file),
        "--once",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == checkpoint_jobs.FAILED
    assert f"{ID} step 10: convert\n" in done.stderr
    assert f"{ID} step 10: evaluate.size failed: " in done.stderr


def test_a_dry_run_shows_the_commands_and_does_nothing(world: World, capsys: pytest.CaptureFixture[str]):
    assert world.once("--dry-run") == 0
    out = capsys.readouterr().out
    assert f"cp '{checkpoints.folder(world.run, 10)}'/model.safetensors" in out  # the folder's name has a space
    assert "waits" in out
    assert "for convert" in out
    assert not world.effects.exists()
    assert sorted(os.listdir(world.run)) == ["checkpoints", "exp_dict.json", "groups.json", "status.json"]


def test_rules_choose_checkpoints(world: World):
    def chosen(**rules: Any) -> list[int]:
        world.raw["checkpoints"] = rules
        world.write()
        return [every[0].step for every in checkpoint_jobs.plan_stages(world.run, checkpoint_plan.read(world.file))]

    checkpoints.mark_best(world.run, 30)
    assert chosen(every=20) == [20, 40]
    assert chosen(best=True) == [30]
    assert chosen(last=True) == [40]
    assert chosen(every=20, best=True) == [20, 30, 40]
    write_json(world.run / metadata.STATUS, {"state": "running", "step": 40})
    assert chosen(last=True) == []
    (checkpoints.folder(world.run, 20) / "model.safetensors").write_text("short")
    assert chosen(every=20) == [40]


def test_the_newest_the_last_and_the_best_stay(world: World):
    checkpoints.mark_best(world.run, 10)
    world.raw["clean_up"]["keep_last"] = 2
    assert world.once() == 0
    assert world.steps() == [10, 30, 40]  # the best, and the two newest
    checkpoints.mark_best(world.run, 30)
    write_json(world.run / metadata.STATUS, {"state": "done", "step": 10, "attempt": 1})  # where a child starts from
    world.raw["clean_up"]["keep_last"] = 1
    assert world.once() == 0
    assert world.steps() == [10, 30, 40]


def test_what_cannot_be_read_back_as_it_was_is_not_deleted(world: World):
    world.raw["clean_up"]["attempts"] = 1
    clean_up = world.raw.pop("clean_up")
    assert world.once() == 0
    for step, content in ((10, b"weights of 11 " * 1000), (20, b"short")):
        world.uploaded(step, "checkpoint", "model.safetensors").write_bytes(content)
    world.uploaded(30, "converted", "weights").unlink()
    world.raw["clean_up"] = clean_up
    assert world.once() == checkpoint_jobs.FAILED
    assert world.steps() == [10, 20, 30, 40]
    reasons = [line["reason"] for line in world.lines("clean_up")]
    assert len(reasons) == 3
    assert all("read back from the destination as" in reason for reason in reasons)
    assert "as nothing, uploaded were" in reasons[2]


def test_checkpoint_that_differs_from_its_upload_is_not_deleted(world: World):
    world.raw["clean_up"]["attempts"] = 1
    clean_up = world.raw.pop("clean_up")
    assert world.once() == 0
    world.checkpoint(10, "trained otherwise")
    world.raw["clean_up"] = clean_up
    assert world.once() == checkpoint_jobs.FAILED
    assert world.steps() == [10, 40]
    assert "is not what was uploaded" in world.lines("clean_up", "failed")[0]["reason"]


def test_altered_upload_does_not_count(world: World):
    """A command that says that all went well, and cut the file."""
    world.raw["upload"] = {
        "command": f"mkdir -p $(dirname {world.there}/{{name}}) && head -c 5000 {{file}} > {world.there}/{{name}}",
        "readback": f"sha256sum < {world.there}/{{name}} && stat -c %s {world.there}/{{name}}",
        "attempts": 2,
        "retry_seconds": 0,
    }
    world.raw["clean_up"]["delete"] = ["checkpoint"]
    for _ in range(3):
        assert world.once() == checkpoint_jobs.FAILED
    assert world.steps() == [10, 20, 30, 40]
    tries = world.lines("upload")
    assert Counter((line["step"], line["result"]) for line in tries) == {
        (step, "failed"): 2 for step in (10, 20, 30, 40)
    }
    assert "read back from the destination as 5000 bytes" in tries[0]["reason"]
    world.raw["upload"]["command"] = world.raw["upload"]["command"].replace("head -c 5000", "cat")
    assert world.once() == checkpoint_jobs.FAILED  # given up
    assert world.once("--retry") == 0
    assert world.steps() == [40]


@pytest.mark.parametrize(
    ("printed", "message"),
    [("", "got ''"), ("a" * 64, "expected one sha256"), (f"{'a' * 64} 12 13", "expected one sha256")],
)
def test_a_readback_must_print_sha256_and_size(tmp_path: Path, printed: str, message: str):
    there = uploads.Commands(lambda file, name: "true", lambda name: f"echo '{printed}'", 10, tmp_path / "log")
    with pytest.raises(RunError, match=message):
        there.read_back("x")


def test_the_end_of_a_readback_command(world: World):
    """What the module prints of its input is what is expected of a readback."""
    source = checkpoints.folder(world.run, 10) / "model.safetensors"
    command = f"cd {ROOT} && {sys.executable} -m src.operations.checkpoint_jobs.uploads < {shlex.quote(str(source))}"
    there = uploads.Commands(lambda file, name: "true", lambda name: command, 60, world.folder / "log")
    assert there.read_back("x") == uploads.file_digests(checkpoints.folder(world.run, 10))["model.safetensors"]


def test_missing_destination_is_reported_and_retried(world: World):
    world.there.rename(world.folder / "away")
    assert world.once() == checkpoint_jobs.FAILED
    assert "no such folder to upload to. Is it mounted?" in world.lines("upload")[0]["reason"]
    assert not world.there.exists()
    assert world.steps() == [10, 20, 30, 40]
    (world.folder / "away").rename(world.there)
    assert world.once() == 0
    assert world.steps() == [40]


def test_a_destination_without_room(world: World):
    """A file system of 64 KiB, real where we may mount one."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", world.there], capture_output=True, check=False
    ).returncode:
        pytest.skip("may not mount a small file system")
    try:
        assert world.once() == checkpoint_jobs.FAILED
        failed = world.lines("upload", "failed")
        assert failed
        assert "No space left on device" in failed[0]["reason"]
        assert 40 in world.steps()
        uploaded = {line["step"] for line in world.lines("upload", "ok")}
        assert set(world.steps()) >= {10, 20, 30, 40} - uploaded
        assert not list(world.there.rglob(".*.????????"))
    finally:
        subprocess.run(["umount", world.there], check=True)


def test_failures_are_retried_up_to_a_limit_and_block_dependent_stages(world: World):
    world.raw["convert"] |= {
        "command": (
            f"echo tried >> {world.effects}; test {{step}} != 20 && cp {{checkpoint}}/model.safetensors {{output}}"
        )
    }
    for _ in range(5):
        assert world.once() == checkpoint_jobs.FAILED
    tries = [line for line in world.lines("convert") if line["step"] == 20]
    assert [(line["attempt"], line["exit_code"], line["result"]) for line in tries] == [
        (n, 1, "failed") for n in (1, 2, 3)
    ]
    assert world.steps() == [20, 40]
    assert not [line for line in world.lines() if line["step"] == 20 and line["stage"] != "convert"]
    assert world.done()["tried"] == 3 + 3


def test_a_pause_between_attempts(world: World):
    world.raw["convert"] |= {"command": "false {output}", "retry_seconds": 3600}
    assert [world.once(), world.once()] == [checkpoint_jobs.FAILED] * 2
    assert len(world.lines("convert")) == 4  # one for each checkpoint


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true {scores}", "no such file"),
        ("echo nonsense > {scores}", "not valid JSON"),
        ("echo '{{}}' > {scores}", "expected a JSON object of numbers by name"),
        ('echo \'{{"a": "b"}}\' > {scores}', "expected a JSON object of numbers by name"),
        ("sleep 600; touch {scores}", "ended after 0.5 s"),
        ("kill -9 $$; touch {scores}", "exit code 137"),
    ],
)
def test_an_evaluation_without_scores_has_failed(world: World, command: str, reason: str):
    task = {"command": command, "attempts": 1, "timeout_seconds": 0.5 if command.startswith("sleep") else 300}
    world.raw = {"checkpoints": {"last": True}, "evaluate": {"tasks": {"t": task}}}
    assert world.once() == checkpoint_jobs.FAILED
    (line,) = world.lines()
    assert reason in line["reason"]
    assert not (world.run / EVALUATIONS).exists()


def test_scores_that_are_not_finite_are_null(world: World):
    task = {"command": 'echo \'{{"a": NaN, "b": 1.5}}\' > {scores}'}
    world.raw = {"checkpoints": {"last": True}, "evaluate": {"tasks": {"t": task}}}
    assert world.once() == 0
    assert jsonl_records.rows(world.run / EVALUATIONS)[0]["scores"] == {"a": None, "b": 1.5}


def test_evaluations_that_were_rolled_back_are_made_again(world: World):
    world.raw = {key: world.raw[key] for key in ("checkpoints", "convert", "evaluate")}
    assert world.once() == 0
    (world.run / EVALUATIONS).write_text(
        "".join(f"{json.dumps(row)}\n" for row in jsonl_records.rows(world.run / EVALUATIONS)[:2])
    )
    assert world.once() == 0
    assert world.done()["evaluate 20"] == 1
    assert world.done()["evaluate 40"] == 2
    assert [row["step"] for row in jsonl_records.rows(world.run / EVALUATIONS)] == [10, 20, 30, 40]


def test_unrecorded_work_is_repeated_with_the_same_result(world: World):
    """As if every worker had been killed between the end of a stage and its line."""
    world.raw = {key: world.raw[key] for key in ("checkpoints", "convert", "evaluate", "upload")}
    assert world.once() == 0
    rows, sent = (
        jsonl_records.rows(world.run / EVALUATIONS),
        world.uploaded(10, "converted", "weights").stat().st_mtime_ns,
    )
    (world.run / JOBS).unlink()
    assert world.once() == 0
    assert set(world.done().values()) == {2}
    assert world.uploaded(10, "converted", "weights").stat().st_mtime_ns == sent  # it was there already
    assert jsonl_records.rows(world.run / EVALUATIONS) == rows
    assert [line["result"] for line in world.lines("convert")] == ["ok"] * 4


def test_interrupted_clean_up_resumes(world: World):
    """As if killed between the deletions of the converted folder and of the checkpoint."""
    clean_up = world.raw.pop("clean_up")
    assert world.once() == 0
    before = world.done()
    place = world.run / "checkpoint_jobs" / "branch-0-step-00000010" / "clean_up"
    place.mkdir()
    (place / "attempt-1.log").touch()
    shutil.rmtree(world.run / "converted" / "branch-0-step-00000010")
    world.raw["clean_up"] = clean_up
    assert world.once() == 0
    assert world.steps() == [40]
    assert world.done() == before


def test_the_same_step_of_another_branch_is_another_checkpoint(world: World):
    world.raw = {key: world.raw[key] for key in ("checkpoints", "convert", "evaluate")}
    assert world.once() == 0
    write_json(world.run / "branch.json", {"branches": [{"number": 3, "from_step": 20}]})
    assert world.once() == 0
    assert [(row["branch"], row["step"]) for row in jsonl_records.rows(world.run / EVALUATIONS)] == [
        *((0, step) for step in (10, 20, 30, 40)),
        *((3, step) for step in (30, 40)),
    ]


def test_a_living_holder_is_never_disturbed_and_a_stopped_one_lives(world: World):
    world.raw = {
        "checkpoints": {"last": True},
        "evaluate": {"tasks": {"t": {"command": world.says("t", "sleep 1; echo '{{\"a\": 1}}' > {scores}")}}},
    }
    other = world.start("--once")
    try:
        lease = world.run / "checkpoint_jobs" / "branch-0-step-00000040" / "evaluate.t" / "lease"
        poll(lease.exists)
        other.send_signal(signal.SIGSTOP)
        assert world.once() == 0
        assert world.lines() == []
        other.send_signal(signal.SIGCONT)
        assert other.wait(300) == 0
    finally:
        other.kill()
        other.wait()
    assert world.done() == {"t 40": 1}
    assert [line["result"] for line in world.lines()] == ["ok"]


def session(world: World) -> int:
    """The process that leads the command of the evaluation, once it has begun."""
    poll((world.folder / "pid").exists)
    poll(lambda: (world.folder / "pid").read_text().strip())
    return os.getsid(int((world.folder / "pid").read_text()))


def is_empty(group: int) -> bool:
    return not any(f") {state} " in text and f" {group} " in text for state in "RSD" for text in stats())


def stats() -> list[str]:
    contents = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            contents.append(path.read_text())
    return contents


@pytest.mark.parametrize("command", ["sleep 100", "trap '' TERM HUP; sleep 100 & sleep 100"], ids=["obeys", "deaf"])
def test_the_command_of_a_killed_worker_is_killed_and_the_stage_repeated(world: World, command: str):
    task = {"command": f"echo $$ > {world.folder}/pid; {command}; touch {{scores}}"}
    world.raw = {"checkpoints": {"last": True}, "evaluate": {"tasks": {"t": task}}}
    first = world.start("--once")
    group = session(world)
    first.kill()
    first.wait()
    poll(lambda: is_empty(group))
    world.raw["evaluate"]["tasks"]["t"]["command"] = "echo '{{\"a\": 1}}' > {scores}"
    assert world.once() == 0
    assert [(line["attempt"], line["result"]) for line in world.lines()] == [(1, "ok")]
    assert [
        path.name for path in (world.run / "checkpoint_jobs" / "branch-0-step-00000040" / "evaluate.t").glob("*work*")
    ] == []


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.002, 0.005, 0.2])
def test_an_interrupted_worker_ends_its_command(world: World, seconds: float):
    """Also where the signal comes while the command is being started."""
    task = {"command": f"echo $$ > {world.folder}/pid; sleep 100; touch {{scores}}"}
    world.raw = {"checkpoints": {"last": True}, "evaluate": {"tasks": {"t": task}}}
    first = world.start("--once")
    first_log = world.run / "checkpoint_jobs" / "branch-0-step-00000040" / "evaluate.t" / "attempt-1.log"
    while not first_log.exists():
        assert first.poll() is None
    time.sleep(seconds)
    group = session(world) if seconds == 0.2 else None
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == 128 + signal.SIGTERM
    if group:
        poll(lambda: is_empty(group))
    assert [line["result"] for line in world.lines()] == ["interrupted"]
    time.sleep(0.1)
    assert not any(str(world.folder) in path.read_text(errors="replace") for path in commands())


def commands() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]


@pytest.mark.slow
def test_two_at_once_killed_at_any_moment_do_each_stage_once(world: World):
    """Kills without end of two workers: each stage is done once, nothing is lost, nothing unverified deleted."""
    rng = random.Random(0)
    world.raw["clean_up"]["retry_seconds"] = 0
    expected = {f"{stage} {step}" for stage in ("convert", "evaluate") for step in (10, 20, 30, 40)}
    schedulers = [world.start("--every", "0.05") for _ in range(2)]
    kills = 0

    def observe() -> tuple[int, ...]:
        return (
            len(world.steps()),
            *(sum(1 for _ in os.walk(place)) for place in (world.run, world.there)),
            len(world.lines()),
        )

    try:
        while world.steps() != [40] or len(world.lines("upload", "ok")) < 4:
            before = observe()
            poll(lambda before=before: observe() != before, 60)
            time.sleep(rng.random() * 0.1)
            victim = schedulers.pop(rng.randrange(2))
            victim.kill()
            victim.wait()
            kills += 1
            schedulers.append(world.start("--every", "0.05"))
    finally:
        for scheduler in schedulers:
            scheduler.kill()
            scheduler.wait()
    assert kills >= 5
    assert world.once() == 0
    assert set(world.done()) == expected
    assert len(jsonl_records.rows(world.run / EVALUATIONS)) == 4
    assert Counter((line["stage"], line["step"]) for line in world.lines(result="ok")) == {
        **{(stage, step): 1 for stage in ("convert", "evaluate", "upload") for step in (10, 20, 30, 40)},
        **{
            ("clean_up", step): 1
            for step in (10, 20, 30)
            if any(x["step"] == step for x in world.lines("clean_up", "ok"))
        },
    }
    for step in (10, 20, 30, 40):
        assert defect(world.there / ID / f"branch-0-step-{step:08d}" / "checkpoint") is None
        assert defect(world.there / ID / f"branch-0-step-{step:08d}" / "converted") is None


def mistake(world: World, change: Callable[[Raw], object]) -> str:
    change(world.raw)
    world.write()
    with pytest.raises(ConfigError) as caught:
        checkpoint_plan.read(world.file)
    return str(caught.value).replace(f"{world.file}.", "").replace(f"{world.file}: ", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["convert"].pop("command"), "convert.command: missing. It has no default, so write it."),
        (lambda raw: raw.update(evalute={}), "unknown key 'evalute'. Did you mean 'evaluate'?"),
        (lambda raw: raw["upload"].update(retry=1), "upload: unknown key 'retry'."),
        (lambda raw: raw["checkpoints"].update(evry=2), "checkpoints: unknown key 'evry'. Did you mean 'every'?"),
        (lambda raw: raw.update(checkpoints={}), "checkpoints: names no checkpoint"),
        (
            lambda raw: raw["convert"].update(command="x {chekpoint} {output}"),
            "{chekpoint}: unknown placeholder 'chekpoint'. Did you mean 'checkpoint'?",
        ),
        (lambda raw: raw["convert"].update(command="x {checkpoint}"), "convert.command: has no {output} in it"),
        (
            lambda raw: raw["convert"].update(command="x } {output}"),
            "a brace that begins no placeholder is written twice",
        ),
        (lambda raw: raw["convert"].update(attempts="3"), "convert.attempts: expected int, got '3' (str)."),
        (lambda raw: raw.pop("convert"), "upload.folders: 'converted' is made by the stage convert"),
        (lambda raw: raw.pop("upload"), "clean_up: deletes only what was uploaded"),
        (lambda raw: raw["clean_up"].update(after=["convert"]), "clean_up: deletes only what was uploaded"),
        (lambda raw: raw["upload"].update(folders=["checkpoint"]), "clean_up.delete: converted: not in upload.folders"),
        (
            lambda raw: raw["upload"].update(command="cp {file} {name}"),
            "expected either `to: FOLDER`, or both `command` and `readback`",
        ),
        (
            lambda raw: raw["upload"].update(to="s3://bucket"),
            "upload.to: expected file:///FOLDER or /FOLDER, got 's3://bucket'",
        ),
        (lambda raw: raw["evaluate"].update(tasks={"../x": {"command": "x {scores}"}}), "expected a name of letters"),
        (lambda raw: raw["evaluate"].update(tasks={}), "evaluate.tasks: expected"),
    ],
)
def test_a_mistake_in_a_plan_is_named(world: World, change: Callable[[Raw], object], message: str):
    assert message in mistake(world, change)


@pytest.mark.parametrize(
    ("text", "message"),
    [("convert: [", "not valid YAML"), ("a: 1\na: 2", "'a'"), ("- 1", "expected the keys of a plan"), ("\xff", "")],
)
def test_a_file_that_is_no_plan(world: World, text: str, message: str, capsys: pytest.CaptureFixture[str]):
    world.file.write_bytes(text.encode("latin-1"))
    assert checkpoint_jobs.main([str(world.runs), "--plan", str(world.file), "--once"]) == 1
    assert message in capsys.readouterr().err


def test_the_example_is_a_plan_that_works(world: World):
    example = checkpoint_plan.read(ROOT / "resources" / "checkpoint_jobs.yaml")
    assert example.stages == list(checkpoint_plan.STAGES)
    world.raw = example.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    world.raw["upload"]["to"] = str(world.there)
    world.raw["checkpoints"]["every"] = 10
    assert world.once() == 0
    assert world.steps() == [30, 40]
    assert [row["scores"] for row in jsonl_records.rows(world.run / EVALUATIONS)] == [{"bytes": 14_000}] * 4


def test_damaged_run_is_reported_and_the_rest_continues(world: World, caplog: pytest.LogCaptureFixture):
    other = world.runs / ("f" * 32)
    other.mkdir()
    (other / metadata.STATUS).write_text("{")
    assert world.once() == 0
    assert f"{other / metadata.STATUS}:1: not valid JSON" in caplog.text
    assert world.steps() == [40]
