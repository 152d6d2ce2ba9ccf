"""The two launch scripts of docs/crossattn.md, carried out whole and as they stand there: on this machine, and as jobs
of the toolkit.

Other than there: the folders lie below a temporary one; the base is a random StarCoder of the same depth; a training
has 2 steps; and two services are stand-ins: the toolkit's closed client (its jobs are processes of this machine), and
the server of Weights & Biases.
"""

import base64
import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from data_prep.crossattn import prepare_qa
from results import table
from tests import toy
from tests.core.launch.fakes.fake_wandb.server import Server
from tests.core.models.conftest import make_base
from tests.core.training.whole.test_flagship import question

FAKES = toy.ROOT / "tests" / "core" / "launch" / "fakes"
BASE, GROUP = "bigcode/starcoderbase-3b", "crossattn_starcoderbase-3b"
ON_A_PROCESSOR = "loop.sequences_per_step=4 loop.micro_batch=2 loop.eval_every=1"
VALUES = {"EXP_GROUP": f'"{GROUP} --set {ON_A_PROCESSOR} data.sequence_tokens=32"', "NSTEPS": "2", "LOG_NSTEPS": "1"}
STARTERS = {"python": "", "torchrun": "-m torch.distributed.run", "deepspeed": "-m deepspeed.launcher.runner"}
KEY = hashlib.sha1(b"looks like a key").hexdigest()
END_STATES = ("SUCCEEDED", "FAILED", "CANCELLED", "INTERRUPTED")


def below(root: Path, text: str) -> str:
    """`text` with the page's folders below `root`."""
    return re.sub(r"(?<![\w.])/(home/project|data|runs)(?!\w)", lambda match: f"{root}{match[0]}", text)


def script(root: Path, line: str) -> str:
    """The page's bash block that has `line`: other folders, and other values of three of its variables."""
    blocks = re.findall(r"```bash\n(.*?)```", (toy.ROOT / "docs" / "crossattn.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if f"EXP_GROUP={json.dumps(GROUP)}" in block and line in block]
    for name, value in VALUES.items():
        text, num_replaced = re.subn(rf'\b{name}=("[^"]*"|\S+)', lambda _, new=f"{name}={value}": new, text)
        assert num_replaced == 1, f"{name} is not set once"
    return below(root, text)


@pytest.fixture(scope="module")
def weights_and_biases() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, weights_and_biases: Server) -> Iterator[Path]:
    """A home with an environment, a key and the base in its hub cache; encoded data; and a copy of the project."""
    root = tmp_path_factory.mktemp("scripts")
    home = root / "home" / "project"
    programs = home / "envs" / "train" / "bin"
    programs.mkdir(parents=True)
    for name, words in STARTERS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "activate").write_text('export CONDA_PREFIX=$1 PATH="$1/bin:$PATH"\n')  # as conda's does
    (home / ".netrc").write_text(
        f"machine 127.0.0.1:{weights_and_biases.server_port}\n  login user\n  password {KEY}\n"
    )
    (home / ".netrc").chmod(0o600)
    write_base(root, home / ".cache" / "huggingface" / "hub" / f"models--{BASE.replace('/', '--')}")
    write_data(root)
    project = toy.project(root, (toy.ROOT / "exp_configs.py").read_text())
    shutil.copytree(toy.ROOT / "resources", project / "resources")
    yield root
    for job in jobs(root):
        if job["state"] not in END_STATES:
            with contextlib.suppress(KeyError, ProcessLookupError):
                os.kill(job["pid"], signal.SIGTERM)


def write_base(root: Path, repository: Path) -> None:
    toy.write_data(root / "toy")
    tokenizer = AutoTokenizer.from_pretrained(root / "toy" / "toy_tokenizer")
    folder = repository / "snapshots" / "0123abc"
    make_base(
        "gpt_bigcode", vocab_size=len(tokenizer), num_hidden_layers=36, max_position_embeddings=8192
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")


def write_data(root: Path) -> None:
    for name, first, count in (("train", 0, 24), ("dev", 1000, 6)):
        with gzip.open(root / f"nq-{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(question(first + i)) + "\n" for i in range(count))
    data = ["--data_path", str(root / "data"), "--name", "nq"]
    prepare_qa.main([*data, "--train", str(root / "nq-train.jsonl.gz"), "--val", str(root / "nq-dev.jsonl.gz")])
    encode = [
        "-m",
        "data_prep.crossattn.preproc_nq",
        "--embedding_model",
        BASE,
        "--maximum_input_length",
        "4096",
        "--model_dtype",
        "bfloat16",
    ]
    command = [sys.executable, *encode, "--data_cache_path", str(root / "data")]
    subprocess.run(command, cwd=toy.ROOT, env=environment(root), check=True, capture_output=True, timeout=300)


def environment(root: Path) -> dict[str, str]:
    """That of a person who is logged in on the toolkit; nothing of the one that runs the tests."""
    home = root / "home" / "project"
    path = f"{home / 'envs' / 'train' / 'bin'}:{os.environ['PATH']}"
    variables = {"HOME": str(home), "PATH": path, "EAI_ACCOUNT_ID": "account-1", "EAI_TOKEN": "token"}
    haven = {"PYTHONPATH": str(FAKES / "fake_client"), "FAKE_TOOLKIT": str(root / "toolkit")}
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ} | variables | haven | settings


def carry_out(root: Path, text: str) -> str:
    """What `text` prints, run by bash in the project; every line of it must succeed."""
    command = ["bash", "-e", "-c", text]
    done = subprocess.run(
        command, cwd=root / "project", env=environment(root), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def trained(runs: Path) -> dict[str, dict[str, Any]]:
    """The last row of each run below `runs`, as our table, haven and the run itself all tell it. Every run must be
    done."""
    runs_by_id = {path.parent.name: path.parent for path in runs.glob("*/exp_dict.json")}
    rows = {
        name: [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
        for name, run in runs_by_id.items()
    }
    assert {json.loads((run / "status.json").read_text())["state"] for run in runs_by_id.values()} == {"done"}
    assert {name: [row["step"] for row in run_rows] for name, run_rows in rows.items()} == {
        name: [1, 2] for name in runs_by_id
    }
    last = {name: run_rows[-1] for name, run_rows in rows.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # haven uses deprecated modules and calls
        from haven.haven_results import ResultManager

        manager = ResultManager(savedir_base=str(runs), exp_ids=list(runs_by_id), verbose=False)
        assert manager.get_score_lists(return_as_dict=True) == rows
    return last


def told_by_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    capsys.readouterr()
    assert table.main([str(runs), "--by", "exp_id", "--json"]) == 0
    return {row["exp_id"]: row["val_loss"] for row in json.loads(capsys.readouterr().out)["rows"]}


@pytest.mark.slow
def test_the_script_for_this_machine(root: Path, capsys: pytest.CaptureFixture[str]):
    """Both of its commands: torchrun with copies, then deepspeed with ZeRO-2, which starts the same experiment over."""
    both = script(root, "deepspeed --num_gpus $NGPUS")
    only_torchrun = both.partition("deepspeed --num_gpus")[0]
    runs, losses = root / "runs" / "crossattn_starcoder_nq", []
    for text, engine in ((only_torchrun, "replicated"), (both, "zero2")):
        carry_out(root, text)
        ((name, row),) = trained(runs).items()
        assert engine in (runs / name / "ledger.jsonl").read_text()
        assert told_by_table(runs, capsys) == {name: row["val_loss"]}
        losses.append(row["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2), "ZeRO-2 trains as copies do, but for the rounding"


def write_job_config(root: Path, server: Server, **values: Any) -> tuple[str, ...]:
    """The examples' entry `toolkit`, with its folders below `root`; returns the folders that its jobs see."""
    (text,) = re.findall(
        r"```python\n(.*?)```", (toy.ROOT / "resources" / "job_configs" / "toolkit.md").read_text(), re.DOTALL
    )
    config: dict[str, Any] = {}
    exec(below(root, text), config)
    entry = config["JOB_CONFIGS"]["toolkit"] | values
    entry["environment"] |= {"WANDB_BASE_URL": server.url, "OMP_NUM_THREADS": "1"}
    (root / "project" / "job_configs.py").write_text(f"JOB_CONFIGS = {{'toolkit': {entry!r}}}\n")
    return tuple(mount.split(":")[1] for mount in entry["data"])


def jobs(root: Path) -> list[dict[str, Any]]:
    """All that the emulated toolkit knows."""
    return [json.loads(path.read_text()) for path in (root / "toolkit").glob("*.json")]


def the_job(root: Path) -> dict[str, Any]:
    """The job that was queued last, once it has ended."""
    end = time.monotonic() + 600
    while True:
        job = max(jobs(root), key=lambda job: job["createdOn"])
        if job["state"] in END_STATES:
            return job
        assert time.monotonic() < end, f"the job is {job['state']} after ten minutes"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_script_for_the_toolkit(root: Path, weights_and_biases: Server, capsys: pytest.CaptureFixture[str]):
    """One job, which trains on as many processes as it has GPUs, sends its scores, and is done."""
    gpus = 2
    if 0 < torch.cuda.device_count() < gpus:
        pytest.skip(f"its {gpus} processes want a GPU each, or a machine without any")
    mounts = write_job_config(root, weights_and_biases, gpus=gpus)
    text = script(root, "-j toolkit")
    assert not [path for path in re.findall(rf"{root}[\w/.-]*", text) if not path.startswith(mounts)], (
        "a job would not see these"
    )
    carry_out(root, text)
    runs = root / "home" / "project" / "runs" / "crossattn_gptbigcode_nq"
    job = the_job(root)
    assert job["state"] == "SUCCEEDED", "".join(path.read_text()[-4000:] for path in (runs / "logs").glob("*.log"))
    ((name, row),) = trained(runs).items()
    assert told_by_table(runs, capsys) == {name: row["val_loss"]}
    start = json.loads((runs / name / "ledger.jsonl").read_text().partition("\n")[0])
    assert (start["world_size"], start["job"]) == (gpus, job["id"])
    setting = text.rpartition("python trainval.py")[0]
    output = carry_out(
        root, f"{setting}python trainval.py -e $EXP_GROUP --steps $NSTEPS -sb $EXP_SAVEDIR --job_option status"
    )
    assert re.search(rf"^{name} +{GROUP} +done +{job['id']} .* 2/2 ", output, re.MULTILINE), output
    identity = json.loads((runs / name / "wandb.json").read_text())["id"]
    logged_run = weights_and_biases.runs[identity]
    assert (logged_run["entity"], logged_run["project"], logged_run["displayName"]) == (
        "team",
        "natural_questions",
        GROUP,
    )
    assert [line["_step"] for line in weights_and_biases.rows[identity]] == [1, 2]
    assert weights_and_biases.rows[identity][-1]["train_loss"] == row["train_loss"]
    assert f"Basic {base64.b64encode(f'api:{KEY}'.encode()).decode()}" in weights_and_biases.keys
