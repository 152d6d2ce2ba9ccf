"""First rows of real documents against the algorithm of BigScience's metadata project, written here from its
description."""

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_prep.metadata import entities, html, stdlib_pages, text, url
from src.data.text.tokenizers import SafeTokenizer
from src.experiments.config import load
from src.systems.metadata.data.annotations import Document, read_row
from src.systems.metadata.data.examples import ExampleMaker, Writing
from src.systems.metadata.groups import GPT2_XL_V2

MODULES = (
    "abc aifc argparse ast base64 bdb bisect bz2 calendar cmd code codecs collections colorsys "
    "concurrent configparser contextlib copy csv dataclasses datetime decimal difflib dis email enum "
    "fileinput fnmatch fractions functools gc glob graphlib gzip hashlib heapq hmac html inspect io "
    "ipaddress itertools json keyword linecache locale logging lzma mailbox math numbers operator optparse os pathlib "
    "pickle pprint queue random re reprlib sched secrets shelve shlex shutil statistics string struct "
    "textwrap threading timeit token traceback types typing urllib uuid warnings wave weakref zipfile zlib "
)
DOCUMENTS = 60
ROOM = 1024
TITLES = {
    "module": "Module_(programming)",
    "object": "Object_(computer_science)",
    "Python": "Python_(programming_language)",
    "string": "String_(computer_science)",
    "class": "Class_(computer_programming)",
    "method": "Method",
    "list": "List",
    "function": "Function",
    "file": "Computer_file",
    "dict": "Associative_array",
    "iterator": "Iterator",
}
WRITING: dict[str, Any] = GPT2_XL_V2["data"]["writing"]


@cache
def pages() -> dict[str, str]:
    """HTML that pydoc renders for modules of the standard library."""
    rendered = stdlib_pages.render(MODULES.split())
    by_size = sorted(
        (page for page in rendered.items() if len(html.extract(page[1]).text) > 500), key=lambda page: len(page[1])
    )
    assert len(by_size) >= DOCUMENTS
    return dict(by_size[:DOCUMENTS])


def paragraph_entities(items: list[dict[str, Any]], paragraphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move entities to their paragraphs as the reference does: a counter that restarts whenever the start changes."""
    moved_items = list[dict[str, Any]]()
    for entity in items:
        span = entity["char_start_idx"], entity["char_end_idx"]
        for paragraph in paragraphs:
            if span[0] >= paragraph["char_start_idx"] and span[1] <= paragraph["char_end_idx"]:
                span = paragraph["char_start_idx"], paragraph["char_end_idx"]
                break
        item = {
            "key": "entity_paragraph",
            "type": "local",
            "char_start_idx": span[0],
            "char_end_idx": span[1],
            "value": entity["value"],
        }
        if item not in moved_items:
            moved_items.append(item)
    number = 0
    numbered_items = []
    for index, item in enumerate(moved_items):
        number = number + 1 if index and item["char_start_idx"] == moved_items[index - 1]["char_start_idx"] else 0
        numbered_items.append({**item, "relative_start_pos": number, "relative_end_pos": number})
    return numbered_items


@cache
def rows() -> list[dict[str, Any]]:
    linker = entities.DictionaryLinker(TITLES)
    result = []
    for name, page in pages().items():
        page_text = html.extract(page)
        row = page_text.columns() | url.extract({"url": f"https://docs.python.org/3/2019/04/05/{name}.html"})
        row["metadata_entity"] = linker.link(row["text"])
        row |= text.extract(row)
        row["metadata_entity_paragraph"] = paragraph_entities(row["metadata_entity"], row["metadata_paragraph"])
        result.append(row)
    return result


@cache
def tokenizer(special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer, trained on the pages, with special tokens that leave blanks around them."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([row["text"][:2000] for row in rows()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", extra_special_tokens=list(special))


def process(item: dict[str, Any], entity_setting: str) -> tuple[str, str] | None:
    """Write the two sides of a local item, with the tag filter of the published configuration."""
    key, value = item["key"], item["value"].replace("_", " ")
    if key == "entity":
        return "", f" [[{value}]]"
    if key == "entity_paragraph":
        return (f" |{value}|", "") if entity_setting == "beg" else ("", f" |{value}|")
    rules, length = WRITING["html"], item["char_end_idx"] - item["char_start_idx"]
    if item["value"] == "body" or (item["value"] not in rules["exceptions"] and length <= rules["max_length"]):
        return None
    attributes = zip(item["html_attrs"]["attrs"], item["html_attrs"]["values"], strict=True)
    return (
        f"<{item['value']}{''.join(f' {name}:{value}' for name, value in attributes if name in rules['attributes'])}>",
        f"</{item['value']}>",
    )


def collate(items: list[dict[str, Any]], key: str, entity_setting: str) -> list[tuple[int, int, int, tuple[str, str]]]:
    at = defaultdict[int, dict[int, str]](dict)
    for item in items:
        sides = process(item, entity_setting)
        if sides is None:
            continue
        for side, text_ in zip(("start", "end"), sides, strict=True):
            if text_:
                by_place = at[item[f"char_{side}_idx"]]
                assert item[f"relative_{side}_pos"] not in by_place, "the reference crashes"
                by_place[item[f"relative_{side}_pos"]] = text_
    starts, ends = WRITING["run_starts"], WRITING["run_ends"]
    return [
        (
            1,
            index,
            index,
            (starts.get(key, "") + "".join(by_place[place] for place in sorted(by_place)) + ends.get(key, ""), ""),
        )
        for index, by_place in at.items()
    ]


def marked_text(row: dict[str, Any], keys: list[str], entity_setting: str) -> tuple[str, list[bool]]:
    insertions = list[tuple[int, int, int, int, tuple[str, str]]]()
    for priority, key in enumerate(keys):
        items = row.get(f"metadata_{key}") or []
        if items and items[0].get("relative_start_pos") is not None:
            sides_by_item = collate(items, key, entity_setting)
        else:
            item_sides = ((item, process(item, entity_setting)) for item in items)
            sides_by_item = [
                (0, item["char_start_idx"], item["char_end_idx"], sides) for item, sides in item_sides if sides
            ]
        insertions += [(priority, *each) for each in sides_by_item]
    insertions.sort(key=lambda each: (each[0], each[1], each[3]))
    ends, empty_starts, empty_ends, starts = (defaultdict[int, list[str]](list) for _ in range(4))
    for *_, start, end, (opening, closing) in insertions:
        (empty_starts if start == end else starts)[start].insert(0, opening)
        (empty_ends if start == end else ends)[end].append(closing)
    out, mask = [], list[bool]()
    for index, character in enumerate([*row["text"], ""]):
        for bucket in (ends, empty_starts, empty_ends, starts):
            for marker in bucket.get(index, []):
                out.append(marker)
                mask += [True] * len(marker)
        out.append(character)
        mask += [False] * len(character)
    return "".join(out), mask


def first_row(
    row: dict[str, Any], keys: list[str], entity_setting: str, encode: Any
) -> tuple[list[int], list[int], list[int]]:
    """Return ids, attention mask and metadata mask of the reference's first row."""
    local = {key for key in ("html", "entity", "entity_paragraph") if row.get(f"metadata_{key}")}
    title, length, source, date = (
        row[f"metadata_{name}"] for name in ("title", "generation_length_text", "generation_datasource", "timestamp")
    )
    phrases = {
        "html": "html",
        "entity": "entity",
        "entity_paragraph": "entity",
        "timestamp": f"Year: {date[0]['value'][:4]} | Month: April",
        "title": f"Title: {title[0]['value']}",
        "url": f"url: {row['metadata_url'][0]['value']}",
        "datasource": f"Datasource: {source[0]['value']}",
        "length": f"Text Length: {length[0]['value']}",
    }
    prefix = " | ".join(
        phrases[key]
        for key in keys
        if key in phrases and (key in local or key not in ("html", "entity", "entity_paragraph"))
    )
    prefix_ids = encode(f"{prefix} |||")["input_ids"]
    text_with_markers, characters = marked_text(row, [key for key in keys if key in local], entity_setting)
    encoded = encode(f" {text_with_markers}")
    characters = [False, *characters]
    mask = []
    for number in range(len(encoded["input_ids"])):
        span = encoded.token_to_chars(number)
        mask.append(int(any(characters[span.start : span.end])))
    room = ROOM - len(prefix_ids)
    ids, mask = encoded["input_ids"][:room], mask[:room]
    attention = [1] * (len(prefix_ids) + len(ids))
    return [*prefix_ids, *ids], attention, [1] * len(prefix_ids) + mask


@pytest.mark.slow
@pytest.mark.parametrize(("position", "setting"), [("beginning", "beg"), ("end", "end")])
@pytest.mark.parametrize("keys", [WRITING["keys"], ["entity_paragraph", "entity", *WRITING["keys"][:-1]]])
def test_first_rows_equal_the_reference(keys: list[str], position: str, setting: str):
    writing = load(Writing, {**WRITING, "keys": keys, "entity_position": position}, "writing")
    encode = tokenizer(tuple(writing.new_tokens()))
    maker = ExampleMaker(writing, SafeTokenizer(encode), ROOM, metadata_loss=True, end_token=False)
    names = (
        "html",
        "entity",
        "entity_paragraph",
        "timestamp",
        "title",
        "url",
        "generation_datasource",
        "generation_length_text",
    )
    columns = [name for name in names if name != "entity" or "entity" in keys]
    restarts = chains = 0
    for row in rows():
        document = read_row(
            {"text": row["text"], **{f"metadata_{name}": row[f"metadata_{name}"] for name in columns}}, "row"
        )
        piece = maker.pieces(document)[0]
        ids, attention, mask = first_row(row, keys, setting, encode)
        assert piece.ids == ids
        assert [1] * len(piece.ids) == attention
        assert [int(not of_text) for of_text in piece.of_text] == mask
        chains += encode.decode(piece.ids).count("<ENTITY_CHAIN>")
        restarts += counters_restart(row, document)
    assert len(rows()) == DOCUMENTS
    assert chains > DOCUMENTS
    assert restarts > DOCUMENTS / 2, "paragraphs that touch have equal positions at one character"


def counters_restart(row: dict[str, Any], document: Document) -> bool:
    """Whether a row has the layout that one counter for starts and ends cannot have; its markers have unique ranks."""
    raw = [(item["char_start_idx"], item["relative_start_pos"]) for item in row["metadata_entity_paragraph"]]
    raw += [(item["char_end_idx"], item["relative_end_pos"]) for item in row["metadata_entity_paragraph"]]
    items = [item for item in document.items if item.key == "entity_paragraph"]
    ranks = [(item.start, item.start_place) for item in items] + [(item.end, item.end_place) for item in items]
    assert len(set(ranks)) == len(ranks)
    return len(set(raw)) < len(raw)
