"""Documents of other layouts as tars of ours: what is read, what is learned, what is left out, and which rows are
errors."""

import hashlib
import io
import json
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from data_prep.interleaved import convert
from data_prep.interleaved.rows import ReaderOptions, read_image
from src.errors import DataError
from src.systems.interleaved.streaming import manifest, tar_index
from tests.systems.interleaved.streaming.pages import picture, tokenizer
from tests.systems.interleaved.streaming.test_tar_index import tar_of

QUESTION, ANSWER = ("prompt", b"Question: How many?\nAnswer:"), ("text", b"Two.")
A, B, C = (picture(number) for number in range(3))
IMAGES = [("image", image) for image in (A, B, C)]


def run(layout: str, files: Sequence[Path], output: Path, *more: str) -> dict[str, int]:
    """What was counted."""
    assert convert.main([layout, *map(str, files), "--output", str(output), *more]) == 0
    return json.loads((output / "converted.json").read_text())


def read(folder: Path) -> list[list[tuple[str, bytes]]]:
    """Kind and content of the parts of each document that the indexes call good."""
    parsed = list[list[tuple[str, bytes]]]()
    for shard in manifest.load(folder).shards:
        index = tar_index.load(folder / shard.url)
        with tar_index.open_tar(folder / shard.url) as tar:
            for number in range(len(index)):
                assert not index.documents["bad"][number]
                parts = [
                    (tar_index.KINDS[p["kind"]], bytes(tar[int(p["offset"]) :][: int(p["size"])]))
                    for p in index.parts_of(number)
                ]
                parsed.append(parts[:-1])
                assert parts[-1][0] == "metadata"
    return parsed


def tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.write_bytes(tar_of([*members]))
    return path


def lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"user": user, "assistant": assistant, "source": "toy"} for user, assistant in pairs]


def page(key: str, parts: Sequence[tuple[str, bytes]], num_missing: int = 0) -> list[tuple[str, bytes]]:
    """The members of a page as vision/m4 writes them. num_missing: parts at its end that are listed and not there."""
    ending = {"text": "txt", "image": "jpeg"}
    members = [(f"{key}.{i}.{kind}.{ending[kind]}", content) for i, (kind, content) in enumerate(parts)]
    member_list = (f"{key}.metadata.txt", "\n".join(name for name, _ in members).encode())
    return [*sorted(members[: len(members) - num_missing]), member_list]


def test_pages_of_m4_stay_in_order_and_incomplete_ones_are_dropped(tmp_path: Path):
    twelve = [part for number in range(6) for part in (("text", f"t{number}".encode()), IMAGES[number % 3])]
    bad_parts = [("text", b"a"), ("image", b"no image"), IMAGES[0]]
    wholly = [("text", b"a"), ("image", b"no image")]
    members = [
        *page("0_x", twelve),
        *page("1_y", twelve[:3], num_missing=1),
        *page("2_z", bad_parts),
        *page("3_v", wholly),
    ]
    members += [*page("4_w", [("text", b"\xff")]), *page("5_u", [IMAGES[0]])]
    counts = run("wd", [tar(tmp_path / "a.tar", members)], tmp_path / "out")
    assert read(tmp_path / "out") == [twelve, [("text", b"a"), IMAGES[0]]]
    assert counts == {
        "rows": 6,
        "documents": 2,
        "images": 7,
        "images left out: cannot be decoded": 2,
        "left out: incomplete": 1,
        "left out: none of its images can be read": 1,
        "left out: a text is not UTF-8": 1,
        "left out: it has no text": 1,
    }


def test_questions_of_m4_are_read_and_answers_are_learned(tmp_path: Path):
    members = [("k1.answer.txt", b"Two."), ("k1.image.jpeg", A), ("k1.question.txt", b"How many?\n")]
    members += [("k2.answer.txt", b"Two."), ("k2.image.jpeg", b""), ("k2.question.txt", b"How many?")]
    for layout in ("vqav2_task_finetuning", "docvqa"):
        counts = run(layout, [tar(tmp_path / "a.tar", members)], tmp_path / layout)
        assert read(tmp_path / layout) == [[IMAGES[0], QUESTION, ANSWER]]
        assert counts == {"rows": 2, "documents": 1, "images": 1, "left out: an image is not there": 1}
        assert manifest.load(tmp_path / layout).shards[0].source == layout
    run("docvqa", [tmp_path / "a.tar"], tmp_path / "asked", "--question", r"Q: {question}\nA:", "--source", "q")
    assert read(tmp_path / "asked")[0][1] == ("prompt", b"Q: How many?\nA:")
    assert manifest.load(tmp_path / "asked").shards[0].source == "q"


def test_turns_of_m4(tmp_path: Path):
    first, second = (json.dumps(turn).encode() for turn in turns(("How many?", "Two."), ("Of?", "Cats.")))
    members = page("0_x", [IMAGES[0], IMAGES[1], ("text", first), ("text", second)])
    run("sft", [tar(tmp_path / "a.tar", members)], tmp_path / "out")
    of = ("prompt", b"Question: Of?\nAnswer:")
    assert read(tmp_path / "out") == [[*IMAGES[:2], QUESTION, ("text", b"Two.\n"), of, ("text", b"Cats.")]]


def test_captions_of_m4_follow_their_images(tmp_path: Path):
    members = [("k1.text.txt", b"a cat"), ("k1.image.jpeg", A), ("k2.image.jpeg", B), ("k2.text.txt", b"  ")]
    counts = run("icp", [tar(tmp_path / "a.tar", members)], tmp_path / "out")
    assert read(tmp_path / "out") == [[IMAGES[0], ("text", b"a cat")]]
    assert counts["left out: it has no text"] == 1


def pdf(pages: int) -> bytes:
    """Pages of other greys and 24 x 48 points."""
    images = [Image.new("L", (24, 48), 40 * number) for number in range(pages)]
    out = io.BytesIO()
    images[0].save(out, "PDF", save_all=True, append_images=images[1:], resolution=72)
    return out.getvalue()


def test_every_page_of_a_pdf_is_a_document_of_its_own(tmp_path: Path):
    """m4 made three times the last page of three: its pages shared one dict."""
    texts = [{"text": ["page", str(number)], "bbox": []} for number in range(3)]
    three = json.dumps({"pages": texts}).encode()
    members = [
        ("a.json", three),
        ("a.pdf", pdf(3)),
        ("b.json", three),
        ("b.pdf", pdf(2)),
        ("c.json", three),
        ("c.pdf", b"%PDF-none"),
    ]
    members += [
        ("d.json", json.dumps({"pages": [{"lines": {"text": ["one", "two"]}}]}).encode()),
        ("d.png", B),
        ("e.pdf", pdf(1)),
    ]
    counts = run("ocr", [tar(tmp_path / "a.tar", members)], tmp_path / "out")
    parsed = read(tmp_path / "out")
    assert [parts[1] for parts in parsed] == [("text", f"page\n{number}".encode()) for number in range(3)] + [
        ("text", b"one\ntwo")
    ]
    for number, ((kind, content), _) in enumerate(parsed[:3]):
        with Image.open(io.BytesIO(content)) as image:
            assert (kind, image.mode, image.size) == ("image", "L", (50, 100)), "150 dots of an inch of 72 points"
            assert image.getpixel((25, 50)) == pytest.approx(40 * number, abs=3)
    assert parsed[3][0] == IMAGES[1]
    assert counts == {
        "rows": 7,
        "documents": 4,
        "images": 4,
        "left out: it has other pages than texts of pages": 1,
        "left out: its PDF cannot be read": 1,
        "left out: incomplete": 1,
    }


def test_images_of_mmc4_precede_their_sentences(tmp_path: Path):
    url = "http://example.org/b.png"
    (tmp_path / "a.jpg").write_bytes(A)
    (tmp_path / f"{hashlib.sha256(url.encode()).hexdigest()}.png").write_bytes(B)
    infos = [{"image_name": "a.jpg", "matched_text_index": 1}, {"raw_url": url, "matched_text_index": 0}]
    infos.append({"image_name": "gone.jpg", "matched_text_index": 0})
    rows = [{"text_list": ["one", "two"], "image_info": infos}, {"text_list": ["one"], "image_info": infos[2:]}]
    counts = run("mmc4", [lines(tmp_path / "a.jsonl", rows)], tmp_path / "out", "--images", str(tmp_path))
    assert read(tmp_path / "out") == [[IMAGES[1], ("text", b"one"), IMAGES[0], ("text", b"two")]]
    drops = {"images left out: is not there": 2, "left out: none of its images can be read": 1}
    assert counts == {"rows": 2, "documents": 1, "images": 2, **drops}


def test_texts_and_images_of_obelics(tmp_path: Path):
    (tmp_path / "a.jpg").write_bytes(A)
    rows = [{"texts": ["one", None, "two"], "images": [None, "a.jpg", None]}, {"texts": ["words"], "images": [None]}]
    run("obelics", [lines(tmp_path / "a.jsonl", rows)], tmp_path / "out", "--images", str(tmp_path))
    assert read(tmp_path / "out") == [[("text", b"one"), IMAGES[0], ("text", b"two")], [("text", b"words")]]


def test_texts_that_spell_images_are_left_out(tmp_path: Path):
    rows = [{"texts": ["one", "<image> two"], "images": [None, None]}, {"texts": ["<image>"], "images": [None]}]
    counts = run("obelics", [lines(tmp_path / "a.jsonl", rows)], tmp_path / "out", "--images", str(tmp_path))
    assert read(tmp_path / "out") == [[("text", b"one")]]
    drops = {"texts left out: a text that spells <image>": 2, "left out: it has no text": 1}
    assert counts == {"rows": 2, "documents": 1, "images": 0, **drops}


def test_images_that_are_there_later_are_not_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = lines(tmp_path / "a.jsonl", [{"texts": ["one", None], "images": [None, "a.jpg"]}] * 2)
    words = ["obelics", str(rows), "--output", str(tmp_path / "out"), "--images", str(tmp_path)]
    (tmp_path / "b.jpg").write_bytes(A)
    (tmp_path / "a.jpg").write_bytes(B)
    assert convert.main(words) == convert.main(words) == 0
    (tmp_path / "c.jpg").write_bytes(A)
    assert convert.main(words) == 1
    assert str(tmp_path / "out") in capsys.readouterr().err


def test_turns_of_tables(tmp_path: Path):
    (tmp_path / "c.png").write_bytes(C)
    images = [{"bytes": A, "path": None}, {"bytes": None, "path": "c.png"}]
    rows = [
        {"images": images, "texts": turns(("How many?", "Two."))},
        {"images": images, "texts": turns(("Is <image> in", "No."), ("<image>?", "Yes."))},
        {"images": images, "texts": turns(("Is <image>?", "No."))},
        {"images": images[:1], "texts": turns(("", "A picture."))},
    ]
    for layout in ("finevision", "the_cauldron"):
        counts = run(layout, [table(tmp_path / "a.parquet", rows)], tmp_path / layout, "--images", str(tmp_path))
        inline = [("prompt", b"Question: Is "), IMAGES[0], ("prompt", b" in\nAnswer:"), ("text", b"No.\n")]
        inline += [("prompt", b"Question: "), IMAGES[2], ("prompt", b"?\nAnswer:"), ("text", b"Yes.")]
        assert read(tmp_path / layout) == [
            [IMAGES[0], IMAGES[2], QUESTION, ANSWER],
            inline,
            [IMAGES[0], ("text", b"A picture.")],
        ]
        assert counts["left out: its texts have other places for images than it has images"] == 1
    counts = run("finevision", [tmp_path / "a.parquet"], tmp_path / "without")
    assert counts["left out: an image is not there"] == 2, "one that has a path alone, and no folder is given"


def test_images_keep_their_bytes(tmp_path: Path):
    tiff = picture(7, (20, 10), "TIFF")
    cut = picture(9, (64, 64), "JPEG")[:-200]
    rows = [{"images": [{"bytes": image, "path": ""}], "texts": turns(("How many?", "Two."))} for image in (tiff, cut)]
    counts = run("finevision", [table(tmp_path / "a.parquet", rows)], tmp_path / "out")
    ((_, content), *_), *others = read(tmp_path / "out")
    assert (content, others, counts["left out: an image cannot be decoded"]) == (tiff, [], 1)


@pytest.mark.parametrize(
    ("layout", "content", "message"),
    [
        ("mmc4", [{"text_list": ["a"], "image_info": []}, []], r"in:2: expected a JSON object, got \[\]"),
        ("mmc4", [{"text_list": "a", "image_info": []}], "in:1: text_list: expected list, got 'a'"),
        (
            "mmc4",
            [{"text_list": ["a"], "image_info": [{"image_name": "x", "matched_text_index": 1}]}],
            r"in:1: image_info\[0\].matched_text_index: expected the index of one of 1 texts, got 1",
        ),
        (
            "mmc4",
            [{"text_list": ["a"], "image_info": [{"image_name": "../x", "matched_text_index": 0}]}],
            r"in:1: image_info\[0\]: expected an image path inside .*, got '../x'",
        ),
        ("obelics", [{"texts": ["a"], "images": []}], "in:1: 1 texts and 0 images"),
        (
            "obelics",
            [{"texts": ["a", None], "images": [None, None]}],
            "in:1: at place 1, expected a text or an image, got neither",
        ),
        ("obelics", [{"texts": [1], "images": [None]}], r"in:1: texts\[0\]: expected str, got 1"),
        ("finevision", [{"images": [], "text": "a"}], "in: column 'texts' is missing. Columns: images, text."),
        (
            "finevision",
            [{"images": [], "texts": [{"user": "a"}]}],
            r"in: row 1: texts\[0\].assistant: expected str, got None",
        ),
        ("finevision", b"words", "in: not a parquet file, or damaged"),
        ("finevision", None, "in: no such file"),
        ("wd", b"words", "in: cut in a header: 5 bytes, and no end of archive. Get it again"),
        (
            "sft",
            [("a.0.text.txt", b"{}"), ("a.metadata.txt", b"a.0.text.txt")],
            "in: document 00000000: user: expected str, got None",
        ),
        ("ocr", [("a.json", b"{}"), ("a.png", A)], "in: document a: pages: expected list, got None"),
        (
            "ocr",
            [("a.json", b'{"pages": [{}]}'), ("a.png", A)],
            r"in: document a: pages\[0\].text: expected list, got None",
        ),
        ("icp", [("a.image.jpeg", A)], r"out: no document could be made from 1 rows. left out: it has no text: 1"),
    ],
)
def test_wrong_rows_are_errors_that_name_them(
    layout: str, content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, images = tmp_path / "in", tmp_path / "images"
    images.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        {"finevision": table, "mmc4": lines, "obelics": lines}.get(layout, tar)(path, content)
    assert convert.main([layout, str(path), "--output", str(tmp_path / "out"), "--images", str(images)]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out" / "shards.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--question", "Q:"], r"--question: expected text that contains \{question\} once, got 'Q:'"),
        (["--images", "none"], "--images none: no such folder"),
        (["--per_shard", "0"], "--per_shard: expected at least 1, got 0"),
        (["in"], "in: listed twice"),
    ],
)
def test_wrong_options(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(tmp_path)
    tar(Path("in"), [("a.image.jpeg", A), ("a.text.txt", b"a")])
    assert convert.main(["icp", "in", *words, "--output", "out"]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_rerun_after_a_full_disk_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = [10] * 20 + [100_000] * 20
    members = [
        member
        for i, n in enumerate(sizes)
        for member in ((f"{i:02}.image.jpeg", IMAGES[i % 3][1]), (f"{i:02}.text.txt", b"x" * n))
    ]
    files = [tar(tmp_path / "a.tar", members[:50]), tar(tmp_path / "b.tar", members[50:])]
    for seed in ([], ["--seed", "3"]):
        name = "".join(seed)
        words = ["icp", *map(str, files), "--per_shard", "8", *seed, "--output"]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        try:
            assert convert.main([*words, str(tmp_path / f"again{name}")]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "cannot write" in capsys.readouterr().err
        assert list((tmp_path / f"again{name}").rglob("*.tar"))
        for folder in ("again", "once"):
            assert convert.main([*words, str(tmp_path / f"{folder}{name}")]) == 0
            assert f"{folder}{name}: 40 rows, 40 documents, 40 images" in capsys.readouterr().out
        again, once = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{folder}{name}").iterdir() if path.name != ".lock"}
            for folder in ("again", "once")
        )
        assert again == once
        assert len(read(tmp_path / f"again{name}")) == 40
    assert read(tmp_path / "again") != read(tmp_path / "again--seed3")
    assert sorted(read(tmp_path / "again")) == sorted(read(tmp_path / "again--seed3"))


def test_tokens_are_counted(tmp_path: Path):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    tar(tmp_path / "a.tar", [("a.image.jpeg", A), ("a.text.txt", b"abc")])
    run("icp", [tmp_path / "a.tar"], tmp_path / "out", "--tokenizer", str(tmp_path / "tokenizer"))
    tokens = tar_index.load(tmp_path / "out" / "shard-00000.tar").tokens
    assert tokens is not None
    assert tokens.tolist() == [0, 3, 0]


def test_real_captions(shared_data: Path, tmp_path: Path):
    """Of Conceptual Captions, by img2dataset."""
    source = shared_data / "image" / "cc12m_wds" / "cc12m-shared.tar"
    counts = {"rows": 16, "documents": 16, "images": 16, "members passed over: no known suffix: .json": 16}
    assert run("icp", [source], tmp_path / "out") == counts
    assert all([kind for kind, _ in parts] == ["image", "text"] for parts in read(tmp_path / "out"))


def test_real_pages_of_mmc4(shared_data: Path, tmp_path: Path):
    """Their pixels are not there: photographs of other origin stand for those of every second image."""
    (source,) = (shared_data / "image" / "mmc4_docs_no_pixels").glob("*.jsonl")
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    names = sorted({info["image_name"] for row in rows for info in row["image_info"]})
    photographs = sorted((shared_data / "image" / "interleaved_chat" / "mllm_demo_data").glob("*.jpg"))
    there = names[::2]
    for number, name in enumerate(there):
        (tmp_path / name).symlink_to(photographs[number % len(photographs)])
    counts = run("mmc4", [source], tmp_path / "out", "--images", str(tmp_path))
    parsed = read(tmp_path / "out")
    expected_parts = list[list[str]]()
    for row in rows:
        placements = [(info["matched_text_index"], info["image_name"]) for info in row["image_info"]]
        kinds = list[str]()
        for number, text in enumerate(row["text_list"]):
            kinds += ["image" for place, name in placements if place == number and name in there]
            kinds += ["text"] if text.strip() else []
        if "image" in kinds or not placements:
            expected_parts.append(kinds)
    assert [[kind for kind, _ in parts] for parts in parsed] == expected_parts
    assert counts["rows"] == len(rows) == 70
    assert counts["images"] + counts["images left out: is not there"] == sum(len(row["image_info"]) for row in rows)


def test_real_conversations(shared_data: Path, tmp_path: Path):
    """Images stand inside their turns; in one conversation the same one twice."""
    folder = shared_data / "image" / "interleaved_chat"
    rows = list[dict[str, Any]]()
    for row in json.loads((folder / "mllm_demo.json").read_text()):
        contents = [message["content"] for message in row["messages"]]
        images = [{"bytes": (folder / name).read_bytes(), "path": name} for name in row["images"]]
        rows.append({"images": images, "texts": turns(*zip(contents[::2], contents[1::2], strict=True))})
    counts = run("finevision", [table(tmp_path / "a.parquet", rows)], tmp_path / "out")
    assert counts == {"rows": 6, "documents": 6, "images": sum(len(row["images"]) for row in rows)}
    for row, parts in zip(rows, read(tmp_path / "out"), strict=True):
        assert [content for kind, content in parts if kind == "image"] == [image["bytes"] for image in row["images"]]
        texts = b"".join(content for kind, content in parts if kind != "image").decode()
        assert texts == "\n".join(
            f"Question: {turn['user'].replace('<image>', '').strip()}\nAnswer:{turn['assistant'].strip()}"
            for turn in row["texts"]
        )


@pytest.mark.parametrize("name", ["missing.png", "x" * 300, "x" * 5000])
def test_an_image_that_is_not_there_is_empty_whatever_its_name(name: str, tmp_path: Path):
    assert read_image(name, ReaderOptions(images=tmp_path), "rows:1") == b""


def test_a_name_of_an_image_that_is_no_text_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"rows:1: .*5"):
        read_image(5, ReaderOptions(images=tmp_path), "rows:1")
