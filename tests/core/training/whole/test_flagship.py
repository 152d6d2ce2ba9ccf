"""The commands of docs/crossattn.md for the published size, on a random StarCoder of its depth: prepare, encode, train
in both ways."""

import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests import toy
from tests.core.models.conftest import make_base
from tests.core.project.test_readme import commands

ON_A_PROCESSOR = [  # which has less time
    *(
        "--set",
        "loop.sequences_per_step=4",
        "loop.micro_batch=1",
        "loop.eval_every=2",
    ),
    *("data.sequence_tokens=32", "--statistics_every", "0"),
]

PROGRAMS = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "deepspeed": ["-m", "deepspeed.launcher.runner"]}


def question(i: int) -> dict:
    """A row of Natural Questions, simplified: the answer is one word of the long answer."""
    thing, colour = toy.THINGS[i % len(toy.THINGS)], toy.COLOURS[i % 7]
    words = f"<P> the {thing} is {colour} . </P> what is it ?".split()
    return {
        "example_id": i,
        "question_text": f"what is the {thing} ?",
        "document_title": f"page {i}",
        "document_url": "none",
        "document_text": " ".join(words),
        "long_answer_candidates": [{"start_token": 0, "end_token": 7, "top_level": True}],
        "annotations": [
            {
                "annotation_id": i,
                "long_answer": {"start_token": 0, "end_token": 7, "candidate_index": 0},
                "short_answers": [{"start_token": 4, "end_token": 5}],
                "yes_no_answer": "NONE",
            }
        ],
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A hub's cache with a StarCoder of 36 layers, and a release of Natural Questions; returns the variables that lead
    to it."""
    root = tmp_path_factory.mktemp("flagship")
    toy.write_data(root / "toy")
    tokenizer = AutoTokenizer.from_pretrained(root / "toy" / "toy_tokenizer")
    repository = root / "hub" / "models--bigcode--starcoderbase-3b"
    folder = repository / "snapshots" / "0123abc"
    make_base(
        "gpt_bigcode", vocab_size=len(tokenizer), num_hidden_layers=36, max_position_embeddings=8192
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    for name, count in (("train", 24), ("dev", 6)):
        with gzip.open(root / f"nq-{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(question(i + 1000 * (name == "dev"))) + "\n" for i in range(count))
    return {
        **os.environ,
        "HF_HUB_CACHE": str(root / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ROOT": str(root),
    }


def carry_out(line: str, environment: dict[str, str], more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A command of the page with /data and /runs below the fixture's folder, from the root of the project."""
    root = environment["ROOT"]
    words = [word.replace("/data", f"{root}/data").replace("/runs", f"{root}/runs") for word in shlex.split(line)]
    words = [f"{root}/{word}" if word.endswith(".jsonl.gz") else "2" if word == "25_000" else word for word in words]
    command = [sys.executable, *PROGRAMS[words[0]], *words[1:], *more]
    return subprocess.run(
        command, cwd=toy.ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_the_commands_of_the_page(environment: dict[str, str]):
    lines = commands("docs/crossattn.md")
    (prepare,) = [line for line in lines if "data_prep.crossattn.prepare_qa" in line]
    (encode,) = [line for line in lines if "data_prep.crossattn.preproc_nq" in line]
    ways = [
        line for line in lines if line.startswith(("torchrun", "deepspeed")) and "crossattn_starcoderbase-3b" in line
    ]
    assert len(ways) == 2

    done = carry_out(prepare, environment)
    assert done.returncode == 0, done.stderr
    done = carry_out(encode, environment)
    assert done.returncode == 0, done.stderr
    losses = []
    for line in ways:
        done = carry_out(line, environment, tuple(ON_A_PROCESSOR))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        runs = (Path(environment["ROOT"]) / "runs" / "crossattn_starcoder_nq").glob("*/scores.jsonl")
        run = max(runs, key=lambda path: path.stat().st_mtime)
        config = json.loads((run.parent / "config.json").read_text())
        assert config["loop"]["precision"] == config["model"]["base"]["dtype"] == "bfloat16"
        rows = [json.loads(row) for row in run.read_text().splitlines()]
        assert rows[-1]["step"] == 2
        assert rows[-1]["cache_bytes_per_context_token"] == 16 * 2, "what is on disk: 16 numbers in bfloat16"
        losses.append([row["train_loss"] for row in rows])
        assert config["data"]["encoded_contexts"] is True
    assert losses[0] == pytest.approx(losses[1], rel=1e-2), "ZeRO-2 trains as copies do, but for rounding"
