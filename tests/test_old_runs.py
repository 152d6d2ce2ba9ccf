"""Save directories that an earlier version of the code has written go on, and end with the bits that it would have
reached.

tests/golden/runs_of_73ce31a.tar.gz holds toy experiments: a finished parent, and two trainings that were stopped on the
way. Its expected.json says how uninterrupted trainings by that version ended. outputs_of_73ce31a.tar.gz adds two
finished runs with generated outputs; its outputs.json holds the part files that their interruption leaves.
"""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.tables import rows
from tests import toy

ARCHIVES = [Path(__file__).parent / "golden" / f"{name}_of_73ce31a.tar.gz" for name in ("runs", "outputs")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`data` and `runs` of the earlier version."""
    for path in ARCHIVES:
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def outputs(folder: Path) -> dict[str, Any]:
    """The two runs with outputs, by name, unfinished: a start goes on from their last checkpoint."""
    output_by_name = json.loads((folder / "outputs.json").read_text())
    for output in output_by_name.values():
        (folder / "runs" / output["exp_id"] / "status.json").unlink()
    return output_by_name


@pytest.fixture
def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


def end(folder: Path, name: str, expected: dict[str, Any]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Hashes of the last checkpoint of an experiment, and its score rows."""
    last = folder / "runs" / expected[name]["exp_id"] / "checkpoints" / expected[name]["last"]
    return {
        file: hashlib.sha256((last / file).read_bytes()).hexdigest() for file in expected[name]["sha256"]
    }, toy.evaluations(folder, expected[name]["exp_id"])


def test_ids_are_where_they_were(expected: dict[str, Any]):
    assert {name: exp_id(output_by_name["experiment"]) for name, output_by_name in expected.items()} == {
        n: f["exp_id"] for n, f in expected.items()
    }


def test_the_table_lists_them(folder: Path, expected: dict[str, Any]):
    output_by_name, warnings = rows.load_rows(folder / "runs")[:2]
    output_by_name = [row for row in output_by_name if row["exp_id"] in {f["exp_id"] for f in expected.values()}]
    assert {row["exp_id"]: row["state"] for row in output_by_name} == {
        f["exp_id"]: "done" if f["stopped_at"] is None else "stopped" for f in expected.values()
    }
    assert not warnings


def test_a_stopped_run_resumes_with_the_same_bits(
    folder: Path, expected: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
):
    groups = {name: [output_by_name["experiment"]] for name, output_by_name in expected.items()}
    assert toy.main(["-e", "crossattn", "seed"], groups, folder) == 0
    anew = tmp_path_factory.mktemp("anew")
    toy.write_data(anew / "data")
    assert toy.main(["-e", "base"], groups, anew) == 0
    same_machine = (
        end(anew, "base", expected)[0] == expected["base"]["sha256"]
    )  # the last bits depend on the processor and its libraries
    for name in ("crossattn", "seed"):
        hashes, scores = end(folder, name, expected)
        expected_rows = [json.loads(line) for line in expected[name]["scores.jsonl"].splitlines()]
        assert [row["step"] for row in scores] == [row["step"] for row in expected_rows]
        for row, other in zip(scores, expected_rows, strict=True):
            assert row == (other if same_machine else pytest.approx(other, rel=1e-3, abs=1e-6))
        assert hashes == expected[name]["sha256"] or not same_machine


def test_a_finished_parent_without_the_settings_that_were_added_since_is_still_one(
    folder: Path, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    run = folder / "runs" / expected["base"]["exp_id"]
    before = (run / "config.json").read_bytes()
    assert "jump_deviations" not in json.loads(before)["loop"]["divergence"]
    assert toy.main(["-e", "base"], {"base": [expected["base"]["experiment"]]}, folder) == 0
    assert "done already" in caplog.text
    assert (run / "config.json").read_bytes() == before


@pytest.mark.parametrize("name", ["answers", "predictions"])
def test_finished_outputs_are_not_generated_again(folder: Path, outputs: dict[str, Any], name: str):
    output = folder / "runs" / outputs[name]["exp_id"] / outputs[name]["folder"]
    before = output.stat().st_ino
    assert toy.main(["-e", name], {name: [outputs[name]["experiment"]]}, folder) == 0
    assert output.stat().st_ino == before


@pytest.mark.parametrize("name", ["answers", "predictions"])
def test_interrupted_outputs_are_continued(
    folder: Path, outputs: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
):
    run = folder / "runs" / outputs[name]["exp_id"]
    output = run / outputs[name]["folder"]
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    shutil.rmtree(output)
    header, *texts = outputs[name]["part"].splitlines(keepends=True)
    rows_saved = 8  # whole batches
    (run / f"{output.name}.part.jsonl").write_text("".join([header, *texts[:rows_saved]]))
    assert toy.main(["-e", name], {name: [outputs[name]["experiment"]]}, folder) == 0
    assert f"resumes after {rows_saved} of {len(texts)} inputs" in caplog.text
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
