"""Commands that load the model of a run, of an export or of a folder of `save_pretrained`, with any file damaged: one
line or a result."""

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.files import MANIFEST
from src.models import export
from src.operations.checkpoint_jobs.__main__ import main as run_checkpoint_jobs
from src.serving import chat
from src.systems.assistants.serving import page, reward_evaluation, reward_server, sampling_report
from src.systems.assistants.serving.triton import repository
from src.systems.crossattn import ask
from src.training.checkpointing import consolidate
from tests import damages, toy
from tests.core.serving import pretrained_folders, small_runs

# tornado does not close a socket that it cannot bind
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]
CROSS = override(toy.CROSSATTN, {"loop.steps": 4, "loop.eval_every": 4})
IDS = {
    "talker": exp_id(small_runs.TALKER),
    "judge": exp_id(small_runs.JUDGE),
    "cross": exp_id(CROSS),
    "base": exp_id(toy.BASE),
}
IDS |= {"saved": "saved", "exported": "exported"}
SAMPLING = "configurations: [{name: greedy, generate_args: {max_new_tokens: 3}}]"
PLAN = {
    "checkpoints": {"every": 4},
    "convert": {"command": "cp {checkpoint}/model.safetensors {output}/weights", "retry_seconds": 0},
    "evaluate": {"tasks": {"size": {"command": 'echo "{{\\"bytes\\": {step}}}" > {scores}', "retry_seconds": 0}}},
    "upload": {"folders": ["checkpoint", "converted"], "retry_seconds": 0},
}
CLEAN_UP = {"delete": ["checkpoint", "converted"], "keep_last": 1, "retry_seconds": 0}
Command = Callable[["World", str], int]
"""The second argument is the name of the damaged run."""


class World:
    """Trained runs, an exported model and a saved one; and a port that is in use, so that a server ends once its model
    is loaded."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.runs, self.output, self.port = folder, folder / "runs", folder / "output", str(port)
        self.places = ["--data_path", str(folder / "data"), "-sb", str(self.runs)]
        self.here = [*self.places, "--device", "cpu"]
        small_runs.train(folder)
        toy.write_data(folder / "data")
        assert toy.main(["-e", "base", "cross"], {"base": [toy.BASE], "cross": [CROSS]}, folder) == 0
        pretrained_folders.save(self.runs / "saved")
        assert export.main([self.run("talker"), str(self.runs / "exported"), *self.places]) == 0
        (folder / "context").write_text("the thing1 is red .")
        (folder / "prompts.jsonl").write_text('"1?"\n')
        (folder / "sampling.yaml").write_text(SAMPLING)

    def run(self, name: str) -> str:
        return str(self.runs / IDS[name])

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def new(self) -> str:
        """The path of an output that does not exist."""
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir()
        return str(self.output / "new")


def _chat(world: World, name: str) -> int:
    return chat.main([world.run(name), "1?", "--max_new_tokens", "3", "--temperature", "0", *world.here])


def _ask(world: World, name: str) -> int:
    context = world.file("context")
    return ask.main([world.run(name), "--context", context, "what is it ?", "--max_new_tokens", "3", *world.here])


def _sample(world: World, name: str) -> int:
    files = ["--prompts", world.file("prompts.jsonl"), "--config", world.file("sampling.yaml"), "--report", world.new()]
    return sampling_report.main([world.run(name), *files, *world.here])


COMMANDS: dict[str, tuple[Command, list[str]]] = {
    "chat": (_chat, ["talker", "base", "saved", "exported"]),
    "ask": (_ask, ["cross", "saved"]),
    "ask --serve": (lambda world, name: ask.main([world.run(name), "--serve", world.port, *world.here]), ["cross"]),
    "sampling_report": (_sample, ["talker", "saved"]),
    "page": (lambda world, name: page.main([world.run(name), "--port", world.port, *world.here]), ["talker"]),
    "reward_server": (
        lambda world, _: reward_server.main([world.run("judge"), "--port", world.port, *world.here]),
        ["judge", "talker"],
    ),
    "reward_evaluation": (
        lambda world, _: reward_evaluation.main([world.run("judge"), "replies", *world.here]),
        ["judge", "talker"],
    ),
    "export": (lambda world, name: export.main([world.run(name), world.new(), *world.places]), ["talker", "judge"]),
    "export --standalone": (
        lambda world, _: export.main([world.run("cross"), world.new(), "--standalone", *world.places]),
        ["cross", "base"],
    ),
    "triton.repository": (
        lambda world, _: repository.main([world.run("judge"), world.new(), "--mode", "rm", *world.places]),
        ["judge"],
    ),
    "consolidate": (lambda world, name: consolidate.main([world.run(name), "--output", world.new()]), ["talker"]),
}
ONE_LINE = {"ask --serve", "page", "reward_server", "consolidate"}
"""Commands that always end in an error here: the port is in use, or there are no shards."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield World(tmp_path_factory.mktemp("world"), busy.getsockname()[1])


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and "attempts" not in path.parts)


def is_loaded(path: Path) -> bool:
    """Whether a command that loads a model reads the file."""
    return path.name in ("exp_dict.json", "status.json") or not {"checkpoints", "saved", "exported"}.isdisjoint(
        path.parts
    )


@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, (_, names) in COMMANDS.items() for name in names]
)
def test_a_damaged_file_is_one_line(world: World, command: str, name: str, capfd: pytest.CaptureFixture[str]):
    act, kinds = COMMANDS[command][0], list(damages.DAMAGE)
    assert damages.check(lambda: act(world, name), "intact", capfd) == (command in ONE_LINE)
    for number, path in enumerate(files_of(world.runs / IDS[name])):
        content = path.read_bytes()
        for damage in kinds if is_loaded(path) else [kinds[number % len(kinds)]]:
            damages.write(path, damage)
            code = damages.check(lambda: act(world, name), f"{path} {damage}", capfd)
            assert code == 1 or path.suffix != ".safetensors" or path.parent.name not in ("saved", "exported"), path
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("chat", "talker"),
        ("ask", "cross"),
        ("reward_evaluation", "judge"),
        ("reward_evaluation", "talker"),
        ("export", "talker"),
    ],
)
def test_a_checkpoint_that_was_written_damaged_is_one_line(
    world: World, command: str, name: str, capfd: pytest.CaptureFixture[str]
):
    act, checkpoint = COMMANDS[command][0], max((world.runs / IDS[name]).glob("checkpoints/step-*"))
    manifest = (checkpoint / MANIFEST).read_bytes()
    for path in files_of(checkpoint):
        content = path.read_bytes()
        for damage in damages.DAMAGE if path.name != MANIFEST else ():
            damages.write(path, damage)
            damages.list_in_manifest(checkpoint)
            code = damages.check(lambda: act(world, name), f"{path} {damage}", capfd)
            assert code == 1 or path.name != "model.safetensors", path
        path.write_bytes(content)
        (checkpoint / MANIFEST).write_bytes(manifest)


def test_checkpoint_jobs_name_a_damaged_file(world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    plan, done, runs = tmp_path / "plan.yaml", tmp_path / "done", tmp_path / "runs"
    (tmp_path / "there").mkdir()
    raw = {**PLAN, "upload": {**PLAN["upload"], "to": f"file://{tmp_path / 'there'}"}}
    shutil.copytree(world.runs / IDS["base"], done / IDS["base"])
    plan.write_text(yaml.safe_dump(raw))
    words = ["--plan", str(plan), "--once"]
    assert run_checkpoint_jobs([str(done), *words]) == 0
    plan.write_text(yaml.safe_dump({**raw, "clean_up": CLEAN_UP}))
    for path in files_of(done):
        for damage in damages.DAMAGE if path.suffix != ".log" else ():
            shutil.rmtree(runs, ignore_errors=True)
            file = shutil.copytree(done, runs) / path.relative_to(done)
            damages.write(file, damage)
            damages.check(lambda: run_checkpoint_jobs([str(runs), *words]), f"{file} {damage}", capfd)
