"""Each release of resources/conversations: what becomes of a few rows in its layout, and of a person's own file with an
entry in YAML."""

import copy
import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import conversation_table, prepare_conversations
from data_prep.assistants.conversation_forms.columns import look_up
from data_prep.assistants.conversation_forms.rows import SPLIT_NAME, pick
from data_prep.assistants.conversation_forms.translation import load_requests
from data_prep.assistants.conversation_joining import Joiner
from data_prep.assistants.conversation_table import load_form
from src.errors import DataError
from src.files import read_yaml
from src.systems.assistants.conversations.entries import read_entry

FIXTURES = Path(__file__).parent / "release_rows.yaml"
TWELVE = {"ar", "de", "fr", "en", "it", "nl", "tr", "ru", "ms", "ko", "ja", "zh"}


@cache
def fixtures() -> dict[str, Any]:
    return read_yaml(FIXTURES, "rows by release")


def show(row: dict[str, Any]) -> str:
    """A row as the fixtures write it."""

    def show_one(head: str, message: dict[str, Any]) -> str:
        tags = [str(value) for name, value in message.items() if name not in ("role", "content", "rank")]
        return f"{head}{message['content']}" + (f" [{'|'.join(tags)}]" if tags else "")

    messages = [show_one(f"{message['role'][0]}:", message) for message in row.get("messages", ())]
    return row.get("text") or " ".join(
        [*messages, *(show_one(f"{reply['rank']}=", reply) for reply in row.get("replies", ()))]
    )


def prepare(folder: Path, words: list[str], name: str) -> dict[str, list[str]]:
    """The rows of each split."""
    assert prepare_conversations.main([*words, "--name", name, "--data_path", str(folder)]) == 0
    paths = {split: folder / name / f"{split}.jsonl" for split in ("train", "val")}
    return {
        split: [show(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        for split, path in paths.items()
    }


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_release_has_rows():
    """And no name stands in two files."""
    releases = {name.partition(" ")[0].replace("de-en", "{pair}") for name in fixtures()}
    release_names = [name for path in conversation_table.FOLDER.glob("*.yaml") for name in read_yaml(path, "releases")]
    assert sorted(release_names) == sorted(releases)
    assert conversation_table.names() == sorted(release_names)
    assert conversation_table.names("rm") == [
        "anthropic_rlhf", "augment_oasst", "hellaswag", "hf_summary", "hf_summary_pairs", "oasst_export",
        "shp", "webgpt", "webgpt_ranked",
    ]  # fmt: skip


@pytest.mark.parametrize("name", fixtures())
def test_rows_of_each_release(name: str, tmp_path: Path):
    release, _, mode = name.partition(" ")
    fixture = fixtures()[name]
    source = write(tmp_path / fixture.get("file", "rows.jsonl"), fixture["rows"] or fixtures()[release]["rows"])
    words = ["--release", release, "--train", source, *(["--mode", mode] if mode else [])]
    splits = prepare(tmp_path, words if release == "augment_oasst" else [*words, "--val", source], "own")
    assert splits["train"] == fixture["wanted"]
    assert splits["val"] == (["u:Hello? 0=Hi. 1=No."] if release == "augment_oasst" else fixture["wanted"])


def test_a_file_of_ones_own_is_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its files lie beside it; columns, and what is left out, are said there."""
    rows = [{"q": f"What is {i}?", "a": "I'm an AI." if i % 5 == 0 else f"It is {i}."} for i in range(40)]
    with gzip.open(tmp_path / "mine.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    entry = tmp_path / "mine.yaml"
    entry.write_text(
        "mine: {train: [mine.jsonl.gz], licence: ours, form: completion, columns: {prompt: q, completion: a}, "
        "without_refusals: true}"
    )
    splits = prepare(tmp_path, ["--release_file", str(entry)], "mine")
    assert "8 in which the assistant refuses" in capsys.readouterr().out
    assert sorted(splits["train"] + splits["val"]) == sorted(f"u:What is {i}? a:It is {i}." for i in range(40) if i % 5)
    assert 1 <= len(splits["val"]) <= 14


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{licence: x, form: alpacca}", "mine: form: unknown form 'alpacca'. Did you mean 'alpaca'?"),
        (
            "{licence: x, form: {name: text, charactres: 2}}",
            "form: unknown key 'charactres'. Did you mean 'characters'?",
        ),
        ("{licence: x, form: text, trian: [a]}", "mine: unknown key 'trian'. Did you mean 'train'?"),
        (
            "{licence: x, form: text}",
            "--train: missing.",
        ),
        ("{licence: x, form: text, hub: a/b}", "train: missing."),
        ("{licence: x, form: oasst, ranked_form: oasst_ranked}", "mine: ranked_form: "),
        ("{licence: x, form: text, split_column: s, val: [b]}", "mine: split_column: "),
        (
            "{licence: x, form: {name: columns, user: '{a|anny}', assistant: '{b}'}}",
            "form.user: unknown filter 'anny'. Did you",
        ),
        ("{licence: x, form: text, train: [none.jsonl]}", "none.jsonl: no such file."),
    ],
)
def test_wrong_entry_is_refused(entry: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.yaml").write_text(f"mine: {entry}\n")
    words = ["--release_file", str(tmp_path / "mine.yaml"), "--name", "mine", "--data_path", str(tmp_path)]
    assert prepare_conversations.main(words) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_no_question_is_in_both_splits(tmp_path: Path):
    """Of replies to one question, which the split keeps together, of pieces of one text, and of joined
    conversations."""
    questions = [{"instruction": f"{i % 40}?", "input": "", "output": f"a{i}"} for i in range(120)]
    splits = prepare(tmp_path, ["--release", "alpaca", "--train", write(tmp_path / "a.jsonl", questions)], "alpaca")
    prompts = [{row.partition(" ")[0] for row in splits[split]} for split in ("train", "val")]
    assert prompts[1]
    assert not prompts[0] & prompts[1]
    texts = [{"text": f"{i} " * 40_000} for i in range(20)]
    splits = prepare(tmp_path, ["--release", "fanfics", "--train", write(tmp_path / "t.jsonl", texts)], "fanfics")
    begins = [{row.split()[1] for row in splits[split]} for split in ("train", "val")]
    assert sum(map(len, splits.values())) > 30
    assert begins[1]
    assert not begins[0] & begins[1]


def test_choices_depend_only_on_the_row(tmp_path: Path):
    """Not on its place, nor on the name of the file."""
    rows = [{"question": f"{i}?", "answer": {"aliases": [f"{i}{c}" for c in "abcde"]}} for i in range(30)]
    words = ["--release", "trivia_qa_nocontext", "--train"]
    first, second = write(tmp_path / "one.jsonl", rows), write(tmp_path / "two.jsonl", rows[::-1])
    rows_by_file = [
        prepare(tmp_path, [*words, source, "--val", source], name)["train"]
        for source, name in ((first, "a"), (second, "b"))
    ]
    assert rows_by_file[0] == rows_by_file[1][::-1]
    assert len({row[-1] for row in rows_by_file[0]}) == 5
    assert pick("abc", {"a": 1, "b": None}) == pick("abc", {"b": None, "a": 1})


def test_translations_go_both_ways_in_all_languages():
    languages = load_requests()["languages"]
    assert languages.keys() >= TWELVE
    for code in languages.keys() - {"en"}:
        form = load_form({"name": "translation", "pair": f"en-{code}"}, "form")
        rows = [
            show(row) for i in range(60) for row in form.read({"translation": {"en": f"A{i}", code: f"B{i}"}}, "here")
        ]
        assert len(rows) == 60
        forth = [row for row in rows if f"[{code}]" in row]
        assert 15 < len(forth) < 45
        wordings = {"".join(sign for sign in row.partition(" a:")[0] if not sign.isdigit()) for row in forth}
        assert len(wordings) == len(languages[code]["own"]) + 3, "every wording is used"
    assert load_form({"name": "translation", "pair": "zh-tw-en"}, "form")


def test_an_earlier_conversation_is_an_example_now_and_then():
    """B20: of the five before it, never itself."""
    talks = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(400)]
    joiner = Joiner(None, 0.2)
    conversations = [row["messages"] for talk in talks for row in joiner.add({"messages": talk})]
    assert [talk[-2:] for talk in conversations] == talks
    longer = [talk for talk in conversations if len(talk) > 2]
    assert 50 < len(longer) < 110
    assert all(1 <= int(talk[2]["content"][1:]) - int(talk[0]["content"][1:]) <= 5 for talk in longer)


def test_conversations_are_joined_until_they_are_long_enough():
    joiner = Joiner(6, 0.0)
    talks = [("s", "ab", "cd"), ("t", "ab", "cd"), ("s", "ef", "gh"), ("s", "ij", "kl")]
    roles = ("system", "user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, talk, strict=True)]}
        for talk in talks
    ]
    assert [show(row) for source in rows for row in joiner.add(source)] == ["s:s u:ab a:cd u:ef a:gh"]
    assert [show(row) for row in joiner.flush()] == ["s:t u:ab a:cd", "s:s u:ij a:kl"]
    assert [show(row) for row in joiner.flush()] == []


def test_unsure_choices_count_on_request():
    row = {"info": {"post": "p"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0, "extra": {"confidence": 3}}
    for least, expected in ((None, 1), (3, 1), (4, 0)):
        form = load_form(
            {"name": "wins", "texts": ["info.post"], "prompts": ["{text}"], "least_confidence": least}, "form"
        )
        assert len(list(form.read(row, "here"))) == expected


def test_long_messages_lose_their_end():
    for name, row in (
        ("soda", {"narrative": "n", "dialogue": ["x" * 99, "y" * 99], "speakers": ["A", "B"]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "x" * 99}, {"from": "gpt", "value": "y" * 99}]}),
    ):
        (result,) = load_form({"name": name, "characters": 20}, "form").read(row, "here")
        assert [len(message["content"]) for message in result["messages"]] == [20, 20]
    (result,) = load_form({"name": "columns", "user": "{a|words}", "assistant": "b"}, "form").read(
        {"a": "w " * 999}, "here"
    )
    assert result["messages"][0]["content"].count("w") == 512


def list_messages(message: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """A message and all below it as rows of the hub, which has labels in columns."""
    labels = message.get("labels") or {}
    label_columns = {"name": [*labels], "value": [each["value"] for each in labels.values()]}
    top = {**message, **more, "labels": label_columns, "replies": None}
    below = [
        row
        for reply in message["replies"]
        for row in list_messages(reply, **{**more, "parent_id": message["message_id"]})
    ]
    return [top, *below]


def test_trees_of_the_hub_are_those_of_the_files(shared_data: Path, tmp_path: Path):
    """The released trees, and their messages in the layout and order of the hub."""
    path = shared_data / "instruct" / "oasst_format" / "en_100_tree.jsonl"
    trees = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tree_columns = [
        {"message_tree_id": tree["message_tree_id"], "tree_state": tree["tree_state"], "parent_id": None}
        for tree in trees
    ]
    rows = [
        row for tree, more in zip(trees, tree_columns, strict=True) for row in list_messages(tree["prompt"], **more)
    ]
    for mode in ("sft", "rm"):
        words = ["--release", "oasst_export", "--synthetic", "--mode", mode, "--train"]
        of_file = prepare(tmp_path, [*words, str(path)], f"trees_{mode}")
        assert prepare(tmp_path, [*words, write(tmp_path / "rows.jsonl", rows)], f"messages_{mode}") == of_file
        assert len(of_file["train"]) > 50


def spoil(value: Any, *path: str | int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, wrong value) of everything below a value."""
    if path:
        yield from ((path, wrong) for wrong in (None, 3, "x", [], {}, [None], [3], [{}], {"a": 1}))
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from spoil(part, *path, name)


@pytest.mark.parametrize("name", fixtures())
def test_rows_of_another_shape_are_refused_or_skipped(name: str):
    """Whatever stands in the place of whatever: an error of the data, which names the row, or a row that is left
    out."""
    release, _, mode = name.partition(" ")
    entry, _ = conversation_table.find(release)
    form = entry.form_of("rm" if mode else entry.modes[0])
    rows = fixtures()[name]["rows"] or fixtures()[release]["rows"]
    keys = [
        json.dumps(look_up(row, entry.group_by, "here")) if entry.group_by else str(place)
        for place, row in enumerate(rows)
    ]
    num_errors = 0
    for key in set(keys):
        group = [row for row, row_key in zip(rows, keys, strict=True) if row_key == key]
        for (place, *path), wrong in spoil(group):
            if not path:
                continue
            spoilt: Any = copy.deepcopy(group)
            within = spoilt[place]
            for part in path[:-1]:
                within = within[part]
            within[path[-1]] = wrong
            try:
                for row in form.read({"rows": spoilt} if entry.group_by else {**spoilt[0], SPLIT_NAME: "x"}, "here"):
                    read_entry(row, "here")
            except DataError:
                num_errors += 1
    assert num_errors


def test_a_paragraph_belongs_to_the_turn_above_it():
    """B21: the reference lost what follows an empty line within a turn."""
    text = "\n\nHuman: A poem?\n\nPlease.\n\nAssistant: Owls\n\nsleep.\n\nBy day."
    row = {"chosen": text, "rejected": text.replace("Owls", "Dogs")}
    (result,) = load_form("dialogues", "form").read(row, "here")
    assert [message["content"] for message in result["messages"]] == ["A poem?\n\nPlease."]
    assert [reply["content"] for reply in result["replies"]] == [
        "Owls\n\nsleep.\n\nBy day.",
        "Dogs\n\nsleep.\n\nBy day.",
    ]


def test_summaries_of_one_text_are_one_row_with_its_own_request():
    """B26: the reference had a text as often as it was compared, its request without a blank, and another text's where
    it had none."""
    comparisons = [("a post", "A", "B"), ("a post", "A", "C"), ("another", "D", "E")]
    rows = [
        {"info": {"id": text, "post": text, "article": None}, "summaries": [{"text": good}, {"text": bad}], "choice": 0}
        for text, good, bad in comparisons
    ]
    release, _ = conversation_table.find("hf_summary")
    assert release.group_by is not None
    groups = {
        look_up(row, release.group_by, "here"): [each for each in rows if each["info"] == row["info"]] for row in rows
    }
    results = [each for group in groups.values() for each in release.form_of("rm").read({"rows": group}, "here")]
    assert len(results) == 2
    for each, text in zip(results, ("a post", "another"), strict=True):
        (prompt,) = each["messages"]
        request = prompt["content"].replace(text, "").strip("\n")
        assert prompt["content"] in (f"{request}\n\n{text}", f"{text}\n\n{request}")
        assert request == request.strip() != ""
    assert [reply["content"] for reply in results[0]["replies"]] == ["A", "B", "C"]
