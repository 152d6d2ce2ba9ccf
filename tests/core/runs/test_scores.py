"""Scores survive kills and full disks, and are read exactly as they were written."""

import contextlib
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict, deque
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from src.errors import DataError, RunError
from src.runs.scores import Scores, last_row, read_score_list
from src.runs.summary import summarize

ROOT = Path(__file__).resolve().parents[3]

WRITER = """
import sys
from pathlib import Path
from src.runs.scores import Scores
scores = Scores(Path(sys.argv[1]))
rows = scores.rows()
step = rows[-1]["step"] if rows else 0
scores.truncate(step)
while True:
    step += 1
    scores.append({"step": step, "loss": 1 / step, "text_length": "x" and 10**15 + step})
    print(step, flush=True)
"""


@pytest.fixture
def scores(tmp_path: Path) -> Scores:
    return Scores(tmp_path / "scores.jsonl")


def test_rows_come_back_exactly_with_step_first(scores: Scores):
    scores.append({"loss": 0.1 + 0.2, "step": 1})
    scores.append({"step": 3, "em": 1})
    assert scores.path.read_text() == '{"step": 1, "loss": 0.30000000000000004}\n{"step": 3, "em": 1}\n'
    assert scores.rows() == [{"step": 1, "loss": 0.1 + 0.2}, {"step": 3, "em": 1}]
    assert Scores(scores.path).rows() == scores.rows()


def test_no_file_is_no_rows(scores: Scores):
    assert scores.rows() == []
    scores.truncate(10)
    assert not scores.path.exists()


def test_numpy_numbers_become_plain_ones(scores: Scores):
    scores.append({"step": 1, "a": np.float64(0.5), "b": np.float32(0.5), "c": np.int64(3)})
    assert scores.rows() == [{"step": 1, "a": 0.5, "b": 0.5, "c": 3}]


@pytest.mark.parametrize("value", ["0.5", True, None, [1], {}, 1j])
def test_anything_but_numbers_is_a_bug(scores: Scores, value: object):
    with pytest.raises(TypeError, match="'loss' is not a number"):
        scores.append({"step": 1, "loss": value})
    assert not scores.path.exists()


@pytest.mark.parametrize("step", [None, 1.0, True, "1"])
def test_a_row_needs_an_int_step(scores: Scores, step: object):
    with pytest.raises(TypeError, match="a row needs an int 'step'"):
        scores.append({"step": step, "loss": 1.0})


def test_nan_and_infinity_become_null(scores: Scores, caplog: pytest.LogCaptureFixture):
    scores.append({"step": 1, "perplexity": math.inf, "loss": math.nan, "x": Fraction(1, 2)})
    assert scores.rows() == [{"step": 1, "perplexity": None, "loss": None, "x": 0.5}]
    assert "perplexity at step 1 is inf; written as null" in caplog.text


def test_steps_only_grow_until_truncated(scores: Scores):
    scores.append({"step": 5})
    for same_file in (scores, Scores(scores.path)):
        with pytest.raises(ValueError, match="step 5 cannot follow step 5: truncate first"):
            same_file.append({"step": 5})
    scores.truncate(4)
    scores.append({"step": 5, "again": 1})
    assert scores.rows() == [{"step": 5, "again": 1}]


def test_truncate_drops_later_rows_and_the_torn_one(scores: Scores):
    scores.path.write_text('{"step": 1, "a": 1.50}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    scores.truncate(2)
    assert scores.path.read_text() == '{"step": 1, "a": 1.50}\n{"step": 2}\n'
    scores.truncate(0)
    assert scores.path.read_text() == ""


@pytest.mark.parametrize(
    "partial_line", [b'{"step": 2, "lo', b"{", b'{"step": 2}', '{"step": 2, "é'.encode()[:-1], b"\x00\x00\x00"]
)
def test_a_torn_last_line_is_ignored_and_never_glued_to(scores: Scores, partial_line: bytes):
    scores.path.write_bytes(b'{"step": 1}\n' + partial_line)
    assert scores.rows() == [{"step": 1}]
    scores.append({"step": 2, "whole": 1})
    assert scores.path.read_text() == '{"step": 1}\n{"step": 2, "whole": 1}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"scores\.jsonl:2: not a row of scores: .*Remove this line, or start over with -r 1"),
        ("", r"scores\.jsonl:2: not a row of scores"),
        ('{"loss": 1}', r"scores\.jsonl:2: expected a row with an int 'step', got '\{\"loss\": 1\}'"),
        ("[1, 2]", r"scores\.jsonl:2: expected a row"),
        ('{"step": 2}, {"step": 3}', r"scores\.jsonl:2: not a row"),
    ],
)
def test_a_corrupt_line_elsewhere_is_named(scores: Scores, line: str, message: str):
    scores.path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 4}}\n')
    for use in (scores.rows, scores.export_haven, lambda: scores.truncate(1), lambda: scores.append({"step": 9})):
        with pytest.raises(DataError, match=message):
            use()


def test_a_writer_killed_at_random_moments_loses_no_finished_row(scores: Scores):
    rng = random.Random(0)
    num_promised = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(scores.path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(rng.randrange(1, 60)):
            num_promised = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        output_words = writer.stdout.read().split()
        writer.wait()
        writer.stdout.close()
        num_promised = int(output_words[-1]) if output_words else num_promised
        steps = [row["step"] for row in scores.rows()]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) in (num_promised, num_promised + 1)
        if rng.random() < 0.5:  # no kill is quick enough to cut 60 bytes in two, so cut by hand
            whole = scores.path.read_bytes()
            scores.path.write_bytes(whole + b'{"step": 99999, "lo'[: rng.randrange(1, 20)])


def test_haven_gets_nan_for_null(scores: Scores, tmp_path: Path):
    scores.append({"step": 1, "a": 0.5})
    scores.append({"step": 2, "a": math.inf})
    scores.export_haven()
    first, second = pickle.loads((tmp_path / "score_list.pkl").read_bytes())
    assert first == {"step": 1, "a": 0.5}
    assert math.isnan(second["a"])
    assert read_score_list(tmp_path / "score_list.pkl")[0] == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["score_list.pkl", "scores.jsonl"]


def test_read_only_scores_refuse_to_write(scores: Scores):
    scores.append({"step": 1})
    reader = Scores(scores.path, read_only=True)
    assert reader.rows() == [{"step": 1}]
    for write in (lambda: reader.append({"step": 2}), lambda: reader.truncate(0), reader.export_haven):
        with pytest.raises(RunError, match="opened for reading only"):
            write()


@pytest.mark.parametrize("protocol", range(6))
def test_foreign_score_lists_are_read_as_plain_numbers(tmp_path: Path, protocol: int):
    numbers = [
        np.float64(0.1),
        np.float32(0.5),
        np.float16(2),
        np.int64(-3),
        np.int32(7),
        np.uint8(255),
        np.bool_(True),
        1,
        0.25,
    ]
    path = tmp_path / "score_list.pkl"
    path.write_bytes(
        pickle.dumps([{"epoch": 1, "values": numbers, "big_endian": np.array([1.5], ">f8")[0], "set": {1}}], protocol)
    )
    (row,) = read_score_list(path)
    assert row == {
        "epoch": 1,
        "values": [n.item() if isinstance(n, np.generic) else n for n in numbers],
        "big_endian": 1.5,
        "set": {1},
    }
    assert {type(n) for n in row["values"]} == {float, int, bool}


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch /tmp/evil-was-here",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps([Evil()]), r"score_list\.pkl: expected a pickled list of dicts, got list"),
        (pickle.dumps(Evil()), r"score_list\.pkl: expected a pickled list of dicts, got Opaque"),
        (pickle.dumps({"a": 1}), "expected a pickled list of dicts, got dict"),
        (pickle.dumps([1]), "expected a pickled list of dicts, got list"),
        (pickle.dumps([{"a": 1}])[:-3], "expected a pickled list"),
        (b"", "expected a pickled list"),
        (json.dumps([{"a": 1}]).encode(), "expected a pickled list"),
    ],
)
def test_other_pickles_are_refused_and_run_nothing(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "score_list.pkl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_score_list(path)
    assert not Path("/tmp/evil-was-here").exists()


class Steps(list):
    """A list of a class of its own, as a user's code may log."""


@pytest.mark.parametrize("protocol", range(6))
def test_unreadable_values_drop_no_row_and_run_no_code(tmp_path: Path, protocol: int):
    values = {
        "<numpy.ndarray>": np.zeros(3),
        "<torch.Tensor>": torch.ones(2),
        "<datetime.datetime>": datetime(2020, 1, 1, tzinfo=UTC),
        "<collections.Counter>": Counter("ab"),
        "<collections.deque>": deque([1]),
        f"<{Steps.__module__}.Steps>": Steps([1, 2]),
        "<posix.system>": Evil(),
        "<numpy.M8>": np.datetime64("2020-01-01"),
    }
    path = tmp_path / "score_list.pkl"
    path.write_bytes(
        pickle.dumps(
            [{**values, "loss": 0.5, "by_name": defaultdict(list, {"x": 1.5})}, {"loss": np.float64(0.25)}], protocol
        )
    )
    first, second = read_score_list(path)
    assert (first.pop("loss"), first.pop("by_name"), second) == (0.5, {"x": 1.5}, {"loss": 0.25})
    assert {name: repr(value) for name, value in first.items()} == {name: name for name in first}
    assert not Path("/tmp/evil-was-here").exists()


def test_a_damaged_score_list_is_one_line(tmp_path: Path):
    """Whatever was overwritten, cut or doubled; and what is named in it changes nothing of ours."""
    rng = random.Random(0)
    row = {
        "step": 1,
        "loss": np.float64(0.5),
        "a": np.zeros(3),
        "names": {"x"},
        "counts": defaultdict(int, a=1),
        "text": "ab",
        "raw": b"ab",
    }
    whole = [pickle.dumps([row, {**row, "bytes": bytearray(9)}], protocol) for protocol in range(6)]
    path = tmp_path / "score_list.pkl"
    messages = []
    for _ in range(2500):
        content = bytearray(rng.choice(whole))
        for _ in range(rng.choice([1, 1, 3])):
            kind, at = rng.randrange(4), rng.randrange(len(content))
            if kind < 2:
                content[at] = rng.randrange(256)
            elif kind == 2:
                content[at : at + 1] = rng.randbytes(rng.randrange(9))
            else:
                del content[at : at + rng.randrange(20)]
            if not content:
                break
        path.write_bytes(content)
        try:
            read_score_list(path)
        except DataError as error:
            messages.append(str(error))
    assert len(messages) > 1000
    assert [message for message in messages if len(message.splitlines()) != 1] == []
    path.write_bytes(whole[4])
    assert read_score_list(path)[0]["loss"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04]r\xff\xff\xff\xff.",  # the memo of 2**32 - 1 values
        b"\x80\x05]\x96\xff\xff\xff\xff\x1f\x00\x00\x00a.",  # a bytearray of 137 GB
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04" + b"(" * 100_000,
    ],
)
def test_a_number_in_a_damaged_score_list_reserves_no_memory(tmp_path: Path, content: bytes):
    path = tmp_path / "score_list.pkl"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(DataError):
            read_score_list(path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_a_missing_score_list_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"score_list\.pkl: no such file"):
        read_score_list(tmp_path / "score_list.pkl")


def test_a_folder_where_the_scores_should_be_is_one_line(tmp_path: Path):
    (tmp_path / "scores.jsonl").mkdir()
    with pytest.raises(RunError, match=r"/scores\.jsonl: cannot read: Is a directory\.$"):
        Scores(tmp_path / "scores.jsonl").append({"step": 1})
    (tmp_path / "score_list.pkl").mkdir()
    with pytest.raises(DataError, match=r"/score_list\.pkl: cannot read: Is a directory\.$"):
        read_score_list(tmp_path / "score_list.pkl")


@pytest.mark.parametrize(
    ("content", "step"),
    [
        ("", None),
        ('{"step": 1}', None),
        ('{"step": 1}\n', 1),
        ('{"step": 1}\n{"step": 2}\n{"st', 2),
        ("x\n" * 9000 + '{"step": 7}\n', 7),
    ],
)
def test_the_last_row_is_read_from_the_end(tmp_path: Path, content: str, step: int | None):
    path = tmp_path / "scores.jsonl"
    path.write_text(content)
    row = last_row(path)
    assert (row and row["step"]) == step
    assert last_row(tmp_path / "missing") is None
    path.write_text('{"step": 8, "long": "' + "x" * 50_000 + '"}\n')
    assert last_row(path) == {"step": 8, "long": "x" * 50_000}
    path.write_text("garbage\n")
    with pytest.raises(DataError, match=r"scores\.jsonl: its last line: not a row of scores"):
        last_row(path)


def test_scores_that_join_the_last_row(scores: Scores):
    scores.append({"step": 1, "em": 0.5})
    scores.append({"step": 2, "em": 0.25, "loss": math.nan})
    for value in (0.5, 0.75):  # made a second time, as after a crash
        scores.add_to_last_row({"inference/em": value})
        assert scores.rows() == [{"step": 1, "em": 0.5}, {"step": 2, "em": 0.25, "loss": None, "inference/em": value}]
    scores.append({"step": 3, "em": 1})
    assert Scores(scores.path).rows()[1:] == [
        {"step": 2, "em": 0.25, "loss": None, "inference/em": 0.75},
        {"step": 3, "em": 1},
    ]


def test_scores_that_join_a_row_before_a_torn_line(scores: Scores):
    scores.append({"step": 1})
    with open(scores.path, "a") as file:
        file.write('{"step": 2, "em"')
    again = Scores(scores.path)
    again.add_to_last_row({"em": 1})
    assert scores.path.read_text() == '{"step": 1, "em": 1}\n'
    again.append({"step": 2})
    assert [row["step"] for row in again.rows()] == [1, 2]


def test_tables_see_what_joins_the_last_row(scores: Scores):
    scores.append({"step": 1, "em": 0.5})
    summary = summarize(scores.path)
    scores.add_to_last_row({"inference/em": 0.75})
    assert summarize(scores.path, summary.to_json()).last == {"em": 0.5, "inference/em": 0.75}


@pytest.mark.parametrize("value", [1e200, -1e200, 10**400])
def test_a_number_counts_as_infinite_if_its_square_overflows(scores: Scores, value: float):
    scores.append({"step": 1, "em": 0.5})
    with open(scores.path, "a") as file:
        file.write(json.dumps({"step": 2, "em": value}) + "\n")
    assert summarize(scores.path).last == {"em": None}


def test_only_the_lease_holder_completes(scores: Scores):
    scores.append({"step": 1})
    with pytest.raises(RunError, match="opened for reading only"):
        Scores(scores.path, read_only=True).add_to_last_row({"em": 1})
