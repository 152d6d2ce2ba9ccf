"""Mapped members: the layouts of webdataset, img2dataset, OBELICS, mmc4 and Energon, from the tar to a row."""

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.interleaved import index
from src.errors import DataError
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from src.systems.interleaved.streaming import manifest, tar_index
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.streaming.test_tar_index import tar_of

TOKENIZER = pages.tokenizer()
A, B, C = (pages.picture(number) for number in (1, 2, 3))


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


LAYOUTS: dict[str, tuple[list[tuple[str, bytes]], dict[str, Any], list[Any]]] = {
    "webdataset, two images": (
        [("k.right.jpg", B), ("k.left.jpg", A), ("k.mask.png", C), ("k.txt", b"words")],
        {"image": ["left.jpg", "RIGHT.jpg"]},
        [1, 2, "words"],
    ),
    "webdataset, a class": ([("k.cls", b"7"), ("k.png", A)], {"text": "cls"}, [1, "7"]),
    "img2dataset": (
        [("k.jpg", A), ("k.txt", b"file"), ("k.json", as_json({"caption": "in json", "url": "u"}))],
        {"image": "jpg", "text": "json:caption"},
        [1, "in json"],
    ),
    "OBELICS": (
        [("k.json", as_json({"texts": ["one", None, "two"], "images": [None, "b.jpg", None]})), ("k.b.jpg", B)],
        {"image": "json:images", "text": "json:texts"},
        ["one", 2, "two"],
    ),
    "OBELICS, addresses and numbered members": (
        [
            ("k.1.jpg", A),
            ("k.2.jpg", B),
            ("k.json", as_json({"texts": [None, "one", None], "images": ["http://x/a", None, "http://x/b.jpg"]})),
        ],
        {"image": "json:images", "text": "json:texts"},
        [1, "one", 2],
    ),
    "mmc4": (
        [
            (
                "k.json",
                as_json(
                    {"text_list": ["one", "two"], "image_info": [{"image_name": "k.b.png", "matched_text_index": 1}]}
                ),
            ),
            ("k.b.png", B),
        ],
        {"image": "json:image_info", "text": "json:text_list"},
        ["one", 2, "two"],
    ),
    "mmc4 with embedded images": (
        [
            (
                "k.json",
                as_json(
                    {
                        "text_list": ["one", "two"],
                        "image_info": [
                            {"image_base64": base64.b64encode(C).decode(), "matched_text_index": 1},
                            {"image_base64": base64.b64encode(A).decode(), "matched_text_index": 0},
                        ],
                    }
                ),
            )
        ],
        {"image": "json:image_info", "text": "json:text_list"},
        [1, "one", 3, "two"],
    ),
    "Energon, captions": (
        [("k.detail.json", as_json([{"c": "words"}])), ("k.jpg", A)],
        {"text": "detail.json:0.c"},
        [1, "words"],
    ),
    "Energon, questions": (
        [("k.json", as_json({"q": "why?", "a": ["so", "there"]})), ("k.jpg", A)],
        {"image": "jpg", "prompt": "json:q", "text": "json:a"},
        [1, "?why?", "so", "there"],
    ),
}


def make(folder: Path, members: list[tuple[str, bytes]], fields: dict[str, Any] | None, *more: str) -> int:
    """Index a tar with these members as split "train" of source "x"; returns the exit code."""
    (folder / "a.tar").write_bytes(tar_of(members))
    words = [] if fields is None else ["--fields", json.dumps(fields)]
    return index.main(
        [str(folder / "a.tar"), "--output", str(folder / "x" / "train"), "--processes", "1", "--verify", *words, *more]
    )


def build_data(folder: Path, **source: Any) -> Any:
    config = pages.config({"x": {"path": "x", **source}}, max_frames=20, sequence_tokens=200)
    return bind(DATASETS, config).build(Places(folder, folder), TOKENIZER, "train", 0)


def list_parts(data: Any) -> list[Any]:
    """Numbers of images and texts of the first document, prompts after a question mark, in the order of its row."""
    (piece,) = data.pieces(0)
    row = data.read_piece(0, piece)
    images = iter(row.frames)
    parts, numbers = list[Any](), {pages.colour(number): number for number in (1, 2, 3)}
    for element in piece.elements:
        if element.grid is not None:
            parts.append(numbers[round((float(next(images)[0, 0].mean()) + 1) * 255 / 2)])
        else:
            parts.append("?" * (element.kind == tar_index.PROMPT) + data.documents[0].text(0, element.part))
    text = TOKENIZER.decode(
        [token for token in row.input_ids if token not in TOKENIZER.convert_tokens_to_ids(pages.TOKENS)]
    )
    assert (
        text.replace(" ", "")
        == "".join(part.removeprefix("?").replace(" ", "") for part in parts if isinstance(part, str)) + "<end>"
    )
    return parts


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("with_counts", [True, False])
def test_layout_is_read_from_its_mapping(layout: str, with_counts: bool, tmp_path: Path):
    members, fields, parts = LAYOUTS[layout]
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    assert make(tmp_path, members, fields, *(["--tokenizer", str(tmp_path / "tokenizer")] if with_counts else [])) == 0
    assert list_parts(build_data(tmp_path, fields=fields)) == parts
    assert list_parts(build_data(tmp_path)) == parts, "the index has the mapping"


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_mapping_that_is_not_that_of_the_index_is_refused(layout: str, tmp_path: Path):
    members, fields, _ = LAYOUTS[layout]
    assert make(tmp_path, members, fields) == 0
    with pytest.raises(DataError, match=r"data\.sources\.x\.fields.*other\.jpg"):
        build_data(tmp_path, fields={"image": "other.jpg"})


def test_index_without_a_mapping_is_refused_where_one_is_set(tmp_path: Path):
    assert make(tmp_path, [("k.jpg", A), ("k.txt", b"words")], None) == 0
    with pytest.raises(DataError, match=r"data\.sources\.x\.fields"):
        build_data(tmp_path, fields={"text": "txt"})


def test_another_mapping_makes_the_index_again(tmp_path: Path):
    members, fields, parts = LAYOUTS["img2dataset"]
    assert make(tmp_path, members, None) == 0
    assert list_parts(build_data(tmp_path)) == [1, "file"]
    assert manifest.load(tmp_path / "x" / "train").facts["passed_over"] == {
        "no known suffix": {".json": [1, len(members[2][1])]}
    }
    assert make(tmp_path, members, fields) == 0
    assert list_parts(build_data(tmp_path)) == parts
    facts = manifest.load(tmp_path / "x" / "train").facts
    assert (facts["fields"], facts["passed_over"]) == (
        {"image": ["jpg"], "text": ["json:caption"]},
        {"not in --fields": {".txt": [1, 4]}},
    )


def test_members_of_a_document_with_other_json_are_counted_by_the_reason(tmp_path: Path):
    members = [("a.jpg", A), ("a.json", b"{not"), ("b.jpg", A), ("b.json", b'{"caption": "words"}')]
    assert make(tmp_path, members, {"text": "json:caption"}) == 0
    facts = manifest.load(tmp_path / "x" / "train").facts
    assert facts["passed_over"] == {"its JSON does not have the mapped fields": {".jpg": [1, len(A)], ".json": [1, 4]}}


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        ({"texts": ["one"], "images": ["a.jpg", None]}, "its JSON does not have the mapped fields"),
        ({"texts": ["one", None], "images": ["a.jpg", None]}, "its JSON does not have the mapped fields"),
        ({"texts": [{"no": "text"}], "images": []}, "its JSON does not have the mapped fields"),
        (
            {"texts": ["one"], "images": [{"image_name": "a.jpg", "matched_text_index": 1}]},
            "its JSON does not have the mapped fields",
        ),
        ({"texts": ["one"], "images": ["data:image/png;base64,!"]}, "an image cannot be decoded"),
        ({"texts": ["\ud800"], "images": []}, "its JSON does not have the mapped fields"),
        ({"texts": ["<image>"], "images": []}, "it has no text"),
        ({"texts": None}, "it has no text"),
        ({"texts": ["one", None], "images": [None, "gone.jpg"]}, "none of its images is in the tar"),
        ({"texts": ["one", None], "images": [None, 7]}, "its JSON does not have the mapped fields"),
        ({"texts": True}, "its JSON does not have the mapped fields"),
        ("no object", "it has no text"),
    ],
)
def test_document_with_unfitting_json_is_bad(value: Any, bad: str, tmp_path: Path):
    good = {"texts": ["one", None], "images": [None, "a.jpg"]}
    members = [("0.json", as_json(good)), ("0.a.jpg", A), ("1.json", as_json(value)), ("2.json", b"{"), ("2.a.jpg", B)]
    assert make(tmp_path, members, {"image": "json:images", "text": "json:texts"}) == 0
    reasons = manifest.load(tmp_path / "x" / "train").facts["bad_documents"]
    assert reasons == Counter([bad, "its JSON does not have the mapped fields"])
    assert [len(build_data(tmp_path).pieces(document)) for document in range(3)] == [1, 0, 0]


def test_images_that_are_not_in_the_tar_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    value = {"texts": ["one", None, None], "images": [None, "gone.jpg", "a.jpg"]}
    assert (
        make(tmp_path, [("k.json", as_json(value)), ("k.a.jpg", A)], {"image": "json:images", "text": "json:texts"})
        == 0
    )
    assert "not read: 1 .json:, 0 bytes: an image that is not in the tar" in capsys.readouterr().out
    assert list_parts(build_data(tmp_path)) == ["one", 1]


def test_documents_without_any_of_their_images_are_named_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    value = {"texts": ["one", None], "images": [None, "gone.jpg"]}
    assert make(tmp_path, [("k.json", as_json(value))], {"image": "json:images", "text": "json:texts"}) == 1
    error = capsys.readouterr().err
    assert "none of its images is in the tar: 1" in error
    assert "--fields" not in error


@pytest.mark.parametrize(
    ("members", "images", "parts"),
    [
        ([("k.0.jpg", A), ("k.1.jpg", B)], ["0.jpg", None, "1.jpg", "2.jpg", None, "3.jpg"], [1, "t", 2, "t"]),
        ([("k.1.jpg", A), ("k.3.jpg", B)], ["0.jpg", None, "1.jpg", "2.jpg", None, "3.jpg"], ["t", 1, "t", 2]),
        ([("k.0.jpg", A), ("k.1.jpg", B)], ["http://x/1.jpg", None, "http://y/0.jpg"], [1, "t", 2]),
        ([("k.0.jpg", A), ("k.1.jpg", B)], ["http://x/1.jpg", None, "http://y/1.jpg"], [1, "t", 2]),
    ],
)
def test_images_of_lists_are_matched_with_the_right_members(
    members: list[tuple[str, bytes]], images: list[str | None], parts: list[Any], tmp_path: Path
):
    value = {"texts": [None if image else "t" for image in images], "images": images}
    fields = {"image": "json:images", "text": "json:texts"}
    assert make(tmp_path, [("k.json", as_json(value)), *members], fields) == 0
    assert list_parts(build_data(tmp_path)) == parts


def test_nan_in_json_is_no_text(tmp_path: Path):
    members = [("a.json", b'{"c": NaN}'), ("a.jpg", A), ("b.json", b'{"c": 1e999}'), ("b.jpg", A)]
    assert make(tmp_path, [*members, ("c.json", b'{"c": 5.5}'), ("c.jpg", A)], {"text": "json:c"}) == 0
    assert manifest.load(tmp_path / "x" / "train").facts["bad_documents"] == {"it has no text": 2}


@pytest.mark.parametrize(
    ("words", "message_part"),
    [
        (["--fields", "{"], "{"),
        (["--fields", '{"images": "jpg"}'], "images"),
        (["--fields", '{"image": ""}'], "image"),
        (["--fields", '{"text": ["txt", "TXT"]}'], "txt"),
        (["--fields", "{}"], "text"),
        (["--fields", '{"text": "json:"}'], "json:"),
        (["--fields", '{"text": 3}'], "text"),
        (["--fields", '{"text": ["txt", "capton"]}'], "capton"),
        (["--max_pixels", "0"], "0"),
    ],
)
def test_bad_option_is_one_line(
    words: list[str], message_part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert make(tmp_path, [("k.jpg", A), ("k.txt", b"words")], None, *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words[0] in error
    assert message_part in error
    assert not (tmp_path / "x" / "train" / "shards.json").exists()


def test_real_captions_from_json(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Conceptual Captions by img2dataset."""
    source = shared_data / "image" / "cc12m_wds" / "cc12m-shared.tar"
    words = ["--output", str(tmp_path), "--processes", "1", "--fields", '{"text": "json:caption"}']
    assert index.main([str(source), *words]) == 0
    report = capsys.readouterr().out
    assert "field json:caption: in 16 of 16 documents" in report
    assert "not read: 16 .txt" in report
