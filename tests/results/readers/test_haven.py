"""haven opens our save directories and gives the numbers of our table."""

import json
import math
import tarfile
import warnings
from pathlib import Path

import pytest

from results import table
from src.runs.scores import Scores
from src.tables import results

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # haven imports deprecated modules
    from haven.haven_results import ResultManager


OLD_RUNS = Path(__file__).resolve().parents[2] / "golden" / "runs_of_73ce31a.tar.gz"


@pytest.fixture
def manager(runs: Path) -> ResultManager:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # haven uses deprecated calls of pandas
        return ResultManager(savedir_base=str(runs), verbose=False)


def test_haven_finds_every_run(manager: ResultManager, runs: Path):
    rows, _ = results.load_rows(runs)
    assert len(manager.exp_list) == len(rows) == 6
    assert sorted(Path(path).name for path in manager.get_savedir_list()) == sorted(row["exp_id"] for row in rows)


def test_havens_histories_are_our_rows(manager: ResultManager, runs: Path):
    histories = manager.get_score_lists(return_as_dict=True)
    assert len(histories) == 6
    for name, rows in histories.items():
        assert rows == Scores(runs / name / "scores.jsonl").rows()


def test_havens_table_is_ours(manager: ResultManager, runs: Path, capsys: pytest.CaptureFixture[str]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = manager.get_score_df(
            columns=["exp_id", "model.stride", "seed"], show_exp_ids=True, show_meta=False, show_max_min=False
        )
    assert table.main([str(runs), "--by", "exp_id", "--json"]) == 0
    ours = {row["exp_id"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    theirs = {row["exp_id"]: row for row in frame.to_dict("records")}
    assert theirs.keys() == ours.keys()
    for name, row in theirs.items():
        for score in ("val_loss", "em", "train_loss"):
            assert row[score] == ours[name][score]
        assert row["step"] == ours[name]["step"]


def test_infinity_at_the_end_is_missing_where_haven_shows_an_earlier_value(runs: Path):
    rows, _ = results.load_rows(runs)
    path = runs / rows[0]["exp_id"]
    scores = Scores(path / "scores.jsonl")
    scores.append({"step": 9, "val_loss": math.inf})
    scores.export_haven()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = ResultManager(savedir_base=str(runs), exp_ids=[path.name], verbose=False)
        frame = other.get_score_df(columns=["exp_id"], show_meta=False, show_max_min=False)
    assert frame["val_loss"].iloc[0] == rows[0]["val_loss"]
    assert results.load_rows(runs)[0][0]["val_loss"] is None


def test_haven_opens_runs_of_an_earlier_version_and_new_ones(runs: Path, tmp_path: Path):
    with tarfile.open(OLD_RUNS) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    old = {path.name: path for path in (tmp_path / "old" / "runs").iterdir() if (path / "exp_dict.json").exists()}
    new = {path.name for path in runs.iterdir() if (path / "exp_dict.json").exists()}
    for path in old.values():
        path.rename(runs / path.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        histories = ResultManager(savedir_base=str(runs), verbose=False).get_score_lists(return_as_dict=True)
    assert len(old) == 3
    assert histories.keys() == old.keys() | new
    for name in histories:
        assert histories[name] == Scores(runs / name / "scores.jsonl").rows()
        assert histories[name]
