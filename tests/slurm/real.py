"""What an administrator can do to a real Slurm, and waiting for what it does."""

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.conftest import ROOT


def wait_until(condition: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Poll until `condition` holds; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} seconds for {what}"
        time.sleep(0.1)


def command(*argv: str) -> str:
    """What a command of Slurm prints; it must succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


class Cluster:
    """A running Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: dict[str, float] = {}

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says of one job."""
        output = command("scontrol", "--oneliner", "show", "job", job_id)
        return dict(re.findall(r"(\S+?)=(\S*)", output))

    def nodes(self, job_id: str) -> list[str]:
        return command("scontrol", "show", "hostnames", self.job(job_id)["NodeList"]).split()

    def alive(self) -> list[str]:
        """Ids of the jobs that wait, run or end."""
        lines = command("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        end_states = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
        return [job_id for job_id, word in map(str.split, lines) if word not in end_states]

    def hurry(self) -> None:
        """Let jobs that were queued again start now: Slurm would have them wait two minutes.

        But not within a second: the node would take the new start for the old one, whose permit was revoked.
        """
        now = time.monotonic()
        lines = command("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i %r").splitlines()
        held_ids = [line.split()[0] for line in lines if line.split()[1] == "BeginTime"]
        self._waiting = {job_id: self._waiting.get(job_id, now) for job_id in held_ids}
        for job_id, since in self._waiting.items():
            if now - since > 2:
                subprocess.run(
                    ["scontrol", "update", f"jobid={job_id}", "StartTime=now"], capture_output=True, check=False
                )

    def wait_for_all(self, seconds: float, but: str = "") -> None:
        """Until no job but `but` waits or runs; those that are queued again are hurried."""

        def over() -> bool:
            self.hurry()
            return not {*self.alive()} - {but}

        wait_until(over, f"the end of {self.alive()}", seconds)

    def preempt(self, job_id: str) -> None:
        """Queue a job of the high partition on the nodes of `job_id`, which must go."""
        nodes = ",".join(self.nodes(job_id))
        command(
            "sbatch",
            "--partition=high",
            f"--nodelist={nodes}",
            "--exclusive",
            "--output=/dev/null",
            "--time=1",
            "--wrap=sleep 1",
        )

    def shorten(self, job_id: str) -> None:
        """Bring the end of a running job near: the signal that comes before it is due now, and is sent within half a
        minute."""
        minutes = int(self.job(job_id)["RunTime"].split(":")[1])
        command("scontrol", "update", f"jobid={job_id}", f"timelimit={minutes + 2}")

    def extend(self, job_id: str) -> None:
        """Take `shorten` back."""
        command("scontrol", "update", f"jobid={job_id}", "timelimit=30")

    def lose(self, node: str) -> None:
        """Let Slurm take a node for dead, and for out of service until `regain`, though its daemon says that it
        lives."""
        for state in ("down", "drain"):
            command("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")

    def regain(self, node: str) -> None:
        """Let a lost node serve again."""
        command("scontrol", "update", f"nodename={node}", "state=resume")

        def serves() -> bool:
            state = command("scontrol", "--oneliner", "show", "node", node).partition("State=")[2].split()[0]
            return "DOWN" not in state and "DRAIN" not in state

        wait_until(serves, f"node {node}")

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """Stop slurmctld, and start it again at the end; what is queued stays queued."""
        words = ["bash", str(ROOT / ".ci" / "slurm"), "slurmctld", str(self.folder)]
        try:
            command(*words, "stop")
            yield
        finally:
            command(*words, "start")

    def clear(self) -> None:
        """Cancel everything and wait for its end."""
        if jobs := self.alive():
            subprocess.run(["scancel", *jobs], capture_output=True, check=False)
            wait_until(lambda: not self.alive(), "the end of cancelled jobs")
