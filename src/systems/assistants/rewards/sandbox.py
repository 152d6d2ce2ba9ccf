"""Run programs that a model wrote in bubblewrap, in parallel, each in a new sandbox that is removed afterwards.

A program has no network, home, environment variables or /proc. It can read /usr, /lib and this Python, and write to a
small /tmp in memory. It cannot start processes, so the limits of its CPU time, memory and files cannot be exceeded. A
filter of system calls also blocks sockets, shared memory and most of the kernel's rarely used interfaces. After the
time limit the first process of its PID namespace is killed, and with it the namespace.

Not protected against: kernel bugs in the remaining system calls, and timing side channels. All programs together can
use `max_parallel` times their memory.
"""

import contextlib
import errno
import json
import marshal
import os
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Literal

from pydantic import Field

from src.errors import ConfigError
from src.experiments.config import Config
from src.systems.assistants.rewards import isolated, isolated_peer, isolated_remote, isolated_values

_BEGIN = """import marshal, os, sys
from types import ModuleType
descriptor = int(sys.argv.pop(1))
for name, code in marshal.loads(os.read(descriptor, 1 << 20)):
    module = sys.modules[name] = ModuleType(name)
    exec(code, module.__dict__)
os.close(descriptor)
module.main()"""
_START_SECONDS = 60.0
"""Time limit for starting bubblewrap and Python on a busy machine. A program's own time limit starts afterwards."""
_STARTS = 3

# Numbers of blocked system calls on x86_64 and aarch64 (None: missing), from the kernel's tables. Threads need `clone`.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "socket": (41, 198), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "personality": (135, 92),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Column of the table, the kernel's number of the architecture (AUDIT_ARCH), number of `clone`."""
_CLONE3, _CLONE_THREAD, _X32 = 435, 0x10000, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


class Limits(Config):
    """Limits of one program."""

    seconds: float = Field(default=10.0, gt=0)
    """Wall-clock time from its first line to its last."""
    cpu_seconds: int = Field(default=5, gt=0)
    """Processor time of one program."""
    memory_mb: int = Field(default=512, ge=64)
    """MiB of address space, for each process."""
    file_mb: int = Field(default=8, gt=0)
    """MiB of a file, and of /tmp."""
    output_kb: int = Field(default=1024, gt=0)
    """KiB of output, after which the program is killed."""
    max_parallel: int | None = Field(default=None, gt=0)
    """Number of parallel programs; None for the number of cores of this process."""

    def resources(self) -> str:
        """The limits as JSON, for `isolated.limit_resources`."""
        mb = 1 << 20
        sizes = {"RLIMIT_AS": self.memory_mb * mb, "RLIMIT_FSIZE": self.file_mb * mb, "RLIMIT_CPU": self.cpu_seconds}
        return json.dumps(sizes | {"RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0})


@dataclass(frozen=True)
class Program:
    """A program to run."""

    role: Literal["serve", "judge"]
    """See src/systems/assistants/rewards/isolated.py. serve: evaluate a program. judge: test a program in another
    sandbox."""
    order: bytes
    """Standard input of the process."""


@dataclass(frozen=True)
class Result:
    """The result of a program."""

    output: bytes
    """The output."""
    end_reason: Literal["exit", "time", "output"]
    """Why the program ended: by itself, or by the time or output limit."""


def run_programs(programs: Sequence[Program], limits: Limits) -> list[Result]:
    """Run programs; returns their results in order. No process or file of them remains, even after an exception.

    Raises:
        ConfigError: this machine cannot isolate programs.
    """
    require()
    if not programs:
        return []
    most = limits.max_parallel or len(os.sched_getaffinity(0))
    # A sandbox dies with the thread that started it (--die-with-parent), so each thread waits for its own sandbox.
    with ThreadPoolExecutor(min(most, len(programs))) as pool:
        return list(pool.map(partial(_run, limits=limits), programs))


@cache
def require() -> None:
    """Raises ConfigError if this machine cannot isolate programs."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise ConfigError(
            f"running programs that a model wrote requires Linux on {' or '.join(_MACHINES)}, "
            f"got {sys.platform} on {platform.machine()}."
        )
    _find_bubblewrap()
    result = _run(Program("serve", isolated.write_message(["evaluate", "7 + 12"])), Limits(max_parallel=1))
    if b"[19, " not in result.output:
        raise ConfigError(
            f"bubblewrap is installed, but a test program that computes 7 + 12 printed {result.output[:100]!r}. "
            "Run `bwrap --ro-bind / / true` to see whether it works here."
        )


def _find_bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise ConfigError(
            "running programs that a model wrote requires bubblewrap, which is not installed. "
            "Run: apt-get install bubblewrap"
        )
    return path


def _run(program: Program, limits: Limits) -> Result:
    problem = ""
    for _ in range(_STARTS):  # a machine can be out of processes or namespaces for a moment
        result = _attempt(program, limits)
        if isinstance(result, Result):
            return result
        problem = result
    raise ConfigError(
        f"bubblewrap: installed, but it cannot start a program on this machine: {problem}. "
        "Allow user, PID and network namespaces: "
        "in a container with `--security-opt seccomp=unconfined`, on Ubuntu with an AppArmor profile for bwrap."
    )


def _attempt(program: Program, limits: Limits) -> Result | str:
    """The result, or the reason why the program did not start."""
    with contextlib.ExitStack() as stack:
        outlet, inlet = _pipe(stack)
        start = partial(_start, stack, limits)
        if program.role == "serve":
            sandboxes = [start(["serve"], _file(stack, program.order), inlet)]
        else:
            (answers, to_judge), (requests, to_program) = _pipe(stack), _pipe(stack)
            sandboxes = [start(["serve"], requests, to_judge)]
            sandboxes += [start(["judge"], _file(stack, program.order), inlet, (answers, to_program))]
            for end in (answers, to_judge, requests, to_program):
                end.close()
        inlet.close()
        output, end_reason = _read(outlet.fileno(), limits)
        if output.startswith(isolated.READY):
            return Result(output.removeprefix(isolated.READY), end_reason)
        for sandbox in sandboxes:
            sandbox.end()
        complaints = [line for sandbox in sandboxes for line in sandbox.complaints()]
        return complaints[0] if complaints else f"no answer within {_START_SECONDS:.0f} s"


def _read(outlet: int, limits: Limits) -> tuple[bytes, Literal["exit", "time", "output"]]:
    """Read output until the last writer exits or a limit is reached; returns it with the end reason."""
    poll = select.poll()
    poll.register(outlet, select.POLLIN)
    output, deadline, is_started = b"", time.monotonic() + _START_SECONDS, False
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return output, "time"
        if not poll.poll(remaining * 1000):
            continue
        piece = os.read(outlet, 1 << 16)
        output += piece
        if not piece:
            return output, "exit"
        if not is_started and output.startswith(isolated.READY):
            is_started, deadline = True, time.monotonic() + limits.seconds
        if len(output) > limits.output_kb << 10:
            return output, "output"


@dataclass
class _Sandbox:
    """A bubblewrap process, which waits for the first process of its PID namespace."""

    process: "subprocess.Popen[bytes]"
    errors: FileIO
    """Messages of bubblewrap."""
    first: int | None = None
    """Descriptor of that first process; None if it did not start or has ended."""

    def end(self) -> None:
        """Kill the processes and wait for their end."""
        if self.first is None:
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
            os.close(self.first)
            self.first = None
        self.process.wait()

    def complaints(self) -> list[str]:
        """The messages of bubblewrap."""
        return os.pread(self.errors.fileno(), 4096, 0).decode(errors="replace").splitlines()


def _start(
    stack: contextlib.ExitStack,
    limits: Limits,
    role: list[str],
    order: FileIO,
    outlet: FileIO,
    peer: Sequence[FileIO] = (),
) -> _Sandbox:
    """Start a role of src/systems/assistants/rewards/isolated.py. order: standard input. peer: more descriptors."""
    errors, rules, code = _file(stack, b""), _file(stack, _filter_rules()), _file(stack, _code())
    info, info_end = _pipe(stack)
    arguments = [*role, limits.resources(), *(str(file.fileno()) for file in peer)]
    options = [*_view(limits.file_mb), "--info-fd", str(info_end.fileno()), "--seccomp", str(rules.fileno())]
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _BEGIN, str(code.fileno()), *arguments]
    process = subprocess.Popen(
        [_find_bubblewrap(), *options, "--", *python],
        stdin=order,
        stdout=outlet,
        stderr=errors,
        pass_fds=[file.fileno() for file in (info_end, rules, code, *peer)],
        env={},
    )
    sandbox = _Sandbox(process, errors)
    stack.callback(sandbox.end)
    info_end.close()
    with contextlib.suppress(ValueError, ProcessLookupError):
        sandbox.first = os.pidfd_open(json.loads(info.readall())["child-pid"])
    return sandbox


def _view(tmp_mb: int) -> Iterator[str]:
    """Options of bubblewrap: namespaces and file system of a program."""
    yield from (
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--hostname",
        "sandbox",
        "--cap-drop",
        "ALL",
    )
    yield from ("--die-with-parent", "--new-session", "--as-pid-1", "--clearenv")
    yield from ("--ro-bind", "/usr", "/usr", "--size", str(tmp_mb << 20), "--tmpfs", "/tmp")
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            yield from ("--ro-bind", folder, folder)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    home = os.path.realpath(sys.base_prefix)
    if Path("/usr") not in Path(home, "lib").parents:
        yield from ("--ro-bind", home, home)
    for device in ("null", "zero", "random", "urandom"):
        yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
    yield from ("--remount-ro", "/", "--chdir", "/tmp")


@cache
def _code() -> bytes:
    """src/systems/assistants/rewards/isolated*.py, compiled, in the order of their imports."""
    modules = (isolated_values, isolated_remote, isolated_peer, isolated)
    return marshal.dumps(
        [(each.__name__, compile(Path(str(each.__file__)).read_bytes(), each.__name__, "exec")) for each in modules]
    )


@cache
def _filter_rules() -> bytes:
    """The seccomp program. System calls of other architectures kill the process; the table's calls, and `clone` except
    for threads, fail with EPERM."""
    column, machine, clone = _MACHINES[platform.machine()]
    refusal = _REFUSE | errno.EPERM
    rules = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if machine == _MACHINES["x86_64"][1]:
        rules += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for numbers in _NUMBERS.values():
        number = numbers[column]
        if number is not None:
            rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refusal)]
    rules += [
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]  # the C library then falls back to `clone`
    rules += [
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, 16),
        (_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, refusal),
        (_RETURN, 0, 0, _ALLOW),
    ]
    rules.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def _file(stack: contextlib.ExitStack, content: bytes) -> FileIO:
    """An unnamed file in memory, positioned at its start."""
    file = stack.enter_context(FileIO(os.memfd_create("sandbox"), "r+"))
    file.write(content)
    file.seek(0)
    return file


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    outlet, inlet = os.pipe()
    return stack.enter_context(FileIO(outlet, "r")), stack.enter_context(FileIO(inlet, "w"))
