"""What lines of a log mean: rules as data, from the exact messages of Slurm, the kernel, CUDA, NCCL, gloo, PyTorch and this project.

A rule holds pairs of a needle, which is looked for first as it is cheap to find, and a pattern that must match within a line
around it. Of several rules that match a line the first in `RULES` counts, so the more telling stand first.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Severity = Literal["info", "warning", "error"]
_SLURM = r"slurmstepd: error: \*\*\* (?:JOB|STEP) \S+ (?:ON \S+ )?CANCELLED AT \S+"


@dataclass(frozen=True)
class Rule:
    """One kind of trouble."""

    name: str
    severity: Severity
    advice: str
    signs: Mapping[str, str] = field(default_factory=dict)
    """Needle -> pattern; "": the needle itself. A pattern stays within one line."""

    @cached_property
    def patterns(self) -> list[tuple[bytes, "re.Pattern[bytes]"]]:
        """(needle, compiled pattern), both of bytes: logs need not be UTF-8."""
        return [
            (needle.encode(), re.compile((pattern or re.escape(needle)).encode(), re.MULTILINE)) for needle, pattern in self.signs.items()
        ]


RULES = (
    Rule(
        "node_failure",
        "error",
        "A machine was lost. The job is requeued where Slurm allows it, else submit it again; leave the node out if it comes back.",
        {
            "DUE TO NODE FAILURE": _SLURM + r" DUE TO NODE FAILURE",
            "srun: error: Node failure": "",
            "srun: error: Aborting, step": r"srun: error: Aborting, step \S+ .*node.*(?:fail|down)",
            "NODE_FAIL": r"\bNODE_FAIL\b",
        },
    ),
    Rule(
        "preemption",
        "warning",
        "Another job took the place. It goes on from its newest checkpoint when it is requeued.",
        {
            "DUE TO PREEMPTION": _SLURM + r" DUE TO PREEMPTION",
            "DUE TO JOB REQUEUE": _SLURM + r" DUE TO JOB REQUEUE",
        },
    ),
    Rule(
        "time_limit",
        "warning",
        "The job reached its time limit. Submit it again: it goes on from its newest checkpoint.",
        {"DUE TO TIME LIMIT": _SLURM + r" DUE TO TIME LIMIT"},
    ),
    Rule(
        "host_out_of_memory",
        "error",
        "The machine's memory ran out. Ask for more (mem), or lower loader workers and micro_batch.",
        {
            "slurmstepd: error: Detected": r"slurmstepd: error: Detected \d+ oom[-_]kill event",
            "oom-kill event": r"slurmstepd: error: .*oom-kill event",
            "Out Of Memory": r"srun: error: \S+: tasks? [\d,\-\[\]]+: Out Of Memory",
            "exceeded memory limit": r"(?:slurmstepd|srun): error: .*exceeded (?:job |step )?memory limit",
            "Exceeded job memory limit": "",
            "Out of memory: Kill": r"Out of memory: Kill(?:ed)? process \d+",
            "oom-kill:constraint": "",
            "invoked oom-killer": "",
            "DefaultCPUAllocator: can't allocate memory": "",
            "DefaultCPUAllocator: not enough memory": "",
            "Cannot allocate memory": r"(?:OSError|RuntimeError|MemoryError|std::bad_alloc).*Cannot allocate memory",
            "MemoryError": r"^(?:\[?\w*rank\]?\d*\]?: ?)?(?:numpy\.\S*)?_?(?:Array)?MemoryError\b",
        },
    ),
    Rule(
        "device_out_of_memory",
        "error",
        "The GPU's memory ran out. Lower micro_batch or the length of the sequences, or turn on gradient checkpointing.",
        {
            "CUDA out of memory": "",
            "CUDA error: out of memory": "",
            "HIP out of memory": "",
            "CUBLAS_STATUS_ALLOC_FAILED": "",
            "torch.OutOfMemoryError": "",
            "Failed to CUDA malloc": r"NCCL WARN .*Failed to CUDA malloc",
        },
    ),
    Rule(
        "gpu_hardware",
        "error",
        "The GPU or its link is faulty. Leave this node out and have it looked at; the last checkpoint is sound.",
        {
            "Xid (": r"NVRM: Xid \([^)]*\): \d+",
            "uncorrectable ECC error": "",
            "uncorrectable NVLink error": "",
            "CUDA error: hardware stack error": "",
            "has fallen off the bus": "",
            "Unable to determine the device handle for GPU": "",
            "GPU is lost": "",
            "CUDA error: system not yet initialized": "",
            "No CUDA GPUs are available": "",
            "no CUDA-capable device is detected": "",
        },
    ),
    Rule(
        "gpu_error",
        "error",
        "A kernel failed. Start again with CUDA_LAUNCH_BLOCKING=1 to see which; an index out of range is the usual cause.",
        {
            "CUDA error: ": r"CUDA error: (?:device-side assert|an illegal|misaligned|unspecified|the launch|unknown|invalid|initiali)",
            "CUBLAS_STATUS_": r"CUDA error: CUBLAS_STATUS_(?!SUCCESS)\w+",
            "CUDNN_STATUS_": r"cuDNN error: CUDNN_STATUS_(?!SUCCESS)\w+",
        },
    ),
    Rule(
        "collective_timeout",
        "error",
        "The ranks waited for one that did not come. Look for what stopped that one: its own error, a full disk, a slow loader.",
        {
            "Watchdog caught collective operation timeout": "",
            "watchdog got stuck": r"ProcessGroup\w* ?'?s? ?watchdog got stuck",
            "watchdog thread terminated with exception": "",
            "collectives have failed or timed out": "",
            "Timed out waiting": r"Timed out waiting \d+ms for (?:recv|send) operation",
            "DistStoreError": r"DistStoreError: (?:.*[Tt]imed out|Timed out)",
            "timeout in ncclCommWatchdog": "",
            "wait timeout after": r"wait timeout after \d+ms",
            "RendezvousTimeoutError": "",
        },
    ),
    Rule(
        "peer_lost",
        "error",
        "Another rank or its machine is gone. Look for the first error among the ranks; the network, if there is none.",
        {
            "Connection closed by peer": r"gloo.*Connection closed by peer|Connection closed by peer \[",
            "Connection reset by peer": r"(?:gloo|NCCL|nccl|tcp/pair|TCPStore|recvValue|sendBytes).*Connection reset by peer",
            "Read error [": r"gloo.*Read error \[",
            "ncclRemoteError": r"ncclRemoteError: ",
            "ncclSystemError": r"ncclSystemError: ",
            "ncclInternalError": r"ncclInternalError: ",
            "NCCL error in": "",
            "socketProgress": r"NCCL WARN .*socketProgress",
            "failed to connect to": r"(?:TCPStore|socket\.cpp|c10d).*failed to connect to",
        },
    ),
    Rule(
        "disk_full",
        "error",
        "No room for files. Make room (python -m results.clean) or a larger quota; the checkpoint before is sound.",
        {
            "No space left on device": "",
            "ENOSPC": r"\bENOSPC\b",
            "Disk quota exceeded": "",
            "enforce fail at inline_container.cc": r"inline_container\.cc.*(?:unexpected pos|PytorchStreamWriter failed)",
        },
    ),
    Rule(
        "storage_error",
        "error",
        "The file system refuses. Ask whoever runs it; the checkpoint before is sound.",
        {
            "Read-only file system": r"(?:\[Errno 30\] |cannot write: )Read-only file system",
            "Stale file handle": r"(?:\[Errno 116\] |cannot (?:write|read): )Stale (?:NFS )?file handle",
            "Input/output error": r"(?:\[Errno 5\] |cannot (?:write|read): )Input/output error",
            "Transport endpoint is not connected": "",
        },
    ),
    Rule(
        "loader_killed",
        "error",
        "A process that loads data died, of memory as a rule. Give the job more memory or /dev/shm, or fewer loader workers.",
        {
            "DataLoader worker (pid": r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)",
            "Please try to raise your shared memory limit": "",
            "insufficient shared memory (shm)": "",
            "unable to open shared memory object": "",
            "unable to mmap": r"unable to mmap \d+ bytes from file",
            "received 0 items of ancdata": "",
        },
    ),
    Rule(
        "not_finite",
        "error",
        "The training ran away. Rewind to an earlier checkpoint with a lower learning rate, or look at the data of this step.",
        {
            "so training stops before the optimizer moves": r"step \d+: the [\w ]+ is (?:nan|inf|-inf), so training stops",
            "all overflowed float16": r"the gradients of the last \d+ steps all overflowed float16",
            "number of nan iterations:": r"number of nan iterations: +[1-9]\d*",
            "Current loss scale already at minimum": "",
            "found NaN in": r"found NaN in (?:local |global )?(?:grad|forward loss)",
        },
    ),
    Rule(
        "import_error",
        "error",
        "The job's Python lacks something. Is it the environment that the tests ran in? See python_binary of the job config.",
        {
            "ModuleNotFoundError: ": r"^(?:\[rank\d+\]: ?|\d+: ?)?ModuleNotFoundError: ",
            "ImportError: ": r"^(?:\[rank\d+\]: ?|\d+: ?)?ImportError: ",
            "command not found": r"(?:ba)?sh: (?:line \d+: )?\S+: command not found",
            "No such file or directory": r"(?:ba)?sh: (?:line \d+: )?\S*python\S*: No such file or directory",
        },
    ),
    Rule(
        "port_in_use",
        "error",
        "Another program listens there. Start again, or choose another port.",
        {"Address already in use": "", "EADDRINUSE": r"\bEADDRINUSE\b"},
    ),
    Rule(
        "killed",
        "error",
        "Killed from outside with signal 9: by the kernel for want of memory, as a rule. Look at the machine's own log.",
        {
            "exitcode: -9": r"\(exitcode: -9\)",
            "exitcode  : -9": "",
            "exit code 137": r"(?:[Ee]xited with |returned |status |^)exit code 137\b",
            "Killed": r"srun: error: \S+: tasks? [\d,\-\[\]]+: Killed|^(?:bash|sh|/\S+): line \d+: +\d+ Killed\b|^Killed$",
            "exits with return code = -9": "",
        },
    ),
    Rule(
        "crashed",
        "error",
        "A library crashed. The lines before say in which call; run with faulthandler for the stack.",
        {
            "Segmentation fault": "",
            "Fatal Python error: ": "",
            "Bus error": "",
            "exitcode: -": r"\(exitcode: -(?:11|6|7|4|8)\)",
            "terminate called": r"terminate called (?:after throwing|without an active exception)",
        },
    ),
    Rule(
        "process_failed",
        "error",
        "A process of the job ended with an error. Its own traceback stands further up.",
        {
            "failed (exitcode:": r"failed \(exitcode: \d+\) local_rank",
            "Exited with exit code": r"srun: error: \S+: tasks? [\d,\-\[\]]+: Exited with exit code [1-9]\d*",
            "exits with return code =": r"exits with return code = [1-9]\d*",
        },
    ),
    Rule(
        "cancelled",
        "warning",
        "Somebody ended the job (scancel), or a step of it failed. Submit it again: it goes on from its newest checkpoint.",
        {"CANCELLED AT": _SLURM + r"(?: \*\*\*| *$)"},
    ),
)


AFTERMATH = frozenset({"collective_timeout", "peer_lost", "killed", "crashed", "process_failed", "cancelled"})
"""What the other ranks, and what started them, say when one has failed for another reason."""


def matches(text: bytes) -> Iterator[tuple[int, int, Rule]]:
    """(start, end, rule) of each line of `text` that a rule knows, in their order, each line once. End excludes the newline.

    Carriage returns end lines, too: progress bars write them.
    """
    lines = text.replace(b"\r", b"\n")
    found: dict[int, int] = {}
    for order, rule in enumerate(RULES):
        for needle, pattern in rule.patterns:
            if needle not in lines:
                continue
            for match in pattern.finditer(lines):
                start = lines.rfind(b"\n", 0, match.start()) + 1
                found[start] = min(order, found.get(start, order))
    for start in sorted(found):
        end = lines.find(b"\n", start)
        yield start, len(lines) if end < 0 else end, RULES[found[start]]
