"""Trainings that start in a fraction of the time: their processes are forked from one that has the libraries loaded.

The command is that of torchrun, accelerate or python, read by their own parsers and run by torchrun's own agent;
trainval.py runs as it does there. Only this differs: a process is forked where it would be started anew. Nothing of
ours is loaded before.
"""

import argparse
import gc
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil

LIBRARIES = [
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "accelerate",
    "transformers",
    "transformers.models.gpt_bigcode.modeling_gpt_bigcode",
    "transformers.optimization",
    "datasets",
    "pydantic",
    "safetensors.torch",
    "psutil",
    "deepspeed",
]
_context: list[ForkServerContext] = []


class Process:
    """A started command, of which can be asked what subprocess.Popen is asked."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path | None,
        log: Path,
        errors: Path | None = None,
    ) -> None:
        """What it prints goes to `log`; what it prints as errors to `errors`, where that is given."""
        if not _context:
            _context.append(multiprocessing.get_context("forkserver"))
            _context[0].set_forkserver_preload(LIBRARIES)
        self._process = _context[0].Process(
            target=_run, args=(list(command), dict(environment), cwd or Path.cwd(), log, errors or log)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout} s")
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that torchrun has started, by rank; fewer while they start or end."""
        processes = {}
        try:
            for child in psutil.Process(self.pid).children():
                word, _, rank = child.name().partition(" ")
                if word == "rank" and child.status() != psutil.STATUS_ZOMBIE:
                    processes[int(rank)] = child
        except psutil.NoSuchProcess:
            return {}
        return processes


def torchrun(script: Path, arguments: Sequence[str], processes: int, log: Path, seconds: float = 600) -> str:
    """Run a script of ours on several processes to its end; what it printed, "" where all went well.

    Raises:
        TimeoutError: it has not ended within so many seconds, and was killed.
    """
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    process = Process([sys.executable, *launcher, str(script), *arguments], environment, None, log)
    try:
        code = process.wait(timeout=seconds)
    finally:
        process.kill()
    return log.read_text() or f"exit code {code}" if code else ""


def _run(command: list[str], environment: dict[str, str], cwd: Path, log: Path, errors: Path) -> None:
    """What the forked process does: become `command`."""
    gc.freeze()  # else its first full collection would copy all that was loaded, for seconds
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # else what it starts would be forked from servers too
    assert "src" not in sys.modules, "the main module loads src, which a project of its own is to load"
    with open(log, "ab") as out, open(errors, "ab") as err, open(os.devnull, "rb") as null:
        for target, source in ((0, null), (1, out), (2, err)):
            os.dup2(source.fileno(), target)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _only_what_python_finds()
    if command[1] != "-m":
        _script(command[1], *command[2:])
        return
    from torch.distributed import run

    run.run = _torchrun
    if command[2] == "torch.distributed.run":
        run.run(run.parse_args(command[3:]))
    else:
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)


def _torchrun(arguments: argparse.Namespace) -> None:
    """What torchrun does, and accelerate through it, but for how its processes begin."""
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    config, _, command = run.config_from_args(arguments)
    config.start_method = "fork"
    elastic_launch(config, _script)(*command[1:])  # torchrun would put python -u before


def _only_what_python_finds() -> None:
    """Leave out of sys.path what the tests have put there; what PYTHONPATH names comes first, as ever."""
    path_entries = [
        str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    ]
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    sys.path[:] = [
        *path_entries,
        *(entry for entry in sys.path if entry.startswith(prefixes) and entry not in path_entries),
    ]


def _script(path: str, *arguments: str) -> None:
    if "RANK" in os.environ:  # /proc goes on to show the environment of whom it was forked from
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
