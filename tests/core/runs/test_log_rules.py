"""Rules on real logs and on lines as Slurm, the kernel, CUDA, NCCL and gloo print them; each event once, whatever
happens to the log."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from src.runs import jsonl_records
from src.runs.history import events, log_rules

ID = "0" * 32
NODE = "srun: error: Node failure on node-7"
FULL = "OSError: [Errno 28] No space left on device"

# Each line as its program prints it.
LINES = {
    "node_failure": [
        NODE,
        "slurmstepd: error: *** JOB 812345 ON node-7 CANCELLED AT 2023-01-05T10:11:12 DUE TO NODE FAILURE, SEE LOG ***",
    ],
    "preemption": ["slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-01-05T10:11:12 DUE TO PREEMPTION ***"],
    "time_limit": [
        "slurmstepd: error: *** STEP 17.0 ON n1 CANCELLED AT 2026-01-05T10:11:12 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-01-05T10:11:12 DUE TO TIME LIMIT ***",
    ],
    "cancelled": ["slurmstepd: error: *** STEP 1809579.0 ON r8i3n1 CANCELLED AT 2021-05-23T08:45:57 ***"],
    "host_out_of_memory": [
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=17.0. Some of your processes may have been killed.",
        (
            "slurmstepd: error: Detected 2 oom_kill events in StepId=17.batch. "
            "Some of the step tasks have been OOM Killed."
        ),
        "srun: error: n1: task 0: Out Of Memory",
        "slurmstepd: error: Exceeded job memory limit at some point.",
        "[12345.678] Out of memory: Killed process 4242 (python) total-vm:1234kB, anon-rss:12kB",
        "[12345.678] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you",
        "MemoryError",
    ],
    "device_out_of_memory": [
        (
            "torch.OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
        ),
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
    "gpu_hardware": [
        "[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: No CUDA GPUs are available",
    ],
    "gpu_error": [
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    ],
    "collective_timeout": [
        (
            "[rank3]:[E101 10:00:00.1 "
            "ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, Op"
        ),
        (
            "RuntimeError: [../third_party/gloo/gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms "
            "for recv operation to complete"
        ),
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    ],
    "peer_lost": [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4321",
        (
            "torch.distributed.DistBackendError: "
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited"
        ),
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
    "disk_full": [
        FULL,
        "OSError: [Errno 122] Disk quota exceeded",
        (
            "runs/ab/scores.jsonl: cannot write: No space left on device. "
            "Nothing complete was lost; make room or choose another folder."
        ),
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0",
    ],
    "storage_error": ["OSError: [Errno 116] Stale file handle", "OSError: [Errno 30] Read-only file system: 'x'"],
    "loader_killed": [
        "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. ",
        "RuntimeError: DataLoader worker (pid(s) 1, 2) exited unexpectedly",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ],
    "not_finite": [
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
    ],
    "import_error": [
        "ModuleNotFoundError: No module named 'safetensors'",
        "[rank1]: ImportError: libcudart.so.12: cannot open shared object file",
    ],
    "port_in_use": [
        "The server socket has failed to listen on any address. Error: EADDRINUSE",
        "OSError: [Errno 98] Address already in use",
    ],
    "killed": ["failed (exitcode: -9) local_rank: 1 (pid: 77)", "srun: error: n1: task 1: Killed"],
    "crashed": [
        "Fatal Python error: Segmentation fault",
        "terminate called without an active exception",
        "failed (exitcode: -11) local_rank: 0",
    ],
    "process_failed": [
        "failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python",
        "srun: error: n1: tasks 0-3: Exited with exit code 1",
    ],
}
# What a healthy run prints, too.
HARMLESS = """
number of skipped iterations:   0 | number of nan iterations:   0 |
srun: Job step aborted: Waiting up to 62 seconds for job step to finish.
+ srun --jobid 1809579 bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'
[INFO] [config.py:904:print]   checkpoint_tag_validation_fail  False
OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768
/lib/torch/cuda/memory.py:373: FutureWarning: torch.cuda.memory_cached has been renamed to torch.cuda.memory_reserved
NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_BLOCKING_WAIT=0 timeout 1800
Could not import flash_attn: ImportError: no such library. Falling back.
pip's ModuleNotFoundError: is what this text is about
the SIGTERM exit code 0; Exited with exit code 0
The king was Killed in battle. Out of memory of man.
[W1121 socket.cpp:759] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97)
step 10/20  train_loss 2.5000  1,234 tokens/s  0:00:10 left
"""


def matches(text: str) -> list[str]:
    return [rule.name for _, _, rule in log_rules.matches(text.encode())]


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_a_line_is_known_by_its_rule(name: str, line: str):
    assert matches(f"before\n{line}\nafter\n") == [name]
    assert matches(f"n1: [rank0] {line}\r\n")[:1] == [name] or line.startswith(("Memory", "Module", "[rank1]: Import"))


def test_every_rule_has_a_line_here_and_advice():
    assert {rule.name for rule in log_rules.rules()} == LINES.keys()
    assert all(rule.advice.endswith(".") for rule in log_rules.rules())


def test_harmless_lines_match_no_rule():
    assert matches(HARMLESS) == []


def test_real_logs_of_a_cluster(shared_data: Path):
    """Two trainings of BigScience: one healthy to the end of its log, one that was cancelled by hand at the end of
    it."""
    folder = shared_data / "logs" / "bigscience_slurm_out"
    assert matches((folder / "meg_ds_3d_gpt2_perf_n16-ds-on.out").read_text()) == []
    text = (folder / "meg_gpt2_base_n4_dp1_tp4_pp4-1809579.out").read_bytes()
    matched = [(text[:start].count(b"\n") + 1, rule.name) for start, _, rule in log_rules.matches(text)]
    assert matched == [(1577, "cancelled"), (1591, "cancelled")]


class World:
    def __init__(self, folder: Path) -> None:
        self.run, self.log = folder / ID, folder / "logs" / f"{ID}.err.log"
        self.run.mkdir()
        self.log.parent.mkdir()

    def write(self, text: str | bytes) -> None:
        with open(self.log, "ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    def scan(self, is_complete: bool = False) -> list[str]:
        return [event["rule"] for event in events.scan(self.run, [self.log], is_complete=is_complete)]

    def events(self) -> list[dict[str, Any]]:
        return jsonl_records.rows(self.run / events.EVENTS)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_event_says_what_where_and_when(world: World):
    world.write(f"one\n{NODE}\n")
    assert world.scan() == ["node_failure"]
    (event,) = world.events()
    assert event.pop("time").endswith("+00:00")
    assert event.pop("advice").startswith("A machine was lost.")
    assert event == {
        "rule": "node_failure",
        "severity": "error",
        "line": NODE,
        "offset": 4,
        "log": f"logs/{ID}.err.log",
        "attempt": 0,
    }


def test_a_log_that_grows_is_read_once(world: World):
    world.write(NODE[:20])
    assert world.scan() == []
    world.write(NODE[20:] + "\n")
    assert [world.scan(), world.scan()] == [["node_failure"], []]
    world.write(FULL)
    assert world.scan() == []
    assert world.scan(is_complete=True) == ["disk_full"]
    assert world.scan(is_complete=True) == []


def test_a_hundred_ranks_that_say_the_same_are_one_event(world: World):
    world.write(f"{NODE}\n" * 100)
    assert world.scan() == ["node_failure"]
    world.write(f"{NODE}\n" * 100)
    assert world.scan() == []
    world.write("step\n" * events.SAME_INCIDENT + f"{NODE}\n")
    assert world.scan() == ["node_failure"]


def test_a_log_that_was_truncated_or_replaced_is_read_from_its_start(world: World):
    world.write(f"{'first' * 10}\n{NODE}\n")
    assert world.scan() == ["node_failure"]
    world.log.write_text(f"{FULL}\n")
    assert world.scan() == ["disk_full"]
    world.log.rename(world.log.with_name(world.log.name + ".1"))
    world.write("another file, and a longer text than before\nRuntimeError: No CUDA GPUs are available\n")
    assert world.scan() == ["gpu_hardware"]
    assert world.scan() == []


def test_a_log_that_is_read_again_notes_nothing_twice(world: World):
    world.write(f"first\n{NODE}\n")
    assert world.scan() == ["node_failure"]
    copy = world.log.read_bytes()
    world.log.unlink()
    world.write(copy + f"{FULL}\n".encode())
    assert world.scan() == ["disk_full"]


def test_bytes_that_are_no_text_and_lines_without_end(world: World):
    world.write(b"\xff\xfe\x00" * 1000 + b"\n\x80 " + NODE.encode() + b" \x80\x1b[0m\n")
    assert world.scan() == ["node_failure"]
    assert world.events()[0]["line"] == f"\ufffd {NODE} \ufffd [0m"
    before = world.log.stat().st_size
    world.write(
        b"\r".join(b"step %d" % i for i in range(400_000)) + b" " * (3 * events.LONGEST_LINE)
    )  # a progress bar, no newline
    world.write(b"x" * 5_000_000)
    assert world.scan() == []
    cursor = json.loads((world.run / events.CURSORS).read_text())[f"logs/{ID}.err.log"]
    assert world.log.stat().st_size - cursor["offset"] <= events.LONGEST_LINE < before + 6_000_000
    world.write(f"\n{FULL}\n")
    assert world.scan() == ["disk_full"]
    assert all(len(event["line"]) <= 500 for event in world.events())


def test_a_lost_or_damaged_cursor_notes_nothing_twice(world: World):
    world.write(f"{NODE}\n")
    assert world.scan() == ["node_failure"]
    (world.run / events.CURSORS).unlink()
    assert world.scan() == []
    (world.run / events.CURSORS).write_text("{")
    assert world.scan() == []
    assert len(world.events()) == 1


def test_a_torn_line_of_the_journal_is_cut(world: World):
    world.write(f"{NODE}\n")
    world.scan()
    with open(world.run / events.EVENTS, "a") as file:
        file.write('{"rule": "half')
    world.write("x\n" * events.SAME_INCIDENT + f"{FULL}\n")
    assert world.scan() == ["disk_full"]
    assert [event["rule"] for event in world.events()] == ["node_failure", "disk_full"]


SCANNER = """
import sys
from pathlib import Path
from src.runs.history import events
events.scan(Path(sys.argv[1]), [Path(sys.argv[2])])
print("looked", flush=True)
while True:
    events.scan(Path(sys.argv[1]), [Path(sys.argv[2])])
"""


@pytest.mark.slow
def test_scanners_at_once_and_killed_at_any_moment_note_each_event_once(world: World):
    """Two read a log while it grows; one after another is killed and replaced."""
    far = "step\n" * (events.SAME_INCIDENT // 5 + 1)
    command = [sys.executable, "-c", SCANNER, str(world.run), str(world.log)]
    world.write("begins\n")

    def start_scanner() -> subprocess.Popen[bytes]:
        scanner = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert scanner.stdout is not None
        assert scanner.stdout.readline() == b"looked\n"
        return scanner

    scanners = [start_scanner() for _ in range(2)]
    try:
        for i in range(60):
            world.write(far + f"{NODE} {i}\n")
            time.sleep(0.01)
            if i % 10 == 9:
                victim = scanners.pop(0)
                victim.kill()
                victim.communicate()
                scanners.append(start_scanner())
    finally:
        for scanner in scanners:
            scanner.kill()
            scanner.communicate()
    world.scan()
    assert [event["line"] for event in world.events()] == [f"{NODE} {i}" for i in range(60)]


def test_the_table_shows_the_cause_and_not_its_consequences(world: World):
    def latest_rule() -> str | None:
        event = events.latest_problem(world.run, 0)
        return event["rule"] if event else None

    assert latest_rule() is None
    peer, memory, failed = LINES["peer_lost"][0], LINES["device_out_of_memory"][0], LINES["process_failed"][0]
    for line, expected in (
        (peer, "peer_lost"),
        (memory, "device_out_of_memory"),
        (failed, "device_out_of_memory"),
        (FULL, "disk_full"),
    ):
        world.write(f"{line}\n")
        world.scan()
        assert latest_rule() == expected
    assert events.latest_problem(world.run, 1) is None
    assert {name for name in LINES if log_rules.is_aftermath(name)} == {
        "collective_timeout",
        "peer_lost",
        "killed",
        "crashed",
        "process_failed",
        "cancelled",
    }


def test_nothing_is_written_where_there_is_no_log(world: World):
    assert world.scan() == []
    assert os.listdir(world.run) == []
