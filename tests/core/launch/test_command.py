"""The words of a command arrive as they were given, through a real bash."""

import base64
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src.errors import ConfigError
from src.experiments.config import load
from src.launch.command import (
    INTERRUPTED_EXIT,
    STOP_AFTER_FAILURES,
    STOPPED_EXIT,
    Config,
    Environment,
    Processes,
    argv,
    check_no_key,
)
from src.launch.job import Job
from src.runs.store import SavedRun
from tests import toy

LONGEST = 600
"""Seconds that none of these commands takes, on however busy a machine."""
ECHO = "import json, sys; print(json.dumps(sys.argv[1:]))"
NASTY = [
    "plain",
    "two words",
    "",
    " ",
    "it's",
    'say "hi"',
    "$HOME",
    "$(exit 3)",
    "`exit 3`",
    "${PATH}",
    "a\nb",
    "\n",
    "tab\there",
    "back\\slash",
    "trailing\\",
    "*",
    "~",
    "a;b&c|d>e<f",
    "#no comment",
    "!history",
    "{a,b}",
    "-e",
    "--",
    "naïve 漢字 🙂",
    "NGPUS",
    "$GPUS_HERE",
    "'",
    "%s",
    "[0.1, 1e-4]",
]


def job_of(words: tuple[str, ...], folder: Path, python_binary: str | None = None) -> Job:
    return Job("id", words, folder, folder / "run", folder / "logs", python_binary)


def run_job(job: Job, **env: str) -> list[str]:
    done = subprocess.run(
        argv(job), cwd=job.cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def python(prefix: str = "") -> str:
    return f'{prefix}{sys.executable} -c "{ECHO}" '


@pytest.mark.parametrize("python_binary", [None, "with prefix"])
def test_every_value_arrives_unchanged(tmp_path: Path, python_binary: str | None):
    script = tmp_path / "echo it.py"
    script.write_text(ECHO)
    binary = f"X=1 ; {sys.executable}" if python_binary else None
    job = job_of((script.name, *NASTY), tmp_path, binary)
    assert run_job(job) == NASTY


def test_random_values_arrive_unchanged(tmp_path: Path):
    draw = random.Random(0)
    alphabet = "ab '\"$`\\\n\t*?!#&|;<>(){}[]~^=%-é漢🙂\x01\x7f"
    words = tuple("".join(draw.choices(alphabet, k=draw.randrange(12))) for _ in range(400))
    assert run_job(job_of(words, tmp_path, python())) == list(words)


def test_the_default_is_this_python(tmp_path: Path):
    job = job_of(("-c", "import sys, json; print(json.dumps([sys.executable]))"), tmp_path)
    assert run_job(job) == [sys.executable]


def test_a_prefix_is_bash(tmp_path: Path):
    """The launch command of the seed: activate an environment, then start by its path."""
    (tmp_path / "activate").write_text("export GREETING=hello\n")
    code = 'import json, os, sys; print(json.dumps([os.environ["GREETING"], *sys.argv[1:]]))'
    environment = f"source {tmp_path}/activate ENV ; {sys.executable} -c '{code}' "
    assert run_job(job_of(("--x", "a b"), tmp_path, environment)) == ["hello", "--x", "a b"]


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", "1"), ("0,1", "2"), ("3,5,7", "3"), ("GPU-1a,GPU-2b", "2"), ("", "1"), ("-1", "1"), ("0, 1", "2")],
)
def test_ngpus_counts_the_visible_devices_of_the_node(tmp_path: Path, visible: str, count: str):
    job = job_of(("NGPUS",), tmp_path, python() + "--nproc-per-node NGPUS ")
    assert run_job(job, CUDA_VISIBLE_DEVICES=visible) == ["--nproc-per-node", count, "NGPUS"]


def fake_smi(folder: Path, text: str, code: int = 0) -> str:
    folder.mkdir()
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat << 'END'\n{text}\nEND\nexit {code}\n")
    smi.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("listing", "code", "count"),
    [
        ("GPU 0: NVIDIA H100 (UUID: GPU-a)\nGPU 1: NVIDIA H100 (UUID: GPU-b)", 0, "2"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-a)\n  MIG 1g.10gb Device 0: (UUID: MIG-a)", 0, "1"),
        ("No devices were found", 6, "1"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "1"),
    ],
)
def test_ngpus_uses_nvidia_smi_by_default(tmp_path: Path, monkeypatch, listing: str, code: int, count: str):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = fake_smi(tmp_path / "bin", listing, code)
    assert run_job(job_of((), tmp_path, python() + "NGPUS "), PATH=path) == [count]


def test_ngpus_is_a_separate_word_and_can_be_quoted(tmp_path: Path):
    """A variable of the user's own keeps its value; a nested bash sees the count too."""
    line = (
        f"""MY_NGPUS=9 bash -c '{sys.executable} -c "{ECHO}" NGPUS "$MY_NGPUS" "$@"' _ "$NGPUS" "${{NGPUS}}" "NGPUS" """
    )
    assert run_job(job_of(("x",), tmp_path, line), CUDA_VISIBLE_DEVICES="4,5,6", NGPUS="7") == [
        "3",
        "9",
        "7",
        "7",
        "3",
        "x",
    ]


def test_the_exit_code_is_that_of_the_command(tmp_path: Path):
    job = job_of(("-c", "raise SystemExit(7)"), tmp_path)
    assert subprocess.run(argv(job), check=False).returncode == 7


PRINT = """
import json, os, sys
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NAMED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED",
         "ACCELERATE_MIXED_PRECISION")
facts = {name: os.environ.get(name) for name in names}
Path(f"got.{facts['RANK'] or 0}").write_text(json.dumps([facts, sys.argv[1:]]))
"""


def run(
    job: Job, processes: Processes, environment: dict[str, str] | None = None, **env: str
) -> list[tuple[dict[str, str], list[str]]]:
    """What each process of a job got, by rank."""
    (job.cwd / "print it.py").write_text(PRINT)
    command = argv(job, processes, environment)
    done = subprocess.run(
        command, cwd=job.cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(path.read_text())) for path in sorted(job.cwd.glob("got.*"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starter", "per_node", "world"),
    [
        ("python", 1, None),
        ("torchrun", "gpus", "3"),
        ("accelerate", 2, "2"),
        pytest.param("deepspeed", 2, "2", marks=pytest.mark.slow),
    ],
)
def test_each_starter_starts_its_processes(tmp_path: Path, starter, per_node, world: str | None):
    """For real; what else may be asked of them is read from their arguments below."""
    job = job_of(("print it.py", *NASTY), tmp_path)
    devices = "" if starter == "deepspeed" else "0,1,2"  # it looks whether they are there
    got = run(
        job, Processes(starter=starter, per_node=per_node), {"NAMED": "it's $HOME\n漢"}, CUDA_VISIBLE_DEVICES=devices
    )
    assert [words for _, words in got] == [NASTY] * int(world or 1)
    assert [facts["RANK"] for facts, _ in got] == ([str(rank) for rank in range(int(world))] if world else [None])
    assert {facts["WORLD_SIZE"] for facts, _ in got} == {world}
    assert {facts["NAMED"] for facts, _ in got} == {"it's $HOME\n漢"}


@pytest.mark.parametrize(
    ("arguments", "expected_words"),
    [
        (["--use_fsdp", "--fsdp_version=2"], ("true", None, "no")),
        (["--use_deepspeed", "--zero_stage", "1"], (None, "true", "no")),
        (["--config_file", "fsdp.yaml"], ("true", None, "bf16")),
    ],
)
def test_accelerate_accepts_sharding_options(tmp_path: Path, arguments: list[str], expected_words: tuple):
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    (tmp_path / "fsdp.yaml").write_text(
        json.dumps({**settings, "mixed_precision": "bf16", "num_machines": 1, "num_processes": 4})
    )
    (tmp_path / "print it.py").write_text(PRINT)
    processes = Processes(
        starter="accelerate", per_node=2, arguments=arguments, env_path=str(programs(tmp_path / "env", "accelerate"))
    )
    line = argv(job_of(("print it.py", "a b"), tmp_path), processes)
    name, _, launch, *words = json.loads(
        subprocess.run(line, capture_output=True, text=True, timeout=LONGEST, check=True).stdout
    )
    assert (name, launch) == ("accelerate", "launch")
    done = toy.finished([sys.executable, "-m", "accelerate.commands.launch", *words], toy.environment(), tmp_path)
    assert done.returncode == 0, done.stderr
    got = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("got.*"))]
    assert [(facts["RANK"], facts["WORLD_SIZE"], words) for facts, words in got] == [
        ("0", "2", ["a b"]),
        ("1", "2", ["a b"]),
    ]
    assert {
        (f["ACCELERATE_USE_FSDP"], f["ACCELERATE_USE_DEEPSPEED"], f["ACCELERATE_MIXED_PRECISION"]) for f, _ in got
    } == {expected_words}


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["torchrun", "deepspeed"])
def test_two_nodes_meet(tmp_path: Path, starter):
    """Each node runs the same line, with what the launcher exports there; both at once, as each waits for the other."""
    (tmp_path / "print it.py").write_text(PRINT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    line = argv(job_of(("print it.py", "a b"), tmp_path), Processes(starter=starter, per_node=2, nodes=2))
    common = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "NNODES": "2",
    }
    nodes = [
        subprocess.Popen(
            line,
            cwd=tmp_path,
            env={**common, "NODE_RANK": str(n)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for n in range(2)
    ]
    try:
        assert [node.wait(timeout=LONGEST) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    got = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("got.*"))]
    assert [(facts["RANK"], facts["LOCAL_RANK"], facts["WORLD_SIZE"], words) for facts, words in got] == [
        ("0", "0", "4", ["a b"]),
        ("1", "1", "4", ["a b"]),
        ("2", "0", "4", ["a b"]),
        ("3", "1", "4", ["a b"]),
    ]


def told_nothing(**more: str) -> dict[str, str]:
    """The environment without a choice of DeepSpeed's device, which whoever runs the tests may have made."""
    return {name: value for name, value in {**os.environ, **more}.items() if name != "DS_ACCELERATOR"}


def programs(folder: Path, *names: str) -> Path:
    """An environment whose programs print their names and arguments as JSON."""
    (folder / "bin").mkdir(parents=True)
    for name in names:
        program = folder / "bin" / name
        code = f"import json, os, sys; print(json.dumps([{name!r}, os.environ.get('DS_ACCELERATOR'), *sys.argv[1:]]))"
        program.write_text(f"#!{sys.executable}\n{code}\n")
        program.chmod(0o755)
    return folder


MANY = {"MASTER_ADDR": "n 1", "MASTER_PORT": "7", "NODE_RANK": "1", "NNODES": "2"}


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ({"starter": "python", "arguments": ["-X", "$1 2"]}, ["python", None, "-X", "$1 2"]),
        ({"starter": "torchrun"}, ["torchrun", None, "--standalone", "--nproc-per-node", "1"]),
        ({"starter": "torchrun", "per_node": 3}, ["torchrun", None, "--standalone", "--nproc-per-node", "3"]),
        (
            {"starter": "accelerate"},  # which then starts plain python
            [
                *(
                    "accelerate",
                    None,
                    "launch",
                    "--num_processes",
                    "1",
                    "--num_machines",
                    "1",
                    "--main_process_port",
                    "0",
                ),
                *("--mixed_precision", "no", "--dynamo_backend", "no"),
            ],
        ),
        (
            {"starter": "torchrun", "per_node": "gpus", "nodes": 2},
            [
                "torchrun",
                None,
                "--nnodes",
                "2",
                "--node-rank",
                "1",
                "--master-addr",
                "n 1",
                "--master-port",
                "7",
                "--nproc-per-node",
                "2",
            ],
        ),
        (
            {"starter": "accelerate", "per_node": "gpus", "nodes": 2},
            [
                *(
                    "accelerate",
                    None,
                    "launch",
                    "--multi_gpu",
                    "--num_processes",
                    "4",
                    "--num_machines",
                    "2",
                    "--machine_rank",
                    "1",
                ),
                *(
                    "--main_process_ip",
                    "n 1",
                    "--main_process_port",
                    "7",
                    "--mixed_precision",
                    "no",
                    "--dynamo_backend",
                    "no",
                ),
            ],
        ),
    ],
)
def test_the_starter_comes_from_the_environment_of_the_job(tmp_path: Path, processes: dict, words: list):
    environment = programs(tmp_path / "my env", "python", "torchrun", "accelerate")
    job = job_of(("trainval.py", "a b"), tmp_path)
    line = argv(job, Processes(env_path=f"{environment}/", **processes))
    env = told_nothing(**MANY, CUDA_VISIBLE_DEVICES="0,1")
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert json.loads(done.stdout) == [*words, "trainval.py", "a b"], done.stderr


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize(("devices", "accelerator"), [("", "cpu"), ("0,1", None)])
def test_deepspeed_starts_without_a_gpu_and_gives_no_local_rank_to_the_script(
    tmp_path: Path, devices: str, accelerator: str | None, per_node: int
):
    environment = programs(tmp_path / "env", "deepspeed", "nvidia-smi")
    (environment / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (environment / "bin" / "python").symlink_to(sys.executable)
    line = argv(
        job_of(("trainval.py",), tmp_path), Processes(starter="deepspeed", per_node=per_node, env_path=str(environment))
    )
    env = told_nothing(CUDA_VISIBLE_DEVICES=devices)
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONGEST, check=False)
    name, local_rank, *words = json.loads(done.stdout)
    assert (name, local_rank, words[:3], words[4:]) == (
        "deepspeed",
        accelerator,
        ["--num_gpus", str(per_node), "--master_port"],
        ["--no_local_rank", "trainval.py"],
    )


def test_deepspeed_on_several_nodes_needs_no_ssh(tmp_path: Path):
    """By a stand-in for Python itself, so that no installed DeepSpeed answers."""
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text(f"""#!/bin/sh
[ "$1" = -c ] && exec {sys.executable} "$@"
exec {sys.executable} -c '{ECHO}' "$@"
""")
    (environment / "bin" / "python").chmod(0o755)
    line = argv(
        job_of(("trainval.py",), tmp_path),
        Processes(starter="deepspeed", per_node=2, nodes=2, env_path=str(environment)),
    )
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, **MANY}, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    start, module, world, *words = json.loads(done.stdout)
    assert (start, module) == ("-m", "deepspeed.launcher.launch")
    assert json.loads(base64.urlsafe_b64decode(world.removeprefix("--world_info="))) == {
        "node0": [0, 1],
        "node1": [0, 1],
    }
    assert words == ["--node_rank=1", "--master_addr=n 1", "--master_port=7", "--no_local_rank", "trainval.py"]


class Fields(Config):
    processes: Processes = Processes()
    environment: Environment = {}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"processes": {"starter": "torchrn"}},
            r"x\.processes\.starter: unknown value 'torchrn'\. Did you mean 'torchrun'\?",
        ),
        ({"processes": {"per_node": 2}}, r"x\.processes: the starter python starts one process\. Choose torchrun"),
        (
            {"processes": {"starter": "torchrun", "per_node": 0}},
            r"x\.processes\.per_node.*: expected a number >= 1, got 0",
        ),
        ({"processes": {"pernode": 2}}, r"x\.processes: unknown key 'pernode'\. Did you mean 'per_node'\?"),
        ({"environment": {"A B": "c"}}, r"x\.environment: expected the name of an environment variable, got 'A B'"),
        ({"environment": {"A": 1}}, r"x\.environment\.A: expected str, got 1"),
        ({"environment": {"A": "\0"}}, r"x\.environment: the value of A contains a zero byte"),
    ],
)
def test_mistakes_in_a_job_config_are_named(raw: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        load(Fields, raw, "x")


@pytest.mark.parametrize(
    "text",
    [
        "export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "MYSQL_PWD='hush hush' python",
        "curl -u me:hush https://host",
        "export URL=https://host/x?sig=hush",
        "export STORE='AccountName=a;AccountKey=hush'",
        "git clone https://longtoken@host/x",
    ],
)
def test_keys_in_lines_of_a_job_are_refused(text: str):
    with pytest.raises(ValueError, match="what looks like a key") as error:
        check_no_key(text)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "export WANDB_API_KEY=$(cat ~/.key)",
        'export HF_TOKEN="$MINE"',
        "docker run -u 1000:1000 image",
        "export KEY_CACHE=1 TOKENIZERS_PARALLELISM=false PWD=/data/x",
        "ssh user@host",
        'curl -u "me:$PASSWORD" https://host',
    ],
)
def test_lines_without_keys_are_accepted(text: str):
    assert check_no_key(text) == text


STATUS = """
import json, sys, time
from pathlib import Path
Path("run").mkdir(exist_ok=True)
if sys.argv[1]:
    state, _, by = sys.argv[1].partition(" by ")
    status = {"state": state, "stopped_by": by, "at": time.time()}
    Path("run/status.json").write_text(json.dumps(status, indent=4, sort_keys=True))
raise SystemExit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("before", "state", "code", "exit_code"),
    [
        ("", "stopped", 1, STOPPED_EXIT),  # torchrun makes 1 of 75
        ("", "stopped", STOPPED_EXIT, STOPPED_EXIT),
        ("", "stopped by signal", 1, STOPPED_EXIT),
        ("", "stopped by person", 1, INTERRUPTED_EXIT),
        ("", "stopped by person", INTERRUPTED_EXIT, INTERRUPTED_EXIT),
        ("stopped by person", "running", 137, 137),
        ("", "failed", 1, 1),
        ("", "running", 137, 137),
        ("stopped", "", 1, 1),  # stopped the time before; now it did not even begin
        ("stopped", "stopped", 1, STOPPED_EXIT),
        ("stopped", "done", 0, 0),
        ("running", "done", 143, 0),  # told to stop while it was ending, or a crash after the end
        ("done", "", 1, 1),  # done the time before; now it did not even begin
    ],
)
def test_a_job_that_was_stopped_in_order_ends_with_75(
    tmp_path: Path, before: str, state: str, code: int, exit_code: int
):
    (tmp_path / "status.py").write_text(STATUS)
    for what, number in ((before, 0), (state, code)):
        done = subprocess.run(
            argv(job_of(("status.py", what, str(number)), tmp_path)), cwd=tmp_path, timeout=LONGEST, check=False
        )
    assert done.returncode == exit_code


@pytest.mark.parametrize(
    ("state", "code", "reason"),
    [
        ("", 1, "failed"),
        ("", STOPPED_EXIT, None),
        ("", INTERRUPTED_EXIT, None),
        ("", 0, None),
        ("running", 1, "running"),
        ("done", 1, "done"),
    ],
)
def test_a_job_that_failed_before_there_was_a_status_says_so(tmp_path: Path, state: str, code: int, reason: str | None):
    """A status of the run itself stays as it is, though another process, which holds the run, may have written it."""
    (tmp_path / "status.py").write_text(STATUS)
    if state:
        subprocess.run([sys.executable, "status.py", state, "0"], cwd=tmp_path, check=True)
    job = job_of(("status.py", "", str(code)), tmp_path)
    assert subprocess.run(argv(job), cwd=tmp_path, timeout=LONGEST, check=False).returncode == code
    assert (
        SavedRun(tmp_path / "run").status["state"] if (tmp_path / "run" / "status.json").exists() else None
    ) == reason
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"status.json"}


def test_a_later_start_that_fails_before_its_training_says_its_own_exit_code(tmp_path: Path):
    (tmp_path / "run").mkdir()
    for code in (3, 4):
        job = job_of(("-c", f"raise SystemExit({code})"), tmp_path)
        assert subprocess.run(argv(job), cwd=tmp_path, timeout=LONGEST, check=False).returncode == code
        assert SavedRun(tmp_path / "run").status["reason"].startswith(f"exit code {code} before its training began")


@pytest.mark.parametrize(
    ("number", "state", "exit_code"),
    [("TERM", "", STOPPED_EXIT), ("USR1", "", STOPPED_EXIT), ("TERM", "failed", 143), ("TERM", "done", 0)],
)
def test_a_signal_before_the_program_can_hear_it_is_a_stop_too(tmp_path: Path, number: str, state: str, exit_code: int):
    """The signal goes to the group, as schedulers send it; bash survives it and tells what became of the program."""
    death = f"import os, signal; os.killpg(0, signal.SIG{number}); raise"
    (tmp_path / "status.py").write_text(STATUS.replace("raise", death))
    job = job_of(("status.py", state, "143"), tmp_path)
    done = subprocess.run(argv(job), cwd=tmp_path, timeout=LONGEST, check=False, start_new_session=True)
    assert done.returncode == exit_code


SAVE = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def save(number, _):
    time.sleep(2)
    Path(f"saved.{rank}").touch()
    sys.exit(75)
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), save)
Path(f"ready.{rank}").touch()
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["torchrun", "deepspeed", "accelerate"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_job_ends_after_its_processes_have_saved(tmp_path: Path, starter, number: signal.Signals):
    (tmp_path / "save.py").write_text(SAVE)
    line = argv(job_of(("save.py",), tmp_path), Processes(starter=starter, per_node=2))
    with open(tmp_path / "out", "w") as out:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        job = subprocess.Popen(line, cwd=tmp_path, env=env, stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + LONGEST
    while len(list(tmp_path.glob("ready.*"))) < 2:
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.05)
    os.killpg(job.pid, number)
    assert job.wait(LONGEST) == STOPPED_EXIT
    assert sorted(path.name for path in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]


@pytest.mark.parametrize(
    ("code", "seconds", "expected_failures"), [(1, 59, 3), (1, 60, 0), (0, 1, 0), (75, 1, 2), (130, 1, 2)]
)
def test_which_ends_count_as_quick_failures(tmp_path: Path, code: int, seconds: int, expected_failures: int):
    (tmp_path / "failures").write_text("1\n1\n")
    script = (
        f"MOST=3; FAILURES={tmp_path / 'failures'}\n{STOP_AFTER_FAILURES}count_failure {code} {seconds}; "
        f"queue_is_stopped && echo $STOP_REASON"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert ("3 in a row" in done.stdout, done.stderr) == (expected_failures == 3, "")
    assert (tmp_path / "failures").exists() == (expected_failures > 0)
    assert not expected_failures or len((tmp_path / "failures").read_text().splitlines()) == expected_failures
