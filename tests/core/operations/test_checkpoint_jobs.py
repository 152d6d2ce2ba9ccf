"""Convert, evaluate, upload, clean up: each stage once, whoever is killed when; nothing deleted that was not read
back."""

import contextlib
import json
import os
import random
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
from fsspec.implementations.local import LocalFileSystem

from src.errors import ConfigError
from src.experiments.identity import exp_id
from src.files import defect, new_directory, write_json
from src.operations.checkpoint_jobs import plan
from src.operations.checkpoint_jobs.__main__ import FAILED, main, plan_stages
from src.operations.checkpoint_jobs.stages import EVALUATIONS, OUTCOMES
from src.runs import jsonl_records
from src.runs.checkpoints import checkpoints
from src.runs.store import STATUS, SavedRun
from tests.conftest import ROOT

EXP = {"recipe": "x", "seed": 0}
ID = exp_id(EXP)
Raw = dict[str, Any]


class World:
    """A run with checkpoints at steps 10, 20, …, that is done; a place to upload to; a plan."""

    def __init__(self, folder: Path, steps: Sequence[int] = (10, 20, 30, 40)) -> None:
        self.folder, self.runs, self.there = folder, folder / "my runs", folder / "there"
        self.run, self.effects, self.file = self.runs / ID, folder / "effects", folder / "plan.yaml"
        self.there.mkdir()
        SavedRun(self.run).write_exp(EXP, ["toys"])
        for step in steps:
            self.checkpoint(step)
        write_json(self.run / STATUS, {"state": "done", "step": steps[-1], "attempt": 1})
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
        return main([str(self.runs), "--plan", str(self.file), "--once", *words])

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

    def outcomes(self, stage: str) -> dict[int, dict[str, Any]]:
        """The outcomes of a stage by step."""
        path = self.run / OUTCOMES
        outcomes = json.loads(path.read_text()) if path.exists() else {}
        return {int(key[-8:]): names[stage] for key, names in outcomes.items() if stage in names}

    def reasons(self, stage: str) -> list[str]:
        """Of the failures of a stage."""
        return [outcome["reason"] for outcome in self.outcomes(stage).values() if outcome["reason"]]

    def steps(self) -> list[int]:
        return [checkpoints.step_of(path) for path in checkpoints.list_all(self.run)]

    def uploaded_path(self, step: int, which: str, name: str) -> Path:
        return self.there / ID / f"branch-0-step-{step:08d}" / which / name


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def poll(condition: Callable[[], Any], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
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
        assert world.uploaded_path(step, "checkpoint", "model.safetensors").read_bytes() == weights
        assert world.uploaded_path(step, "converted", "weights").read_bytes() == weights
        assert world.uploaded_path(step, "checkpoint", "tokenizer/tokenizer.json").exists()
    assert (
        defect(world.there / ID / "branch-0-step-00000010" / "checkpoint") is None
    )  # a whole checkpoint, to be copied back
    rows = jsonl_records.rows(world.run / EVALUATIONS)
    assert [(row["run"], row["branch"], row["step"], row["task"], row["scores"]) for row in rows] == [
        (ID, 0, step, "size", {"bytes": step}) for step in (10, 20, 30, 40)
    ]
    assert (world.run / "checkpoint_jobs" / "branch-0-step-00000010" / "convert.log").exists()


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
    assert done.returncode == FAILED
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
    def select_steps(**rules: Any) -> list[int]:
        world.raw["checkpoints"] = rules
        world.write()
        return [every[0].step for every in plan_stages(world.run, plan.read(world.file))]

    checkpoints.mark_best(world.run, 30)
    assert select_steps(every=20) == [20, 40]
    assert select_steps(best=True) == [30]
    assert select_steps(last=True) == [40]
    assert select_steps(every=20, best=True) == [20, 30, 40]
    write_json(world.run / STATUS, {"state": "running", "step": 40})
    assert select_steps(last=True) == []
    (checkpoints.folder(world.run, 20) / "model.safetensors").write_text("short")
    assert select_steps(every=20) == [40]


def test_the_newest_the_last_and_the_best_stay(world: World):
    checkpoints.mark_best(world.run, 10)
    world.raw["clean_up"]["keep_last"] = 2
    assert world.once() == 0
    assert world.steps() == [10, 30, 40]  # the best, and the two newest
    checkpoints.mark_best(world.run, 30)
    write_json(world.run / STATUS, {"state": "done", "step": 10, "attempt": 1})  # where a child starts from
    world.raw["clean_up"]["keep_last"] = 1
    assert world.once() == 0
    assert world.steps() == [10, 30, 40]


def test_checkpoints_with_a_different_upload_are_not_deleted(world: World):
    world.raw["clean_up"]["attempts"] = 1
    clean_up = world.raw.pop("clean_up")
    assert world.once() == 0
    for step, content in ((10, b"weights of 11 " * 1000), (20, b"short")):
        world.uploaded_path(step, "checkpoint", "model.safetensors").write_bytes(content)
    world.uploaded_path(30, "converted", "weights").unlink()
    world.raw["clean_up"] = clean_up
    assert world.once() == FAILED
    assert world.steps() == [10, 20, 30, 40]
    reasons = world.reasons("clean_up")
    assert len(reasons) == 3
    assert all("read back" in reason for reason in reasons)
    assert "read back nothing" in reasons[2]


def test_checkpoint_that_differs_from_its_upload_is_not_deleted(world: World):
    world.raw["clean_up"]["attempts"] = 1
    clean_up = world.raw.pop("clean_up")
    assert world.once() == 0
    world.checkpoint(10, "trained otherwise")
    world.raw["clean_up"] = clean_up
    assert world.once() == FAILED
    assert world.steps() == [10, 40]
    assert "read back" in world.reasons("clean_up")[0]


def test_altered_upload_does_not_count(world: World, monkeypatch: pytest.MonkeyPatch):
    """A destination that cuts files, and reports no error."""
    world.raw["upload"]["attempts"] = 2
    with monkeypatch.context() as cutting:
        cutting.setattr(
            LocalFileSystem, "put_file", lambda _, file, path: Path(path).write_bytes(Path(file).read_bytes()[:5000])
        )
        for _ in range(3):
            assert world.once() == FAILED
    assert world.steps() == [10, 20, 30, 40]
    assert [outcome["failures"] for outcome in world.outcomes("upload").values()] == [2] * 4
    assert "read back 5000 bytes" in world.reasons("upload")[0]
    assert world.once() == FAILED, "given up"
    assert world.once("--retry") == 0
    assert world.steps() == [40]


def test_an_upload_to_a_file_system_of_another_protocol(world: World):
    world.raw["upload"]["to"] = "memory://archive"
    assert world.once() == 0
    assert world.steps() == [40]
    files, root = plan.open_destination("memory://archive")
    path = f"{root}/{ID}/branch-0-step-00000010/checkpoint/model.safetensors"
    assert files.cat_file(path) == b"weights of 10 " * 1000


def test_missing_destination_is_reported_and_retried(world: World):
    world.there.rename(world.folder / "away")
    assert world.once() == FAILED
    assert "no such folder to upload to." in world.reasons("upload")[0]
    assert not world.there.exists()
    assert world.steps() == [10, 20, 30, 40]
    (world.folder / "away").rename(world.there)
    assert world.once() == 0
    assert world.steps() == [40]


def test_failures_are_retried_up_to_a_limit_and_block_dependent_stages(world: World):
    world.raw["convert"] |= {
        "command": (
            f"echo tried >> {world.effects}; test {{step}} != 20 && cp {{checkpoint}}/model.safetensors {{output}}"
        )
    }
    for _ in range(5):
        assert world.once() == FAILED
    assert world.outcomes("convert")[20] | {"time": 0} == {
        "done": False,
        "failures": 3,
        "reason": "exit code 1",
        "time": 0,
    }
    assert world.steps() == [20, 40]
    assert 20 not in world.outcomes("evaluate.size")
    assert world.done()["tried"] == 3 + 3


def test_a_pause_between_attempts(world: World):
    world.raw["convert"] |= {"command": "false {output}", "retry_seconds": 3600}
    assert [world.once(), world.once()] == [FAILED] * 2
    assert [outcome["failures"] for outcome in world.outcomes("convert").values()] == [1] * 4


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true {scores}", "no such file"),
        ("echo nonsense > {scores}", "not valid JSON"),
        ("echo '{{}}' > {scores}", "expected a JSON object of numbers by name"),
        ('echo \'{{"a": "b"}}\' > {scores}', "expected a JSON object of numbers by name"),
        ("sleep 600; touch {scores}", "stopped after 0.5 s"),
        ("kill -9 $$; touch {scores}", "exit code 137"),
    ],
)
def test_an_evaluation_without_scores_has_failed(world: World, command: str, reason: str):
    task = {"command": command, "attempts": 1, "timeout_seconds": 0.5 if command.startswith("sleep") else 300}
    world.raw = {"checkpoints": {"last": True}, "evaluate": {"tasks": {"t": task}}}
    assert world.once() == FAILED
    assert reason in world.reasons("evaluate.t")[0]
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


@pytest.mark.slow
def test_unrecorded_work_is_repeated_with_the_same_result(world: World):
    """As if every worker had been killed between the end of a stage and its line."""
    world.raw = {key: world.raw[key] for key in ("checkpoints", "convert", "evaluate", "upload")}
    assert world.once() == 0
    rows, uploaded_file = (
        jsonl_records.rows(world.run / EVALUATIONS),
        world.uploaded_path(10, "converted", "weights").stat().st_mtime_ns,
    )
    (world.run / OUTCOMES).unlink()
    assert world.once() == 0
    assert set(world.done().values()) == {2}
    assert world.uploaded_path(10, "converted", "weights").stat().st_mtime_ns == uploaded_file  # it was there already
    assert jsonl_records.rows(world.run / EVALUATIONS) == rows


def test_interrupted_clean_up_resumes(world: World):
    """As if killed between the deletions of the converted folder and of the checkpoint."""
    clean_up = world.raw.pop("clean_up")
    assert world.once() == 0
    before = world.done()
    shutil.rmtree(world.run / "converted" / "branch-0-step-00000010")
    world.raw["clean_up"] = clean_up
    assert world.once() == 0
    assert world.steps() == [40]
    assert world.done() == before


@pytest.mark.slow
def test_the_same_step_of_another_branch_is_another_checkpoint(world: World):
    world.raw = {key: world.raw[key] for key in ("checkpoints", "convert", "evaluate")}
    assert world.once() == 0
    write_json(world.run / "branch.json", {"branches": [{"number": 3, "from_step": 20}]})
    assert world.once() == 0
    assert [(row["branch"], row["step"]) for row in jsonl_records.rows(world.run / EVALUATIONS)] == [
        *((0, step) for step in (10, 20, 30, 40)),
        *((3, step) for step in (30, 40)),
    ]


@pytest.mark.slow
def test_a_living_holder_is_never_disturbed_and_a_stopped_one_lives(world: World):
    world.raw = {
        "checkpoints": {"last": True},
        "evaluate": {"tasks": {"t": {"command": world.says("t", "sleep 1; echo '{{\"a\": 1}}' > {scores}")}}},
    }
    other = world.start("--once")
    try:
        lease = world.run / "checkpoint_jobs" / "lease"
        poll(lease.exists)
        other.send_signal(signal.SIGSTOP)
        assert world.once() == 0
        assert world.outcomes("evaluate.t") == {}
        other.send_signal(signal.SIGCONT)
        assert other.wait(300) == 0
    finally:
        other.kill()
        other.wait()
    assert world.done() == {"t 40": 1}
    assert world.outcomes("evaluate.t")[40]["done"]


def session(world: World) -> int:
    """The process that leads the command of the evaluation, once it has begun."""
    poll((world.folder / "pid").exists)
    poll(lambda: (world.folder / "pid").read_text().strip())
    return os.getsid(int((world.folder / "pid").read_text()))


def is_empty(group: int) -> bool:
    return not any(f") {state} " in text and f" {group} " in text for state in "RSD" for text in stats())


def stats(file: str = "stat") -> list[str]:
    contents = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            contents.append(path.read_text(errors="replace"))
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
    assert world.outcomes("evaluate.t")[40]["done"]
    assert not list(world.run.glob("checkpoint_jobs/*/*work*"))


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.2])
def test_an_interrupted_worker_ends_its_command(world: World, seconds: float):
    """Also where the signal comes while the command is being started."""
    task = {"command": f"echo $$ > {world.folder}/pid; sleep 100; touch {{scores}}"}
    world.raw = {"checkpoints": {"last": True}, "evaluate": {"tasks": {"t": task}}}
    first = world.start("--once")
    first_log = world.run / "checkpoint_jobs" / "branch-0-step-00000040" / "evaluate.t.log"
    while not first_log.exists():
        assert first.poll() is None
    time.sleep(seconds)
    group = session(world) if seconds == 0.2 else None
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == 128 + signal.SIGTERM
    if group:
        poll(lambda: is_empty(group))
    assert world.outcomes("evaluate.t") == {}, "an interruption is no failure"
    time.sleep(0.1)
    assert not any(str(world.folder) in text for text in stats("cmdline"))


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
            len(world.outcomes("upload")),
        )

    try:
        while world.steps() != [40] or not all(
            world.outcomes("upload").get(n, {}).get("done") for n in (10, 20, 30, 40)
        ):
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
    for step in (10, 20, 30, 40):
        assert defect(world.there / ID / f"branch-0-step-{step:08d}" / "checkpoint") is None
        assert defect(world.there / ID / f"branch-0-step-{step:08d}" / "converted") is None


def mistake(world: World, change: Callable[[Raw], object]) -> str:
    change(world.raw)
    world.write()
    with pytest.raises(ConfigError) as error_info:
        plan.read(world.file)
    return str(error_info.value).replace(f"{world.file}.", "").replace(f"{world.file}: ", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["convert"].pop("command"), "convert.command: missing. It has no default, so write it."),
        (lambda raw: raw.update(evalute={}), "unknown key 'evalute'. Did you mean 'evaluate'?"),
        (lambda raw: raw["upload"].update(retry=1), "upload: unknown key 'retry'."),
        (lambda raw: raw["checkpoints"].update(evry=2), "checkpoints: unknown key 'evry'. Did you mean 'every'?"),
        (lambda raw: raw.update(checkpoints={}), "checkpoints: selects no checkpoint"),
        (
            lambda raw: raw["convert"].update(command="x {chekpoint} {output}"),
            "{chekpoint}: unknown placeholder 'chekpoint'. Did you mean 'checkpoint'?",
        ),
        (lambda raw: raw["convert"].update(command="x {checkpoint}"), "convert.command: has no {output} in it"),
        (
            lambda raw: raw["convert"].update(command="x } {output}"),
            "Write a literal brace twice",
        ),
        (lambda raw: raw["convert"].update(attempts="3"), "convert.attempts: expected int, got '3' (str)."),
        (lambda raw: raw.pop("convert"), "upload.folders: 'converted' is made by the stage convert"),
        (lambda raw: raw.pop("upload"), "clean_up: deletes only uploaded folders"),
        (lambda raw: raw["upload"].update(folders=["checkpoint"]), "clean_up.delete: converted: not in upload.folders"),
        (lambda raw: raw["upload"].update(to="s4://bucket"), "upload.to: unknown protocol 's4'."),
        (lambda raw: raw["upload"].update(to="there"), "upload.to: expected /FOLDER or a URL"),
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
    assert main([str(world.runs), "--plan", str(world.file), "--once"]) == 1
    assert message in capsys.readouterr().err


def test_the_example_is_a_plan_that_works(world: World):
    example = plan.read(ROOT / "resources" / "checkpoint_jobs.yaml")
    assert example.stages == list(plan.STAGES)
    world.raw = example.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    world.raw["upload"]["to"] = str(world.there)
    world.raw["checkpoints"]["every"] = 10
    assert world.once() == 0
    assert world.steps() == [30, 40]
    assert [row["scores"] for row in jsonl_records.rows(world.run / EVALUATIONS)] == [{"bytes": 14_000}] * 4


def test_damaged_run_is_reported_and_the_rest_continues(world: World, caplog: pytest.LogCaptureFixture):
    other = world.runs / ("f" * 32)
    other.mkdir()
    (other / STATUS).write_text("{")
    assert world.once() == FAILED
    assert f"{other / STATUS}:1: not valid JSON" in caplog.text
    assert world.steps() == [40]
