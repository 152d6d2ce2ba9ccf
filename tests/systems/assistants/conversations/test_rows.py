"""Which rows of a file can be asked or ranked: the same from the index of a large file as by reading each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src.data import jsonl, jsonl_index
from src.errors import DataError
from src.experiments.config import Places
from src.systems.assistants.conversations.rows import ANSWERED_ROW, EMPTY_ROW, RANKED_ROW, ConversationRows, read_rows
from tests.systems.assistants.conversations.talk import row, write_rows

ROWS: list[dict[str, Any]] = [
    row("a", "b"),
    {"text": "plain"},
    {**row("a"), "replies": [{"content": "b", "rank": 0}, {"content": "c", "rank": 1}]},
    {**row("a"), "replies": [{"content": "b", "rank": 0}, {"content": "c", "rank": 0}]},
    {**row("a"), "replies": [{"content": "b", "rank": 0}]},
    row("a", "b", "c"),
    row("a", " ", "c", ""),
    {**row("a"), "replies": [{"content": "", "rank": 0}]},
]
EXPECTED_ROWS = {ANSWERED_ROW: {0}, RANKED_ROW: {2}, EMPTY_ROW: {6, 7}}


@given(places=st.lists(st.sampled_from(range(len(ROWS))), min_size=1, max_size=12), large=st.booleans(), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_kinds_are_those_of_the_rows(
    places: list[int],
    large: bool,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = tmp_path_factory.mktemp("rows") / "corpus"
    write_rows(folder, {"train": [ROWS[place] for place in places]})
    monkeypatch.setattr(jsonl_index, "MIN_BYTES", 1 if large else 1 << 25)
    row_indices = data.draw(
        st.none() | st.permutations(range(len(places))).map(lambda some: some[: 1 + len(some) // 2])
    )
    for _ in range(2):  # the second time from the index that was kept
        rows = ConversationRows(read_rows(folder / "train.jsonl"), row_indices)
        selected_places = places if row_indices is None else [places[i] for i in row_indices]
        assert rows[:] == [ROWS[place] for place in selected_places]
        for kind, expected_rows in EXPECTED_ROWS.items():
            assert [*rows.numbers_of(kind)] == [i for i, place in enumerate(selected_places) if place in expected_rows]
            assert [*rows.numbers_of(kind, invert=True)] == [
                i for i, place in enumerate(selected_places) if place not in expected_rows
            ]


def test_a_large_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl_index, "MIN_BYTES", 1)
    write_rows(tmp_path / "corpus", {"train": ROWS})
    read_rows(tmp_path / "corpus" / "train.jsonl")
    (index,) = (tmp_path / "corpus").glob(".train.jsonl.*.index")
    content, kinds = index.read_bytes(), -4 * len(ROWS)
    index.write_bytes(content[:kinds] + np.frombuffer(content[kinds:], np.uint32)[::-1].tobytes())
    rows = ConversationRows(read_rows(tmp_path / "corpus" / "train.jsonl"))
    reversed_places = [len(ROWS) - 1 - place for place in (0, 2)]
    assert [*rows.numbers_of(ANSWERED_ROW), *rows.numbers_of(RANKED_ROW)] == reversed_places, "from the index"


@pytest.mark.parametrize(("name", "command"), [("webgpt", "--name webgpt "), ("joke", "--name joke "), ("jok", None)])
def test_unprepared_release_is_reported_with_its_command(name: str, command: str | None, tmp_path: Path):
    with pytest.raises(DataError, match="no such data set") as error_info:
        jsonl.corpus_folder(Places(tmp_path, tmp_path), name)
    assert (f"python -m data_prep.assistants.prepare_conversations {command}" in str(error_info.value)) == (
        command is not None
    )
