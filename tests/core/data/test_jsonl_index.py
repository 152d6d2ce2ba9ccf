"""The index of a large JSONL file: made once when its rows are checked, then mapped, and never trusted for another
file."""

import json
import multiprocessing
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.data import jsonl, jsonl_index
from src.data.text import documents
from src.errors import DataError
from src.experiments.config import Places, load
from src.files import new_directory
from src.systems.t5.tasks import dataset, task_table

ROWS = [{"text": f"text {i} é", "kind": "abc"[i % 3]} for i in range(2000)]


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Every file is large enough, and the user's cache is empty."""
    monkeypatch.setattr(jsonl_index, "MIN_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, rows: list[Any]) -> Path:
    with new_directory(folder) as beside:
        (beside / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "train.jsonl"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "c", ROWS)


def read(path: Path, rules: str = "toy 1") -> tuple[jsonl.Rows, list[str]]:
    """The rows, and the places of those that were checked."""
    checked_rows: list[str] = []
    return jsonl.read_rows(
        path, {"text": str}, None, lambda _row, where: checked_rows.append(where), lambda row: row["kind"], rules
    ), checked_rows


def index_of(path: Path) -> Path:
    (index,) = path.parent.glob(".*.index")
    return index


def test_rows_are_checked_once(path: Path):
    first, checked_rows = read(path)
    assert len(checked_rows) == 2000
    second, checked_again = read(path)
    assert not checked_again
    for rows in (first, second):
        assert rows == ROWS
        assert (rows[7], rows[-1], len(rows)) == (ROWS[7], ROWS[-1], 2000)
        assert [rows.row_index.names[group] for group in rows.row_index.groups] == [row["kind"] for row in ROWS]
    assert {entry.name for entry in path.parent.iterdir()} == {"manifest.json", "train.jsonl", index_of(path).name}


def test_mapped_rows_cost_no_memory(path: Path):
    """The least of three reads, as other threads of the process allocate too."""
    read(path)
    sizes = []
    for _ in range(3):
        tracemalloc.start()
        try:
            rows, _ = read(path)
            sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert len(rows) == 2000
    assert min(sizes) < 12_000, "2000 rows in memory take 24,000 bytes"


def test_a_small_file_has_no_index(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl_index, "MIN_BYTES", 1 << 25)
    assert len(read(path)[1]) == len(read(path)[1]) == 2000
    assert not list(path.parent.glob(".*"))


def test_no_index_without_rules(path: Path):
    jsonl.read_rows(path, {"text": str})
    assert not list(path.parent.glob(".*"))


def test_a_malformed_row_is_named_and_no_index_is_saved(tmp_path: Path):
    path = write(tmp_path / "c", [*ROWS[:5], {"text": 3, "kind": "a"}])
    for _ in range(2):
        with pytest.raises(DataError, match=r"c/train\.jsonl:6: field 'text': expected str, got 3 \(int\)\."):
            read(path)
    assert not list(path.parent.glob(".*"))


def replace_bytes(path: Path) -> None:
    """Other content of the same size and time."""
    state = path.stat()
    with open(path, "r+b") as file:
        file.write(b"#")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def prepare_again(path: Path) -> None:
    write(path.parent, [*ROWS[1:], ROWS[0]])


@pytest.mark.parametrize("change", [touch, prepare_again])
def test_another_file_is_checked_again(path: Path, change: Callable[[Path], None]):
    read(path)
    change(path)
    rows, checked_rows = read(path)
    assert len(checked_rows) == 2000
    assert sorted(row["text"] for row in rows) == sorted(row["text"] for row in ROWS)
    assert not read(path)[1]


def test_other_content_of_the_same_size_and_time_is_found(path: Path):
    read(path)
    replace_bytes(path)
    with pytest.raises(DataError, match=r"train\.jsonl:1: not valid JSON"):
        read(path)


def test_other_rules_have_an_index_of_their_own(path: Path):
    read(path)
    assert len(read(path, "toy 2")[1]) == 2000
    assert not read(path)[1]
    assert not read(path, "toy 2")[1]
    assert len(list(path.parent.glob(".*.index"))) == 2


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-4], lambda data: b"{}\n" + data, lambda data: data[:300] + data[-300:]],
)
def test_a_damaged_index_is_made_again(path: Path, damage: Callable[[bytes], bytes]):
    read(path)
    index = index_of(path)
    whole = index.read_bytes()
    index.write_bytes(damage(whole))
    assert len(read(path)[1]) == 2000
    assert index.read_bytes() == whole


def test_where_the_folder_cannot_be_written_the_cache_of_the_user_can(path: Path, tmp_path: Path):
    read(path)
    index = index_of(path)
    index.unlink()
    index.mkdir()  # in its way, also for root
    assert len(read(path)[1]) == 2000
    rows, checked_rows = read(path)
    assert (rows, checked_rows) == (ROWS, [])
    assert len(list((tmp_path / "cache" / "trainval").iterdir())) == 1


def test_where_nothing_can_be_written_rows_are_checked_each_time(path: Path, tmp_path: Path):
    read(path)
    index = index_of(path)
    index.unlink()
    index.mkdir()
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        rows, checked_rows = read(path)
        assert (rows, len(checked_rows)) == (ROWS, 2000)


def test_a_pickled_copy_maps_the_same_index(path: Path):
    read(path)
    rows, _ = read(path)
    data = pickle.dumps(rows)
    assert len(data) < 2000
    assert pickle.loads(data) == ROWS
    index_of(path).unlink()
    with pytest.raises(DataError, match=r"\.index: the row index was removed or replaced"):
        pickle.loads(data)
    assert rows == ROWS, "what is mapped stays"


def test_concurrent_processes_write_one_complete_index(path: Path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()

    def work() -> None:
        barrier.wait(60)
        rows, checked_rows = read(path)
        results.put((len(checked_rows), rows == ROWS, rows.row_index.place is not None))

    processes = [context.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == [(0, True, True)] * 3 + [(2000, True, True)], (
        "one checks, others wait"
    )
    for process in processes:
        process.join(60)
    assert not read(path)[1]
    assert len(list(path.parent.glob(".*"))) == 1, "nothing unfinished is left"


def test_text_is_checked_once_whatever_reads_it(places: Places, tokenizer: Any, write_corpus: Callable[..., Path]):
    folder = write_corpus("c", [{"text": "one. two."}, {"text": "three."}])
    read = [documents.read(places, "c", tokenizer, "train") for _ in range(2)]
    assert [ids.tolist() for ids in read[1]] == [tokenizer(text)["input_ids"] for text in ("one. two.", "three.")]
    (index,) = folder.glob(".train.*")
    inode = index.stat().st_ino
    rows = jsonl.read_rows(folder / "train.jsonl", {"text": str}, rules="text 1")
    assert (rows.row_index.place or [None])[0] == index
    assert index.stat().st_ino == inode, "not again"


def test_rows_of_a_task_are_checked_once_and_again_for_other_labels(
    places: Places, tokenizer: Any, write_corpus: Callable[..., Path]
):
    folder = write_corpus("c", [{"thing": "sky", "label": "blue"}, {"thing": "sun", "label": "pink"}])
    task = {"columns": ["thing"], "labels": ["blue", "pink"], "metrics": ["accuracy"], "weight": 1}

    def build() -> Any:
        (folder / task_table.TASK_FILE).write_text(json.dumps({"colour": task}))
        return load(dataset.Config, {"task": "colour", "corpus": "c"}, "data").build(places, tokenizer, "train", 0)

    assert build().target(1) == "pink"
    (index,) = folder.glob(".train.*")
    inode = index.stat().st_ino
    assert build().target(1) == "pink"
    assert index.stat().st_ino == inode, "not again"
    task["labels"] = ["blue", "grey"]
    with pytest.raises(DataError, match=r"train\.jsonl:2: expected a label of 'colour': blue, grey; got 'pink'"):
        build()
