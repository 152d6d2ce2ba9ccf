"""A preparation of pages as an array of a real Slurm gives the bytes of one on this machine."""

from pathlib import Path

import pytest

from data_prep.metadata import prepare
from tests.data_prep.metadata.test_prepare import EXTRACT, page, write_json
from tests.slurm.real import Cluster, command, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_an_array_prepares_the_same_data_as_this_machine(cluster: Cluster, tmp_path: Path):
    partition = command("sinfo", "--noheader", "--format=%R").split()[0]
    for number in range(5):
        write_json(tmp_path / f"{number}.jsonl.gz", [page(f"p{number}x{i}") for i in range(30)])
    words = ["--name", "made", "--train", str(tmp_path), "--val", str(tmp_path / "3.jsonl.gz"), *EXTRACT]
    assert prepare.main([*words, "--workers", "1", "--data_path", str(tmp_path / "here")]) == 0
    array = ["--workers", "2", "--slurm", f"partition={partition}", "time=00:10:00", "mem_per_cpu_gb=1"]
    assert prepare.main([*words, *array, "--data_path", str(tmp_path / "array")]) == 0
    assert not cluster.alive(), "the command waits for its jobs"
    for name in ("train.jsonl", "val.jsonl", "manifest.json"):
        assert (tmp_path / "array" / "made" / name).read_bytes() == (tmp_path / "here" / "made" / name).read_bytes()
    sacct = ["sacct", "--noheader", "--allocations", "--name=metadata", "--format=state"]
    wait_until(lambda: command(*sacct).split() == ["COMPLETED"] * 5, "the accounting of five tasks")
