"""What was done to a run stays written, whoever is killed while writing it."""

import json
import multiprocessing
import os
import re
import socket
from pathlib import Path

import pytest

from src.errors import RunError
from src.runs import ledger


def test_events_are_read_in_order_with_person_and_time(tmp_path: Path):
    ledger.append(tmp_path, ledger.event("start", step=0))
    ledger.append(tmp_path, ledger.event("rewind", step=40, why="Verlustspitze ↑"))
    first, second = ledger.read(tmp_path)
    assert (first["event"], first["step"]) == ("start", 0)
    assert (second["event"], second["why"]) == ("rewind", "Verlustspitze ↑")
    assert re.fullmatch(rf".+@{re.escape(socket.gethostname())}", second["who"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", second["when"])


def test_no_ledger_is_an_empty_one(tmp_path: Path):
    assert ledger.read(tmp_path) == []


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_a_line_that_was_torn_hides_no_other(tmp_path: Path, length: int):
    ledger.append(tmp_path, ledger.event("start"))
    whole = (tmp_path / ledger.FILE).read_bytes()
    (tmp_path / ledger.FILE).write_bytes(whole + whole[:length])
    assert [event["event"] for event in ledger.read(tmp_path)] == ["start"]
    ledger.append(tmp_path, ledger.event("stop"))
    assert [event["event"] for event in ledger.read(tmp_path)] == ["start", "stop"]
    assert (tmp_path / ledger.FILE).read_bytes().startswith(whole + whole[:length]), (
        "nothing that was written is changed"
    )


def test_an_event_that_was_written_but_for_its_newline_is_there_once(tmp_path: Path):
    event = ledger.event("rewind", id="abc")
    (tmp_path / ledger.FILE).write_text(json.dumps(event))
    ledger.append(tmp_path, event)
    assert ledger.read(tmp_path) == [event]


def test_an_event_with_an_id_is_recorded_once(tmp_path: Path):
    for _ in range(2):
        ledger.append(tmp_path, ledger.event("rewind", id="abc"))
        ledger.append(tmp_path, ledger.event("save"))
    assert [event["event"] for event in ledger.read(tmp_path)] == ["rewind", "save", "save"]


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path: Path):
    os.symlink("/dev/full", tmp_path / ledger.FILE)
    with pytest.raises(RunError, match=r"ledger\.jsonl: cannot write: No space left on device"):
        ledger.append(tmp_path, ledger.event("start"))


def test_several_writers_tear_no_line(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(tmp_path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    events = ledger.read(tmp_path)
    assert sorted(event["event"] for event in events) == sorted("abc" * 30)
    assert [event["number"] for event in events if event["event"] == "b"] == list(range(30))


def write_many(run: Path, name: str) -> None:
    for number in range(30):
        ledger.append(run, ledger.event(name, number=number, padding="x" * 5000))
