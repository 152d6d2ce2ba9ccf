"""Sources that the `datasets` library has saved: folders, parquet files, and sets of the hub that lie in its cache."""

import json
from pathlib import Path

import pytest

from data_prep.crossattn import prepare_qa
from data_prep.crossattn.qa_splits import Options
from src.data import jsonl
from src.errors import DataError

ROWS = [
    {
        "id": str(i),
        "title": "T",
        "context": f"Town {i} is red.",
        "question": f"What is {i}?",
        "answers": {"text": ["red"] if i % 3 else [], "answer_start": [0] if i % 3 else []},
    }
    for i in range(30)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """SQuAD-like rows as a folder with two splits, a folder of one set, and a parquet file."""
    import datasets

    folder = tmp_path_factory.mktemp("saved")
    datasets.disable_progress_bars()
    train, val = datasets.Dataset.from_list(ROWS[:20]), datasets.Dataset.from_list(ROWS[20:])
    datasets.DatasetDict({"train": train, "validation": val}).save_to_disk(folder / "both")
    datasets.DatasetDict({"test": val}).save_to_disk(folder / "test_alone")
    train.save_to_disk(folder / "train_alone")
    train.to_parquet(folder / "train.parquet")
    return folder


def prepare_rows(folder, **options):
    prepare_qa.prepare(
        folder, Options(name="c", **{key: (str(v),) if isinstance(v, Path) else v for key, v in options.items()})
    )
    return {
        split: list(jsonl.read_rows(folder / "c" / f"{split}.jsonl", {"question": str, "answer": str}))
        for split in ("train", "val")
    }


def test_a_folder_gives_its_splits(saved, tmp_path):
    rows = prepare_rows(tmp_path, train=saved / "both", val=saved / "both")
    assert [row["id"] for row in rows["train"]] == [str(i) for i in range(20)]
    assert [row["answer"] for row in rows["val"][:4]] == ["red", "UNANSWERABLE", "red", "red"]
    facts = json.loads((tmp_path / "c" / "manifest.json").read_text())["made_from"]["sources"]["train"]
    assert facts[0]["name"] == "both"
    assert len(facts[0]["sha256"]) == 64


def test_a_folder_of_one_set_and_a_parquet_file(saved, tmp_path):
    whole = prepare_rows(tmp_path, train=saved / "train_alone", val=saved / "test_alone")
    assert len(whole["val"]) == 10
    assert prepare_rows(tmp_path, train=saved / "train.parquet", val=saved / "test_alone") == whole


def test_a_published_set_that_is_prepared_is_read_without_its_encodings(tmp_path):
    """The fields of the published form of xc-cache, encodings among them; and what is prepared of it can be prepared
    again."""
    import datasets

    rows = [
        {
            "context": f"Town {i} is red.",
            "contexts_list": [f"Town {i} is blue.", f"Town {i} is red."],
            "titles_list": ["Other", "Town"],
            "useful_contexts": [0, 1],
            "question": f"What is {i}?",
            "answer": "yes" if i % 2 else "UNANSWERABLE",
            "sample_idx": i // 2,
            "dataset": "hotpot_qa" if i % 2 else "squad_v2",
            "encoder_hidden_states": [[0.5, 0.25]] * 3,
        }
        for i in range(8)
    ]
    splits = {name: datasets.Dataset.from_list(some) for name, some in (("train", rows[:6]), ("val", rows[6:]))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "published")
    splits["train"].to_parquet(tmp_path / "train.parquet")
    result = prepare_rows(tmp_path, train=tmp_path / "published", val=tmp_path / "published")
    expected = {key: value for key, value in rows[1].items() if key != "encoder_hidden_states"} | {
        "answer": "Yes",
        "answers": ["Yes"],
    }
    assert result["train"][1] == expected | {"sample_idx": 1}
    assert [row["answer"] for row in result["val"]] == ["UNANSWERABLE", "Yes"]
    files = {split: tmp_path / "c" / f"{split}.jsonl" for split in result}
    prepare_qa.prepare(tmp_path, Options(name="again", train=(str(files["train"]),), val=(str(files["val"]),)))
    assert (tmp_path / "again" / "train.jsonl").read_bytes() == files["train"].read_bytes()
    assert prepare_rows(tmp_path, train=tmp_path / "train.parquet", val=tmp_path / "published") == result


def test_unreadable_hub_sets_are_named(saved, tmp_path):
    with pytest.raises(DataError, match=r"test_alone: no split 'train'. Splits: test."):
        prepare_rows(tmp_path, train=saved / "test_alone", val=saved / "both")
    truncated = tmp_path / "torn.parquet"
    truncated.write_bytes((saved / "train.parquet").read_bytes()[:-50])
    with pytest.raises(DataError, match=r"torn.parquet: not a parquet file, or damaged"):
        prepare_rows(tmp_path, train=truncated, val_percent=50)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match=r"broken: `datasets` cannot read it "):
        prepare_rows(tmp_path, train=tmp_path / "broken", val_percent=50)


def test_a_set_of_the_hub_that_is_not_in_the_cache_says_how_to_get_it(tmp_path):
    with pytest.raises(
        DataError, match=r"hub:org/qa@v2: cannot be loaded .*load_dataset\('org/qa', 'v2'\).save_to_disk\('FOLDER'\)"
    ):
        prepare_rows(tmp_path, train=("hub:org/qa@v2",), val_percent=50)
