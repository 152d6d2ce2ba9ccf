"""Kill a training at random and compare its result with an undisturbed one.

    python -m tests.faults.harness -e GROUP [--processes 2] [--faults 50] [--seed 0] -- [arguments of trainval.py]

Each fault is SIGKILL, SIGTERM or a stop and continuation (SIGSTOP, SIGCONT) of a random process at a random moment:
while it starts, between two steps, inside a checkpoint. Whatever ends is started again with the same command. Linux
only.
"""

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from src.support.command_line import make_parser
from src.training.checkpointing import dcp_shards
from tests import warm

TrainingProcess = subprocess.Popen[bytes] | warm.Process
FAULTS = ("SIGKILL", "SIGTERM", "SIGSTOP")
_DEADLINE = 300.0
"""Seconds without progress after which a training is taken to hang."""


@dataclass(frozen=True)
class Training:
    """One experiment, as a command line that starts and continues it."""

    command: Sequence[str]
    run: Path
    """Its save directory."""
    environment: dict[str, str]
    cwd: Path | None = None
    warm: bool = False
    """Fork its processes from one that has the libraries loaded: tests/warm.py."""

    def start(self, log: Path) -> "TrainingProcess":
        """Start or continue it."""
        if self.warm:
            return warm.Process(self.command, self.environment, self.cwd, log)
        with open(log, "ab") as out:
            return subprocess.Popen(
                list(self.command), env=self.environment, cwd=self.cwd, stdout=out, stderr=out, start_new_session=True
            )

    def rows(self) -> int:
        """Score rows so far: how progress is seen from outside."""
        path = self.run / "scores.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def state(self) -> str:
        """What status.json says, "new" where there is none."""
        path = self.run / "status.json"
        return json.loads(path.read_text())["state"] if path.exists() else "new"

    def fingerprints(self) -> dict[str, str]:
        """Hashes of what must come out the same: the scores, and the tensors and the state of the last checkpoint."""
        last = max((self.run / "checkpoints").glob("step-*"))
        names = [path.relative_to(last) for path in (*last.glob("*.safetensors"), last / "state.json")]
        digests = {str(name): _sha256(last / name) for name in sorted(names)}
        shards = dcp_shards.tensors(last / dcp_shards.MOMENTS)  # their headers have no order of their own
        digests |= {name: tensor.digest() for name, tensor in shards.items()}
        return {**digests, "last": last.name, "scores.jsonl": _sha256(self.run / "scores.jsonl")}


@dataclass
class Report:
    """What was done to a training."""

    kinds: Sequence[str] = FAULTS
    """Of faults, to draw from."""
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    scores: str = ""
    """scores.jsonl, as it was at the end."""


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processes(torchrun: TrainingProcess) -> list[psutil.Process]:
    """The processes that train, by rank; fewer while they start or end."""
    members = {}
    try:
        children = psutil.Process(torchrun.pid).children()
        if isinstance(torchrun, warm.Process):  # they have the environment of whom they were forked from
            return children
        for child in children:
            try:
                members[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
    except psutil.NoSuchProcess:
        return []
    return [members[rank] for rank in sorted(members)]


def run_undisturbed(training: Training, log: Path) -> dict[str, str]:
    """Run it to its end; its fingerprints. The save directory is deleted."""
    code = training.start(log).wait()
    if code != 0:
        raise RuntimeError(f"the undisturbed training ended with exit code {code}:\n{log.read_text()[-3000:]}")
    digests = training.fingerprints()
    shutil.rmtree(training.run)
    return digests


def disturb(
    training: Training, faults: int, draw: random.Random, log: Path, world_size: int, kinds: Sequence[str] = FAULTS
) -> Report:
    """Train with `faults` faults of these kinds on the way, several times over if that is more than one training has
    time for.

    Raises:
        AssertionError: it ended otherwise than the undisturbed training.
        RuntimeError: it failed, or hangs.
    """
    expected_digests = run_undisturbed(training, log)
    report = Report(kinds)
    while len(report.faults) < faults:
        if report.starts > 20 and not report.faults:
            raise RuntimeError(
                f"{training.run}: none of {report.starts} starts could be disturbed: is it a launcher with processes?"
            )
        _train(training, faults, draw, log, world_size, report)
        digests = training.fingerprints()
        assert digests == expected_digests, (
            f"{training.run}: {report.faults}: differs in "
            f"{[name for name in expected_digests if digests.get(name) != expected_digests[name]]}"
        )
        report.scores = (training.run / "scores.jsonl").read_text()
        shutil.rmtree(training.run)
    return report


def _train(training: Training, faults: int, draw: random.Random, log: Path, world_size: int, report: Report) -> None:
    while training.state() != "done":
        process = training.start(log)
        report.starts += 1
        before = len(report.faults)
        try:
            for _ in _moments(training, process, draw, faults - len(report.faults), world_size):
                if not strike(process, draw, report):
                    break
            _wait(process, training)
        finally:
            _end(process)
        if (
            training.state() == "failed" and len(report.faults) == before
        ):  # who has lost a peer to SIGKILL says so, and may
            raise RuntimeError(
                f"{training.run}: {(training.run / 'status.json').read_text()}\n{log.read_text()[-3000:]}"
            )


def _moments(
    training: Training, process: TrainingProcess, draw: random.Random, num_left: int, world_size: int
) -> Iterator[None]:
    """Random moments of one start: some rows from now, or while it starts, and some milliseconds."""
    for _ in range(num_left):
        rows, starting = training.rows() + draw.choice((0, 1, 1, 2, 2)), draw.random() * (1 if training.warm else 3)
        now = training.rows()
        while process.poll() is None and (training.rows() < rows or len(processes(process)) < world_size):
            time.sleep(0.001)
        time.sleep(starting if rows == now else draw.random() * draw.choice((0.005, 0.05)))
        if process.poll() is not None:
            return
        yield


def strike(process: TrainingProcess, draw: random.Random, report: Report) -> bool:
    """One fault on one process; False where it ends the training."""
    everyone = processes(process)
    if not everyone:
        return False
    name, victim = draw.choice(report.kinds), draw.choice(everyone)
    try:
        if name == "SIGSTOP":
            victim.suspend()
            time.sleep(draw.random() * 0.5)
            victim.resume()
        else:
            victim.send_signal(signal.Signals[name])
    except psutil.NoSuchProcess:
        return False
    report.faults.append(name)
    return name == "SIGSTOP"


def _wait(process: TrainingProcess, training: Training) -> None:
    """Until the launcher has ended."""
    rows, since = training.rows(), time.monotonic()
    while process.poll() is None:
        if training.rows() != rows:
            rows, since = training.rows(), time.monotonic()
        if time.monotonic() - since > _DEADLINE:
            raise RuntimeError(f"{training.run}: no progress for {_DEADLINE:g} s.")
        time.sleep(0.01)


def _end(process: TrainingProcess) -> None:
    """Nothing of this start lives on."""
    everyone = processes(process)
    if process.poll() is None:
        process.kill()
        process.wait()
    psutil.wait_procs(everyone, timeout=300)


def main(arguments: Sequence[str] | None = None) -> int:
    """Disturb every experiment of a group; exit code 1 where one did not end as it should."""
    parser = make_parser("tests.faults.harness", __doc__)
    parser.add_argument("-e", "--exp_group", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--faults", type=int, default=50, help="in all, shared between the experiments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("rest", nargs="*", help="after --: arguments of trainval.py, such as --fsdp")
    options = parser.parse_args(arguments)
    from src.experiments.config import top_level
    from src.runs import plan

    items = plan.load_groups(top_level("exp_configs", "EXP_GROUPS"), [options.exp_group], [])
    draw, bad = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        for item in items:
            training = trained(item.exp_id, Path(folder, "runs"), options.processes, options.rest)
            log = Path(folder, "log")
            try:
                report = disturb(training, -(-options.faults // len(items)), draw, log, options.processes)
            except (AssertionError, RuntimeError) as error:
                bad += 1
                print(f"{item.exp_id}  {error}", file=sys.stderr)
            else:
                print(
                    f"{item.exp_id}  {len(report.faults)} faults, {report.starts} starts: the same every time",
                    flush=True,
                )
    return 1 if bad else 0


def trained(exp_id: str, runs: Path, count: int, rest: Sequence[str]) -> Training:
    """The command of an experiment of exp_configs.py under torchrun."""
    import os

    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(count),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    words = ["trainval.py", "--exp_id", exp_id, "-sb", str(runs), "--with-parents", *rest]
    return Training([sys.executable, *launcher, *words], runs / exp_id, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
