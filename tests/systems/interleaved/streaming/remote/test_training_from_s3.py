"""interleaved_tiny from an S3 server with a cold cache of two shards, killed on its way: as from the disk, to the last
bit.

STEPS=800 in the environment trains to the end, four minutes; results: docs/dev/log/2026-11-streaming.md.
"""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from data_prep.interleaved import digit_pages, index
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.systems.interleaved.groups import INTERLEAVED_TINY
from src.systems.interleaved.streaming import manifest
from tests import toy
from tests.faults import harness
from tests.systems.interleaved.streaming.remote.s3_server import S3Server

STEPS = int(os.environ.get("STEPS", "40"))
EXP = override(INTERLEAVED_TINY, {"loop.steps": STEPS, "loop.eval_every": STEPS // 2, "answers.questions": STEPS // 4})
SHARDS = 8


def move_to_s3(server: S3Server, data: Path) -> None:
    """The tars of the training split, whose list then names them there."""
    folder = data / "digit_pages" / "train"
    dataset_manifest = manifest.load(folder)
    urls = [server.put(f"pages/{shard.url}", (folder / shard.url).read_bytes()) for shard in dataset_manifest.shards]
    shutil.rmtree(folder)
    tokenizer = str(data / "digit_pages" / "tokenizer")
    assert index.main([*urls, "--output", str(folder), "--source", "digits", "--tokenizer", tokenizer]) == 0


@pytest.mark.slow
def test_a_training_from_s3_ends_as_one_from_the_disk(
    s3_of_session: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in s3_of_session.environment.items():
        monkeypatch.setenv(name, value)
    digit_pages.prepare(
        tmp_path / "data", pages=5 * STEPS, val_pages=max(40, STEPS // 4), per_shard=5 * STEPS // SHARDS
    )
    sizes = [shard.bytes for shard in manifest.load(tmp_path / "data" / "digit_pages" / "train").shards]
    monkeypatch.setenv("SHARD_CACHE_GB", str(2 * max(sizes) / 1e9))
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'tiny': [{EXP!r}]}}\n")
    command = toy.command(root, ["-e", "tiny", "--log_every", "4"], tmp_path)
    environment = {**toy.environment(), **s3_of_session.environment, "SHARD_CACHE_GB": str(2 * max(sizes) / 1e9)}
    training = harness.Training(command, tmp_path / "runs" / exp_id(EXP), environment)
    log = tmp_path / "log"
    assert training.start(log).wait() == 0, log.read_text()[-3000:]
    expected = training.fingerprints()
    last = json.loads((training.run / "scores.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(training.run)
    move_to_s3(s3_of_session, tmp_path / "data")
    report = harness.Report(("SIGKILL",))
    while training.state() != "done":
        process = training.start(log)
        for _ in range(1 if len(report.faults) < 3 else 0):
            rows = training.rows() + STEPS // 20
            while process.poll() is None and training.rows() < rows:
                time.sleep(0.001)
            process.kill()
            report.faults.append(f"after {rows} rows")
        process.wait()
        assert training.state() != "failed", log.read_text()[-3000:]
    assert len(report.faults) == 3
    cached = list((tmp_path / "data" / "shard_cache").glob("*.tar"))
    assert 1 <= len(cached) <= 2
    rows = [json.loads(line) for line in (training.run / "scores.jsonl").read_text().splitlines()]
    assert any(0 < row["cache_hits"] < 1 for row in rows)
    fingerprints = training.fingerprints()
    weights = "model.safetensors"
    assert fingerprints[weights] == expected[weights]
    assert {name: rows[-1][name] for name in last} == last
    if STEPS >= 800:
        assert last["word_accuracy"] >= 0.8
        assert last["word_accuracy_shuffled_context"] <= 0.15, "chance is 0.1"
