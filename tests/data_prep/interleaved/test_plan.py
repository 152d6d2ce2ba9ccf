"""What the planner expects, beside what the order of a training does."""

import math
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from data_prep.interleaved import plan, planning
from data_prep.interleaved.planning import Simulation, moves, shards_together
from data_prep.interleaved.write import Document, Part, Writing, write
from src.data.orders import RankShare
from src.systems.interleaved.streaming.arrangement import Source
from src.systems.interleaved.streaming.texts import TextTokens
from tests.systems.interleaved.streaming import pages

OPTIONS: dict[str, Any] = {"sequence_tokens": 80, "max_frames": 8, "open_rows": 4, "shuffle": "window", "window": 40}
OPTIONS |= {"style": "idefics3", "frame_size": pages.SIDE, "image_tokens": 1, "max_size": 2 * pages.SIDE}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plan")
    pages.write_pages(root / "pages", 600)
    pages.write_pages(root / "more", 50, "more", counted=False)
    pages.tokenizer().save_pretrained(root / "tokenizer")
    return root


@pytest.fixture
def folder(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: the order of documents depends on the names of their sources."""
    monkeypatch.chdir(written)
    return Path()


def opened(folder: Path, *names: str, rates: list[float] | None = None, **more: Any) -> Any:
    return plan.open_data(
        [folder / name for name in names or ("pages",)], str(folder / "tokenizer"), rates, {**OPTIONS, **more}
    )


def words(folder: Path, *more: str, **options: Any) -> list[str]:
    settings = {**OPTIONS, "sequences_per_step": 4, "processes": 2, "sample": 200, **options}
    arguments = ["--tokenizer", str(folder / "tokenizer"), *(f"--{name}={value}" for name, value in settings.items())]
    return [str(folder / "pages"), *more, *arguments]


@pytest.mark.parametrize("open_rows", [1, 4])
def test_rows_fill_as_in_a_training(folder: Path, open_rows: int):
    data = opened(folder, open_rows=open_rows)
    batches = islice(data.order(0, 4, 99, ()).micro_batches(0, RankShare(4, 4, 0, 1), {}), 450)
    padding = [batch.counters["padding"] for batch in list(batches)[50:]]
    trained = 1 - sum(pad for pad, _ in padding) / sum(every for _, every in padding)
    simulation = Simulation(data, 0, 4, 2400)
    assert simulation.rows.fill == pytest.approx(trained, abs=0.01)
    assert (
        simulation.fills[open_rows]
        == simulation.rows.fill
        == pytest.approx(sum(simulation.rows.tokens) / 80 / len(simulation.rows.keys))
    )
    lengths = [len(data.sample(*key).input_ids) for key in simulation.rows.keys[:20]]
    assert lengths == list(simulation.rows.tokens[:20])
    assert [sum(len(frames) for frames in data.sample(*key).frames) for key in simulation.rows.keys[:20]] == list(
        simulation.rows.frames[:20]
    )
    assert max(simulation.rows.frames) <= 8


def test_a_small_sample_and_many_open_rows_expect_no_more_than_a_large_one(folder: Path):
    """The rows that a lane makes first are fuller than all later ones: it has taken the fullest of those that are
    open."""
    data = opened(folder)
    assert Simulation(data, 0, 4, 300).pack(32, 8).fill == pytest.approx(
        Simulation(data, 0, 4, 6000).pack(32, 8).fill, abs=0.01
    )


def test_documents_that_are_too_long_are_counted_by_source(folder: Path, tmp_path: Path):
    texts = TextTokens(pages.tokenizer())
    lengths = [10, 200] * 20
    documents = [
        Document(str(i), [Part("text", b"a"), Part("prompt", b"?" * n), Part("text", b"x")])
        for i, n in enumerate(lengths)
    ]
    documents.append(Document("blank", [Part("image", pages.picture(0), "png")]))
    write(tmp_path / "long", documents, {}, Writing(10, "long", texts=texts))
    data = plan.open_data([tmp_path / "long", folder / "more"], str(folder / "tokenizer"), [0.9, 0.1], OPTIONS)
    by_name = {source.name: source for source in Simulation(data, 0, 4, 400).by_source()}
    long, more = by_name[str(tmp_path / "long")], by_name[str(folder / "more")]
    assert (long.documents, long.left_out, long.too_long) == (41, 1, 20)
    assert long.tokens_left_out >= 20 * 200 > long.text_tokens - long.tokens_left_out
    assert (long.images, long.image_tokens) == (0, 0)
    assert (more.too_long, more.left_out, more.tokens_left_out) == (0, 0, 0)
    assert more.images > 0


@pytest.mark.parametrize("shuffle", ["none", "shards", "window"])
def test_tars_that_are_open_and_how_far_documents_move(shuffle: Any):
    draw = random.Random(0)
    for _ in range(20):
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(1, 20))]
        window = draw.randint(2, 50)
        source = Source(sizes, shuffle, window, "seed")
        order = [source.document(0, place) for place in range(source.count)]
        of = [shard for shard, size in enumerate(sizes) for _ in range(size)]
        band, step = (2 * window, window) if shuffle == "window" else (7, 1)
        expected = max(len({of[document] for document in order[at : at + band]}) for at in range(0, source.count, step))
        assert shards_together(source, 7) == expected
        stored = [
            document
            for shard in planning.shard_order(source)
            for document in range(source.count)
            if of[document] == shard
        ]
        assert moves(source, 10**6) == [abs(stored.index(document) - place) for place, document in enumerate(order)]
        assert (max(moves(source, 5)) == 0) or shuffle == "window"


def test_report_reads_only_indexes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pages.write_pages(tmp_path / "pages", 200)
    pages.tokenizer().save_pretrained(tmp_path / "tokenizer")
    for path in (tmp_path / "pages").glob("*.tar"):
        path.unlink()
    output = tmp_path / "plots" / "plan.png"
    assert plan.main(words(tmp_path, "--measure=0", f"--output={output}")) == 0
    out = capsys.readouterr().out
    assert "200 of 200 documents" in out
    assert "up to 4 of 8 tars are open" in out
    assert f"wrote {output}" in out
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "speed" not in out
    assert "no counts" not in out


def test_speed_is_measured_and_compared(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert plan.main(words(folder, str(folder / "more"), "--measure=0.2", "--rows_per_second=1e9")) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"speed: [\d.]+ rows/s of one process \(\d+ rows in [\d.]+ s\), [\d.]+ of 2; "
        r"wanted are 1000000000.0: [\d.]+ times",
        out,
    )
    assert f"{folder / 'more'}: the indexes have no counts of this tokenizer's tokens" in out
    assert f"{folder / 'pages'}: the indexes have no counts" not in out
    assert plan.compare(10, 2.0, plan.Training(4, 2, 5.0)) == [
        (
            "speed: 5.0 rows/s of one process (10 rows in 2.0 s), 10.0 of 2; "
            "wanted are 5.0: 50% of the time of a core for each process"
        )
    ]


def test_better_settings_are_recommended_and_good_ones_are_left(folder: Path, capsys: pytest.CaptureFixture[str]):
    poor = {"open_rows": 1, "max_frames": 3, "sequence_tokens": 40, "window": 2, "sequences_per_step": 3}
    assert plan.main(words(folder, "--measure=0", **poor)) == 0
    out = capsys.readouterr().out
    for field in ("open_rows", "max_frames", "sequence_tokens", "shuffle", "sequences_per_step"):
        assert f"recommended: {field}: " in out
    good = {"open_rows": 32, "max_frames": 99, "sequence_tokens": 200, "window": 400}
    assert plan.main(words(folder, "--measure=0", **good)) == 0
    assert "recommended: these settings" in capsys.readouterr().out
    ((_, tokens),) = re.findall(r"recommended: (sequence_tokens): (\d+)", out)
    data = opened(folder, sequence_tokens=int(tokens), max_frames=99)
    (source,) = Simulation(data, 0, 4, 600).by_source()
    assert source.too_long <= math.ceil(0.01 * source.documents)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sample": 0}, "--sample: expected at least 1, got 0"),
        ({"processes": 0}, "--processes: expected at least 1, got 0"),
        ({"sample": 1, "sequence_tokens": 4000}, "--sample 1: too few documents to fill a row"),
        ({"max_size": 9}, "max_size: expected a multiple of frame_size, 8, got 9"),
        ({"tokenizer": "./none"}, "./none: no such tokenizer folder"),
        ({"output": "plan.none"}, "--output plan.none: Format 'none' is not supported"),
    ],
)
def test_wrong_options(folder: Path, more: dict[str, Any], message: str, capsys: Any):
    assert plan.main(words(folder, "--measure=0", **more)) == 1
    assert message in capsys.readouterr().err


def test_rates_are_of_each_folder(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert plan.main(words(folder, str(folder / "more"), "--measure=0", "--rates", "0.5")) == 1
    assert "--rates: expected 2, one for each folder, got 1" in capsys.readouterr().err
    assert plan.main(words(folder, str(folder / "pages"), "--measure=0")) == 1
    assert "a folder is given twice" in capsys.readouterr().err
    simulation = Simulation(opened(folder, "pages", "more", rates=[1, 3]), 0, 4, 400)
    more, pages_source = simulation.by_source()
    assert more.name == str(folder / "more")
    assert more.documents == 50, "all of them, read again and again"
    assert pages_source.documents == pytest.approx(100, abs=8)
