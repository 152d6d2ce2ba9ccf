"""Tags and notes: beside a run, not in its id, shown and filtered by."""

import json
from pathlib import Path

import pytest

from results import note, report, table
from results.dashboard import Dashboard
from results.pages import overview, run_page
from src.runs.run_dir import RunDir
from src.runs.store import REMARKS, SavedRun
from src.tables import results

# panel 1.9.4 calls pandas in a way that pandas 3.1 announces the end of
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:pandas.errors.Pandas4Warning")


def ids(runs: Path) -> list[str]:
    return sorted(row["exp_id"] for row in results.load_rows(runs)[0])


def test_tags_and_notes_are_set_from_the_command_line(runs: Path, capsys: pytest.CaptureFixture[str]):
    one, other, *_ = ids(runs)
    before = SavedRun(runs / one).exp
    assert (
        note.main([one[:9], other, "--runs", str(runs), "--tag", "good", "to keep", "--note", "best of the first week"])
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        f"{name[:8]}  #good #to keep  best of the first week" for name in (one, other)
    ]
    assert note.main([other, "--runs", str(runs), "--untag", "good", "--tag", "odd", "--note", ""]) == 0
    assert note.main([other, "--runs", str(runs)]) == 0
    assert capsys.readouterr().out == f"{other[:8]}  #to keep #odd\n" * 2
    assert SavedRun(runs / one).exp == before
    assert ids(runs)[0] == one


def test_they_are_shown_and_filtered_by(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other, *_ = ids(runs)
    results.load_rows(runs)  # what is remembered of a run must not hide a later remark
    SavedRun(runs / one).write_remarks(["good"], note="looks <fine>")
    SavedRun(runs / other).write_remarks(["goodish"])
    assert [row["exp_id"] for row in results.filter_rows(results.load_rows(runs)[0], "'good' in tags")] == [one]
    assert table.main([str(runs), "--where", "'good' in tags"]) == 0
    assert "tags good, note looks <fine>." in " ".join(capsys.readouterr().out.split())
    page = Dashboard(runs, "tiny")
    assert sorted(page.jobs.value["notes"])[-2:] == ["#good looks <fine>", "#goodish"]
    page.text.value = "LOOKS"
    assert page.jobs.value["experiment"].tolist() == [one[:8]]
    assert report.main([str(runs), "-o", str(tmp_path / "report.html")]) == 0
    assert run_page.main([str(runs / one), "-o", str(tmp_path / "run.html")]) == 0
    for name in ("report", "run"):
        assert "#good looks &lt;fine&gt;" in (tmp_path / f"{name}.html").read_text()


def test_a_run_that_has_only_a_dict_can_be_tagged_and_started(tmp_path: Path):
    from src.runs.store import SavedRun

    exp = {"recipe": "toy", "seed": 0, "tags": "its own"}
    with RunDir.open(tmp_path / "elsewhere", exp, exp) as run_dir:
        name = run_dir.exp_id
    SavedRun(tmp_path / "runs" / name).write_exp(exp, ["later"])
    SavedRun(tmp_path / "runs" / name).write_remarks(["queued"])
    with RunDir.open(tmp_path / "runs", exp, exp) as run:
        assert run.attempt == 1
    (row,) = results.load_rows(tmp_path / "runs")[0]
    assert (row["tags"], row["config.tags"]) == (["queued"], "its own")
    assert overview.remarks(overview.load(tmp_path / "runs")) == {name: "#queued"}


@pytest.mark.parametrize("content", ["[1", '["good"]', '{"tags": "good", "note": ""}', '{"tags": []}'])
def test_damaged_file_is_reported(runs: Path, content: str, capsys: pytest.CaptureFixture[str]):
    one = ids(runs)[0]
    (runs / one / REMARKS).write_text(content)
    rows, warnings = results.load_rows(runs)
    assert len(rows) == 5
    assert REMARKS in warnings[0]
    assert note.main([one, "--runs", str(runs), "--tag", "good"]) == 1
    assert "Repair it or delete it" in capsys.readouterr().err
    assert (runs / one / REMARKS).read_text() == content, "a file that a person may repair"


def test_a_tag_is_a_word(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert note.main([ids(runs)[0], "--runs", str(runs), "--tag", "a,b"]) == 1
    assert "--tag: expected one or a few words without a comma, got 'a,b'." in capsys.readouterr().err
    assert json.dumps([]) == json.dumps(results.load_rows(runs)[0][0]["tags"])
