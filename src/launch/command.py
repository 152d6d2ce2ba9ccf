"""The command of one experiment in bash, quoted so that every value arrives unchanged."""

import re
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from src.errors import ConfigError, LaunchError
from src.experiments.config import Config
from src.launch.job import QUEUE_STOPPED, Job, LauncherConfig
from src.runs.store import STATUS
from src.support.redaction import SECRET_VALUE

STOPPED_EXIT = 75
"""Exit code of a job that stopped gracefully and resumes when it is restarted: EX_TEMPFAIL of sysexits.h."""
INTERRUPTED_EXIT = 130
"""Exit code of a job that a person stopped: it is not restarted automatically."""
STOP_AFTER_FAILURES = f"""\
# $FAILURES has one line for each of the last jobs of the submission that failed within a minute of their start.
queue_is_stopped() {{  # then $STOP_REASON says why
    STOP_REASON="not started: $MOST {QUEUE_STOPPED}. See why, then --job_option retry"
    [ "$MOST" -gt 0 ] && [ "$({{ wc -l < "$FAILURES"; }} 2> /dev/null || echo 0)" -ge "$MOST" ]
}}
count_failure() {{  # $1 the exit code, $2 seconds since the start
    case $1 in
        0) rm -f "$FAILURES" ;;
        {STOPPED_EXIT} | {INTERRUPTED_EXIT}) ;;
        *) if [ "$2" -lt 60 ]; then echo "$1" >> "$FAILURES"; else rm -f "$FAILURES"; fi ;;
    esac
}}
"""
"""Bash that stops the queue of a submission after $MOST quick failures in a row."""
_OF_TORCHRUN = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
_NGPUS = re.compile(r"(?<![\w${])NGPUS(?!\w)")
_COUNT_GPUS = (
    'export GPUS_HERE=$(if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tr , \'\\n\' <<< "$CUDA_VISIBLE_DEVICES";'
    " else nvidia-smi -L 2> /dev/null | grep '^GPU '; fi | grep -c '^[^-]');"
    ' [ "$GPUS_HERE" -gt 0 ] || GPUS_HERE=1;'
)
# DeepSpeed does not detect that a machine has no GPU.
_WITHOUT_GPU = (
    '[ -n "${DS_ACCELERATOR+set}${CUDA_VISIBLE_DEVICES:+set}" ] || nvidia-smi -L > /dev/null 2>&1 || '
    "export DS_ACCELERATOR=cpu;"
)
# DeepSpeed's launchers die of signals that their processes handle, and kill these before they write a checkpoint.
_DEAF = """bash -c 'trap "" TERM USR1; exec "$@"' _ """
_WORLD_INFO = (
    "import base64, json, sys; nodes, each = map(int, sys.argv[1:]);"
    ' world = {f"node{i}": list(range(each)) for i in range(nodes)};'
    " print(base64.urlsafe_b64encode(json.dumps(world).encode()).decode())"
)
_FREE_PORT = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
_MODULES = {
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
    "accelerate": "accelerate.commands.launch",
}
_SHARING = {"--use_deepspeed", "--use_fsdp", "--multi_gpu", "--config_file"}
"""Options of accelerate that choose how the model is distributed."""


# Names of likely secrets, unless the value is a number, a switch or a file; and values that look like secrets.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API)?(?:KEY|CREDENTIALS?|AUTH|PASS|PWD)(?:$|_)|(?:TOKEN|SECRET|PASSWORD|PASSWD)(?:$|_)", re.IGNORECASE
)
_PASSWORD = re.compile("PASSWORD|PASSWD|SECRET", re.IGNORECASE)
_HARMLESS = re.compile(r"\d{0,6}|true|false|yes|no|on|off", re.IGNORECASE)
_FILE = re.compile(r"(?:~|\.{1,2}|/[\w.-]+)/.*", re.DOTALL)


def _looks_like_a_key(name: str, value: str) -> bool:
    if SECRET_VALUE.search(value):
        return True
    is_password = _PASSWORD.search(name) and not name.upper().endswith(("FILE", "PATH", "DIR"))
    harmless = not is_password and (_FILE.fullmatch(value) or _HARMLESS.fullmatch(value))
    return bool(_SECRET_NAME.search(name) and not harmless and value)


def check_no_key(text: str) -> str:
    """Return `text`, a line of a job's script. Raises ValueError if part of it looks like a key."""
    settings = re.findall(r"\b([A-Za-z_]\w*)=['\"]?([^\s;&|'\"$`]+)", text)
    if SECRET_VALUE.search(text) or any(_looks_like_a_key(name, value) for name, value in settings):
        raise ValueError(
            "contains what looks like a key, which the job's files would expose. Export it where you submit."
        )
    return text


def check_python_binary(text: str) -> None:
    """Raises ConfigError if part of it looks like a key."""
    try:
        check_no_key(text)
    except ValueError as error:
        raise ConfigError(f"--python_binary: {error}") from None


def _check_variables(environment: dict[str, str]) -> dict[str, str]:
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(f"expected the name of an environment variable, got {name!r}.")
        if "\0" in value:
            raise ValueError(
                f"the value of {name} contains a zero byte, which environment variables cannot. Remove it."
            )
        if _looks_like_a_key(name, value):
            raise ValueError(
                f"{name} looks like a secret, which the job and its files would expose. "
                "Export it where you submit (jobs of local and slurm inherit that), "
                "put it into the account's secret store, or where the job finds it, such as ~/.netrc."
            )
    return environment


def _check_word(word: str) -> str:
    if "\0" in word:
        raise ValueError(f"a zero byte, which command arguments cannot contain, in {word!r}. Remove it.")
    return word


Environment = Annotated[dict[str, str], AfterValidator(_check_variables)]
"""Environment variables of a job."""


class Processes(Config):
    """How one job starts its processes."""

    starter: Literal["python", "torchrun", "deepspeed", "accelerate"] = "python"
    """The command that starts the processes."""
    per_node: Annotated[int, Field(ge=1)] | Literal["gpus"] = 1
    """Processes on each node; "gpus": one per GPU of the node, counted there, at least 1."""
    nodes: int = Field(default=1, ge=1)
    """Nodes of one job."""
    arguments: list[Annotated[str, AfterValidator(_check_word), AfterValidator(check_no_key)]] = []
    """Additional arguments of the starter."""
    env_path: Annotated[str, Field(min_length=1), AfterValidator(_check_word)] | None = None
    """Folder of the Python environment with the starter in its bin/. None: ENV_PATH if set, else this Python's."""
    stop_seconds: int = Field(default=120, ge=1)
    """How long torchrun waits for its processes to finish a step and write a checkpoint when it is stopped."""

    @model_validator(mode="after")
    def _check_starter(self) -> "Processes":
        if self.starter == "python" and (self.per_node, self.nodes) != (1, 1):
            raise ValueError(
                "the starter python starts one process. Choose torchrun, deepspeed or accelerate for several."
            )
        return self


class QueueConfig(LauncherConfig):
    """Settings that all launchers share."""

    SUBMISSION_SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Settings that the overrides of an experiment cannot change: all jobs of a submission share them."""
    stop_after_failures: int = Field(default=5, ge=0)
    """End the submission after this many experiments in a row failed within a minute of their start. 0: never."""
    processes: Processes = Processes()
    environment: Environment = {}
    """Variables of the job. They are not secret: do not put keys here."""
    submissions: str = ""
    """Folder of the submissions. Filled in by `resources.load`; not allowed in a job config."""

    def settings_of(self, job: Job) -> Self:
        """The config of one job, with its overrides. Raises LaunchError if they change one of `SUBMISSION_SETTINGS`."""
        config = job.resources if isinstance(job.resources, type(self)) else self
        if changed := [name for name in self.SUBMISSION_SETTINGS if getattr(config, name) != getattr(self, name)]:
            raise LaunchError(
                f"{job.exp_id}: overrides cannot change {changed[0]} of the launcher {self.name}: "
                "all jobs of a submission share it. Remove it from the override, or submit this experiment on its own."
            )
        return config


def shell_line(job: Job, processes: Processes | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Bash that runs `job` and exits with its code; a complete argument of `bash -c`.

    With several nodes, each node runs it, with MASTER_ADDR, MASTER_PORT, NODE_RANK and NNODES set.

    The exit code is `STOPPED_EXIT` if the job stopped gracefully: if its save directory says so (torchrun turns every
    other code into 1), or if SIGTERM or SIGUSR1 came before it could handle them. It is `INTERRUPTED_EXIT` if a person
    stopped it, and 0 if the run was done before the command failed, for example by a signal while the processes end.
    bash itself ignores both signals. If the command fails before the training writes a status, this writes the status
    "failed", for readers that cannot query the scheduler.

    NGPUS in `job.python_binary`, which replaces the starter, becomes the number of GPUs of the machine that runs the
    line: those of CUDA_VISIBLE_DEVICES if set, else those of `nvidia-smi -L`, at least 1.
    """
    processes = processes or Processes()
    exports = [f"export {name}={shlex.quote(value)};" for name, value in (environment or {}).items()]
    if job.python_binary is None:
        before, start = _starter_command(processes)
    else:
        start = _NGPUS.sub("$GPUS_HERE", job.python_binary)
        before = [_COUNT_GPUS] if start != job.python_binary else []
    stopping = (
        f'JOB_STATUS={shlex.quote(str(job.run / STATUS))}; JOB_BEFORE=$(cat "$JOB_STATUS" 2> /dev/null); '
        "JOB_SIGNALLED=; trap JOB_SIGNALLED=1 TERM USR1;"
    )
    ending = f"""
JOB_CODE=$?; JOB_AFTER=$(cat "$JOB_STATUS" 2> /dev/null)
if [ $JOB_CODE -ne 0 ]; then
    [ "$JOB_AFTER" != "$JOB_BEFORE" ] || JOB_AFTER=
    case "$JOB_AFTER" in
        *'"state": "done"'*) JOB_CODE=0 ;;
        *'"stopped_by": "person"'*'"state": "stopped"'*) JOB_CODE={INTERRUPTED_EXIT} ;;
        *'"state": "stopped"'*'"stopped_by": "person"'*) JOB_CODE={INTERRUPTED_EXIT} ;;
        *'"state": "stopped"'*) JOB_CODE={STOPPED_EXIT} ;;
        *'"state": "failed"'*) ;;
        *) [ -z "$JOB_SIGNALLED" ] || JOB_CODE={STOPPED_EXIT} ;;
    esac
    JOB_MOVE=-n
    ! grep -qs '"exit code [0-9]* before its training began; its log says why"' "$JOB_STATUS" || JOB_MOVE=-f
    case $JOB_CODE in {STOPPED_EXIT} | {INTERRUPTED_EXIT}) ;; *) [ -e "$JOB_STATUS" ] && [ $JOB_MOVE = -n ] || {{
        printf '{{"state": "failed", "reason": "exit code %s before its training began; its log says why"}}\\n' \\
            $JOB_CODE > "$JOB_STATUS.$$"
        mv $JOB_MOVE "$JOB_STATUS.$$" "$JOB_STATUS"
    }} 2> /dev/null ;; esac
fi
exit $JOB_CODE"""
    return (
        f"{' '.join([stopping, *_torchrun_variables(processes), *exports, *before])}\n{start} "
        f"{shlex.join(job.args)}{ending}"
    )


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without torchrun's variables: a job is not a rank of the torchrun that started this process."""
    return {name: value for name, value in environment.items() if not _OF_TORCHRUN.fullmatch(name)}


def argv(job: Job, processes: Processes | None = None, environment: Mapping[str, str] | None = None) -> list[str]:
    """`shell_line` as the argument list of a process that any launcher can start without a shell of its own."""
    return ["bash", "-c", shell_line(job, processes, environment)]


def _torchrun_variables(processes: Processes) -> list[str]:
    """Exports for torchrun. They are set for every starter: `python_binary` can use torchrun, and they do no harm.

    Without the first, a restart after a rank dies hangs or fails half of the time (torch 2.13 with gloo).
    """
    return [
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1;",
        "export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1;",
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={processes.stop_seconds};",
    ]


def _starter_command(processes: Processes) -> tuple[list[str], str]:
    """Bash to run first, and the start of the command, for a job without `python_binary`."""
    folder = processes.env_path and processes.env_path.rstrip("/") + "/bin"
    python = shlex.quote(f"{folder}/python" if folder else sys.executable)
    each = '"$GPUS_HERE"' if processes.per_node == "gpus" else str(processes.per_node)
    before = [f'export PATH={shlex.quote(folder)}":$PATH";'] if folder else []
    before += [_COUNT_GPUS] if processes.per_node == "gpus" else []
    if processes.starter == "python":
        start, flags = python, ""
    else:
        start = shlex.quote(f"{folder}/{processes.starter}") if folder else f"{python} -m {_MODULES[processes.starter]}"
        several = processes.nodes > 1
        if processes.starter == "torchrun":
            rendezvous = (
                '--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
            )
            flags = f"{rendezvous if several else '--standalone'} --nproc-per-node {each}"
        elif processes.starter == "accelerate":
            # --cpu with several processes would silently start one; --multi_gpu works without a GPU.
            flag_names = {word.partition("=")[0] for word in processes.arguments}
            multi_gpu_flag = "" if flag_names & _SHARING else "--multi_gpu"
            before.append(
                f"JOB_WORLD=$(({processes.nodes} * {each.strip(chr(34))})); JOB_MANY=; "
                f'[ "$JOB_WORLD" -lt 2 ] || JOB_MANY={multi_gpu_flag};'
            )
            rendezvous = (
                '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"'
            )
            flags = (
                f'$JOB_MANY --num_processes "$JOB_WORLD" --num_machines {processes.nodes} '
                f"{rendezvous if several else '--main_process_port 0'}"
            )
            flags += "" if "--config_file" in flag_names else " --mixed_precision no --dynamo_backend no"
            start += " launch" if folder else ""
        elif several:
            # DeepSpeed's runner uses ssh to reach other nodes; here the scheduler starts each node's processes.
            before.append(_WITHOUT_GPU)
            start = f"{_DEAF}{python} -m deepspeed.launcher.launch"
            world = f'--world_info="$({python} -c {shlex.quote(_WORLD_INFO)} "$NNODES" {each})"'
            flags = (
                f'{world} --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" '
                '--master_port="$MASTER_PORT" --no_local_rank'
            )
        else:
            before.append(f"{_WITHOUT_GPU} JOB_PORT=$({python} -c {shlex.quote(_FREE_PORT)});")
            start = _DEAF + start
            flags = f'--num_gpus {each} --master_port "$JOB_PORT" --no_local_rank'
    return before, " ".join([word for word in (start, flags, shlex.join(processes.arguments)) if word])
