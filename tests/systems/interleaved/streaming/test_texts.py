"""Texts as tokens: how they are joined, and which are left out."""

import pickle

import pytest

from src.systems.interleaved.streaming import tar_index
from src.systems.interleaved.streaming.images import FAKE, IMAGE
from src.systems.interleaved.streaming.tar_index import IMAGE as IMAGE_KIND
from src.systems.interleaved.streaming.tar_index import PROMPT, TEXT
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.texts import END, TextTokens, count_tokens
from tests.systems.interleaved.streaming import pages

TOKENIZER = pages.tokenizer()
TEXTS = TextTokens(TOKENIZER)


def decoded(kinds: list[int], contents: list[bytes | None]) -> list[str]:
    return [TOKENIZER.decode(ids) for ids in TEXTS.encode(kinds, contents)]


def test_texts_are_joined_with_a_space_unless_an_image_is_between():
    kinds = [TEXT, PROMPT, IMAGE_KIND, TEXT, TEXT]
    assert decoded(kinds, [b"a", b"b", None, b"c", b"d"]) == ["a", " b", "", "c", " d"]


@pytest.mark.parametrize("text", [b"", b" \n", f"x{FAKE}".encode(), f"{IMAGE} y".encode()])
def test_empty_texts_and_such_as_spell_images_are_left_out(text: bytes):
    assert decoded([TEXT, TEXT], [text, b"b"]) == ["", "b"]


def test_control_tokens_in_texts_are_plain_characters():
    (ids,) = TEXTS.encode([TEXT], [b"a<end>b"])
    assert TOKENIZER.eos_token_id not in ids
    assert TOKENIZER.decode(ids) == "a<end>b"


def test_middle_of_a_text_of_several_documents_is_read():
    """Bug of m4: of a text with several ends only the first and the last piece were kept."""
    (text,) = decoded([TEXT], [f"one{END}two{END} three".encode()])
    assert text == "one<end>two<end>three"


def test_the_digest_is_of_what_decides_about_text():
    more = pages.tokenizer()
    more.add_special_tokens({"extra_special_tokens": ["<new>"]}, replace_extra_special_tokens=False)
    assert TextTokens(more).digest == TEXTS.digest, "text is never a control token"
    more.add_tokens(["hello"])
    assert TextTokens(more).digest != TEXTS.digest
    again: TextTokens = pickle.loads(pickle.dumps(TEXTS))
    assert again.encode([TEXT], [b"<end>"]) == TEXTS.encode([TEXT], [b"<end>"])


def test_an_index_has_the_tokens_of_each_text(tmp_path):
    dataset_manifest = pages.write_pages(tmp_path / "pages", 30)
    for shard in dataset_manifest.shards:
        with tar_index.open_tar(dataset_manifest.folder / shard.url) as tar:
            index = build(tar)
            count_tokens(index, tar, TEXTS)
            saved = tar_index.load_file(dataset_manifest.folder / shard.index, shard.bytes, shard.url)
            assert saved.tokens is not None
            assert index.tokens is not None
            assert saved.tokens.tolist() == index.tokens.tolist()
            assert saved.facts["tokenizer"] == TEXTS.digest
            assert {int(n) for n, kind in zip(saved.tokens, saved.parts["kind"], strict=True) if kind != TEXT} == {0}
            assert all(saved.tokens[saved.parts["kind"] == TEXT] > 0)
