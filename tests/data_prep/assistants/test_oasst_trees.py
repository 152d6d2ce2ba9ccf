"""Files of Open-Assistant's trees and messages are counted, filtered and split."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import oasst_trees


def message(name: str, role: str = "prompter", *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    for reply in replies:
        reply["parent_id"] = name
    return {
        "message_id": name,
        "text": f"text of {name}",
        "role": role,
        "lang": "en",
        "replies": list(replies),
        "rank": None,
        **more,
    }


def trees() -> list[dict[str, Any]]:
    first = message(
        "p1",
        "prompter",
        message("a1", "assistant", rank=0),
        message("a2", "assistant", rank=1, synthetic=True),
        user_id="u1",
    )
    second = message(
        "p2",
        "prompter",
        message("b1", "assistant", deleted=True),
        message("b2", "assistant"),
        lang="de",
        review_result=False,
    )
    third = message("p3", "prompter", message("c1", "assistant", message("p4", user_id="u1")))
    states = ("ready_for_export", "growing", "ready_for_export")
    states_of_messages = zip((first, second, third), states, strict=True)
    return [
        {"message_tree_id": prompt["message_id"], "tree_state": state, "prompt": prompt}
        for prompt, state in states_of_messages
    ]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "trees.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(tree) + "\n" for tree in trees()).encode()))
    return path


def rows(path: Path) -> list[Any]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]


def run(action: str, source: Path, *words: str) -> list[str]:
    """Ids, or texts, of what was written."""
    output = source.with_name("out.jsonl")
    assert oasst_trees.main([action, str(source), str(output), *words]) == 0
    return [row if isinstance(row, str) else row.get("message_id", row.get("message_tree_id")) for row in rows(output)]


def test_counts(source: Path, capsys: pytest.CaptureFixture[str]):
    assert oasst_trees.main(["counts", str(source)]) == 0
    counts = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {name: int(count) for name, count in counts.items()} == {
        "trees": 3, "messages": 9, "synthetic": 1, "deleted": 1, "role prompter": 4, "role assistant": 5,
        "language en": 8, "language de": 1, "prompts with replies": 2, "prompts with ranked replies": 1,
    }  # fmt: skip
    assert oasst_trees.main(["counts", str(source), "--lang", "de,fr"]) == 0
    assert "messages                     1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["p1", "p2", "p3"]),
        (("--state", "growing,ranking"), ["p2"]),
        (("--synthetic", "without"), ["p2", "p3"]),
        (("--synthetic", "only"), ["p1"]),
        (("--lang", "de"), ["p2"]),
    ],
)
def test_trees_are_filtered(source: Path, words: tuple[str, ...], expected: list[str]):
    assert run("filter_trees", source, *words) == expected


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_b27_nulls_are_left_out_of_trees_too(source: Path, name: str):
    """`exclude_none` did nothing in trees. And as a flag it is off where it is not given: `type=bool` was always
    true."""
    output = source.with_name(name)
    for words, nulls in (([], True), (["--without_nulls"], False)):
        assert oasst_trees.main(["filter_trees", str(source), str(output), *words]) == 0
        assert ("null" in json.dumps(rows(output))) == nulls
    assert rows(output)[0]["prompt"]["replies"][0]["rank"] == 0


def test_b27_a_split_is_of_trees_and_depends_on_its_seed(tmp_path: Path):
    trees = [
        {"message_tree_id": f"t{i}", "tree_state": "growing", "prompt": message(f"t{i}", "prompter", message(f"r{i}"))}
        for i in range(40)
    ]
    source = tmp_path / "trees.jsonl"
    source.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
    flat = tmp_path / "flat.jsonl"
    messages = [
        {"message_tree_id": tree["message_tree_id"], **each}
        for tree in trees
        for each in oasst_trees.walk(tree["prompt"])
    ]
    flat.write_text("".join(json.dumps({**row, "replies": []}) + "\n" for row in messages))
    val_ids = []
    for path, seed in ((source, "1"), (source, "1"), (flat, "1"), (source, "2")):
        outputs = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
        assert oasst_trees.main(["split", str(path), *map(str, outputs), "--val_percent", "25", "--seed", seed]) == 0
        train, val = ({row["message_tree_id"] for row in rows(output)} for output in outputs)
        assert train | val == {f"t{i}" for i in range(40)}
        assert not train & val
        assert sum(len(rows(output)) for output in outputs) == (80 if path == flat else 40)
        val_ids.append(val)
    assert val_ids[0] == val_ids[1] == val_ids[2] != val_ids[3]
    assert len(val_ids[0]) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["filter_trees", "trees", "out", "--state", "grown"],
            "--state: unknown state 'grown'. Did you mean 'growing'?",
        ),
        (["filter_trees", "messages", "out"], "messages:1: expected a tree, got a message."),
        (["filter_trees", "trees", "trees"], "a file is used twice"),
        (["split", "trees", "out", "out"], "a file is used twice"),
        (["split", "trees", "out", "val", "--val_percent", "1"], "--val_percent: 1 % of 1 trees"),
        (["split", "trees", "out", "val", "--val_percent", "100"], "expected a number between 0 and 100, got 100."),
        (["split", "messages", "out", "val"], "messages:1: message_tree_id is missing"),
        (
            ["counts", "neither"],
            "neither:1: expected a tree with message_tree_id and prompt, or a message with message_id, got",
        ),
        (["counts", "mute"], "mute:1: field 'text' of a message: expected text, got None."),
        (["counts", "odd"], "odd:1: field 'replies': expected a list of messages, got {'a': 1} (dict)."),
        (["split", "trees", "out", "."], "--output .: "),
        (["filter_trees", "none", "out"], "none: no such file."),
        (["filter_trees", "torn", "out"], "torn:2: "),
    ],
)
def test_errors_leave_the_output_unchanged(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    tree = json.dumps(trees()[0])
    content = {
        "trees": tree,
        "messages": json.dumps(trees()[0]["prompt"]),
        "neither": '{"text": "x"}',
        "torn": f'{tree}\n{{"message',
        "mute": '{"message_id": "x", "role": "prompter"}',
        "odd": '{"message_id": "x", "text": "a", "role": "prompter", "replies": {"a": 1}}',
        "out": "before",
    }
    for name, text in content.items():
        Path(name).write_text(text + "\n")
    assert oasst_trees.main(words) == 1
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == content.keys()
    assert all(Path(name).read_text() == text + "\n" for name, text in content.items())


def test_released_files(shared_data: Path):
    """Trees, and messages with their replies."""
    outputs = [
        oasst_trees.counts(oasst_trees.read(shared_data / "instruct" / "oasst_format" / f"en_100_{kind}.jsonl"))
        for kind in ("tree", "message")
    ]
    assert outputs[0]["trees"] == 99
    assert {**outputs[1], "trees": 99} == outputs[0]


def test_some_trees_are_drawn(source: Path):
    names = ["p1", "p2", "p3"]
    ids_by_seed = {seed: run("filter_trees", source, "--count", "2", "--seed", str(seed)) for seed in range(8)}
    assert all(
        len(tree_ids) == 2 and tree_ids == [name for name in names if name in tree_ids]
        for tree_ids in ids_by_seed.values()
    ), "in their order"
    assert len({tuple(tree_ids) for tree_ids in ids_by_seed.values()}) > 1
    assert run("filter_trees", source, "--count", "2", "--seed", "3") == ids_by_seed[3]
    assert run("filter_trees", source, "--count", "9") == names
    long = trees()
    long[1]["prompt"]["replies"][0]["text"] = "x" * 11
    (source.parent / "long.jsonl").write_text("".join(json.dumps(tree) + "\n" for tree in long))
    assert run("filter_trees", source.parent / "long.jsonl", "--max_length", "10") == ["p1", "p3"]


def test_half_a_surrogate_pair_is_written_as_it_was_read(tmp_path: Path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({**trees()[0], "note": "\ud800 \u00e9"}) + "\n")
    assert oasst_trees.main(["filter_trees", str(source), str(output)]) == 0
    assert rows(output)[0]["note"] == "\ud800 \u00e9"
